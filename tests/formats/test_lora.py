"""Adapter files: written and read back in each format, as other programs write them, damaged, foreign."""

import contextlib
import json
import struct

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llama_jax.errors import ArgumentError, FormatError
from llama_jax.formats.load import interleave_rows, open_model
from llama_jax.formats.lora import load_lora
from llama_jax.formats.save import save_gguf
from llama_jax.formats.save_lora import save_lora_gguf, save_peft
from llama_jax.lora import LAYER_MATRICES, LoraFactors, init_lora

from .conftest import random_params, tiny_config

CONFIG = tiny_config()
ALL = (*LAYER_MATRICES, "embedding", "output_head")
WQ = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
DOWN = "base_model.model.model.layers.1.mlp.down_proj.lora_{}.weight"


def filled(adapter, seed=0):
    rng = np.random.default_rng(seed)
    return {
        path: LoraFactors(a=np.asarray(f.a), b=rng.normal(size=f.b.shape).astype(f.b.dtype), scale=f.scale)
        for path, f in adapter.items()
    }


@pytest.fixture
def adapter():
    """Two ranks and three scales."""
    key = jax.random.key(0)
    both = init_lora(key, CONFIG, rank=4, alpha=8.0, targets=ALL)
    other = init_lora(key, CONFIG, rank=3, alpha=7.0, targets=["w_up"], rslora=True)
    other |= init_lora(key, CONFIG, rank=4, alpha=3.0, targets=["output_head"])
    return filled(both | other)


def assert_same(left, right, **tolerance):
    assert list(left) == list(right)
    for path in left:
        for side in "ab":
            x, y = np.asarray(getattr(left[path], side)), np.asarray(getattr(right[path], side))
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x.astype(np.float32), y.astype(np.float32), **(tolerance or dict(rtol=0)))
        assert left[path].scale == pytest.approx(right[path].scale, rel=1e-12)


def change(f):
    """scale * b a, float64."""
    return f.scale * np.asarray(f.b, np.float64) @ np.asarray(f.a, np.float64)


def in_order(adapter):
    order = list(init_lora(jax.random.key(0), CONFIG, targets=ALL))
    return {path: adapter[path] for path in order if path in adapter}


# PEFT


def test_peft_round_trip(tmp_path, adapter):
    save_peft(tmp_path, adapter, base_model="some/model")
    assert_same(load_lora(tmp_path, CONFIG), in_order(adapter))
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (4, 8, "some/model")
    assert settings["rank_pattern"] == {rf"model\.layers\.{n}\.mlp\.up_proj": 3 for n in (0, 1)}
    assert settings["alpha_pattern"]["lm_head"] == 3
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert tensors[WQ.format("A")].shape == (4, 64)
    assert tensors["base_model.model.model.embed_tokens.lora_embedding_A"].shape == (4, 96)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_peft_keeps_narrow_types(tmp_path, dtype):
    adapter = init_lora(jax.random.key(0), CONFIG, dtype=dtype)
    save_peft(tmp_path, adapter)
    assert_same(load_lora(tmp_path, CONFIG), adapter)


