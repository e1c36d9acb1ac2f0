"""The exceptions of the package. Each message is one sentence that names the value and what is allowed.

What comes from a file goes into a message through `shown` or `plain`: short, and without control characters.
"""

from __future__ import annotations

import reprlib
from typing import Any

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 100


class LlamaJaxError(Exception):
    """Base of all errors that a user's input can cause."""


class ArgumentError(LlamaJaxError, ValueError):
    """An argument or option has a value outside of what is allowed."""


class FormatError(LlamaJaxError, ValueError):
    """A model, vocabulary or adapter file is damaged, inconsistent or of an unsupported kind."""


def shown(value: Any, limit: int = 100) -> str:
    """A value from a file as an error may show it: its `repr`, so that control characters are escaped, shortened."""
    if getattr(value, "ndim", 0):
        value = value[:7].tolist()
    text = repr(value[: limit + 1]) if isinstance(value, (str, bytes)) else _REPR.repr(value)
    return text if len(text) <= limit + 2 else text[: limit - 3] + "..."


def plain(text: object, limit: int = 100) -> str:
    """As `shown`, without quotes: for names inside of a longer one, and for other libraries' messages."""
    text = repr(" ".join(str(text)[: 4 * limit].split()))[1:-1].replace("\\'", "'")
    return text if len(text) <= limit else text[: limit - 3] + "..."


def reason(error: object) -> str:
    """What another library's error says, to stand within a sentence: `plain`, without a period at its end."""
    return plain(error, 300).removesuffix(".") or type(error).__name__
