from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_jax.errors import ArgumentError
from llama_jax.text.detokenize import StreamDetokenizer
from llama_jax.text.tokenizer import Tokenizer

letters = st.text("ab c", min_size=1, max_size=4)


def stream(tokenizer: Tokenizer, ids: list[int], stop=(), **options: bool) -> tuple[list[str], str | None]:
    detokenizer = StreamDetokenizer(tokenizer, stop, **options)
    pieces = [detokenizer.push(i) for i in ids]
    return [*pieces, detokenizer.finish()], detokenizer.stopped


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: at the stop string that is complete first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(ids=st.lists(st.integers(0, 274), max_size=40), stops=st.lists(letters, max_size=3))
@settings(max_examples=200, deadline=None)
def test_pieces_are_the_decoded_text_cut_at_the_first_stop(spm: Tokenizer, ids: list[int], stops: list[str]) -> None:
    pieces, stopped = stream(spm, ids, stops)
    assert ("".join(pieces), stopped) == cut(spm.decode(ids), stops)


@given(text=st.text("abc é", max_size=30), stops=st.lists(letters, min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_stops_across_token_borders(spm: Tokenizer, text: str, stops: list[str]) -> None:
    pieces, stopped = stream(spm, spm.encode(text), stops)
    assert ("".join(pieces), stopped) == cut(text, stops)


@given(text=st.text(max_size=20))
@settings(deadline=None)
def test_only_whole_characters_are_released(bpe: Tokenizer, text: str) -> None:
    ids = byte_ids(bpe)
    pieces, _ = stream(bpe, [ids[b] for b in text.encode()])
    assert "".join(pieces) == text
    assert pieces[:-1] == [p for c in text for p in [*[""] * (len(c.encode()) - 1), c]]


def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    return {tokenizer.token_bytes(i)[0]: i for i in range(256)}


def test_text_is_released_as_early_as_it_is_certain(bpe: Tokenizer) -> None:
    detokenizer = StreamDetokenizer(bpe, ["END", "é!"])
    ids = byte_ids(bpe)
    released = [detokenizer.push(ids[b]) for b in "xEé?ENd".encode()]
    assert released == ["x", "", "", "E", "é?", "", "", "ENd"]
    assert [detokenizer.push(ids[b]) for b in b"ENDx"] == ["", "", "", ""]
    assert (detokenizer.stopped, detokenizer.finish()) == ("END", "")


def test_incomplete_text_is_flushed(bpe: Tokenizer) -> None:
    ids = byte_ids(bpe)
    detokenizer = StreamDetokenizer(bpe, ["ENDE"])
    assert [detokenizer.push(ids[b]) for b in b"END\xf0\x9f"] == ["", "", "", "", ""]
    assert detokenizer.finish() == "END\ufffd"
    assert detokenizer.finish() == ""


def test_leading_space(spm: Tokenizer) -> None:
    ids = [1, 266, 259, 262]
    assert "".join(stream(spm, ids)[0]) == "a c" == spm.decode(ids)
    assert "".join(stream(spm, ids, continuation=True)[0]) == " a c"


@pytest.mark.parametrize("stop", [[""], ["a", ""], ""])
def test_empty_stop_strings_are_refused(spm: Tokenizer, stop) -> None:
    with pytest.raises(ArgumentError, match="stop string is ''"):
        StreamDetokenizer(spm, stop)


def test_long_streams_with_long_stops_take_linear_time(spm: Tokenizer) -> None:
    stops = ["a" * 5000 + "b", "a" * 4000 + "c", "ab" * 500]
    start = time.perf_counter()
    pieces, stopped = stream(spm, [260] * 200_000, stops)
    assert time.perf_counter() - start < 4  # measured 0.6 s
    assert (sum(map(len, pieces)), stopped) == (200_000, None)