def write_peft(folder, tensors=None, **settings):
    """A folder as PEFT writes it, with factors of two weights."""
    if tensors is None:
        rng = np.random.default_rng(0)
        shapes = {
            WQ.format("A"): (4, 64),
            WQ.format("B"): (64, 4),
            DOWN.format("A"): (4, 128),
            DOWN.format("B"): (64, 4),
        }
        tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    defaults = dict(peft_type="LORA", r=4, lora_alpha=8, bias="none", use_dora=False, modules_to_save=None)
    (folder / "adapter_config.json").write_text(json.dumps(defaults | settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({}, (2.0, 2.0)),
        (dict(use_rslora=True), (4.0, 4.0)),
        (dict(alpha_pattern={"q_proj": 2}), (0.5, 2.0)),
        (dict(alpha_pattern={"proj": 2}), (2.0, 2.0)),
        (dict(alpha_pattern={r"layers\.[01]\..*_proj": 12, "q_proj": 2}), (3.0, 3.0)),
        (dict(alpha_pattern={"model.layers.1.mlp.down_proj": 1, "^q_proj": 5}, use_rslora=True), (4.0, 0.5)),
        (dict(r=9, rank_pattern={"q_proj|down_proj": 4}), (2.0, 2.0)),
        (dict(lora_alpha=0), (0.0, 0.0)),
        (dict(lora_alpha=2.5, lora_dropout=0.1, target_modules=["q_proj"], some_new_setting=None), (0.625, 0.625)),
    ],
)
def test_peft_settings(tmp_path, settings, scales):
    adapter = load_lora(write_peft(tmp_path, **settings), CONFIG)
    assert list(adapter) == ["layers.0.wq", "layers.1.w_down"]
    assert tuple(f.scale for f in adapter.values()) == scales


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (dict(peft_type="IA3"), "peft_type is 'IA3'; it must be 'LORA'"),
        (dict(use_dora=True), "use_dora is True; only adapters without it are supported"),
        (dict(bias="all"), "bias is 'all'"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save is "),
        (dict(fan_in_fan_out=True), "fan_in_fan_out is True"),
        (dict(some_new_setting="wild"), "some_new_setting is 'wild'"),
        (dict(init_lora_weights="pissa"), "init_lora_weights is 'pissa', which changes the model's own weights"),
        (dict(lora_alpha="8"), "lora_alpha is '8'; it must be a number from 0"),
        (dict(alpha_pattern={"q_proj": None}), "alpha_pattern is None; it must be a number"),
        (dict(alpha_pattern=[1]), "alpha_pattern is "),
        (dict(alpha_pattern={"(a+)+b": 1}), "it must be a regular expression"),
        (dict(alpha_pattern={".*.*.*.*b": 1}), "it must be a regular expression"),
        (dict(alpha_pattern={"[": 1}), "it must be a regular expression"),
        (dict(r=5), r"the factors of model.layers.0.self_attn.q_proj have rank 4; adapter_config.json says 5"),
        (dict(rank_pattern={"down_proj": 8}), "layers.1.mlp.down_proj have rank 4; adapter_config.json says 8"),
    ],
)
def test_peft_settings_that_are_refused(tmp_path, settings, sentence):
    with pytest.raises(FormatError, match=sentence):
        load_lora(write_peft(tmp_path, **settings), CONFIG)


def tensors(**changes):
    made = {WQ.format("A"): np.ones((4, 64), np.float32), WQ.format("B"): np.ones((64, 4), np.float32)}
    return {name: x for name, x in (made | {WQ.format(k): v for k, v in changes.items()}).items() if x is not None}


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (tensors(B=None), "lacks one of the two factors of layers.0.wq"),
        (tensors(B=np.ones((32, 4), np.float32)), r"shapes \(4, 64\) and \(32, 4\); .* needs \[r, 64\] and \[64, r\]"),
        (tensors(A=np.ones((3, 64), np.float32)), r"have shapes \(3, 64\) and \(64, 4\)"),
        (tensors(A=np.ones((4, 65), np.float32)), r"have shapes \(4, 65\)"),
        (tensors(A=np.full((4, 64), np.nan, np.float32)), "hold values that are not finite"),
        (tensors(A=np.ones((4, 64), np.int32)), "is no LoRA factor"),
        ({}, "holds no LoRA factors"),
        ({"base_model.model.lm_head.weight": np.ones((96, 64), np.float32)}, "lm_head.weight' is no LoRA"),
        (
            {k.replace("layers.0", "layers.7"): v for k, v in tensors().items()},
            "changes layers.7.wq; the model has 2 layers",
        ),
    ],
)  # fmt: skip
def test_peft_tensors_that_are_refused(tmp_path, made, sentence):
    with pytest.raises(FormatError, match=sentence):
        load_lora(write_peft(tmp_path, made), CONFIG)


# GGUF


