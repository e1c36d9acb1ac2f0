from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_jax.errors import ArgumentError, FormatError
from llama_jax.text.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from llama_jax.text.vocabulary import longest_first, split_specials
from tests.text.conftest import tiny_bpe, tiny_spm

N = 275


def replaced(key: str, index: int, value: object) -> dict[str, object]:
    """The tiny SentencePiece metadata with one entry of one array changed."""
    metadata = tiny_spm()
    values = list(metadata[f"tokenizer.ggml.{key}"])  # type: ignore[call-overload]
    values[index] = value
    return {**metadata, f"tokenizer.ggml.{key}": values}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "tokenizer.ggml.model is None"),
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'; allowed are 'llama' and 'gpt2'"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.tokens is missing"),
        (tiny_spm(**{"tokenizer.ggml.tokens": "abc"}), "tokenizer.ggml.tokens is str"),
        (tiny_spm(**{"tokenizer.ggml.tokens": []}), "0 tokens but 275 scores"),
        (tiny_spm(**{"tokenizer.ggml.scores": [0.0]}), "275 tokens but 1 scores"),
        (tiny_spm(**{"tokenizer.ggml.token_type": [1]}), "275 tokens but 1 token types"),
        (tiny_spm(**{"tokenizer.ggml.bos_token_id": N}), "BOS token has the id 275; allowed are 0 to 274"),
        (tiny_spm(**{"tokenizer.ggml.eos_token_id": -1}), "EOS token has the id -1"),
        (tiny_spm(**{"tokenizer.ggml.eos_token_id": "x"}), "eos_token_id is 'x'"),
        (tiny_spm(**{"tokenizer.ggml.eot_token_id": 4_294_967_295}), "4294967295"),
        (replaced("token_type", 7, 9), "Token 7 has the type 9"),
        (replaced("scores", 8, math.nan), "Token 8 has the score nan"),
        (replaced("token_type", 7, math.inf), "token_type holds inf"),
        (replaced("scores", 8, "x"), "scores holds 'x'"),
        ({"tokenizer.ggml.model": np.array([1, 2])}, "tokenizer.ggml.model is "),
        (tiny_spm(**{"tokenizer.ggml.eos_token_id": math.inf}), "eos_token_id is inf"),
        (tiny_spm(**{"tokenizer.ggml.add_bos_token": np.array([1, 2])}), "add_bos_token is "),
        (replaced("tokens", 9, 5), "tokens holds 5"),
        (replaced("tokens", 9, "<0xZZ>"), "byte token '<0xZZ>'"),
        (
            tiny_bpe(**{"tokenizer.ggml.pre": "klingon"}),
            "'klingon'; allowed are 'default', 'gpt-2', 'mpt', 'olmo', 'llama-bpe'",
        ),
        (tiny_bpe(**{"tokenizer.ggml.merges": None}), "tokenizer.ggml.merges is missing"),
    ],
)
def test_bad_metadata_is_named(metadata: dict[str, object], words: str) -> None:
    with pytest.raises(FormatError) as caught:
        tokenizer_from_gguf(metadata)
    assert words in str(caught.value)
    assert str(caught.value).endswith(".")


def test_asked_for_bos_without_one() -> None:
    metadata = tiny_bpe(**{"tokenizer.ggml.add_bos_token": True})
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(FormatError, match="BOS"):
        tokenizer_from_gguf(metadata)
    del metadata["tokenizer.ggml.add_bos_token"]
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.bos_id is None
    with pytest.raises(ArgumentError, match="no BOS"):
        tokenizer.encode("a", add_bos=True)
    del metadata["tokenizer.ggml.eos_token_id"]
    with pytest.raises(ArgumentError, match="no EOS"):
        tokenizer_from_gguf(metadata).encode("a", add_eos=True)


def test_numpy_arrays_and_bytes_are_accepted(spm: Tokenizer) -> None:
    metadata = tiny_spm()
    metadata["tokenizer.ggml.scores"] = np.asarray(metadata["tokenizer.ggml.scores"], np.float32)
    metadata["tokenizer.ggml.token_type"] = np.asarray(metadata["tokenizer.ggml.token_type"], np.int32)
    metadata["tokenizer.ggml.bos_token_id"] = np.uint32(1)
    metadata["tokenizer.ggml.tokens"] = [t.encode() for t in metadata["tokenizer.ggml.tokens"]]  # type: ignore[attr-defined]
    assert tokenizer_from_gguf(metadata).encode("abc <tool>é") == spm.encode("abc <tool>é")


