"""The programs from files to files, and what they say of wrong input."""

import dataclasses
import json
import re
import shutil
import struct

import jax
import numpy as np
import pytest

import llama_jax
from llama_jax.cli import options
from llama_jax.cli.main import main as cli
from llama_jax.errors import ArgumentError, FormatError
from llama_jax.formats.load import interleave_rows
from llama_jax.model import by_path, init_params
from tests.tiny import tiny_config, tiny_params
from training import baby_llama, finetune_lora, train_text_from_scratch
from training.checkpoint_2023 import read_checkpoint_2023
from training.finetune_lora import encode_conversation, read_examples
from training.loop import METRICS, read_metrics
from training.train_text_from_scratch import feed_forward_width, ggml_params
from training.vocabulary import vocabulary_of

TEXT = "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n" * 30


@pytest.fixture(autouse=True)
def no_compile_cache(monkeypatch):
    """The compile cache is a setting of the whole process: other tests must not get it."""
    monkeypatch.setattr(options, "cache_compiled_programs", lambda: None)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def arguments(text, run, *more):
    small = ["--ctx", "16", "--embd", "32", "--head", "4", "--head-kv", "2", "--layer", "1", "--mult", "16", "-b", "4"]
    return ["--train-data", str(text), "--checkpoint-out", str(run), "--vocab-train", "300", *small, *more]


def test_train_writes_a_model_that_goes_on_and_is_drawn(tmp_path, text, capsys):
    run = tmp_path / "run"
    command = arguments(text, run, "--val-split", "0.1", "--eval-interval", "2", "--print-details-interval", "3")
    assert cli(["train", *command, "-n", "4", "--predict", "5", "--samples-after-nl"]) == 0
    model = llama_jax.load(run / "model.gguf", dtype="float32")
    assert model.config.n_kv_heads == 2
    assert model.config.d_ff == feed_forward_width(32, 16) == 96
    assert isinstance(model.generate("To be", max_tokens=3), str)
    capsys.readouterr()
    # The same command with more batches goes on; a folder is Hugging Face's form.
    assert (
        cli(["train", *command, "-n", "6", "--predict", "0", "--model-out", str(run / "hf"), "--samples-after-nl"]) == 0
    )
    assert [line["step"] for line in read_metrics(run / METRICS) if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert sum("validation_loss" in line for line in read_metrics(run / METRICS)) == 3
    other = arguments(text, run, "--checkpoint-in", str(tmp_path / "other"), "-n", "9")
    shutil.copytree(run, tmp_path / "other")
    assert cli(["train", *command, "--layer", "2", "--embd", "64"]) == 1
    assert "has another shape: --embd is 64, not 32, --layer is 2, not 1; leave" in capsys.readouterr().err
    assert cli(["train", *command, "--vocab-train", "310"]) == 1
    assert "has a vocabulary of 300 pieces." in capsys.readouterr().err
    assert cli(["train", *other]) == 1
    assert "already holds a run; leave --checkpoint-in out to go on with it" in capsys.readouterr().err
    again = llama_jax.load(run / "hf", dtype="float32")
    assert again.tokenizer.encode(TEXT) == model.tokenizer.encode(TEXT)
    assert not np.array_equal(again.params.embedding, model.params.embedding)
    pytest.importorskip("matplotlib")
    assert cli(["plot", str(run)]) == 0
    assert (run / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.strip() == str(run / "metrics.png")


@pytest.mark.slow
def test_transformers_reads_what_was_trained(tmp_path, text):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    out = tmp_path / "hf"
    command = arguments(text, tmp_path / "run", "-n", "2", "--predict", "0", "--model-out", str(out))
    assert train_text_from_scratch.main(command) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ours = llama_jax.load(out, dtype="float32")
    ids = ours.tokenizer.encode(TEXT[:60])
    assert transformers.AutoTokenizer.from_pretrained(out)(TEXT[:60])["input_ids"] == ids
    expected = theirs(torch.tensor([ids])).logits.detach().numpy()
    logits, _ = llama_jax.forward(ours.params, np.array([ids], np.int32), ours.config)
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_june_2023_begins_at_the_logarithm_of_the_vocabulary(tmp_path, text):
    run = tmp_path / "run"
    command = arguments(text, run, "--compat", "ggml-2023", "-n", "3", "--adam-iter", "2", "--predict", "0")
    assert train_text_from_scratch.main(command) == 0
    lines = [line for line in read_metrics(run / METRICS) if "loss" in line]
    # Its norms were random with mean 0, so the first logits are nearly 0; its first learning rate is 0.
    assert lines[0]["loss"] == pytest.approx(np.log(300), abs=0.02)
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.0, 1e-5, 3e-5], rel=1e-5)


