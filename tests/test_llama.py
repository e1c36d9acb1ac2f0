"""The shipped model from text to text; golden texts are what it wrote in float32 on a CPU when it was shipped."""

import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch

import jax.numpy as jnp
import numpy as np
import pytest

import llama_jax
from llama_jax import ArgumentError, FormatError, Llama, sampling_params, tensor_mesh
from llama_jax import session as session_module
from llama_jax.text.chat import encode_chat

PROMPT = "ROMEO.\n"
GREEDY = dict(max_tokens=40, temperature=0.0)
# The smallest margin between the two best logits on the way is 0.056.
GOLDEN = "I am a gentleman of the Fairy.\n\nFLUELLEN.\nI am glad to see you well.\n\nFLUELLEN.\nI am gl"
QUESTION = [{"role": "user", "content": "Who is there?"}]


@pytest.fixture(scope="module")
def loaded() -> Llama:
    return llama_jax.load(dtype="float32", n_ctx=128)


@pytest.fixture
def model(loaded) -> Llama:
    """The shipped model with a context of 128 tokens and nothing in its cache."""
    return Llama(loaded.config, loaded.params, loaded.tokenizer, n_ctx=128)


def test_golden_text(model):
    assert model.generate(PROMPT, **GREEDY) == GOLDEN


def test_golden_answer(model):
    assert (
        model.chat(QUESTION, max_tokens=20, temperature=0.0)
        == "He is a very villain.\n\nTHIRD CITIZEN.\nHe's a good fellow"
    )


def test_a_stream_is_the_text_in_pieces(model):
    pieces = list(model.stream(PROMPT, **GREEDY))
    assert "".join(pieces) == GOLDEN
    assert len(pieces) > 1


def test_a_seed_gives_one_text(model):
    options = dict(max_tokens=30, temperature=1.0)
    text = model.generate(PROMPT, seed=7, **options)
    assert "".join(model.stream(PROMPT, seed=7, **options)) == text
    assert model.generate(PROMPT, seed=8, **options) != text


def test_a_prompt_of_ids(model):
    ids = model.tokenizer.encode(PROMPT)
    assert ids[0] == model.tokenizer.bos_id
    assert model.generate(np.array(ids), **GREEDY) == GOLDEN


def test_an_empty_prompt_begins_a_text(model):
    assert model.tokenize_prompt("") == [model.tokenizer.bos_id]
    assert model.generate("", max_tokens=4, temperature=0.0).startswith("\n\n[")


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("gentleman of", "I am a "),  # several tokens long
        ("entle", "I am a g"),  # begins inside a word
        (["Fairy", "of the"], "I am a gentleman "),
        ("I am a gentleman", ""),
        ("nowhere", GOLDEN),
        ("I am glib", GOLDEN),  # withheld at the end, and then released
    ],
)
def test_stop_strings(model, stop, text):
    assert model.generate(PROMPT, stop=stop, **GREEDY) == text


@pytest.mark.parametrize(("max_tokens", "text"), [(0, ""), (1, "I"), (2, "I am")])
def test_max_tokens(model, max_tokens, text):
    assert model.generate(PROMPT, max_tokens=max_tokens, temperature=0.0) == text


def test_a_full_context_ends_the_text(loaded):
    model = Llama(loaded.config, loaded.params, loaded.tokenizer, n_ctx=24)
    prompt = model.tokenize_prompt(PROMPT)
    text = model.generate(PROMPT, max_tokens=None, temperature=0.0)
    assert GOLDEN.startswith(text)
    # The last token needs no place of its own, since nothing comes after it.
    assert model.timings.generated_tokens + 1 == 24 - len(prompt) + 1
    assert model.generate(PROMPT, max_tokens=1000, temperature=0.0) == text
    model.generate([prompt[0]] * 24, max_tokens=None, temperature=0.0)
    assert (model.timings.prompt_tokens, model.timings.generated_tokens) == (23, 0)  # one token, from the prompt's run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperature=-1.0), "temperature is -1.0"),
        (dict(temperature=float("nan")), "temperature is nan"),
        (dict(top_k=1.5), "top_k is 1.5"),
        (dict(top_p=0.0), "top_p is 0.0"),
        (dict(min_p=2.0), "min_p is 2.0"),
        (dict(repeat_penalty=0.0), "repeat_penalty is 0.0"),
        (dict(repeat_last_n=-3), "repeat_last_n is -3"),
        (dict(seed=2**70), "seed is"),
        (dict(max_tokens=-1), "max_tokens is -1"),
        (dict(stop=["", "x"]), "stop string is ''"),
        (dict(prompt=[1] * 129), "129 tokens; the context holds 128"),
        (dict(prompt=[]), "no tokens"),
        (dict(prompt=[1, 2048]), "token id 2048; ids go from 0 to 2047"),
        (dict(prompt=[-1, 5]), "token id -1"),
        (dict(prompt=b"abc"), "type bytes"),
        (dict(prompt=["a"]), "token id of the prompt is 'a'"),
        (dict(temperature="hot"), "temperature is 'hot'"),
        (dict(temperature=1e308), "temperature is 1e"),
        (dict(repeat_penalty=1e-300), "repeat_penalty is 1e-300"),
        (dict(top_k=True), "top_k is True"),
        (dict(seed=1.5), "seed is 1"),
        (dict(max_tokens=1.5), "max_tokens is 1"),
        (dict(stop=5), "stop is 5"),
        (dict(stop=[None]), "stop is"),
    ],
)
def test_wrong_arguments_raise_at_the_call(model, options, message):
    with pytest.raises(ArgumentError, match=message) as error:
        model.stream(**({"prompt": PROMPT} | options))
    assert str(error.value).count("\n") == 0
    assert str(error.value).endswith(".")


