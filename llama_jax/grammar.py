"""Constraints on what may be generated: regular expressions, JSON schemas, GBNF and Lark grammars, through llguidance.

The state of a row's grammar lives on the host; it tells which tokens may come next, and that set goes to the device as
one bit a token, where `sample` applies it. llguidance comes with the extra `grammar`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from llama_jax.errors import ArgumentError, plain
from llama_jax.gbnf_notation import gbnf_to_lark
from llama_jax.sampling.from_text import tokens_within

if TYPE_CHECKING:
    from llama_jax.text.tokenizer import Tokenizer

Kind = Literal["regex", "json_schema", "gbnf", "lark"]
# At most so much white space stands between the parts of a JSON text; without a bound a small model may never end it.
_JSON_SPACE = r"[ ]?|\n[ \t]{0,20}"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text must match, whatever the vocabulary: made by `regex`, `json_schema`, `gbnf` and `lark`."""

    kind: Kind
    text: str


def regex(pattern: str) -> Grammar:
    """The whole text matches `pattern`, in the syntax of Rust's regex crate: no look-around, no back-references."""
    return Grammar("regex", _checked_text("regex", pattern))


def json_schema(schema: Mapping[str, Any] | str | bool) -> Grammar:
    """The text is JSON that fits `schema`; {} takes any JSON.

    Raises:
      ArgumentError: the schema is not JSON. What it says is checked when the constraint is made.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"The JSON schema is not JSON that can be read: {plain(error)}.") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise ArgumentError(f"The JSON schema is of type {type(schema).__name__}; it must be a JSON object.")
    try:
        return Grammar("json_schema", json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"The JSON schema is not JSON: {plain(error)}.") from None


def gbnf(text: str) -> Grammar:
    """The text matches rule `root` of a grammar in llama.cpp's notation.

    Raises:
      ArgumentError: a mistake in the notation; one sentence names its line.
    """
    gbnf_to_lark(_checked_text("grammar", text))
    return Grammar("gbnf", text)


def lark(text: str) -> Grammar:
    """The text matches rule `start` of a grammar in llguidance's variant of Lark's notation."""
    return Grammar("lark", _checked_text("grammar", text))


def _checked_text(name: str, text: Any) -> str:
    if not isinstance(text, str):
        raise ArgumentError(f"The {name} is of type {type(text).__name__}; it must be a str.")
    return text


class ConstraintCompiler:
    """Makes constraints for one vocabulary; the vocabulary is read once, at the first."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def compile(self, grammar: Grammar) -> Constraint:
        """`grammar` for this vocabulary.

        Raises:
          ArgumentError: the grammar has a mistake, says what cannot be followed, or llguidance is not installed.
        """
        library = _library()
        tokenizer = self._library_tokenizer
        source = _library_grammar(library, grammar)
        wrong, messages = library.LLMatcher.validate_grammar_with_warnings(source, tokenizer)
        if wrong:
            raise ArgumentError(f"The {_NAMES[grammar.kind]} cannot be used: {plain(messages[0], 300)}.")
        matcher = library.LLMatcher(tokenizer, source, log_level=0)
        first = matcher.deep_copy()
        first.compute_bitmask()
        if error := first.get_error():
            reason = "it takes no text" if error.startswith("NoExtension") else plain(error, 300)
            raise ArgumentError(f"The {_NAMES[grammar.kind]} cannot be used: {reason}.")
        return Constraint(matcher)

    @cached_property
    def _library_tokenizer(self) -> Any:
        library = _library()
        adapter = library.TokenizerWrapper(_TokenizerAdapter(self._tokenizer))
        ends = list(self._tokenizer.eog_ids)
        return library.LLTokenizer(adapter, n_vocab=self._tokenizer.vocab_size, eos_token=ends or None)


_NAMES = {"regex": "regular expression", "json_schema": "JSON schema", "gbnf": "grammar", "lark": "grammar"}


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ArgumentError(
            "Constrained output needs llguidance, which is not installed; pip install 'llama-jax[grammar]'."
        ) from None
    return llguidance


def _library_grammar(library: Any, grammar: Grammar) -> str:
    matcher = library.LLMatcher
    if grammar.kind == "regex":
        return matcher.grammar_from_regex(grammar.text)
    if grammar.kind == "json_schema":
        try:
            return matcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": _JSON_SPACE})
        except ValueError as error:
            raise ArgumentError(f"The JSON schema cannot be used: {plain(error, 300)}.") from None
    return matcher.grammar_from_lark(gbnf_to_lark(grammar.text) if grammar.kind == "gbnf" else grammar.text)


class _TokenizerAdapter:
    """What llguidance asks of a tokenizer: bytes of each token, special ones marked, and text to ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id = tokenizer.bos_id
        ends = (tokenizer.eos_id, *tokenizer.eog_ids)
        self.eos_token_id = next((i for i in ends if i is not None), 0)
        ids = range(tokenizer.vocab_size)
        self.special_token_ids = [i for i in ids if tokenizer.is_control(i)]
        self.tokens = [
            tokenizer.piece(i).encode() if tokenizer.is_control(i) else tokenizer.token_bytes(i) for i in ids
        ]

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # so that llguidance hands over strings
            raise TypeError(f"expected str, not {type(text).__name__}")
        return tokens_within(self._tokenizer, text)


class Constraint:
    """A grammar for one vocabulary. It holds no state of a text: `start` gives that."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def start(self) -> Any:
        """The state at the beginning of a text: llguidance's matcher."""
        return self._matcher.deep_copy()


class TokenMasks:
    """Which tokens each row of a batch may take next; a row without a constraint may take all.

    Args:
      constraints: one per row, None for a free one.
      vocab_size: rows of the model's embedding.
    """

    def __init__(self, constraints: Sequence[Constraint | None], vocab_size: int) -> None:
        self._matchers = [constraint and constraint.start() for constraint in constraints]
        self._words = np.full((len(constraints), -(-vocab_size // 32)), -1, np.int32)

    def words(self) -> np.ndarray:
        """[B, ceil(V / 32)] int32 as `sample` takes it."""
        for row, matcher in zip(self._words, self._matchers, strict=True):
            if matcher is None:
                continue
            allowed = np.frombuffer(matcher.compute_bitmask(), np.int32)
            row[:] = 0
            row[: len(allowed)] = allowed[: len(row)]
        return self._words.copy()

    def accept(self, new: Sequence[Sequence[int]]) -> np.ndarray:
        """Takes each row's new tokens in; [B] bool tells the rows whose text is complete and allows nothing more.

        Raises:
          ArgumentError: a grammar has become too complex to follow.
        """
        for row, (matcher, ids) in enumerate(zip(self._matchers, new, strict=True)):
            if matcher is None or matcher.is_stopped():
                continue
            matcher.consume_tokens(list(ids))
            if matcher.is_error():
                raise ArgumentError(f"The grammar of sequence {row} cannot go on: {plain(matcher.get_error(), 300)}.")
        return np.array([matcher is not None and matcher.is_stopped() for matcher in self._matchers])
