"""Whole models: saved and loaded in both formats, damaged, and SmolLM2 against the gguf package."""

from __future__ import annotations

import dataclasses
import json
import os
import time
import tracemalloc

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from safetensors.numpy import load_file, save_file

from llama_jax.config import PRESETS, RopeScaling
from llama_jax.errors import ArgumentError, FormatError
from llama_jax.formats import names
from llama_jax.formats.config_gguf import gguf_metadata, llama3_divisors
from llama_jax.formats.gguf import GGUFFile
from llama_jax.formats.load import check_tensors, half_split_rows, interleave_rows, load_params, open_model
from llama_jax.formats.save import save_gguf, save_hf
from llama_jax.lora import init_lora, with_lora
from llama_jax.model import join_projections

from .conftest import random_params, tiny_config


def on_host(path, array):
    return array


def load(path, dtype=np.float32):
    with open_model(path) as file:
        return file.config, load_params(file, dtype, on_host)


def assert_same(left, right, **tolerance):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, **tolerance) if tolerance else np.testing.assert_array_equal(a, b)


CONFIGS = {
    "plain": tiny_config(),
    "tied": tiny_config(tied_embeddings=True),
    "wide heads": tiny_config(head_dim=32),
    "window": tiny_config(sliding_window=64, norm_epsilon=1e-6, rope_theta=1e6),
    "yarn": tiny_config(rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_context_length=128)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_through_both_formats(tmp_path, name):
    config = CONFIGS[name]
    params = random_params(config)
    save_gguf(tmp_path / "m.gguf", params, config, types="F32")
    save_hf(tmp_path / "hf", params, config)
    for path in ("m.gguf", "hf"):
        loaded_config, loaded = load(tmp_path / path)
        assert loaded_config == config
        assert_same(loaded, params)


def test_llama3_scaling_becomes_divisors_in_gguf_and_comes_back_through_config_json(tmp_path):
    scaling = RopeScaling(kind="llama3", factor=8.0, original_context_length=8192)
    config = tiny_config(rope_scaling=scaling, rope_theta=500000.0)
    params = random_params(config)
    save_gguf(tmp_path / "m.gguf", params, config)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    np.testing.assert_array_equal(reader.tensors[0].data, llama3_divisors(config))
    loaded, _ = load(tmp_path / "m.gguf")
    assert loaded.rope_divisors == tuple(map(float, llama3_divisors(config)))
    save_hf(tmp_path / "hf", params, loaded)
    assert load(tmp_path / "hf")[0] == config


# Largest difference that a type may make to values from N(0, 1), from its step and a range of +-5.
@pytest.mark.parametrize(
    ("types", "tolerance"),
    [
        ("F32", 0),
        ("F16", 2e-3),
        ("BF16", 2e-2),
        ("Q8_0", 0.025),
        ("Q5_0", 0.35),
        ("Q5_1", 0.2),
        ("Q4_0", 0.7),
        ("Q4_1", 0.4),
    ],
)
def test_types_of_matrices(tmp_path, types, tolerance):
    config = tiny_config()
    params = random_params(config)
    save_gguf(tmp_path / "m.gguf", params, config, types=types)
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert {t.tensor_type.name for name, t in tensors.items() if "norm" not in name} == {types}
    assert {t.tensor_type.name for name, t in tensors.items() if "norm" in name} == {"F32"}
    # llama.cpp's readers find query rows interleaved.
    query = quants.dequantize(tensors["blk.1.attn_q.weight"].data, GGMLQuantizationType[types])
    expected = interleave_rows(np.asarray(params.layers[1].wq), config.n_heads)
    np.testing.assert_allclose(query, expected, atol=tolerance, rtol=0)
    loaded_config, loaded = load(tmp_path / "m.gguf")
    assert loaded_config == config
    assert_same(loaded, params, atol=tolerance, rtol=0)
    np.testing.assert_array_equal(half_split_rows(query, config.n_heads), loaded.layers[1].wq)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_dtypes_keep_every_bit(tmp_path, dtype):
    config = tiny_config()
    params = random_params(config, dtype)
    save_gguf(tmp_path / "m.gguf", params, config, types="BF16" if dtype == jnp.bfloat16 else "F16")
    save_hf(tmp_path / "hf", params, config)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == jnp.dtype(dtype).name
    for path in ("m.gguf", "hf"):
        _, loaded = load(tmp_path / path, dtype)
        assert_same(loaded, params)
        assert loaded.output_norm.dtype == np.float32
    written = load_file(tmp_path / "hf" / "model.safetensors")
    np.testing.assert_array_equal(written["model.layers.0.self_attn.q_proj.weight"], params.layers[0].wq)


def test_metadata_survives(tmp_path):
    config = tiny_config()
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.chat_template": "",
        "tokenizer.ggml.tokens": ["<unk>", "", "▁a", b"\xff"],
        "tokenizer.ggml.scores": [0.0, -1, 0.5],
        "tokenizer.ggml.token_type": [2, 3, 1],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "x.negative": -1,
        "x.big": 2**40,
        "x.array": np.array([1, 2], np.uint16),
    }
    save_gguf(tmp_path / "m.gguf", random_params(config), config, metadata=metadata)
    with open_model(tmp_path / "m.gguf") as file:
        found = file.metadata
    for key, value in metadata.items():
        if key != "tokenizer.ggml.merges":
            kept = found[key]
            assert (kept.tolist() if isinstance(kept, np.ndarray) else kept) == (
                value.tolist() if isinstance(value, np.ndarray) else value
            )
    assert "tokenizer.ggml.merges" not in found
    assert found["tokenizer.ggml.scores"].dtype == np.float32
    assert found["tokenizer.ggml.token_type"].dtype == np.int32
    assert found["x.array"].dtype == np.uint16
    assert found["general.file_type"] == 1
    # What was read can be written again.
    kept = {k: v for k, v in found.items() if k.startswith("tokenizer.")}
    save_gguf(tmp_path / "again.gguf", random_params(config), config, metadata=kept)
    with open_model(tmp_path / "again.gguf") as file:
        assert file.metadata["tokenizer.ggml.tokens"] == metadata["tokenizer.ggml.tokens"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"types": "Q4_K"}, "types is 'Q4_K'; it must be one of F32"),
        ({"metadata": {"llama.block_count": 3}}, "'llama.block_count' is decided by the config"),
        ({"metadata": {"x": None}}, "'x' is None"),
        ({"metadata": {"x": 2**64}}, "'x' is 18446744073709551616"),
        ({"metadata": {"x": ["a", 1]}}, "'x' mixes"),
        ({"metadata": {"x": np.zeros((2, 2))}}, "'x' is an array"),
        ({"config": tiny_config(n_layers=3)}, "2 layers .* the config says 3 layers"),
        ({"config": tiny_config(tied_embeddings=True)}, "an output head"),
        ({"config": tiny_config(d_ff=64)}, r"w_gate has shape \(128, 64\); the config says \(64, 64\)"),
    ],
)
def test_what_cannot_be_saved_leaves_the_old_file(tmp_path, arguments, message):
    path = tmp_path / "m.gguf"
    path.write_text("old")
    config = tiny_config()
    with pytest.raises(ArgumentError, match=message):
        save_gguf(path, random_params(config), arguments.pop("config", config), **arguments)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("types", ["F16", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("bad", [1e9, np.nan, np.inf])
def test_values_that_a_type_cannot_hold(tmp_path, types, bad):
    config = tiny_config()
    params = random_params(config).replace(embedding=jnp.full((96, 64), bad, jnp.float32))
    with pytest.raises(ArgumentError, match="embedding holds values"):
        save_gguf(tmp_path / "m.gguf", params, config, types=types)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("types", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_of_tiny_values_become_zero(tmp_path, types):
    config = tiny_config()
    params = random_params(config).replace(embedding=jnp.full((96, 64), 1e-41, jnp.float32))
    save_gguf(tmp_path / "m.gguf", params, config, types=types)
    assert not load(tmp_path / "m.gguf")[1].embedding.any()


def test_rows_that_do_not_fill_blocks_cannot_be_saved(tmp_path):
    config = tiny_config(d_model=80)
    with pytest.raises(ArgumentError, match="embedding has rows of 80 values; Q8_0 needs a multiple of 32"):
        save_gguf(tmp_path / "m.gguf", random_params(config), config, types="Q8_0")


def test_tokenizer_files_are_copied(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    save_hf(tmp_path / "hf", random_params(tiny_config()), tiny_config(), tokenizer_files=[tmp_path / "tokenizer.json"])
    names_found = sorted(p.name for p in (tmp_path / "hf").iterdir())
    assert names_found == ["config.json", "model.safetensors", "tokenizer.json"]


def _hf_variant(tmp_path, change, config=None):
    config = config or tiny_config()
    save_hf(tmp_path, random_params(config), config)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return open_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks output_norm"),
        (lambda t: [t.pop(n) for n in list(t) if ".0." in n], r"lacks layers.0.attention_norm.* and 6 more"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(2)}), "no use for: .*q_proj.bias"),
        (lambda t: t.update({"model.layers.7.mlp.up_proj.weight": np.zeros(2)}), "no use for: .*layers.7"),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(2)}),
            r"'model.norm.weight' has shape \(2,\).* need \(64,\)",
        ),
    ],
)
def test_wrong_tensors_are_named(tmp_path, change, message):
    with _hf_variant(tmp_path, change) as file, pytest.raises(FormatError, match=message):
        load_params(file, np.float32, on_host)