def test_an_unknown_option_raises_at_the_call(model):
    with pytest.raises(TypeError, match="temprature"):
        model.stream(PROMPT, temprature=1.0)


def test_interleaved_streams_do_not_disturb_each_other(model):
    other = "HAMLET.\n"
    alone = model.generate(other, **GREEDY)
    texts = ["", ""]
    streams = [model.stream(PROMPT, **GREEDY), model.stream(other, **GREEDY)]
    running = [0, 1]
    while running:
        for i in list(running):
            piece = next(streams[i], None)
            texts[i] += piece or ""
            if piece is None:
                running.remove(i)
    assert texts == [GOLDEN, alone]
    assert alone != GOLDEN


def test_threads_do_not_disturb_each_other(model):
    prompts = [PROMPT, "HAMLET.\n"] * 3
    alone = [model.generate(prompt, **GREEDY) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(lambda prompt: model.generate(prompt, **GREEDY), prompts)) == alone


def test_a_dropped_stream_leaves_the_model_usable(model):
    stream = model.stream(PROMPT, **GREEDY)
    next(stream)
    stream.close()
    model.stream(PROMPT, **GREEDY)  # never started
    assert model.generate(PROMPT, **GREEDY) == GOLDEN


def test_an_interrupt_within_a_step_leaves_the_model_usable(model, monkeypatch):
    decode = session_module._decode_jit

    def interrupted(*arguments):
        decode(*arguments)  # takes the cache's buffers, and nobody gets the new ones
        raise KeyboardInterrupt

    monkeypatch.setattr(session_module, "_decode_jit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate(PROMPT, **GREEDY)
    monkeypatch.undo()
    assert model.generate(PROMPT, **GREEDY) == GOLDEN


def test_a_prompt_that_goes_on_is_not_run_again(model):
    ids = model.tokenize_prompt(PROMPT)
    model.generate(ids, **GREEDY)
    assert (model.timings.prompt_tokens, model.timings.cached_tokens) == (len(ids), 0)
    assert model.timings.generated_tokens == 39
    model.generate(ids, **GREEDY)
    assert (model.timings.prompt_tokens, model.timings.cached_tokens) == (1, len(ids) - 1)
    model.generate([*ids, 5, 6], **GREEDY)
    assert (model.timings.prompt_tokens, model.timings.cached_tokens) == (2, len(ids))


def test_a_conversation_reuses_its_beginning(model):
    first = encode_chat(model.tokenizer, QUESTION)
    pieces = list(model.stream_chat(QUESTION, max_tokens=12, temperature=0.0))
    answer = "".join(pieces)
    assert answer == model.chat(QUESTION, max_tokens=12, temperature=0.0)
    assert answer == model.generate(first, max_tokens=12, temperature=0.0).removeprefix(" ")
    model.chat([*QUESTION, {"role": "assistant", "content": answer}, *QUESTION], max_tokens=12)
    assert model.timings.cached_tokens >= len(first)


def test_wrong_messages_are_refused(model):
    with pytest.raises(ArgumentError, match="Message 0 has the role None"):
        model.stream_chat([{"content": "no role"}])


def test_padding_of_the_vocabulary_is_never_sampled(loaded):
    direction = np.random.default_rng(0).normal(size=(1, loaded.config.d_model)).astype(np.float32)
    padding = jnp.asarray(1e4 * np.concatenate([direction, -direction]))  # one of them has the best logit
    params = loaded.params.replace(embedding=jnp.concatenate([loaded.params.embedding, padding]))
    config = dataclasses.replace(loaded.config, vocab_size=loaded.config.vocab_size + 2)
    model = Llama(config, params, loaded.tokenizer, n_ctx=128)
    assert model.generate(PROMPT, **GREEDY) == GOLDEN
    unlimited = sampling_params(temperature=0.0)
    ((new,),) = model.new_session().generate([model.tokenize_prompt(PROMPT)], unlimited, max_tokens=1)
    assert new[0] >= loaded.config.vocab_size


def test_a_vocabulary_larger_than_the_embedding_is_refused(loaded):
    config = dataclasses.replace(loaded.config, vocab_size=2000)
    with pytest.raises(ArgumentError, match="2048 tokens; the model's embedding has only 2000"):
        Llama(config, loaded.params, loaded.tokenizer)


def test_warming_up_changes_nothing(model):
    model.warm_up(PROMPT, temperature=0.0)
    assert model.generate(PROMPT, **GREEDY) == GOLDEN
    assert model.timings.cached_tokens == 0


def test_a_mesh_gives_the_same_text(loaded):
    model = llama_jax.load(dtype="float32", n_ctx=128, mesh=tensor_mesh(2))
    assert len(model.params.layers[0].w_gate.sharding.device_set) == 2
    assert model.generate(PROMPT, **GREEDY) == GOLDEN


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_progress_reaches_its_total(dtype):
    calls = []
    model = llama_jax.load(dtype=dtype, progress=lambda done, total: calls.append((done, total)))
    done, total = zip(*calls, strict=True)
    weights = [model.params.embedding, model.params.output_norm]
    weights += [w for layer in model.params.layers for w in vars(layer).values()]
    assert set(total) == {sum(w.nbytes for w in weights)}
    assert list(done) == sorted(done)
    assert done[-1] == total[0]


@pytest.mark.parametrize(("n_ctx", "expected"), [(None, 512), (0, 512), (40, 40)])
def test_the_context_defaults_to_the_model(loaded, n_ctx, expected):
    assert Llama(loaded.config, loaded.params, loaded.tokenizer, n_ctx=n_ctx).n_ctx == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(n_ctx=-1), "n_ctx is -1"),
        (dict(n_batch=0), "n_batch is 0"),
        (dict(path="/nope"), "'/nope' does not exist"),
        (dict(path="~nobody-of-this-name/x.gguf"), "does not exist"),
        (dict(path="x" * 5000), "does not exist"),
        (dict(path="hf:nobody"), "not of the form hf:owner/name"),
        (dict(path="hf:a/b/c"), "not of the form hf:owner/name"),
        (dict(dtype="bf16"), "dtype is 'bf16'; it must be float32, bfloat16 or float16"),
        (dict(dtype="int8"), "int8; it must be float32, bfloat16 or float16"),
    ],
)
def test_load_refuses(options, message):
    with pytest.raises(ArgumentError, match=message):
        llama_jax.load(**options)


