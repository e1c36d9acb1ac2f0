"""The tables of a vocabulary against the file's own."""

import numpy as np
import pytest

import llama_jax
from llama_jax.formats.gguf import GGUFFile
from llama_jax.llama import shipped_model
from llama_jax.text.tokenizer import tokenizer_from_gguf


@pytest.fixture(scope="module")
def shipped():
    return llama_jax.Vocab.load()


def test_the_tables_are_those_of_the_file(shipped):
    with GGUFFile(shipped_model()) as file:
        metadata = file.metadata
    assert list(shipped.pieces) == metadata["tokenizer.ggml.tokens"]
    np.testing.assert_array_equal(np.float32(shipped.scores), metadata["tokenizer.ggml.scores"])
    np.testing.assert_array_equal(shipped.types, metadata["tokenizer.ggml.token_type"])
    assert len(shipped) == len(shipped.pieces)
    assert (shipped.bos_id, shipped.eos_id) == (1, 2)
    assert shipped.pieces[shipped.newline_id] == "<0x0A>"


@pytest.mark.parametrize(("capacity", "n"), [(0, 0), (1, 1), (10, 10), (10**6, None)])
def test_as_many_are_given_as_there_is_room_for(shipped, capacity, n):
    pieces, scores = shipped.get_vocab(capacity)
    n = len(shipped) if n is None else n
    assert (pieces, scores) == (shipped.pieces[:n], shipped.scores[:n])
    assert len(pieces) == len(scores) == n


def test_a_negative_capacity_is_refused(shipped):
    with pytest.raises(llama_jax.ArgumentError, match="capacity is -1; it must be an integer from 0"):
        shipped.get_vocab(-1)


def test_a_vocabulary_of_byte_pairs_has_no_scores():
    texts = ["<s>", "a", "b", "ab", "Ċ"]
    vocab = llama_jax.Vocab(
        tokenizer_from_gguf(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "gpt-2",
                "tokenizer.ggml.tokens": texts,
                "tokenizer.ggml.token_type": [3, 1, 1, 1, 1],
                "tokenizer.ggml.merges": ["a b"],
                "tokenizer.ggml.bos_token_id": 0,
                "tokenizer.ggml.eos_token_id": 0,
            }
        )
    )
    assert (list(vocab.pieces), set(vocab.scores)) == (texts, {0.0})
    assert list(vocab.types) == [3, 1, 1, 1, 1]
    assert vocab.newline_id == 4


def test_a_real_vocabulary(llama2):
    vocab = llama_jax.Vocab(llama2)
    assert vocab.pieces[15043] == "▁Hello"
    assert (len(vocab), vocab.scores[260], vocab.newline_id) == (32000, -1.0, 13)
