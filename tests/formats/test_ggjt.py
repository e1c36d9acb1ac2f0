"""Files from before GGUF, built here from their description: every version, types, parts, vocabularies, damage."""

import struct

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

import llama_jax
from llama_jax.errors import FormatError
from llama_jax.formats import names
from llama_jax.formats.load import check_tensors, interleave_rows, load_params, open_model
from llama_jax.formats.save import save_gguf
from llama_jax.quantization.packed import QuantizedTensor

from .conftest import random_params, tiny_config

# No grouped heads and the constants of Llama 1, which these files cannot name.
CONFIG = tiny_config(n_kv_heads=4, norm_epsilon=1e-6, context_length=2048, vocab_size=300)
KINDS = {
    "ggml": (b"lmgg", None),
    "ggmf": (b"fmgg", 1),
    "ggjt 1": (b"tjgg", 1),
    "ggjt 2": (b"tjgg", 2),
    "ggjt 3": (b"tjgg", 3),
}
COLUMNS = ("tok_embeddings.weight", "attention.wo.weight", "feed_forward.w2.weight")


def legacy_name(path):
    layer, _, field = path.rpartition(".")
    return f"{layer}.{names.LEGACY_LAYER[field]}" if layer else names.LEGACY_TOP[path]


def legacy_tokens(config):
    """Unknown, BOS, EOS, 256 bytes as themselves, then pieces."""
    bytes_ = [bytes([b]) for b in range(256)]
    pieces = [f" {chr(97 + i)}".encode() for i in range(config.vocab_size - 259)]
    return [" ⁇ ".encode(), b"", b"", *bytes_, *pieces]


def tensors_of(params, config, kind="F32"):
    """Legacy name to (numpy shape, type id, rows of bytes), query and key rows interleaved."""
    found = {}
    for path in names.parameter_shapes(config):
        layer, _, field = path.rpartition(".")
        values = np.asarray(getattr(params.layers[int(layer[7:])] if layer else params, field), np.float32)
        heads = names.rotary_heads(path, config)
        if heads is not None:
            values = interleave_rows(values, heads)
        own = "F32" if values.ndim == 1 else kind
        rows = quants.quantize(values, GGMLQuantizationType[own])
        found[legacy_name(path)] = (values.shape, int(GGMLQuantizationType[own]), rows)
    return found


def write(path, tensors, config, kind="ggjt 3", tokens=None, scores=None, n_rot=None, **header):
    magic, version = KINDS[kind]
    tokens = legacy_tokens(config) if tokens is None else tokens
    scores = np.zeros(len(tokens)) if scores is None else scores
    numbers = dict(
        n_vocab=len(tokens), n_embd=config.d_model, n_mult=256, n_head=config.n_heads, n_layer=config.n_layers,
        n_rot=config.head_dim if n_rot is None else n_rot, ftype=0,
    ) | header  # fmt: skip
    with path.open("wb") as file:
        file.write(magic + (b"" if version is None else struct.pack("<I", version)))
        file.write(struct.pack("<7I", *numbers.values()))
        for token, score in zip(tokens, scores, strict=True):
            file.write(struct.pack("<I", len(token)) + token)
            if version is not None:
                file.write(struct.pack("<f", score))
        for name, (shape, type_id, rows) in tensors.items():
            file.write(struct.pack("<3I", len(shape), len(name), type_id))
            file.write(struct.pack(f"<{len(shape)}I", *shape[::-1]) + name.encode())
            if magic == b"tjgg":
                file.write(b"\0" * (-file.tell() % 32))
            file.write(np.ascontiguousarray(rows).tobytes())
    return path


def load(path, packed=False):
    with open_model(path) as file:
        check_tensors(file)
        return file.config, load_params(file, np.float32, lambda _, array: array, packed=packed)


