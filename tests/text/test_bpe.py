from __future__ import annotations

import json
import time
import unicodedata
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Library

from llama_jax.errors import FormatError
from llama_jax.text.bpe import BYTE_OF_CHARACTER, PRE_TOKENIZERS
from llama_jax.text.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from tests.text.conftest import shared_path, tiny_bpe

assigned = st.characters(exclude_categories=["Cn", "Cs"], max_codepoint=0x2FFFF)
pieces = st.sampled_from(
    [
        *(" ", "   ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "'s", "'LL", "'re", "don't", "1234567", "٣٤", "½", "²"),
        *("Hello", " world", "é", "e\u0301", "😀", "中文", "!?", "...\n", "$a", "_x", "Ǆ"),
    ]
)
texts = st.lists(st.one_of(pieces, st.text(assigned, max_size=6)), max_size=12).map("".join)

# An independent reading of the rules, without regular expressions and without the tokenizers library.

SPACES = set("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {chr(c) for c in range(0x2000, 0x200B)}


def kind(c: str) -> str:
    major = unicodedata.category(c)[0]
    return "space" if c in SPACES else {"L": "letter", "N": "number"}.get(major, "other")


def run(text: str, at: int, *kinds: str) -> int:
    while at < len(text) and kind(text[at]) in kinds:
        at += 1
    return at


def contraction(text: str, at: int, fold: bool) -> int:
    for ending in ("s", "t", "re", "ve", "m", "ll", "d"):
        found = text[at + 1 : at + 1 + len(ending)]
        if text[at] == "'" and (found == ending or (fold and found.isascii() and found.lower() == ending)):
            return at + 1 + len(ending)
    return at


def space_end(text: str, at: int) -> int:
    """Spaces up to the last one, which belongs to the word behind it, unless nothing follows."""
    end = run(text, at, "space")
    return end if end == len(text) or end == at + 1 else end - 1


def words_gpt2(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        end = contraction(text, at, fold=False)
        skip = at + (text[at] == " ")
        if end == at and skip < len(text) and kind(text[skip]) != "space":
            end = run(text, skip, kind(text[skip]))
        if end == at:
            end = space_end(text, at)
        yield text[at:end]
        at = end


def words_smollm(text: str) -> Iterator[str]:
    part = ""
    for c in text:
        if kind(c) == "number":
            yield from words_gpt2(part)
            yield c
            part = ""
        else:
            part += c
    yield from words_gpt2(part)


def words_llama3(text: str, digits: int = 3) -> Iterator[str]:
    at = 0
    while at < len(text):
        end = contraction(text, at, fold=True)
        if end == at:
            skip = at + (kind(text[at]) in ("other", "space") and text[at] not in "\r\n")
            letters = run(text, skip, "letter")
            end = letters if letters > skip else at
        if end == at and kind(text[at]) == "number":
            end = min(run(text, at, "number"), at + digits)
        if end == at:
            skip = at + (text[at] == " ")
            other = run(text, skip, "other")
            if other > skip:
                end = other
                while end < len(text) and text[end] in "\r\n":
                    end += 1
        if end == at:
            spaces = run(text, at, "space")
            newline = max(text.rfind("\n", at, spaces), text.rfind("\r", at, spaces))
            end = newline + 1 if newline >= 0 else space_end(text, at)
        yield text[at:end]
        at = end


CHARACTER_OF_BYTE = {b: c for c, b in BYTE_OF_CHARACTER.items()}


class Oracle:
    def __init__(self, metadata: dict, words, ignore_merges: bool) -> None:
        self.ids = {t: i for i, t in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(m.split(" ")): i for i, m in enumerate(metadata["tokenizer.ggml.merges"])}
        self.words, self.ignore_merges = words, ignore_merges

    def encode(self, text: str) -> list[int]:
        return [
            i for word in self.words(text) for i in self.merge("".join(CHARACTER_OF_BYTE[b] for b in word.encode()))
        ]

    def merge(self, word: str) -> list[int]:
        if self.ignore_merges and word in self.ids:
            return [self.ids[word]]
        parts = list(word)
        while len(parts) > 1:
            ranked = [(self.ranks.get(pair, 10**9), i) for i, pair in enumerate(pairwise(parts))]
            rank, i = min(ranked)
            if rank == 10**9:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return [self.ids[p] for p in parts if p in self.ids]

    def kept(self, text: str) -> str:
        """The text without the bytes that the vocabulary has no token for; SmolLM2 lacks 21 of them."""
        return bytes(b for b in text.encode() if CHARACTER_OF_BYTE[b] in self.ids).decode("utf-8", "replace")


@pytest.fixture(scope="session")
def llama3_oracle(llama3_metadata) -> Oracle:
    return Oracle(llama3_metadata, words_llama3, ignore_merges=True)


@pytest.fixture(scope="session")
def smollm2_oracle(smollm2_metadata) -> Oracle:
    return Oracle(smollm2_metadata, words_smollm, ignore_merges=False)


@given(text=texts)
@settings(max_examples=300, deadline=None)
def test_llama3_agrees_with_the_oracle(llama3: Tokenizer, llama3_oracle: Oracle, text: str) -> None:
    assert llama3.encode(text, add_bos=False) == llama3_oracle.encode(text)
    assert llama3.decode(llama3.encode(text)) == text


@given(text=texts)
@settings(max_examples=200, deadline=None)
def test_smollm2_agrees_with_the_oracle(smollm2: Tokenizer, smollm2_oracle: Oracle, text: str) -> None:
    assert smollm2.encode(text) == smollm2_oracle.encode(text)
    assert smollm2.decode(smollm2.encode(text)) == smollm2_oracle.kept(text)


@given(text=texts)
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "smollm"])
def test_pre_tokenizers_agree_with_the_oracle(pre: str, text: str) -> None:
    words = {"gpt-2": words_gpt2, "smollm": words_smollm, "qwen2": lambda t: words_llama3(t, digits=1)}[pre]
    metadata = pair_vocabulary(pre)
    assert PAIRS[pre].encode(text, add_bos=False) == Oracle(metadata, words, ignore_merges=False).encode(text)


def pair_vocabulary(pre: str) -> dict[str, object]:
    """Bytes and every pair of two spaces, digits, letters and signs, so that ids show where words end."""
    symbols = ["Ġ", "Ċ", "č", *"0123456789", *"abdehlmorstvLw'!?.$_x"]
    merges = [f"{a} {b}" for a in symbols for b in symbols]
    return tiny_bpe(
        **{
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": [*BYTE_OF_CHARACTER, *(m.replace(" ", "") for m in merges), "<s>", "</s>"],
            "tokenizer.ggml.token_type": [1] * (256 + len(merges)) + [3, 3],
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.bos_token_id": 256 + len(merges),
            "tokenizer.ggml.eos_token_id": 257 + len(merges),
        }
    )


PAIRS = {pre: tokenizer_from_gguf(pair_vocabulary(pre)) for pre in ("gpt-2", "qwen2", "smollm")}


def test_known_ids(llama3: Tokenizer) -> None:
    # fixed values, confirmed by the oracle above; no other program was run for them
    assert llama3.encode("Hello world!") == [128000, 9906, 1917, 0]
    assert llama3.encode("Hello, we can use") == [128000, 9906, 11, 584, 649, 1005]
    assert llama3.encode("") == [128000]
    assert llama3.encode("<|eot_id|>", add_bos=False, parse_special=True) == [128009]
    assert 128009 not in llama3.encode("<|eot_id|>")
    assert llama3.eog_ids == (128001, 128009)


def test_ids_of_the_reference_run(smollm2: Tokenizer) -> None:
    # transformers 5.24 on the same file
    runs = json.loads(shared_path("reference/smollm2_hf_f32.json").read_text())
    assert len(runs) >= 3
    for run_ in runs:
        assert smollm2.encode(run_["prompt"], parse_special=True) == run_["ids"]
        greedy = b"".join(
            smollm2.piece(i).encode() if smollm2.is_control(i) else smollm2.token_bytes(i) for i in run_["greedy_ids"]
        )
        assert greedy.decode("utf-8", "replace") == run_["greedy_text"]
    assert smollm2.eog_ids == (0, 2, 4)


def test_tiny_vocabulary(bpe: Tokenizer) -> None:
    hello, world = 259, 264
    assert bpe.encode("hello world") == [hello, world]
    assert bpe.encode("hello world", add_bos=True) == [265, hello, world]
    assert bpe.encode("<|im_start|>hello<think>", parse_special=True) == [265, hello, 267]
    assert bpe.decode([265, hello, 267, world, 266, 268]) == "hello<think> world"
    assert (bpe.eog_ids, bpe.is_control(266), bpe.is_control(267)) == ((266,), True, False)


def test_default_rule_where_the_file_names_none(caplog: pytest.LogCaptureFixture) -> None:
    metadata = tiny_bpe()
    del metadata["tokenizer.ggml.pre"]
    tokenizer = tokenizer_from_gguf(metadata)
    assert "tokenizer.ggml.pre is missing" in caplog.text
    assert tokenizer.encode("hello world") == [259, 264]


def test_default_rule_cuts_punctuation_first_and_digits_in_threes() -> None:
    metadata = pair_vocabulary("default")
    tokenizer = tokenizer_from_gguf(metadata)
    assert [tokenizer.piece(i) for i in tokenizer.encode(" !!12345")] == ["Ġ", "!!", "12", "3", "45"]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_every_byte(pre: str) -> None:
    tokenizer = tokenizer_from_gguf(tiny_bpe(**{"tokenizer.ggml.pre": pre}))
    text = "Hello  WORLD's\r\n\n 12345 ½ é e\u0301 😀😀 中文 \u00a0x\t\t y!!/\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_must_fit_the_vocabulary() -> None:
    with pytest.raises(FormatError, match="zz"):
        tokenizer_from_gguf(tiny_bpe(**{"tokenizer.ggml.merges": ["zz z"]}))
    with pytest.raises(FormatError, match="'he'"):
        tokenizer_from_gguf(tiny_bpe(**{"tokenizer.ggml.merges": ["he"]}))


def test_merges_never_lead_to_a_control_token() -> None:
    tokenizer = tokenizer_from_gguf(tiny_bpe(**{"tokenizer.ggml.eot_token_id": 259}))
    assert tokenizer.special_tokens["hello"] == 259
    assert [tokenizer.piece(i) for i in tokenizer.encode("hello world")] == ["hell", "o", "Ġworld"]


def test_128k_vocabulary_builds_fast(llama3_metadata) -> None:
    start = time.perf_counter()
    tokenizer_from_gguf(llama3_metadata)
    assert time.perf_counter() - start < 3  # measured 0.5 s


@pytest.mark.parametrize("text", ["a", " ", "7", "😀", "\n", "\t \n x", "<|eot_id|>"])
@pytest.mark.parametrize("name", ["llama3", "smollm2"])
def test_long_runs_take_no_time(request: pytest.FixtureRequest, name: str, text: str) -> None:
    tokenizer = request.getfixturevalue(name)
    long = text * (200_000 // len(text))
    start = time.perf_counter()
    ids = tokenizer.encode(long)
    assert time.perf_counter() - start < 4  # measured 0.1 to 0.4 s
    assert tokenizer.decode(ids) == long


# tokenizer.json


def write_json_folder(folder, library: Library, **config: object) -> None:
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@given(text=texts, parse_special=st.booleans())
@settings(max_examples=100, deadline=None)
def test_tokenizer_json_agrees_with_gguf(json_twin, bpe: Tokenizer, text: str, parse_special: bool) -> None:
    text = f"hello<|im_end|>{text}<think> world"
    assert json_twin.encode(text, parse_special=parse_special) == bpe.encode(text, parse_special=parse_special)
    ids = json_twin.encode(text)
    assert json_twin.decode(ids) == text == bpe.decode(ids)


@pytest.fixture(scope="session")
def json_twin(bpe, tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("twin")
    content = json.loads(bpe._library.to_str())
    content["model"]["vocab"] |= {"<|im_start|>": 265, "<|im_end|>": 266, "<think>": 267}
    twin = Library.from_str(json.dumps(content))
    # <|im_end|> is deliberately not special here: the EOS of a model never comes from a user's text
    twin.add_special_tokens(["<|im_start|>"])
    twin.add_tokens([AddedToken("<|im_end|>", special=False), AddedToken("<think>", special=False, normalized=False)])
    twin.decoder = decoders.ByteLevel()
    write_json_folder(folder, twin, eos_token="<|im_end|>", bos_token="<|im_start|>")
    return tokenizer_from_folder(folder)


def test_tokenizer_json_tables(json_twin: Tokenizer) -> None:
    assert json_twin.special_tokens == {"<|im_start|>": 265, "<|im_end|>": 266}
    assert (json_twin.bos_id, json_twin.eos_id, json_twin.eog_ids) == (265, 266, (266,))
    assert (json_twin.add_bos, json_twin.add_eos, json_twin.add_space_prefix) == (False, False, False)


def test_tokenizer_json_of_the_sentencepiece_kind(tmp_path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "ab", "▁ab"]
    vocabulary = {t: i for i, t in enumerate(tokens)}
    model = models.BPE(vocabulary, [("a", "b"), ("▁", "ab")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    library = Library(model)
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    library.normalizer = normalizers.Sequence(steps)  # type: ignore[arg-type]
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    write_json_folder(tmp_path, library, eos_token="</s>", bos_token="<s>")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer = tokenizer_from_folder(tmp_path)
    assert (tokenizer.add_bos, tokenizer.add_eos, tokenizer.add_space_prefix) == (True, False, True)
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.encode("ab aé\n") == [1, 263, 259, 260, 3 + 0xC3, 3 + 0xA9, 3 + 10]
    assert tokenizer.decode(tokenizer.encode("ab aé\n")) == "ab aé\n"
    assert tokenizer.encode("a</s>", parse_special=True)[-1] == 2
    assert 2 not in tokenizer.encode("a</s>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": False}))
    assert tokenizer_from_folder(tmp_path).encode("ab") == [263]


def test_long_runs_in_tokenizer_json(tmp_path, smollm2: Tokenizer) -> None:
    write_json_folder(tmp_path, smollm2._library)  # type: ignore[attr-defined]
    tokenizer = tokenizer_from_folder(tmp_path)
    start = time.perf_counter()
    assert tokenizer.encode("a" * 200_000) == smollm2.encode("a" * 200_000)
    assert time.perf_counter() - start < 4


def test_damaged_tokenizer_json_is_named(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        tokenizer_from_folder(tmp_path)
