"""A Jinja environment for chat templates, which come with models and cannot be trusted.

Jinja's sandbox keeps a template away from Python's internals. This one also keeps it from running or growing without
end: every operation is paid for out of a budget, and no string may exceed `MAX_TEXT` characters.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from inspect import isbuiltin
from typing import Any, cast

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import do_round, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_TEXT = 4 * 2**20
"""Largest string, and largest result, in characters."""

BUDGET = 64 * 2**20
"""Work of one rendering: characters moved, plus `STEP` for each operation and eight times that for each call."""

STEP = 32

SECONDS = 5.0
"""Longest time of one rendering."""

_FILTERS = """
    abs attr capitalize count d default dictsort e escape first float groupby int items last length list lower map max
    min reject rejectattr reverse safe select selectattr sort sum title trim unique upper wordcount
"""
_METHODS = """
    capitalize casefold center copy count endswith find format get index isalnum isalpha isascii isdecimal isdigit
    islower isnumeric isspace istitle isupper items join keys ljust lower lstrip partition removeprefix removesuffix
    replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper values
    zfill
"""
_SAFE_METHODS = frozenset(_METHODS.split())


class _Budget:
    def __init__(self) -> None:
        self.left = BUDGET
        self.deadline = time.monotonic() + SECONDS


_budget: ContextVar[_Budget] = ContextVar("llama_jax_template_budget")


def start_budget() -> None:
    """Give the current thread or task a fresh budget."""
    _budget.set(_Budget())


def pay(cost: int = 0) -> None:
    """Take `cost` and one step from the budget; raises SecurityError when nothing is left."""
    budget = _budget.get()
    budget.left -= cost + STEP
    if budget.left < 0 or time.monotonic() > budget.deadline:
        raise SecurityError("it does too much work")


def check_length(length: int) -> None:
    """Raises SecurityError when a string or list of that length is too long."""
    if length > MAX_TEXT:
        raise SecurityError(f"it builds a text or list longer than {MAX_TEXT}")


def to_text(value: Any) -> str:
    """`str(value)`, after a look at how long it may get."""
    if not isinstance(value, str):
        _walk(value)
        value = str(value)
    check_length(len(value))
    pay(len(value))
    return value


def _walk(value: Any) -> None:
    """Pay for every item in a nest of lists and mappings, each time it occurs."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            _walk(item)
    pay(len(value) if isinstance(value, (str, bytes)) else 0)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment; one may serve many threads."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, GenerationExtension],
            finalize=_finalize,
        )
        standard = self.filters
        self.filters = {name: standard[name] for name in _FILTERS.split()}
        self.filters |= {
            "_loop": _loop,
            "_concat": _concat,
            "format": _format_filter,
            "indent": _indent,
            "join": _join_filter,
            "replace": _replace_filter,
            "round": _round,
            "string": to_text,
            "tojson": to_json,
        }
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Metering().visit(Parser(self, source, name, filename).parse())

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result may be much larger than what goes in."""
        pay()
        if operator == "%" and isinstance(left, (str, bytes)):
            return _percent(left, right)
        if operator == "+" and isinstance(left, (str, bytes, list, tuple)) and hasattr(right, "__len__"):
            _grow(len(left) + len(right))
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(times, int):
                    _grow(len(sequence) * times)
            if isinstance(left, int) and isinstance(right, int):
                check_length(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
            _grow(left.bit_length() * max(right, 0))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        """Guard `str.format`, which Jinja replaces by a function of its own."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def guarded(*args: Any, **kwargs: Any) -> str:
            _check_pattern(value.__self__, [*args, kwargs])
            return wrapped(*args, **kwargs)

        return guarded

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function, macro or method."""
        owner = getattr(__obj, "__self__", None)
        name = getattr(__obj, "__name__", "")
        pay(len(owner) if isinstance(owner, (str, bytes, list, tuple, dict)) else 8 * STEP)
        if isbuiltin(__obj):
            if name not in _SAFE_METHODS or not isinstance(owner, (str, list, tuple, dict)):
                raise SecurityError(f"it calls {name}, which templates may not")
            if isinstance(owner, str):
                args = _check_method(owner, name, args)
        return super().call(__context, __obj, *args, **kwargs)


class GenerationExtension(Extension):
    """`{% generation %}` marks what an assistant says, for training; here its body is simply printed."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Metering(NodeTransformer):
    """Rewrites a template so that loops, `~` and literal text are paid for like everything else."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(cast(nodes.Expr, node.iter), "_loop")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Const:  # noqa: N802
        return nodes.Const(node.data, lineno=node.lineno)


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


# `pass_context` keeps Jinja from running these while it compiles.


@pass_context
def _finalize(_context: Context, value: Any) -> str:
    return to_text(value)


@pass_context
def _loop(_context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        pay()
        yield item


@pass_context
def _concat(_context: Context, values: Sequence[Any]) -> str:
    texts = [to_text(value) for value in values]
    check_length(sum(map(len, texts)))
    return "".join(texts)


def _grow(length: int) -> None:
    check_length(length)
    pay(max(length, 0))


def _join(separator: str, items: Iterable[Any]) -> str:
    texts = [to_text(item) for item in items]
    _grow(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


@pass_context
def _join_filter(context: Context, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    return _join(to_text(d), value)


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    times = text.count(old) if count < 0 else min(count, text.count(old))
    _grow(len(text) + times * len(new))
    return text.replace(old, new, count)


def _replace_filter(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    return _replace(to_text(value), to_text(old), to_text(new), -1 if count is None else count)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text, margin = to_text(value), width if isinstance(width, str) else " " * _small(width)
    lines = text.splitlines() + ([""] if text.endswith("\n") else [])
    _grow(len(text) + len(margin) * len(lines))
    indented = [margin + line if (first if i == 0 else line or blank) else line for i, line in enumerate(lines)]
    return "\n".join(indented)


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    return do_round(value, _small(precision), method)  # type: ignore[arg-type]


def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False, **more: Any):
    """JSON as chat templates expect it: no HTML escapes, other scripts as they are."""
    _walk(value)
    indent = None if indent is None else _small(indent)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys, **more)
    return to_text(text)


def _small(number: Any) -> int:
    number = int(number)
    if not 0 <= number <= 1000:
        raise SecurityError(f"it uses {number} where at most 1000 is allowed")
    return number


def _percent(pattern: str | bytes, values: Any) -> Any:
    _check_pattern(pattern if isinstance(pattern, str) else pattern.decode("latin-1"), values)
    return pattern % values


def _format_filter(value: Any, *args: Any, **kwargs: Any) -> str:
    return _percent(to_text(value), kwargs or args)


def _check_pattern(pattern: str, values: Any) -> None:
    """Look for widths in a format pattern, and at how long the values may make it."""
    if re.search(r"%[^a-zA-Z%]*(\d{4}|\*)|\{[^}]*(\d{4}|\{)[^}]*\}", pattern):
        raise SecurityError("it uses a format pattern with a large or computed width")
    _walk(values)
    _grow(len(pattern) + sum(map(pattern.count, "%{")) * len(str(values)))


def _check_method(text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Bound what a string's method may build."""
    if name in ("center", "ljust", "rjust", "zfill") and args:
        check_length(int(args[0]))
        pay(int(args[0]))
    elif name == "replace" and len(args) >= 2:
        _replace(text, *args)
    elif name == "join" and args:
        items = list(args[0])
        _join(text, items)
        return (items,)
    return args


class TemplateRefusedError(TemplateError):
    """The template itself says that it cannot show these messages."""


def _raise_exception(message: Any) -> None:
    raise TemplateRefusedError(to_text(message))


def _strftime_now(pattern: Any) -> str:
    _check_pattern(to_text(pattern), ())
    return datetime.now().strftime(pattern)
