"""Checks of a caller's numbers: one sentence that names the value and what is allowed."""

from __future__ import annotations

import operator
from typing import Any

from llama_jax.errors import ArgumentError

MOST = 2**31 - 1  # of what becomes an int32
_LARGEST = 3e38  # of what becomes a float32
_SMALLEST = 1e-37


def integer(name: str, value: Any, low: int, high: int = MOST, allowed: str | None = None) -> int:
    """`value` as an int from `low` to `high`; numpy's integers count, bool does not."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise ArgumentError(f"{name} is {value!r}; it must be {allowed or f'an integer from {low} to {high}'}.")
    return number


def number(name: str, value: Any, low: float, high: float = _LARGEST, *, allowed: str, positive: bool = False) -> float:
    """`value` as a float from `low` to `high`, above 0 also as a float32 where `positive`."""
    try:
        result = float("nan") if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        result = float("nan")
    if not low <= result <= high or (positive and result < _SMALLEST):
        if positive and 0 < result < _SMALLEST:
            allowed += f", at least {_SMALLEST:g}"
        elif result > high == _LARGEST:
            allowed += f", at most {_LARGEST:g}"
        elif result < low == -_LARGEST:
            allowed += f", at least {-_LARGEST:g}"
        raise ArgumentError(f"{name} is {value!r}; it must be {allowed}.")
    return result
