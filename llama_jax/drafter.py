"""The host's side of speculative decoding: where a session's drafts come from, and what has come of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from llama_jax.errors import ArgumentError
from llama_jax.model import Params
from llama_jax.speculative import Draft, ModelDraft, NgramDraft, Speculation

if TYPE_CHECKING:
    from llama_jax.session import Session


class Drafter:
    """Drafts for the rows of a session.

    Args:
      options: how many tokens, and when.
      session: of the draft model, with as many rows and as much room; None drafts with n-grams.
    """

    def __init__(self, options: Speculation, session: Session | None) -> None:
        if (session is None) == (options.ngram is None):
            raise ArgumentError("Speculation needs either a draft model or n-grams.")
        self.options = options
        self._session = session

    @property
    def params(self) -> Params | None:
        """Of the draft model."""
        return None if self._session is None else self._session.params

    @property
    def intact(self) -> bool:
        """Whether the draft model's cache is there: an interrupt amid a step loses it."""
        return self._session is None or self._session.intact

    def prepare(self, tokens: list[list[int]]) -> None:
        """The draft model's cache comes to hold `tokens`: it runs prompts, restored texts and what a shift leaves."""
        if self._session is not None and self._session.tokens != tokens:
            self._session.prefill(tokens)

    def draft(self, tokens: Sequence[Sequence[int]], latest: Sequence[int], capacity: int) -> Draft:
        """What the device drafts from.

        Args:
          tokens: what the cache of `capacity` tokens holds of each row.
          latest: each row's token behind those.
        """
        if self._session is not None:
            return ModelDraft(cache=self._session.cache, config=self._session.config)
        texts = np.zeros((len(tokens), capacity + 1), np.int32)
        for text, row, token in zip(texts, tokens, latest, strict=True):
            text[: len(row) + 1] = [*row, token]
        return NgramDraft(tokens=jnp.asarray(texts))

    def keep(self, draft: Draft) -> None:
        """Takes the draft model's cache back from the device."""
        if self._session is not None and isinstance(draft, ModelDraft):
            self._session.cache = draft.cache

    def follow(self, latest: Sequence[int], new: Sequence[Sequence[int]]) -> None:
        """The draft model's cache now holds each row's `latest` token and all but the last of its `new` ones."""
        if self._session is not None:
            for row, token, ids in zip(self._session.tokens, latest, new, strict=True):
                row.extend([token, *ids][: len(ids)])

    def warm_up_prompt(self, longest: int) -> None:
        """Compiles what running prompts needs."""
        if self._session is not None:
            self._session.warm_up_prompt(longest)
