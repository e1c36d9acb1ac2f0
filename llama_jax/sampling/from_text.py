"""Sampling options that speak of text, in terms of a vocabulary's ids."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_jax import checks
from llama_jax.errors import ArgumentError

if TYPE_CHECKING:
    from llama_jax.text.tokenizer import Tokenizer

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
TEXT_OPTIONS = ("ignore_eos", "penalize_nl", "dry_sequence_breakers")
_LONGEST_TAIL = 20  # tokens


def resolve_options(options: Mapping[str, Any], tokenizer: Tokenizer, n_ctx: int) -> dict[str, Any]:
    """Keyword arguments of `sampling_params` for a vocabulary.

    Args:
      options: those of `sampling_params`, and: `ignore_eos` bans every end-of-generation token; `penalize_nl=False`
        leaves the newline out of the penalties; `dry_sequence_breakers` are strings over which DRY finds no repetition
        (llama.cpp's by default). `repeat_last_n` and `dry_penalty_last_n` of -1, or beyond the context, are `n_ctx`.
        A key of `logit_bias` may be a text, each of whose tokens is meant; a bias of False bans.

    Raises:
      ArgumentError: one of these is not what it should be.
    """
    options = dict(options)
    for name in ("repeat_last_n", "dry_penalty_last_n"):
        n = options.get(name)
        if isinstance(n, int) and not isinstance(n, bool) and (n == -1 or n > n_ctx):
            options[name] = n_ctx
    bias = _token_biases(options.get("logit_bias"), tokenizer)
    if _flag(options, "ignore_eos", False):
        bias |= dict.fromkeys(tokenizer.eog_ids, float("-inf"))
    if bias:
        options["logit_bias"] = bias
    if not _flag(options, "penalize_nl", True):
        options["exempt_id"] = newline_id(tokenizer)
    breakers = options.pop("dry_sequence_breakers", DEFAULT_BREAKERS)
    if isinstance(breakers, str) or not all(isinstance(text, str) for text in breakers):
        raise ArgumentError(f"dry_sequence_breakers is {breakers!r}; it must be a list of strings.")
    if options.get("dry_multiplier") and "dry_breakers" not in options:
        options["dry_breakers"] = breaking_tokens(tokenizer, tuple(breakers))
    return options


def _flag(options: dict[str, Any], name: str, default: bool) -> bool:
    value = options.pop(name, default)
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} is {value!r}; it must be True or False.")
    return value


def _token_biases(biases: Any, tokenizer: Tokenizer) -> dict[int, float]:
    if not biases:
        return {}
    if not isinstance(biases, Mapping):
        raise ArgumentError(f"logit_bias is {biases!r}; it must be a mapping of token ids or texts to numbers.")
    found: dict[int, float] = {}
    for key, bias in biases.items():
        bias = float("-inf") if bias is False else bias
        if isinstance(key, str):
            found |= dict.fromkeys(tokenizer.encode(key, add_bos=False, add_eos=False, parse_special=True), bias)
        else:
            found[checks.integer("A token id of logit_bias", key, 0, tokenizer.vocab_size - 1)] = bias
    return found


def newline_id(tokenizer: Tokenizer) -> int | None:
    """The token of a newline alone, None where the vocabulary has none."""
    ids = tokenizer.encode("\n", add_bos=False, add_eos=False)
    return ids[-1] if ids and tokenizer.token_bytes(ids[-1]) == b"\n" else None


@functools.lru_cache(maxsize=8)
def breaking_tokens(tokenizer: Tokenizer, breakers: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Sequences of token ids that hold one of `breakers`, or whose first token holds its beginning at its end.

    As in llama.cpp, the rest of such a breaker is taken to follow in the tokens that encoding gives for it.
    """
    if "" in breakers:
        raise ArgumentError("A DRY sequence breaker is ''; only strings of at least one character are allowed.")
    wanted = [breaker.encode() for breaker in breakers]
    tails: dict[bytes, Sequence[int]] = {}
    found: dict[tuple[int, ...], None] = {}
    for i in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(i)
        for breaker in wanted:
            if breaker in data:
                found[(i,)] = None
                continue
            for n in range(1, min(len(breaker), len(data) + 1)):
                if data.endswith(breaker[:n]):
                    rest = breaker[n:]
                    if rest not in tails:
                        tails[rest] = tokens_within(tokenizer, rest.decode("utf-8", "replace"))[:_LONGEST_TAIL]
                    found[(i, *tails[rest])] = None
    return tuple(found)


def tokens_within(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of `text` where it goes on another text: without the space that encoding puts before a text.

    Where that space is one token with the first word, the word's ids are those of its letters' longest matches.
    """
    ids = tokenizer.encode(text, add_bos=False, add_eos=False)
    if not tokenizer.add_space_prefix or not ids:
        return ids
    first = tokenizer.token_bytes(ids[0])
    return _longest_matches(tokenizer, first.removeprefix(b" ")) + ids[1:]


@functools.lru_cache(maxsize=4)
def _ids_of_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    ids = reversed(range(tokenizer.vocab_size))
    return {data: i for i in ids if (data := tokenizer.token_bytes(i))}


def _longest_matches(tokenizer: Tokenizer, data: bytes) -> list[int]:
    id_of = _ids_of_bytes(tokenizer)
    ids: list[int] = []
    while data:
        n = next((n for n in range(len(data), 0, -1) if data[:n] in id_of), 0)
        if not n:
            break
        ids.append(id_of[data[:n]])
        data = data[n:]
    return ids
