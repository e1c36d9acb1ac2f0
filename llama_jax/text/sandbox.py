"""A Jinja environment for chat templates, which come with models and cannot be trusted.

Jinja's sandbox keeps a template away from Python's internals. This one also keeps it from running or growing without
end: every operation and everything it makes is paid for out of a budget, no string may exceed `MAX_TEXT` characters,
and the clock is looked at between operations. Since Python cannot be stopped inside one operation, each has to be
short: lists are walked before they are compared or sorted, tuples do not nest, and integers stay small.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from inspect import isbuiltin
from typing import Any, cast

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import do_round, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg
from jinja2.visitor import NodeTransformer
from markupsafe import escape

MAX_TEXT = 4 * 2**20
"""Largest string, and largest result, in characters."""

BUDGET = 64 * 2**20
"""Work of one rendering: characters moved, plus `STEP` for each operation and eight times that for each call."""

STEP = 32

MAX_BITS = 2**16
"""Size of the largest integer."""

MAX_SOURCE = 2**20
"""Largest template, in characters; published ones have at most some 30,000."""

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
_COMPARING_FILTERS = frozenset(["sort", "unique", "groupby", "min", "max", "dictsort"])
_COMPARING_TESTS = frozenset(
    ["in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le"]
)
_PASSING = frozenset(["abs", "attr", "d", "default", "first", "float", "int", "last", "length", "count", "get"])
"""Filters and methods that make nothing, but hand on what is there."""


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


def _walk(value: Any, indent: int = 0, margin: int = 0) -> None:
    """Pay for every item of a nest of lists and mappings, each time it occurs, and for margins growing by `indent`."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            _walk(item, indent, margin + indent)
    pay(margin + (len(value) if isinstance(value, (str, bytes)) else 0))


