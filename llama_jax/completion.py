"""Whole texts with what is to be said about them: why they ended, their tokens, log-probabilities."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llama_jax.sampling import SamplingParams
from llama_jax.session import Session, TokenLogprobs
from llama_jax.text.detokenize import StreamDetokenizer


@dataclass(frozen=True, slots=True)
class Completion:
    """One text that follows a prompt."""

    text: str
    tokens: tuple[int, ...]  # as generated: with the end-of-generation token, and to the end of a stop string
    finish_reason: Literal["stop", "length"]  # "length": max_tokens, or the context is full
    stop: str | None  # the stop string that ended the text
    logprobs: tuple[TokenLogprobs, ...] | None  # of `tokens`, if they were asked for


def complete(
    session: Session,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[StreamDetokenizer],
    sampling: SamplingParams,
    eog_ids: Sequence[int],
    limits: Mapping[str, Any],
) -> list[Completion]:
    """Runs all rows of `session` to their ends.

    Args:
      texts: one per row; they hold the stop strings.
      limits: keyword arguments of `Session.generate`.
    """
    tokens: list[list[int]] = [[] for _ in prompts]
    pieces: list[list[str]] = [[] for _ in prompts]

    def ended(row: int) -> bool:
        return texts[row].stopped is not None or (bool(tokens[row]) and tokens[row][-1] in eog_ids)

    with contextlib.closing(session.generate(prompts, sampling, eos_ids=eog_ids, **limits)) as chunks:
        for new in chunks:
            for row, text in enumerate(texts):
                for token in new[row]:
                    if text.stopped is not None:
                        break
                    tokens[row].append(token)
                    if token not in eog_ids:
                        pieces[row].append(text.push(token))
            if all(map(ended, range(len(prompts)))):
                break
    done: list[Completion] = []
    for row, (text, ids) in enumerate(zip(texts, tokens, strict=True)):
        full = len(ids) >= limits["max_tokens"] or len(prompts[row]) + len(ids) > session.capacity
        logprobs = None if sampling.logprobs is None else tuple(session.logprobs[row][: len(ids)])
        done.append(
            Completion(
                text="".join(pieces[row]) + text.finish(),
                tokens=tuple(ids),
                finish_reason="length" if full and not ended(row) else "stop",
                stop=text.stopped,
                logprobs=logprobs,
            )
        )
    return done