def assert_same(params, expected, atol=0.0):
    for path in names.parameter_shapes(CONFIG):
        layer, _, field = path.rpartition(".")
        a, b = (getattr(p.layers[int(layer[7:])] if layer else p, field) for p in (params, expected))
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=atol, rtol=0)
        assert np.asarray(a).flags.aligned


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("types", ["F32", "F16"])
def test_plain_types_are_read_in_every_version(tmp_path, kind, types):
    params = random_params(CONFIG)
    config, loaded = load(write(tmp_path / "m.bin", tensors_of(params, CONFIG, types), CONFIG, kind))
    assert config == CONFIG
    assert_same(loaded, params, atol=0 if types == "F32" else 2e-3)


@pytest.mark.parametrize(
    ("types", "readable"),
    [("Q4_0", [3]), ("Q4_1", [3]), ("Q8_0", [3]), ("Q5_0", [2, 3]), ("Q5_1", [2, 3])],
)
def test_quantized_types_are_read_where_their_layout_is_today_s(tmp_path, types, readable):
    params = random_params(CONFIG)
    tensors = tensors_of(params, CONFIG, types)
    save_gguf(tmp_path / "m.gguf", params, CONFIG, types=types)
    with open_model(tmp_path / "m.gguf") as file:
        expected = load_params(file, np.float32, lambda _, array: array)
    for version in (1, 2, 3):
        path = write(tmp_path / "m.bin", tensors, CONFIG, f"ggjt {version}")
        if version in readable:
            assert_same(load(path)[1], expected)
            assert isinstance(load(path, packed=True)[1].layers[0].wq, QuantizedTensor)
        else:
            with pytest.raises(FormatError, match=rf"{types} as ggjt version {version} laid it out, which changed"):
                load(path)
    with pytest.raises(FormatError, match=rf"type {types} as ggml version 0 laid it out"):
        load(write(tmp_path / "m.bin", tensors, CONFIG, "ggml"))


@pytest.mark.parametrize("types", ["F32", "Q8_0"])
def test_several_parts_are_put_together(tmp_path, types):
    params = random_params(CONFIG)
    whole = tensors_of(params, CONFIG, types)
    expected = load(write(tmp_path / "whole.bin", whole, CONFIG))[1]
    for i in range(2):
        part = {}
        for name, (shape, type_id, rows) in whole.items():
            if len(shape) == 2:
                axis = 1 if name.endswith(COLUMNS) else 0
                rows = np.split(rows, 2, axis)[i]
                shape = (shape[0], shape[1] // 2) if axis else (shape[0] // 2, shape[1])
            part[name] = (shape, type_id, rows)
        write(tmp_path / ("m.bin" if i == 0 else f"m.bin.{i}"), part, CONFIG)
    config, loaded = load(tmp_path / "m.bin")
    assert config == CONFIG
    assert_same(loaded, expected)
    (tmp_path / "m.bin.1").rename(tmp_path / "away")
    with pytest.raises(FormatError, match=r"is the first of 2 files; m\.bin\.1 is missing beside it"):
        load(tmp_path / "m.bin")
    write(tmp_path / "m.bin.1", whole, CONFIG)
    with pytest.raises(FormatError, match=r"the parts of tensor 'tok_embeddings.weight' differ in shape or type"):
        load(tmp_path / "m.bin")
    write(tmp_path / "m.bin.1", whole, CONFIG, n_mult=1)
    with pytest.raises(FormatError, match=r"does not belong to m\.bin"):
        load(tmp_path / "m.bin")


def test_grouped_heads_mean_llama_2_70b(tmp_path):
    config = tiny_config(n_kv_heads=2, norm_epsilon=1e-5, context_length=2048, vocab_size=300)
    params = random_params(config)
    assert load(write(tmp_path / "m.bin", tensors_of(params, config), config))[0] == config


def test_the_whole_way_to_text(tmp_path):
    path = write(tmp_path / "m.bin", tensors_of(random_params(CONFIG), CONFIG), CONFIG)
    model = llama_jax.load(path, n_ctx=64)
    assert model.tokenizer.encode("b<") == [1, 260, 3 + ord("<")]
    assert model.tokenizer.decode([1, 260, 3 + ord("<")]) == "b<"
    assert isinstance(model.generate("a", max_tokens=3, temperature=0.0), str)
    with open_model(path) as file:
        assert (file.metadata["legacy.format"], file.metadata["legacy.version"]) == ("ggjt", 3)


TEXTS = [
    "Hello world",
    " Hello  World!",
    "wörld 🦙 ご飯",
    "",
    "3.14 + \t\n tabs\n\n",
    "<s> is no special token",
    "A" * 30,
]


@pytest.mark.parametrize("kind", ["ggml", "ggjt 3"])
def test_a_real_vocabulary_gives_the_ids_of_its_gguf(tmp_path, vocabularies, kind):
    """ggml files hold no scores: the order of the ids stands in for them."""
    with open_model(vocabularies / "ggml-vocab-llama-spm.gguf") as file:
        tokenizer, metadata = file.tokenizer(), dict(file.metadata)
    pieces = metadata["tokenizer.ggml.tokens"]
    tokens = [piece.replace("▁", " ").encode() for piece in pieces]
    tokens[:259] = legacy_tokens(CONFIG)[:259]
    config = tiny_config(n_kv_heads=4, n_layers=1, vocab_size=len(tokens))
    tensors = tensors_of(random_params(tiny_config(n_kv_heads=4, n_layers=1)), config)
    path = write(tmp_path / "m.bin", tensors, config, kind, tokens, metadata["tokenizer.ggml.scores"])
    with open_model(path) as file:
        legacy = file.tokenizer()
    for text in TEXTS:
        assert legacy.encode(text) == tokenizer.encode(text)
        assert legacy.decode(legacy.encode(text)) == text
    assert (legacy.bos_id, legacy.eos_id, legacy.eog_ids) == (1, 2, (2,))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(n_rot=8), r"n_rot is 8; it must be the width of a head, 16"),
        (dict(n_head=3), r"n_head is 3; it must divide the model's width, 64"),
        (dict(n_head=0), r"n_head is 0; it must divide"),
        (dict(n_layer=3), "lacks layers.2.attention_norm"),
        (dict(n_layer=1), "holds tensors that a LLaMA model has no use for"),
        (dict(n_embd=96), r"the embedding has 64 columns; the model's width, 96, must be a multiple"),
        (dict(n_embd=128), r"is the first of 2 files; m\.bin\.1 is missing"),
        (dict(n_vocab=2**31), "n_vocab is 2147483648; a file of"),
    ],
)
def test_numbers_that_do_not_fit(tmp_path, changes, sentence):
    with pytest.raises(FormatError, match=sentence):
        load(write(tmp_path / "m.bin", tensors_of(random_params(CONFIG), CONFIG), CONFIG, **changes))


