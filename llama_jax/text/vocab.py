"""The vocabulary of a model as tables: what llama.cpp's `llama_get_vocab` and its relatives give."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from llama_jax import checks
from llama_jax.text.vocabulary import TokenType

if TYPE_CHECKING:
    from llama_jax.text.tokenizer import Tokenizer


class Vocab:
    """Pieces, scores and types of all tokens, one entry per id.

    Attributes:
      pieces: the tokens as the vocabulary writes them; bytes that are not UTF-8 become U+FFFD.
      scores: what SentencePiece orders merges by; 0 in vocabularies of byte pairs, which have none.
      types: what kind of token each is.
      bos_id, eos_id: None where the vocabulary has none.
      newline_id: the last token of a line break; None where the vocabulary cannot write it.
      eog_ids: all tokens that end a generation.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        self.pieces: tuple[str, ...] = tuple(map(tokenizer.piece, ids))
        self.scores: tuple[float, ...] = tuple(map(tokenizer.score, ids))
        self.types: tuple[TokenType, ...] = tuple(map(tokenizer.token_type, ids))
        self.bos_id = tokenizer.bos_id
        self.eos_id = tokenizer.eos_id
        self.eog_ids = tokenizer.eog_ids
        self.newline_id = next(reversed(tokenizer.encode("\n", add_bos=False, add_eos=False)), None)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> Vocab:
        """The vocabulary of a model file, whose weights are not read; None is the model that ships with the package.

        Raises as `llama_jax.load`.
        """
        from llama_jax.formats.hub import resolve_path
        from llama_jax.formats.load import open_model
        from llama_jax.llama import shipped_model

        with open_model(shipped_model() if path is None else resolve_path(path)) as file:
            return cls(file.tokenizer())

    def __len__(self) -> int:
        return len(self.pieces)

    def get_vocab(self, capacity: int) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """Pieces and scores of the first `capacity` tokens, or of all where there are fewer.

        Raises:
          ArgumentError: the capacity is negative.
        """
        capacity = checks.integer("capacity", capacity, 0)
        return self.pieces[:capacity], self.scores[:capacity]
