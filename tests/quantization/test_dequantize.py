"""Decoding against the gguf package, whose decoders are bit-equal to ggml's C code."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from llama_jax.errors import ArgumentError, FormatError
from llama_jax.quantization import BLOCK_TYPES, as_plain, dequantize, row_bytes
from llama_jax.quantization.types import UNSUPPORTED_TYPE_NAMES

FLOATS = [name for name, t in BLOCK_TYPES.items() if t.decode is not None or name in ("F32", "F16", "BF16")]
QUANTIZED = [name for name, t in BLOCK_TYPES.items() if t.decode is not None]


def _reference(raw: np.ndarray, name: str, rows: int) -> np.ndarray:
    with np.errstate(all="ignore"):
        return quants.dequantize(raw.reshape(rows, -1), GGMLQuantizationType[name]).astype(np.float32)


@pytest.mark.parametrize("name", FLOATS)
def test_random_bytes_decode_to_the_bits_of_the_gguf_package(name):
    # Random bytes give every code, and scales that are subnormal, infinite and NaN. 4 chunks and a part of one.
    columns, rows = 1024, 137
    raw = np.random.default_rng(7).integers(0, 256, rows * row_bytes(name, columns), np.uint8)
    values = dequantize(raw, name, (rows, columns))
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values.view(np.uint32), _reference(raw, name, rows).view(np.uint32))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_narrower_results_are_the_float32_values_rounded_once(name, dtype):
    raw = np.random.default_rng(3).integers(0, 256, 90 * row_bytes(name, 512), np.uint8)
    with np.errstate(all="ignore"):
        expected = _reference(raw, name, 90).astype(dtype)
    np.testing.assert_array_equal(dequantize(raw, name, (90, 512), dtype).view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize(("name", "dtype"), [("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_plain_types_are_views(name, dtype):
    values = np.array([[1.5, -2.0], [0.25, 3.0]], dtype)
    raw = values.view(np.uint8).reshape(-1)
    for view in (as_plain(raw, name, (2, 2)), dequantize(raw, name, (2, 2), dtype)):
        assert view.dtype == dtype
        assert np.shares_memory(view, values)
        np.testing.assert_array_equal(view.astype(np.float32), values.astype(np.float32))


def test_the_table_agrees_with_the_gguf_package():
    from gguf import GGML_QUANT_SIZES

    for t in BLOCK_TYPES.values():
        number = GGMLQuantizationType[t.name]
        assert (t.ggml_id, t.block_size, t.block_bytes) == (int(number), *GGML_QUANT_SIZES[number])
    for number, name in UNSUPPORTED_TYPE_NAMES.items():
        assert GGMLQuantizationType(number).name == name


@pytest.mark.parametrize("name", QUANTIZED)
def test_rows_that_do_not_fill_blocks_are_refused(name):
    columns = BLOCK_TYPES[name].block_size * 3 // 2
    with pytest.raises(FormatError, match=f"{columns} values; type {name} needs"):
        dequantize(np.zeros(3 * BLOCK_TYPES[name].block_bytes, np.uint8), name, (2, columns))


def test_wrong_sizes_and_names_are_refused():
    with pytest.raises(FormatError, match="needs 36 bytes; there are 18"):
        dequantize(np.zeros(18, np.uint8), "Q4_0", (2, 32))
    with pytest.raises(ArgumentError, match=r"'Q9_9'.*Q4_0"):
        dequantize(np.zeros(18, np.uint8), "Q9_9", (1, 32))
    with pytest.raises(ArgumentError, match="Q4_0 is quantized"):
        as_plain(np.zeros(18, np.uint8), "Q4_0", (1, 32))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_finite_values_round_to_nearest_even(dtype):
    # Halfway cases between neighbours of bfloat16, both parities, next to random values of many magnitudes.
    rng = np.random.default_rng(5)
    halfway = (np.arange(0x3F80, 0x4080, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    values = np.concatenate([halfway, -halfway, rng.normal(size=4096).astype(np.float32) * 10.0 ** rng.integers(-4, 4)])
    values = values.reshape(4, -1).astype(np.float32)
    result = dequantize(values.view(np.uint8), "F32", values.shape, dtype)
    np.testing.assert_array_equal(result.view(np.uint16), values.astype(dtype).view(np.uint16))