def test_removed_types_and_versions_are_named(tmp_path):
    tensors = tensors_of(random_params(CONFIG), CONFIG)
    name = "layers.1.attention.wo.weight"
    shape, _, rows = tensors[name]
    with pytest.raises(FormatError, match=rf"tensor '{name}' has type Q4_2, which cannot be read"):
        load(write(tmp_path / "m.bin", tensors | {name: (shape, 4, rows)}, CONFIG))
    data = write(tmp_path / "m.bin", tensors, CONFIG).read_bytes()
    (tmp_path / "m.bin").write_bytes(data[:4] + struct.pack("<I", 4) + data[8:])
    with pytest.raises(FormatError, match="the ggjt version is 4; it must be 1 or 2 or 3"):
        load(tmp_path / "m.bin")


def test_damage_is_one_sentence(tmp_path):
    config = tiny_config(n_kv_heads=4, n_layers=1, vocab_size=300, d_model=32, d_ff=32)
    whole = write(tmp_path / "m.bin", tensors_of(random_params(config), config), config).read_bytes()
    path = tmp_path / "m.bin"
    rng = np.random.default_rng(0)
    for size in [*range(4, 60), *rng.integers(60, len(whole), 60)]:
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError) as caught:
            load(path)
        assert "\n" not in str(caught.value)
    errors = []
    for position in rng.integers(4, 5000, 200):
        path.write_bytes(whole[:position] + bytes([rng.integers(256)]) + whole[position + 1 :])
        try:
            load(path)
        except FormatError as error:
            errors.append(str(error))
    assert len(errors) > 20
    assert not [error for error in errors if "\n" in error]