def test_gguf_round_trip(tmp_path, adapter):
    path = tmp_path / "adapter.gguf"
    save_lora_gguf(path, adapter, CONFIG)
    loaded = load_lora(path, CONFIG)
    assert list(loaded) == list(in_order(adapter))
    for name, f in loaded.items():  # one alpha for all: differences of scale went into b
        np.testing.assert_allclose(change(f), change(adapter[name]), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(f.a, adapter[name].a)
    assert loaded["layers.0.wq"].scale == 2.0


def test_gguf_is_as_llama_cpp_reads_it(tmp_path, adapter):
    save_lora_gguf(tmp_path / "adapter.gguf", adapter, CONFIG, types="F16")
    reader = gguf.GGUFReader(tmp_path / "adapter.gguf")
    fields = {key: reader.get_field(key).contents() for key in reader.fields if not key.startswith("GGUF.")}
    assert fields == {
        "general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0,
    }  # fmt: skip
    found = {t.name: t.data for t in reader.tensors}
    assert {data.dtype.name for data in found.values()} == {"float16"}
    query = adapter["layers.1.wq"]
    np.testing.assert_array_equal(found["blk.1.attn_q.weight.lora_a"], np.asarray(query.a, np.float16))
    np.testing.assert_array_equal(
        found["blk.1.attn_q.weight.lora_b"], interleave_rows(np.asarray(query.b), 4).astype(np.float16)
    )
    key = adapter["layers.1.wk"]
    np.testing.assert_array_equal(
        found["blk.1.attn_k.weight.lora_b"], interleave_rows(np.asarray(key.b), 2).astype(np.float16)
    )
    assert found["token_embd.weight.lora_a"].shape == (96, 4)
    assert found["token_embd.weight.lora_b"].shape == (64, 4)


def write_gguf(path, made=None, alpha=8.0, **keys):
    writer = gguf.GGUFWriter(path, keys.pop("architecture", "llama"))
    for key, value in ({"general.type": "adapter", "adapter.type": "lora"} | keys).items():
        if value is not None:
            writer.add_string(key, value)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    if made is None:
        made = {"a": np.ones((4, 64), np.float32), "b": np.ones((64, 4), np.float32)}
        made = {f"blk.0.attn_v.weight.lora_{side}": x for side, x in made.items()}
        made["blk.0.attn_v.weight.lora_b"] = np.ones((32, 4), np.float32)
    for name, x in made.items():
        quantized = x.dtype == np.uint8
        writer.add_tensor(name, x, raw_dtype=gguf.GGMLQuantizationType.Q8_0 if quantized else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_alpha_of_zero_means_no_scale(tmp_path):
    assert load_lora(write_gguf(tmp_path / "8.gguf"), CONFIG)["layers.0.wv"].scale == 2.0
    assert load_lora(write_gguf(tmp_path / "0.gguf", alpha=0.0), CONFIG)["layers.0.wv"].scale == 1.0
    assert load_lora(write_gguf(tmp_path / "none.gguf", alpha=None), CONFIG)["layers.0.wv"].scale == 1.0


def test_quantized_factors_are_read(tmp_path):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(32, 64)).astype(np.float32), rng.normal(size=(32, 32)).astype(np.float32)
    q8 = {side: gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0) for side, x in dict(a=a, b=b).items()}
    made = {f"blk.0.attn_v.weight.lora_{side}": x for side, x in q8.items()}
    f = load_lora(write_gguf(tmp_path / "q8.gguf", made), CONFIG)["layers.0.wv"]
    np.testing.assert_allclose(f.a, a, atol=0.02)
    np.testing.assert_allclose(f.b, b, atol=0.02)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"general.type": "model"}, "general.type is 'model'; an adapter for this model has 'adapter'"),
        ({"adapter.type": None}, "adapter.type is None"),
        ({"architecture": "qwen2"}, "general.architecture is 'qwen2'; an adapter for this model has 'llama'"),
        ({"alpha": -1.0}, "adapter.lora.alpha is -1.0; it must be a number from 0"),
        ({"made": {"blk.0.attn_q.weight": np.ones((64, 64), np.float32)}}, "is no LoRA factor"),
        ({"made": {"blk.0.attn_norm.weight": np.ones(64, np.float32)}}, "is no LoRA factor"),
        ({"made": {"blk.0.attn_q.weight.lora_c": np.ones((4, 64), np.float32)}}, "is no LoRA factor"),
        ({"made": {"blk.0.attn_q.weight.lora_a": np.ones((4, 64), np.float32)}}, "lacks one of the two factors"),
        ({"adapter.alora.invocation_tokens": "x"}, "that certain tokens activate"),
    ],
)
def test_gguf_files_that_are_refused(tmp_path, keys, sentence):
    with pytest.raises(FormatError, match=sentence):
        load_lora(write_gguf(tmp_path / "adapter.gguf", **keys), CONFIG)


# The format of 2023


def write_ggla(path, made, rank=4, alpha=8, version=1, kind=0):
    """As llama.cpp's converter of 2023 wrote it: a transposed, dimensions from the fastest, data at multiples of 32."""
    with path.open("wb") as file:
        file.write(b"algg" + struct.pack("<3i", version, rank, alpha))
        for name, x in made.items():
            encoded = name.encode()
            file.write(struct.pack("<3i", x.ndim, len(encoded), kind))
            file.write(struct.pack(f"<{x.ndim}i", *x.shape[::-1]) + encoded)
            file.write(b"\0" * (-file.tell() % 32))
            file.write(x.astype(np.float16 if kind else np.float32).tobytes())
    return path