def _pay_for(made: Any) -> None:
    """Pay for a text or list that an operation has made."""
    if isinstance(made, (str, bytes)):
        _grow(len(made))
    elif isinstance(made, (list, tuple, dict)):
        pay(STEP * len(made))


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
        self.filters = {name: _metered(name, standard[name]) for name in _FILTERS.split()}
        self.tests = {name: _comparing(test) if name in _COMPARING_TESTS else test for name, test in self.tests.items()}
        self.filters |= {
            "_loop": _loop,
            "_compared": _compared,
            "_concat": _concat,
            "_dict": _dict,
            "_list": _list,
            "_slice": _slice,
            "_tuple": _tuple,
            "e": _escape,
            "escape": _escape,
            "safe": to_text,
            "sum": _sum,
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
        self.globals["dict"] = _make_dict
        self.globals["namespace"] = _make_namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise SecurityError(f"it has {len(source)} characters where at most {MAX_SOURCE} are allowed")
        return _Metering().visit(Parser(self, source, name, filename).parse())

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result may be much larger than what goes in."""
        pay()
        if operator == "%" and isinstance(left, (str, bytes)):
            return _percent(left, right)
        left, right = (list(side) if isinstance(side, tuple) else side for side in (left, right))
        if operator == "+" and isinstance(left, (str, bytes, list)) and hasattr(right, "__len__"):
            _grow(_weight(left) * len(left) + _weight(right) * len(right))
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, bytes, list)) and isinstance(times, int):
                    _grow(_weight(sequence) * len(sequence) * times)
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
            _check_bits(left.bit_length() * max(right, 0))
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
            elif name in ("count", "index"):
                _walk([owner, *args])
        elif isinstance(__obj, Macro) and (__obj.catch_varargs or __obj.catch_kwargs):
            args = tuple(map(_flat, args))
            kwargs = {key: _flat(value) for key, value in kwargs.items()}
        result = super().call(__context, __obj, *args, **kwargs)
        if name not in _PASSING:
            _pay_for(result)
        return result


class GenerationExtension(Extension):
    """`{% generation %}` marks what an assistant says, for training; here its body is simply printed."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Metering(NodeTransformer):
    """Rewrites a template so that what Jinja leaves to Python is paid for like everything else."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(cast(nodes.Expr, node.iter), "_loop")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        sides = (node, *node.ops)
        if len(sides) > 2 or not any(isinstance(side.expr, nodes.Const) for side in sides):  # a constant is quick
            for side in sides:
                side.expr = _filtered(side.expr, "_compared")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = [bound or nodes.Const(None) for bound in (node.arg.start, node.arg.stop, node.arg.step)]
        return _filtered(node.node, "_slice", bounds)

    def visit_List(self, node: nodes.List) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_list")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_dict")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_tuple") if node.ctx == "load" else node

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:  # noqa: N802
        raise SecurityError("it uses autoescape, which templates may not")

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Const:  # noqa: N802
        return nodes.Const(node.data, lineno=node.lineno)


def _filtered(node: nodes.Expr, name: str, args: Sequence[nodes.Expr] = ()) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """One of Jinja's filters that pays for what it makes."""
    at = 0 if _PassArg.from_obj(function) is None else 1

    @wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        value = args[at]
        pay()
        if isinstance(value, (list, tuple, Mapping)):
            if name in _COMPARING_FILTERS:
                _walk(value)
        elif isinstance(value, str):
            pay(STEP * len(value) if name in _COMPARING_FILTERS or name == "list" else 0)
            if name == "trim":
                _check_needles([*args[at + 1 :], *kwargs.values()])
        elif isinstance(value, Iterable) and not isinstance(value, (range, Undefined)):
            value = _paid(value)
        if name == "unique":
            value = _paid(value)
        result = function(*args[:at], value, *args[at + 1 :], **kwargs)
        if isinstance(result, Iterator):
            return _paid(result)
        if name not in _PASSING and result is not value:
            _pay_for(result)
        return result

    return metered


def _comparing(test: Callable[..., bool]) -> Callable[..., bool]:
    def metered(left: Any, right: Any) -> bool:
        pay()
        for side in (left, right):
            if isinstance(side, (list, tuple, Mapping)):
                _walk(side)
        return test(left, right)

    return metered


def _paid(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        pay()
        yield item


def _flat(value: Any) -> Any:
    """A list for a tuple: tuples in tuples would take long to hash."""
    return list(value) if isinstance(value, tuple) else value


def _weight(sequence: Any) -> int:
    """What one item costs, in characters."""
    return 8 if isinstance(sequence, (list, tuple)) else 1


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise SecurityError(f"it builds an integer longer than {MAX_BITS} bits")


def _check_needles(values: Iterable[Any]) -> None:
    """Refuse long texts where Python's search takes the product of two lengths."""
    for value in values:
        if isinstance(value, str) and len(value) > 1000:
            raise SecurityError("it searches for a text longer than 1000")


def _make_dict(pairs: Any = (), **more: Any) -> dict[Any, Any]:
    pairs = pairs.items() if isinstance(pairs, Mapping) else pairs
    made = {_key(key): _flat(value) for key, value in _paid(pairs)}
    return made | {key: _flat(value) for key, value in more.items()}


def _make_namespace(*args: Any, **more: Any) -> Namespace:
    return Namespace(_make_dict(*args, **more))


def _key(value: Any) -> Any:
    if isinstance(value, tuple):
        raise SecurityError("it uses a tuple as a key")
    return value


# `pass_context` keeps Jinja from running these while it compiles.


@pass_context
def _finalize(_context: Context, value: Any) -> str:
    return to_text(value)


@pass_context
def _loop(_context: Context, items: Iterable[Any]) -> Iterator[Any]:
    return _paid(items)


@pass_context
def _compared(_context: Context, value: Any) -> Any:
    if isinstance(value, (list, tuple, Mapping)):
        _walk(value)
    else:
        pay(len(value) // 16 if isinstance(value, str) else 0)
    return value


@pass_context
def _list(_context: Context, made: list[Any]) -> list[Any]:
    pay(8 * len(made))
    return made


@pass_context
def _tuple(_context: Context, made: tuple[Any, ...]) -> tuple[Any, ...]:
    pay(8 * len(made))
    return tuple(map(_flat, made))


@pass_context
def _dict(_context: Context, made: dict[Any, Any]) -> dict[Any, Any]:
    pay(STEP * len(made))
    return {_key(key): _flat(value) for key, value in made.items()}


@pass_context
def _slice(_context: Context, value: Any, start: Any, stop: Any, step: Any) -> Any:
    part = value[start:stop:step]
    if isinstance(part, (str, bytes, list, tuple)):
        pay(_weight(part) * len(part))
    return part


@pass_context
def _sum(context: Context, value: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    for item in value:
        start = cast(Sandbox, context.environment).call_binop(context, "+", start, item)
    return start


def _escape(value: Any) -> str:
    text = to_text(value)
    _grow(len(text) + 4 * sum(map(text.count, "&<>'\"")))
    return str(escape(text))


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


def to_json(
    value: Any,
    indent: int | None = None,
    ensure_ascii: bool = False,
    sort_keys: bool = False,
    separators: Sequence[str] | None = None,
) -> str:
    """JSON as chat templates expect it: no HTML escapes, other scripts as they are."""
    indent = None if indent is None else _small(indent)
    more = 0 if separators is None else sum(map(len, separators))
    _walk(value, (indent or 0) + more)
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys, separators=cast(Any, separators)
    )
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
    elif name in ("strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition"):
        _check_needles(args)
    return args


class TemplateRefusedError(TemplateError):
    """The template itself says that it cannot show these messages."""


def _raise_exception(message: Any) -> None:
    raise TemplateRefusedError(to_text(message))


def _strftime_now(pattern: Any) -> str:
    _check_pattern(to_text(pattern), ())
    return datetime.now().strftime(pattern)
