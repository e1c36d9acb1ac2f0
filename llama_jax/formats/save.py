"""Writing models: GGUF files and Hugging Face folders. A killed process leaves the old file or the new one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from llama_jax.config import LlamaConfig
from llama_jax.errors import ArgumentError, shown
from llama_jax.formats import names
from llama_jax.formats.config_gguf import ARCHITECTURE, gguf_metadata, llama3_divisors
from llama_jax.formats.config_hf import hf_config
from llama_jax.formats.files import replacing
from llama_jax.formats.load import interleave_rows
from llama_jax.formats.safetensors import SINGLE_FILE
from llama_jax.lora import dense_weight
from llama_jax.model import Params, weight_at
from llama_jax.quantization import BFLOAT16, BLOCK_TYPES, row_bytes

_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32}
"""What `general.file_type` says of a file whose matrices have this type."""

GGUF_TYPES = tuple(_FILE_TYPES)
"""The types of matrices that can be written."""

_OWN_KEYS = ("general.architecture", "general.alignment", "general.file_type", "general.quantization_version")
_OWN_PREFIXES = (f"{ARCHITECTURE}.", "split.")
_HF_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NEGLIGIBLE = 1e-30  # far under half of the smallest float16 scale, so such values become zero in any block

MetadataValue = str | bytes | bool | int | float | Sequence[Any] | np.ndarray


def save_gguf(
    path: str | Path,
    params: Params,
    config: LlamaConfig,
    *,
    metadata: Mapping[str, MetadataValue] | None = None,
    types: str = "F16",
) -> None:
    """Write a GGUF v3 file of architecture `llama`; norm vectors are F32, one tensor is in host memory at a time.

    Args:
      path: of the file; replaced only when the new one is complete.
      params: all weights, of any kind: packed ones are unpacked, adapters added.
      config: the model's constants.
      metadata: further keys, such as the tokenizer's: str, bool, int (u32, or i32, i64, u64 where it must be), float
        (f32), or a list of one of them (ints i32, floats f32), or a numpy array with its own type. Empty lists are
        left out, since a GGUF array needs an element.
      types: of the matrices: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0 or Q5_1.

    Raises:
      ArgumentError: a key is one that the config decides, a value or type cannot be written, a row is not a multiple
        of the block size, shapes disagree with the config, or a weight is not finite in the type.
    """
    if types not in _FILE_TYPES:
        raise ArgumentError(f"types is {shown(types)}; it must be one of {', '.join(_FILE_TYPES)}.")
    shapes = _checked_shapes(params, config)
    block = BLOCK_TYPES[types].block_size
    for parameter, shape in shapes.items():
        if len(shape) == 2 and shape[1] % block:
            raise ArgumentError(f"{parameter} has rows of {shape[1]} values; {types} needs a multiple of {block}.")
    # The gguf package is slow to import and only needed here.
    from gguf import GGMLQuantizationType, GGUFWriter

    divisors = _divisors(config)
    with replacing(Path(path)) as temporary:
        writer = GGUFWriter(temporary, ARCHITECTURE)
        try:
            _add_metadata(writer, gguf_metadata(config), metadata or {}, types)
            if divisors is not None:
                writer.add_tensor_info(names.GGUF_ROPE_DIVISORS, divisors.shape, divisors.dtype, divisors.nbytes)
            for parameter, shape in shapes.items():
                kind = "F32" if names.is_norm(parameter) else types
                nbytes = int(np.prod(shape[:-1])) * row_bytes(kind, shape[-1])
                raw_type = GGMLQuantizationType(BLOCK_TYPES[kind].ggml_id)
                writer.add_tensor_info(names.gguf_name(parameter), shape, np.dtype(np.float32), nbytes, raw_type)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            if divisors is not None:
                writer.write_tensor_data(divisors)
            for parameter in shapes:
                values = _get(params, parameter)
                heads = names.rotary_heads(parameter, config)
                if heads is not None:
                    values = interleave_rows(values, heads)
                writer.write_tensor_data(_encode(values, "F32" if names.is_norm(parameter) else types, parameter))
        finally:
            writer.close()


def save_hf(
    folder: str | Path,
    params: Params,
    config: LlamaConfig,
    *,
    dtype: DTypeLike | None = None,
    tokenizer_files: Sequence[str | Path] = (),
) -> None:
    """Write config.json and model.safetensors; one tensor is in host memory at a time.

    Args:
      folder: made if absent; each file is replaced only when the new one is complete.
      params: all weights, of any kind: packed ones are unpacked, adapters added.
      config: the model's constants.
      dtype: of all tensors: float32, bfloat16 or float16; None keeps each tensor's own.
      tokenizer_files: copied into the folder under their names.

    Raises:
      ArgumentError: shapes disagree with the config, config.json cannot express it, or a weight is not finite in the
        dtype.
    """
    folder = Path(folder)
    contents = hf_config(config)
    shapes = _checked_shapes(params, config)
    types = {}
    for parameter in shapes:
        own = np.dtype(dtype if dtype is not None else weight_at(params, parameter).dtype)
        types[parameter] = next((name for name in _HF_DTYPES if BLOCK_TYPES[name].dtype == own), None)
        if types[parameter] is None:
            raise ArgumentError(f"{parameter} has dtype {own}; float32, bfloat16 and float16 can be written.")
    contents["torch_dtype"] = _HF_DTYPES[types["embedding"]]
    folder.mkdir(parents=True, exist_ok=True)
    for source in map(Path, tokenizer_files):
        with replacing(folder / source.name) as temporary:
            shutil.copyfile(source, temporary)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for parameter, shape in shapes.items():
        nbytes = int(np.prod(shape)) * BLOCK_TYPES[types[parameter]].block_bytes
        entry = {"dtype": types[parameter], "shape": shape, "data_offsets": [at, at + nbytes]}
        header[names.hf_name(parameter)] = entry
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)  # the data begin on a 64-byte border
    with replacing(folder / SINGLE_FILE) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for parameter in shapes:
            _encode(_get(params, parameter), types[parameter], parameter).tofile(file)
    with replacing(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def _get(params: Params, path: str) -> np.ndarray:
    return np.asarray(dense_weight(weight_at(params, path)))


def _checked_shapes(params: Params, config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    if len(params.layers) != config.n_layers or (params.output_head is None) != config.tied_embeddings:
        raise ArgumentError(
            f"The parameters have {len(params.layers)} layers and {'no' if params.output_head is None else 'an'} "
            f"output head; the config says {config.n_layers} layers and tied_embeddings={config.tied_embeddings}."
        )
    shapes = names.parameter_shapes(config)
    for path, shape in shapes.items():
        own = tuple(weight_at(params, path).shape)
        if own != shape:
            raise ArgumentError(f"{path} has shape {own}; the config says {shape}.")
    return shapes


def _divisors(config: LlamaConfig) -> np.ndarray | None:
    if config.rope_divisors is not None:
        return np.array(config.rope_divisors, np.float32)
    return llama3_divisors(config) if config.rope_scaling.kind == "llama3" else None


def _encode(values: np.ndarray, kind: str, path: str) -> np.ndarray:
    """Values as the bytes or the dtype that a file holds; refuses what the type cannot hold."""
    values = np.ascontiguousarray(values)
    dtype = BLOCK_TYPES[kind].dtype
    if dtype is not None and values.dtype == dtype:
        encoded = values
    elif dtype is not None:
        with np.errstate(all="ignore"):
            encoded = values.astype(dtype)
    else:
        encoded = _quantize(values.astype(np.float32), kind, path)
    if dtype is not None and not np.isfinite(encoded).all():
        raise ArgumentError(f"{path} holds values that are not finite in {kind}; its largest is {_largest(values)}.")
    return encoded.view(np.uint16) if dtype == BFLOAT16 else encoded


def _quantize(values: np.ndarray, kind: str, path: str) -> np.ndarray:
    from gguf import GGMLQuantizationType, quants

    values = np.where(np.abs(values) < _NEGLIGIBLE, np.float32(0), values)
    if not np.isfinite(values).all():
        raise ArgumentError(f"{path} holds values that are not finite, so {kind} cannot hold them.")
    try:
        with np.errstate(over="raise"):
            return quants.quantize(values, GGMLQuantizationType(BLOCK_TYPES[kind].ggml_id))
    except FloatingPointError:
        raise ArgumentError(f"{path} holds values too large for {kind}; its largest is {_largest(values)}.") from None


def _largest(values: np.ndarray) -> str:
    return f"{np.max(np.abs(values.astype(np.float32))):g}"


def _add_metadata(writer: Any, own: Mapping[str, Any], extra: Mapping[str, MetadataValue], types: str) -> None:
    for key in extra:
        if key in _OWN_KEYS or key.startswith(_OWN_PREFIXES):
            raise ArgumentError(f"The metadata key {shown(key)} is decided by the config and cannot be given.")
    decided = {"general.file_type": _FILE_TYPES[types], "general.quantization_version": 2}
    for key, value in {**own, **decided, **extra}.items():
        if key != "general.architecture":  # the writer has put it first
            _add_value(writer, key, value)


def _add_value(writer: Any, key: str, value: Any) -> None:
    from gguf import GGUFValueType as Kind

    if isinstance(value, np.ndarray):
        kind = {
            "uint8": Kind.UINT8, "int8": Kind.INT8, "uint16": Kind.UINT16, "int16": Kind.INT16, "uint32": Kind.UINT32,
            "int32": Kind.INT32, "uint64": Kind.UINT64, "int64": Kind.INT64, "float32": Kind.FLOAT32,
            "float64": Kind.FLOAT64, "bool": Kind.BOOL,
        }.get(value.dtype.name)  # fmt: skip
        if kind is None or value.ndim != 1:
            raise ArgumentError(
                f"The metadata value {shown(key)} is an array of {value.dtype}; it must be one axis of numbers."
            )
        value = value.tolist()
    elif isinstance(value, (list, tuple)):
        value = list(value)
        kind = _kind_of_list(key, value)
    else:
        writer.add_key_value(key, value, _kind_of_scalar(key, value))
        return
    if value:
        writer.add_key_value(key, value, Kind.ARRAY, sub_type=kind)


def _kind_of_scalar(key: str, value: Any) -> Any:
    from gguf import GGUFValueType as Kind

    if isinstance(value, (str, bytes)):
        return Kind.STRING
    if isinstance(value, bool):
        return Kind.BOOL
    if isinstance(value, float):
        return Kind.FLOAT32
    if isinstance(value, int):
        for kind, low, high in (
            (Kind.UINT32, 0, 2**32),
            (Kind.INT32, -(2**31), 2**31),
            (Kind.INT64, -(2**63), 2**63),
            (Kind.UINT64, 0, 2**64),
        ):
            if low <= value < high:
                return kind
    raise ArgumentError(
        f"The metadata value {shown(key)} is {shown(value)}; it must be text, a bool, a 64-bit int or a float."
    )


def _kind_of_list(key: str, values: list[Any]) -> Any:
    from gguf import GGUFValueType as Kind

    types = set(map(type, values))
    if types <= {str, bytes}:
        return Kind.STRING
    if types == {bool}:
        return Kind.BOOL
    if types == {int}:
        return Kind.INT32 if all(-(2**31) <= x < 2**31 for x in values) else Kind.INT64
    if types <= {int, float}:
        return Kind.FLOAT32
    raise ArgumentError(
        f"The metadata list {shown(key)} mixes {sorted(t.__name__ for t in types)}; one type is allowed."
    )
