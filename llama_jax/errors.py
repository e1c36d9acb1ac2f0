"""The exceptions of the package. Each message is one sentence that names the value and what is allowed."""

from __future__ import annotations


class LlamaJaxError(Exception):
    """Base of all errors that a user's input can cause."""


class ArgumentError(LlamaJaxError, ValueError):
    """An argument or option has a value outside of what is allowed."""


class FormatError(LlamaJaxError, ValueError):
    """A model, vocabulary or adapter file is damaged, inconsistent or of an unsupported kind."""