def test_harmless_tensors_are_ignored(tmp_path):
    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    with _hf_variant(tmp_path, change, tiny_config(tied_embeddings=True)) as file:
        assert load_params(file, np.float32, on_host).output_head is None


def test_integer_weights_are_refused(tmp_path):
    def change(tensors):
        tensors["model.norm.weight"] = np.zeros(64, np.int32)

    with _hf_variant(tmp_path, change) as file, pytest.raises(FormatError, match="type I32, which holds no weights"):
        load_params(file, np.float32, on_host)


def test_a_config_with_billions_of_layers_fails_at_once(tmp_path):
    save_hf(tmp_path, random_params(tiny_config()), tiny_config())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2**31 - 1}))
    with open_model(tmp_path) as file, pytest.raises(FormatError, match="21 parameters; a model of 2147483647 layers"):
        check_tensors(file)


def test_paths_that_are_no_models(tmp_path):
    with pytest.raises(ArgumentError, match="does not exist"):
        open_model(tmp_path / "absent.gguf")
    with pytest.raises(FormatError, match=r"folder without config\.json"):
        open_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ArgumentError, match="name the folder that holds it"):
        open_model(tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"holds no config\.json"):
        open_model(tmp_path)


@pytest.mark.parametrize("name", ["fifo.gguf", "folder/config.json", "folder/model.safetensors"])
def test_pipes_and_devices_are_never_opened(tmp_path, name):
    save_hf(tmp_path / "folder", random_params(tiny_config()), tiny_config())
    path = tmp_path / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(FormatError, match=f"{path.name} is not a regular file"):
        open_model(path if path.suffix == ".gguf" else path.parent)
    with pytest.raises(FormatError, match="/dev/zero is not a regular file"):
        open_model("/dev/zero")
    for impossible in ("a\0b", "x" * 5000):
        with pytest.raises(ArgumentError, match="cannot be read"):
            open_model(impossible)