@pytest.mark.parametrize("make", [tiny_spm, tiny_bpe])
def test_entries_that_are_not_utf8(make) -> None:
    metadata = make()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], b"\xff\xfe"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    if "tokenizer.ggml.scores" in metadata:
        metadata["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"], 0.0]
    tokenizer = tokenizer_from_gguf(metadata)
    last = tokenizer.vocab_size - 1
    assert tokenizer.token_bytes(last) == b"\xff\xfe"
    assert tokenizer.piece(last) == "\ufffd\ufffd"
    assert tokenizer.decode(tokenizer.encode("hello ab")) == "hello ab"


def test_ends_of_generation(spm: Tokenizer) -> None:
    # "<|eot_id|>" is of the normal type in the file
    assert [spm.piece(i) for i in spm.eog_ids] == ["</s>", "<|end|>", "<|eot_id|>"]
    assert all(map(spm.is_control, spm.eog_ids))
    assert not set(spm.eog_ids) & set(spm.encode("<|eot_id|></s>"))
    with_eot = tokenizer_from_gguf(tiny_spm(**{"tokenizer.ggml.eot_token_id": 260, "tokenizer.ggml.eom_token_id": 261}))
    assert with_eot.eog_ids == tuple(sorted({*spm.eog_ids, 260, 261}))


def test_bos_and_eos_follow_the_file_unless_told() -> None:
    for add_bos in (False, True):
        for add_eos in (False, True):
            rules = {"tokenizer.ggml.add_bos_token": add_bos, "tokenizer.ggml.add_eos_token": add_eos}
            tokenizer = tokenizer_from_gguf(tiny_spm(**rules))
            assert tokenizer.encode("a") == [1] * add_bos + [266] + [2] * add_eos
            assert tokenizer.encode("a", add_bos=not add_bos)[0] == (266 if add_bos else 1)
            assert tokenizer.encode("a", add_eos=not add_eos)[-1] == (266 if add_eos else 2)
            assert tokenizer.encode("") == [1] * add_bos + [2] * add_eos


@pytest.mark.parametrize("token_id", [-1, N])
def test_unknown_ids_are_named(spm: Tokenizer, token_id: int) -> None:
    for method in (spm.token_bytes, spm.piece, spm.is_control, lambda i: spm.decode([i])):
        with pytest.raises(ArgumentError, match=f"{token_id} does not exist; allowed are 0 to 274"):
            method(token_id)


@given(text=st.text(st.characters(), max_size=20))  # lone surrogates too
@pytest.mark.parametrize("name", ["spm", "bpe"])
def test_any_string_survives(request: pytest.FixtureRequest, name: str, text: str) -> None:
    tokenizer = request.getfixturevalue(name)
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert tokenizer.decode(tokenizer.encode(text)) == (expected.replace("▁", " ") if name == "spm" else expected)


def test_special_tokens_claim_their_places_longest_first() -> None:
    specials = longest_first({"ab": 1, "bcd": 2, "é": 3})
    assert split_specials("abcd ab", specials) == ["a", 2, " ", 1]
    assert split_specials("ééab", specials) == [3, 3, 1]
    assert split_specials("", specials) == []


def test_literals_hide_special_tokens(spm: Tokenizer, bpe: Tokenizer) -> None:
    for tokenizer, special in ((spm, "<|end|>"), (bpe, "<|im_end|>")):
        plain = tokenizer.encode(f"a{special}b")
        assert tokenizer.encode("a\U000f0000b", parse_special=True, literals={"\U000f0000": special}) == plain
        assert tokenizer.encode(f"a{special}b", parse_special=True) != plain


def test_folder_without_tokenizer(tmp_path) -> None:
    with pytest.raises(FormatError, match=r"tokenizer\.json or tokenizer\.model is needed"):
        tokenizer_from_folder(tmp_path)