def test_random_weights_of_june_2023():
    config = tiny_config()
    for path, leaf in by_path(jax.jit(ggml_params, static_argnums=1)(jax.random.key(0), config)).items():
        leaf = np.asarray(leaf)
        assert float(np.abs(leaf).max()) <= sum(leaf.shape) ** -0.5 * (1 + 1e-6), path
        if leaf.size > 1000:  # a standard normal cut to +-1 has a standard deviation of 0.718
            assert float(leaf.std()) == pytest.approx(0.718 * sum(leaf.shape) ** -0.5, rel=0.06)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--head", "5"], "--embd is 32; it must be a multiple of --head, 5."),
        (["--rotmax", "4"], "--rotmax is 4; it must be at least 8, the width of a head"),
        (["--train-data", "/nowhere"], "'/nowhere' is no file or folder"),
        (["--checkpoint-in", "/nowhere"], "--checkpoint-in '/nowhere' is neither a run's folder with checkpoints nor"),
        (["--vocab-model", "x.gguf"], "--vocab-model and --vocab-train were both given"),
        (["--compat", "ggml-2023", "--use-lbfgs"], "--compat ggml-2023 goes with AdamW only"),
        (["-b", "0"], "batch is 0; it must be an integer from 1"),
        (["--val-split", "2"], "The validation split is 2.0; it must be from 0 to 0.9."),
        (["--model-type", "Q4_K"], "--model-type is 'Q4_K'; it must be one of F32, F16, "),
        (["--model-type", "Q8_0", "--embd", "48"], "--model-type Q8_0 needs rows of a multiple of 32 values; the mo"),
        (["--model-out", "/nowhere/m.gguf"], "--model-out '/nowhere/m.gguf' lies in a folder that does not exist."),
        (["--mesh", "x"], "The mesh is 'x'; it must be like data=2,fsdp=4,tensor=1."),
    ],
)
def test_wrong_options_are_a_sentence(tmp_path, text, capsys, more, sentence):
    assert cli(["train", *arguments(text, tmp_path / "run", *more)]) == 1
    assert f"llama-jax: {sentence}" in capsys.readouterr().err


def test_a_damaged_vocabulary_is_a_sentence(tmp_path, text, capsys):
    for name in ("vocabulary.json", "tokenizer.model"):
        (tmp_path / name).write_text('{"tokenizer.')
    assert cli(["train", *arguments(text, tmp_path)]) == 1
    assert f"The vocabulary '{tmp_path / 'vocabulary.json'}' is damaged: " in capsys.readouterr().err


def test_plot_of_nothing_is_a_sentence(tmp_path, capsys):
    assert cli(["plot", str(tmp_path)]) == 1
    assert "does not exist; name the folder of a training run." in capsys.readouterr().err


# Checkpoints of June 2023


def write_checkpoint_2023(path, params, config):
    """As the program of that time wrote it, but for the optimiser's state."""
    names = {
        "embedding": "tok_embeddings", "output_norm": "norm", "output_head": "output",
        "attention_norm": "attention_norm", "wq": "attention.wq", "wk": "attention.wk", "wv": "attention.wv",
        "wo": "attention.wo", "ffn_norm": "ffn_norm", "w_gate": "feed_forward.w1", "w_down": "feed_forward.w2",
        "w_up": "feed_forward.w3",
    }  # fmt: skip
    data = b"pcgg" + struct.pack(
        "<10I", 0, 7, 8, 9, config.vocab_size, config.d_model, 16, config.n_heads, config.n_layers, config.head_dim
    )
    for parameter, values in by_path(params).items():
        layer, _, field = parameter.rpartition(".")
        name = f"{layer}.{names[field]}.weight".lstrip(".").encode()
        values = np.asarray(values)
        if field in ("wq", "wk"):
            values = interleave_rows(values, config.n_heads)
        data += (
            struct.pack("<3I", values.ndim, len(name), 0) + struct.pack(f"<{values.ndim}I", *values.shape[::-1]) + name
        )
        data += bytes(-len(data) % 32) + values.astype("<f4").tobytes()
    path.write_bytes(data + b"the optimiser's state")


def test_a_checkpoint_of_2023_gives_its_weights(tmp_path):
    config = tiny_config(n_kv_heads=4, head_dim=8, n_layers=2)
    params = tiny_params(config)
    path = tmp_path / "checkpoint.bin"
    write_checkpoint_2023(path, params, config)
    got_config, got, counters = read_checkpoint_2023(path, context_length=64)
    assert got_config == dataclasses.replace(config, norm_epsilon=1e-6)
    jax.tree.map(np.testing.assert_array_equal, got, params)
    assert counters == dict(iterations=7, samples=8, tokens=9)
    whole = path.read_bytes()
    for size in (3, 20, 50, 1000, len(whole) - 4000):
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError):
            read_checkpoint_2023(path, 64)