def test_reading_one_parameter(tmp_path):
    config = tiny_config()
    params = random_params(config)
    save_gguf(tmp_path / "m.gguf", params, config, types="Q8_0")
    with open_model(tmp_path / "m.gguf") as file:
        packed = file.read_packed("layers.0.wk")
        assert packed.shape == (32, 64 // 32 * 34)
        values = file.read("layers.0.wk")
        np.testing.assert_array_equal(quants.dequantize(packed, GGMLQuantizationType.Q8_0), values)
        np.testing.assert_allclose(values, params.layers[0].wk, atol=0.025)
        assert file.read("layers.0.wk", ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16
        norm = file.read("output_norm")
        with pytest.raises(ArgumentError, match=r"no parameter 'layers\.9\.wk'"):
            file.read("layers.9.wk")
        with pytest.raises(ArgumentError, match="dtype is int8; it must be float32"):
            file.read("layers.0.wk", np.int8)
    np.testing.assert_array_equal(norm, params.output_norm)  # a view that outlives the file
    assert not norm.flags.owndata


def test_reading_takes_little_memory_beside_the_result(tmp_path):
    config = tiny_config(d_model=1024, n_heads=32, n_kv_heads=32, head_dim=64, d_ff=2048, n_layers=1)
    params = random_params(config)
    save_gguf(tmp_path / "m.gguf", params, config, types="Q8_0")
    with open_model(tmp_path / "m.gguf") as file:
        tracemalloc.start()
        values = file.read("layers.0.wq", ml_dtypes.bfloat16)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < values.nbytes + (6 << 20)
    np.testing.assert_allclose(values.astype(np.float32), params.layers[0].wq, atol=0.05)


def test_smollm2_is_what_the_gguf_package_reads(smollm2_path):
    with GGUFFile(smollm2_path) as raw, open_model(smollm2_path) as file:
        assert file.config == PRESETS["smollm2-135m"]
        params = load_params(file, np.float32, on_host)
        for path in names.parameter_shapes(file.config):
            info = raw.tensors[names.gguf_name(path)]
            rows = raw.raw(info.name).reshape(info.shape[0], -1)
            expected = quants.dequantize(rows, GGMLQuantizationType[info.type_name]).reshape(info.shape)
            heads = {"wq": 9, "wk": 3}.get(path.rpartition(".")[2])
            if heads:
                expected = expected.reshape(heads, 32, 2, 576).transpose(0, 2, 1, 3).reshape(info.shape)
            layer, _, field = path.rpartition(".")
            found = getattr(params.layers[int(layer[7:])] if layer else params, field)
            np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_smollm2_loads_in_under_a_second(smollm2_path):
    times = []
    for _ in range(3):
        began = time.perf_counter()
        load(smollm2_path)
        times.append(time.perf_counter() - began)
    assert min(times) < 1.0  # measured: 0.44 s on two cores


def test_params_are_placed_with_matrices_in_the_dtype_and_norms_in_float32(tmp_path):
    config = dataclasses.replace(tiny_config(), tied_embeddings=True)
    save_gguf(tmp_path / "m.gguf", random_params(config), config, types="Q8_0")
    seen = {}

    def place(path, array):
        seen[path] = array.dtype
        return jnp.asarray(array)

    with open_model(tmp_path / "m.gguf") as file:
        params = load_params(file, jnp.bfloat16, place)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    assert list(seen) == list(names.parameter_shapes(config))
    assert {path: dtype for path, dtype in seen.items() if "norm" in path and dtype != np.float32} == {}
    assert {dtype for path, dtype in seen.items() if "norm" not in path} == {np.dtype(ml_dtypes.bfloat16)}


@pytest.mark.parametrize("shape", [(), (0,), (64,), (64, 0), (64, 32), (64, 64, 1)])
def test_rotary_weights_of_the_wrong_shape(tmp_path, shape):
    config = tiny_config(n_layers=1)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in gguf_metadata(config).items():
        if key != "general.architecture":
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for path, right in names.parameter_shapes(config).items():
        values = np.zeros(shape if path == "layers.0.wq" else right, np.float32)
        writer.add_tensor_info(names.gguf_name(path), values.shape, values.dtype, values.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for path, right in names.parameter_shapes(config).items():
        writer.write_tensor_data(np.zeros(shape if path == "layers.0.wq" else right, np.float32))
    writer.close()
    with open_model(tmp_path / "m.gguf") as file:
        for read in (file.read, file.read_packed):
            with pytest.raises(FormatError, match=r"attn_q.* need \(64, 64\)"):
                read("layers.0.wq")
        with pytest.raises(FormatError, match=r"attn_q.* need \(64, 64\)"):
            load_params(file, np.float32, on_host)


@pytest.mark.parametrize("kind", ["gguf", "safetensors", "config.json"])
def test_damaged_bytes_never_cause_anything_but_our_errors(tmp_path, kind):
    config = tiny_config(n_layers=1)
    params = random_params(config)
    metadata = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.scores": [1.0, 2.0]}
    save_gguf(tmp_path / "m.gguf", params, config, types="Q8_0", metadata=metadata)
    save_hf(tmp_path / "hf", params, config)
    damaged = {"gguf": "m.gguf", "safetensors": "hf/model.safetensors", "config.json": "hf/config.json"}[kind]
    model = tmp_path / damaged.split("/")[0]
    whole = (tmp_path / damaged).read_bytes()
    rng = np.random.default_rng(11)
    errors = []
    for _ in range(300):
        content = np.frombuffer(whole, np.uint8).copy()
        places = rng.integers(0, min(len(whole), 1600), rng.integers(1, 4))  # the headers
        content[places] = rng.choice([0, 255, rng.integers(256)], len(places))
        (tmp_path / damaged).write_bytes(content.tobytes())
        try:
            load(model)
        except (FormatError, ArgumentError) as error:
            errors.append(str(error))
    assert len(errors) > 100
    assert not [error for error in errors if "\n" in error]


def test_weights_of_any_kind_are_written(tmp_path):
    config = tiny_config()
    params = random_params(config)
    plain, mixed = tmp_path / "plain.gguf", tmp_path / "mixed.gguf"
    save_gguf(plain, params, config, types="Q8_0")
    with open_model(plain) as file:
        packed = load_params(file, np.float32, lambda _, weight: jax.tree.map(jnp.asarray, weight), packed=True)
    adapter = init_lora(jax.random.key(1), config, rank=2)
    save_gguf(mixed, with_lora(join_projections(packed), adapter), config, types="Q8_0")
    assert mixed.read_bytes() == plain.read_bytes()  # a fresh adapter changes nothing, and packing no value