def test_ggla_rows_are_in_the_order_that_their_names_tell(tmp_path):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(4, 64)).astype(np.float32), rng.normal(size=(64, 4)).astype(np.float32)
    converted = {"layers.1.attention.wq.weight.loraA": a.T, "layers.1.attention.wq.weight.loraB": b}
    f = load_lora(write_ggla(tmp_path / "a.bin", converted), CONFIG)["layers.1.wq"]
    np.testing.assert_array_equal(f.a, a)
    np.testing.assert_array_equal(f.b, b)
    assert f.scale == 2.0
    trained = {"blk.1.attn_q.weight.loraA": a.T, "blk.1.attn_q.weight.loraB": interleave_rows(b, 4)}
    trained |= {"blk.0.attn_norm.weight.loraA": a.T[:, :1], "blk.0.attn_norm.weight.loraB": b[:1, :1]}
    adapter = load_lora(write_ggla(tmp_path / "b.bin", trained, kind=1), CONFIG)
    np.testing.assert_array_equal(adapter["layers.1.wq"].b, b.astype(np.float16))
    np.testing.assert_array_equal(adapter["layers.0.attention_norm"].a, a[:1].astype(np.float16))


def test_damaged_ggla_files_are_refused(tmp_path):
    made = {
        "layers.1.attention.wv.weight.loraA": np.ones((64, 4)),
        "layers.1.attention.wv.weight.loraB": np.ones((32, 4)),
    }
    whole = write_ggla(tmp_path / "whole.bin", made).read_bytes()
    assert list(load_lora(tmp_path / "whole.bin", CONFIG)) == ["layers.1.wv"]
    path = tmp_path / "cut.bin"
    for size in range(4, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError):
            load_lora(path, CONFIG)
    for position in range(4, 60):
        path.write_bytes(whole[:position] + b"\xff" + whole[position + 1 :])
        with contextlib.suppress(FormatError):
            load_lora(path, CONFIG)
    with pytest.raises(FormatError, match=r"version, rank and alpha are 2, 4, 8; they must be 1"):
        load_lora(write_ggla(path, made, version=2), CONFIG)


# Foreign files


def test_what_is_no_adapter_is_said_to_be_so(tmp_path):
    with pytest.raises(ArgumentError, match="does not exist"):
        load_lora(tmp_path / "none.gguf", CONFIG)
    with pytest.raises(FormatError, match=r"holds no adapter_config\.json"):
        load_lora(tmp_path, CONFIG)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FormatError, match=r"holds no adapter_model\.safetensors; weights in a pickle"):
        load_lora(tmp_path, CONFIG)
    (tmp_path / "x.pt").write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(FormatError, match="is not a LoRA adapter but a zip archive"):
        load_lora(tmp_path / "x.pt", CONFIG)
    write_peft(tmp_path / "folder")
    with pytest.raises(FormatError, match="name the folder that holds it"):
        load_lora(tmp_path / "folder" / "adapter_model.safetensors", CONFIG)
    save_gguf(tmp_path / "model.gguf", random_params(CONFIG), CONFIG)
    with pytest.raises(FormatError, match=r"general.type is None; an adapter for this model has 'adapter'"):
        load_lora(tmp_path / "model.gguf", CONFIG)


def test_an_adapter_is_no_model(tmp_path, adapter):
    save_lora_gguf(tmp_path / "a.gguf", adapter, CONFIG)
    save_peft(tmp_path / "a", adapter)
    for name in ("a.gguf", "a"):
        with pytest.raises(FormatError, match=r"is an adapter; name its model, and it with --lora"):
            open_model(tmp_path / name)


def test_wrong_arguments_of_the_writers(tmp_path, adapter):
    with pytest.raises(ArgumentError, match=r"types is 'Q8_0'; it must be one of F32, F16"):
        save_lora_gguf(tmp_path / "x.gguf", adapter, CONFIG, types="Q8_0")
    with pytest.raises(ArgumentError, match="The adapter is empty"):
        save_peft(tmp_path / "x", {})
    norm = {"layers.0.ffn_norm": LoraFactors(a=np.ones((1, 64)), b=np.ones((1, 1)), scale=1.0)}
    with pytest.raises(ArgumentError, match=r"The adapter changes layers.0.ffn_norm"):
        save_peft(tmp_path / "x", norm)
    large = {"layers.0.wv": LoraFactors(a=np.full((1, 64), 1e6), b=np.ones((32, 1)), scale=1.0)}
    with pytest.raises(ArgumentError, match=r"factors of layers.0.wv hold values that are not finite in F16"):
        save_lora_gguf(tmp_path / "x.gguf", large, CONFIG, types="F16")
    assert not list(tmp_path.iterdir())


def test_an_adapter_in_bfloat16_is_written_as_gguf(tmp_path):
    adapter = filled(init_lora(jax.random.key(0), CONFIG, dtype=jnp.bfloat16, targets=["wo"]))
    save_lora_gguf(tmp_path / "x.gguf", adapter, CONFIG)
    f = load_lora(tmp_path / "x.gguf", CONFIG)["layers.0.wo"]
    assert adapter["layers.0.wo"].b.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(f.b, adapter["layers.0.wo"].b.astype(np.float32))