def test_load_refuses_an_empty_folder(tmp_path):
    with pytest.raises(FormatError, match=r"without config\.json"):
        llama_jax.load(tmp_path)


def test_a_hub_path_without_the_hub_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ArgumentError, match=r"pip install 'llama-jax\[hub\]'"):
        llama_jax.load("hf:owner/name")


def test_a_failed_download_is_one_sentence(monkeypatch):
    class Hub:
        @staticmethod
        def hf_hub_download(name, file):
            raise OSError(f"no {file} in {name}\nand a long explanation")

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    with pytest.raises(ArgumentError, match=r"of 'hf:o/n:f.gguf' failed: no f.gguf in o/n$"):
        llama_jax.load("hf:o/n:f.gguf")


def test_a_download_takes_only_what_is_read(monkeypatch, tmp_path):
    asked = {}

    class Hub:
        @staticmethod
        def snapshot_download(name, **patterns):
            asked.update(patterns, name=name)
            return tmp_path

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    with pytest.raises(FormatError, match=r"without config\.json"):
        llama_jax.load("hf:owner/name")

    def taken(file: str) -> bool:
        return any(fnmatch(file, p) for p in asked["allow_patterns"]) and not any(
            fnmatch(file, p) for p in asked["ignore_patterns"]
        )

    assert asked["name"] == "owner/name"
    assert all(map(taken, ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "tokenizer.json"]))
    assert not any(map(taken, ["consolidated.safetensors", "original/params.json", "pytorch_model.bin", "x.gguf"]))
