from __future__ import annotations

import json
import time

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_jax.errors import FormatError
from llama_jax.text.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from tests.text.conftest import shared_path, tiny_spm

pieces = st.sampled_from(
    [" ", "  ", "\n", "\t", "▁", "a", "the", "é", "😀", "中文", "<s>", "0x0A", "\0", "\u200d", "ﬁ", "Å"]
)
texts = st.lists(st.one_of(pieces, st.text(max_size=8)), max_size=12).map("".join)


@pytest.fixture(scope="session")
def library() -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(shared_path("data/llama2-tokenizer.model")))


@given(text=texts)
@settings(max_examples=300, deadline=None)
def test_gguf_vocabulary_gives_the_ids_of_the_original_model(llama2: Tokenizer, library, text: str) -> None:
    assert llama2.encode(text, add_bos=False) == library.encode(text)


@given(text=texts)
@settings(max_examples=300, deadline=None)
def test_decode_restores_the_text(llama2: Tokenizer, text: str) -> None:
    # U+2581 is how the vocabulary writes a space
    assert llama2.decode(llama2.encode(text)) == text.replace("▁", " ")


# The line with <s> is llama.cpp's output; the others are what sentencepiece gives for the original model, after BOS.
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", [1]),
        ("Hello <s> wörld", [1, 15043, 29871, 1, 29871, 281, 1340, 430]),
        (" ", [1, 259]),
        ("\n", [1, 29871, 13]),
        ("Hello world", [1, 15043, 3186]),
        (" Hello", [1, 29871, 15043]),
    ],
)
def test_known_ids(llama2: Tokenizer, text: str, ids: list[int]) -> None:
    assert llama2.encode(text, parse_special=True) == ids


def test_special_text_of_a_user_stays_text(llama2: Tokenizer) -> None:
    ids = llama2.encode("a</s>b")
    assert 2 not in ids
    assert llama2.decode(ids) == "a</s>b"


def test_folder_with_tokenizer_model(tmp_path, llama2: Tokenizer) -> None:
    (tmp_path / "tokenizer.model").write_bytes(shared_path("data/llama2-tokenizer.model").read_bytes())
    config = {
        "chat_template": "T",
        "add_eos_token": True,
        "bos_token": {"content": "<s>"},
        "added_tokens_decoder": {
            "32000": {"content": "<|im_end|>", "special": True},
            "32002": {"content": "<tool>", "special": False},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 32002]}))
    tokenizer = tokenizer_from_folder(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (32003, 1, 2)
    assert tokenizer.eog_ids == (2, 32000, 32002)
    assert (tokenizer.add_bos, tokenizer.add_eos, tokenizer.chat_template) == (True, True, "T")
    assert tokenizer.piece(32001) == "[PAD32001]"
    for text in ("Hello <s> wörld", "  x\n\n", "<|im_end|>"):
        assert tokenizer.encode(text) == [*llama2.encode(text), 2]
    assert tokenizer.encode("a<|im_end|>b", parse_special=True) == [1, 263, 32000, 289, 2]


def test_damaged_tokenizer_model_is_named(tmp_path) -> None:
    for data in (b"", b"\xff\xff\xff", b"\x0a\x05\x0a\x03abc\x1a\x09", b"\x0a\x05\x0a\x03abc"):
        (tmp_path / "tokenizer.model").write_bytes(data)
        with pytest.raises(FormatError, match=r"tokenizer\.model"):
            tokenizer_from_folder(tmp_path)


# The tiny vocabulary: "▁" 259, a 260, b 261, c 262, é 263, (ab 264), bc 265, ▁a 266, abc 267, later ab 274.


def test_merges_by_score_then_leftmost(spm: Tokenizer) -> None:
    # "bc" scores above "ab" and "▁a"; "abc" is then reached from a + bc
    assert spm.encode("bc", add_bos=False) == [259, 265]
    assert spm.encode("babc", add_bos=False) == [259, 261, 267]
    assert spm.encode("acac", add_bos=False) == [266, 262, 260, 262]


def test_of_equal_texts_the_last_id_wins(spm: Tokenizer) -> None:
    assert spm.encode("bab", add_bos=False) == [259, 261, 274]
    assert spm.token_bytes(264) == spm.token_bytes(274) == b"ab"


def test_characters_without_a_piece_become_bytes(spm: Tokenizer) -> None:
    assert spm.encode("z\n", add_bos=False) == [259, 3 + ord("z"), 3 + 10]
    assert spm.encode("😀", add_bos=False) == [259, *(3 + b for b in "😀".encode())]
    assert spm.decode([3 + 0xF0, 3 + 0x9F]) == "\ufffd"


def test_without_byte_tokens_unknown_characters_become_unk() -> None:
    metadata = tiny_spm()
    keep = [i for i in range(275) if not 3 <= i < 259]
    for key in ("tokens", "scores", "token_type"):
        values = metadata[f"tokenizer.ggml.{key}"]
        assert isinstance(values, list)
        metadata[f"tokenizer.ggml.{key}"] = [values[i] for i in keep]
    assert tokenizer_from_gguf(metadata).encode("azb") == [1, 266 - 256, 0, 261 - 256]


def test_space_prefix_can_be_off() -> None:
    tokenizer = tokenizer_from_gguf(tiny_spm(**{"tokenizer.ggml.add_space_prefix": False}))
    assert tokenizer.encode("bc") == [1, 265]
    assert tokenizer.decode([259, 265]) == " bc"


def test_user_defined_tokens_always_match_and_a_space_follows(spm: Tokenizer) -> None:
    tool = tokenizer_id(spm, "<tool>")
    assert spm.encode("b<tool>b", add_bos=False) == [259, 261, tool, 259, 261]
    assert spm.decode([tool]) == "<tool>"


def test_longest_special_token_first(spm: Tokenizer) -> None:
    end, en = tokenizer_id(spm, "<|end|>"), tokenizer_id(spm, "<|en")
    assert spm.encode("<|end|><|en", add_bos=False, parse_special=True) == [end, en]
    assert not {end, en} & set(spm.encode("<|end|><|en"))


def test_unused_tokens_are_never_used(spm: Tokenizer) -> None:
    assert not {272, 273} & set(spm.encode("d[PAD273]", parse_special=True))
    assert spm.token_bytes(273) == b""


def test_vocabulary_older_than_gguf() -> None:
    """Without types: raw bytes at 3 to 258, plain spaces; a byte and a token of the same text: the token wins."""
    tokens = [" \u2047 ", "", "", *(bytes([b]) for b in range(256)), " ", "A", "B", " A", "AB"]
    scores = [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
    }
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.encode("A B\nAB") == [1, 262, 259, 261, 3 + 10, 263]
    assert tokenizer.encode("ÿ") == [1, 259, 3 + 0xC3, 3 + 0xBF]
    assert tokenizer.decode([1, 262, 259, 261, 13, 263]) == "A B\nAB"
    assert tokenizer.eog_ids == (2,)


@pytest.mark.parametrize("text", ["a", " ", "7", "😀", "\n", "ab c", "<s>", "</s> "])
def test_long_runs_take_no_time(llama2: Tokenizer, text: str) -> None:
    long = text * (200_000 // len(text))
    start = time.perf_counter()
    ids = llama2.encode(long)
    assert time.perf_counter() - start < 2  # measured 0.05 s
    assert llama2.decode(ids) == long


def tokenizer_id(tokenizer: Tokenizer, text: str) -> int:
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.piece(i) == text)