# Adapters


def test_only_answers_count():
    tokenizer = vocabulary_of(None).tokenizer
    messages = [
        dict(role="user", content="What news?"),
        dict(role="assistant", content="None, my lord."),
        dict(role="user", content="Go."),
        dict(role="assistant", content="I go."),
    ]
    ids, counts = encode_conversation(tokenizer, messages)
    text = tokenizer.decode(ids.tolist())
    assert "What news?" in text
    runs = np.split(ids, np.flatnonzero(np.diff(counts)) + 1)
    kinds = [counts[0], *counts[1:][np.diff(counts)]]
    learnt = [tokenizer.decode(run.tolist()).strip() for run, kind in zip(runs, kinds, strict=True) if kind]
    assert learnt == ["None, my lord.", "I go."]


def test_json_lines_of_all_kinds(tmp_path):
    tokenizer = vocabulary_of(None).tokenizer
    path = tmp_path / "x.jsonl"
    chat = [dict(role="user", content="a"), dict(role="assistant", content="b")]
    path.write_text("\n".join(map(json.dumps, [dict(messages=chat), dict(prompt="a", response="b"), dict(text="c")])))
    (a, a_counts), (b, b_counts), (_, c_counts) = read_examples([str(path)], tokenizer)
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a_counts, b_counts)
    assert c_counts is None
    path.write_text('{"messages": []}')
    with pytest.raises(ArgumentError, match=r"line 1: .* has neither `messages` with an assistant's"):
        list(read_examples([str(path)], tokenizer))


@pytest.fixture
def small_model(tmp_path):
    """A tiny model with the shipped vocabulary, packed as Q8_0."""
    source = vocabulary_of(None)
    config = tiny_config(vocab_size=source.tokenizer.vocab_size, n_layers=1, head_dim=8, d_ff=64)
    path = tmp_path / "base.gguf"
    llama_jax.save_gguf(path, init_params(jax.random.key(0), config), config, metadata=source.metadata, types="Q8_0")
    return path


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_finetune_lora(tmp_path, small_model, packed):
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps(dict(prompt="Who goes there?", response="A friend, my lord, a friend.")) + "\n")
    run = tmp_path / "run"
    out = tmp_path / ("adapter.gguf" if packed else "adapter")
    command = [
        "-m", str(small_model), "--train-data", str(data), "--checkpoint-out", str(run), "--lora-out", str(out),
        "-c", "32", "-b", "2", "-n", "12", "--rank", "4", "--adam-alpha", "0.02", "--warmup", "0", "--dropout", "0.1",
        *(["--packed"] if packed else []),
    ]  # fmt: skip
    assert finetune_lora.main(command) == 0
    losses = [line["loss"] for line in read_metrics(run / METRICS)]
    assert losses[-1] < losses[0] - 0.2
    base = llama_jax.load(small_model, dtype="float32")
    adapted = llama_jax.load(small_model, dtype="float32", lora=[out])
    tokens = np.array([base.tokenizer.encode("A friend, my lord")], np.int32)
    a, b = (llama_jax.forward(m.params, tokens, m.config)[0] for m in (base, adapted))
    assert not np.allclose(a, b, atol=1e-3)


def test_finetune_lora_checks_its_output_first(tmp_path, small_model, capsys):
    data = tmp_path / "text.txt"
    data.write_text("A friend, my lord.\n")
    (tmp_path / "a.gguf").mkdir()
    for out, problem in (
        (tmp_path / "no" / "adapter", "lies in a folder that does not exist."),
        (tmp_path / "a.gguf", "is a folder; name a .gguf file or a folder."),
        (data, "is no folder; name a .gguf file or a folder."),
    ):
        run = tmp_path / "run"
        command = ["-m", str(small_model), "--train-data", str(data), "--checkpoint-out", str(run)]
        assert finetune_lora.main([*command, "--lora-out", str(out)]) == 1
        assert f"--lora-out {str(out)!r} {problem}" in capsys.readouterr().err
        assert not run.exists()


def test_baby_llama_learns(capsys):
    assert baby_llama.main(["--steps", "150", "--lora", "4"]) == 0
    out = capsys.readouterr().out
    first, second = (float(text) for text in re.findall(r"loss ([\d.]+) nats", out))
    assert first < 0.4  # of ln 16 = 2.77 at the beginning
    assert second < 0.8
    drawn = re.findall(r"\|(.{16})\|", out)
    assert len(drawn) == 2 * baby_llama.T
    for line in drawn[: baby_llama.T]:  # the model's stars are near the wave's dots
        assert "*" not in line or "." not in line or abs(line.index("*") - line.index(".")) <= 3
