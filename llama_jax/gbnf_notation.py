"""llama.cpp's notation for grammars, read and written again as llguidance's Lark.

llguidance cuts a text into terminals, each as long as possible, before its parser sees them; GBNF knows no terminals.
So everything between two references to recursive rules becomes one terminal, a regular expression, in which nothing is
cut too early; a grammar without recursion is one regular expression whole. What remains different: where a terminal's
end overlaps with the beginning of the next, the longer terminal wins.

The notation: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llama_jax.errors import ArgumentError, shown

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_HEX = {"x": 2, "u": 4, "U": 8}
_MOST_REPEATS = 2000
_MOST_DEPTH = 200  # of brackets within each other


@dataclass(frozen=True, slots=True)
class Chars:
    """One character: as a regular expression."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Reference:
    """Another rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the vocabulary, in llguidance's notation."""

    text: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`node` at least `low` times, at most `high` times; None: any number."""

    node: Node
    low: int
    high: int | None


Node = Chars | Reference | Token | Sequence | Choice | Repeat


def gbnf_to_lark(text: str) -> str:
    """The same grammar for llguidance.

    Raises:
      ArgumentError: a mistake in the notation, a rule that is missing or written twice, no rule `root`.
    """
    return _Writer(_Reader(text).rules()).lark()


class _Reader:
    """A recursive-descent parser."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip(newlines=True)
        while self._at < len(self._text):
            name = self._name()
            self._skip(newlines=False)
            self._expect("::=")
            self._skip(newlines=True)
            if name in rules:
                raise self._mistake(f"the rule {name} is there twice")
            rules[name] = self._choice(nested=False)
            self._skip(newlines=False)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._mistake(f"{shown(self._text[self._at])} is not expected")
            self._skip(newlines=True)
        if "root" not in rules:
            raise ArgumentError("The grammar has no rule root, which is where a text begins.")
        for node in rules.values():
            for name in _references(node):
                if name not in rules:
                    raise ArgumentError(f"The grammar has no rule {shown(name)}, to which another one refers.")
        return rules

    def _mistake(self, what: str) -> ArgumentError:
        line = self._text.count("\n", 0, self._at) + 1
        return ArgumentError(f"Line {line} of the grammar has a mistake: {what}.")

    def _peek(self, n: int = 1) -> str:
        return self._text[self._at : self._at + n]

    def _expect(self, text: str) -> None:
        if self._peek(len(text)) != text:
            raise self._mistake(f"{text} is expected, not {shown(self._peek() or 'the end')}")
        self._at += len(text)

    def _match(self, pattern: str, what: str) -> str:
        found = re.compile(pattern).match(self._text, self._at)
        if not found:
            raise self._mistake(f"{what} is expected, not {shown(self._peek() or 'the end')}")
        self._at = found.end()
        return found[0]

    def _skip(self, *, newlines: bool) -> None:
        """White space and comments."""
        self._match(r"(?:[ \t\r\n]|#[^\r\n]*)*" if newlines else r"(?:[ \t]|#[^\r\n]*)*", "")

    def _name(self) -> str:
        return self._match(r"[a-zA-Z0-9_-]+", "a name")

    def _choice(self, *, nested: bool) -> Node:
        options = [self._sequence(nested=nested)]
        while self._peek() == "|":
            self._at += 1
            self._skip(newlines=True)
            options.append(self._sequence(nested=nested))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, *, nested: bool) -> Node:
        parts: list[Node] = []
        while (node := self._element()) is not None:
            self._skip(newlines=nested)
            while self._peek() and self._peek() in "*+?{":
                node = self._repeated(node)
                self._skip(newlines=nested)
            parts.append(node)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _element(self) -> Node | None:
        start = self._peek()
        if start == '"':
            return self._literal()
        if start == "[":
            return self._class()
        if start == ".":
            self._at += 1
            return Chars(r"(?s:.)")
        if start == "(":
            return self._group()
        if start and start in "<!":
            return self._token()
        if re.match(r"[a-zA-Z0-9_-]", start):
            return Reference(self._name())
        return None

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise self._mistake(f"brackets stand more than {_MOST_DEPTH} deep")
        self._at += 1
        self._skip(newlines=True)
        node = self._choice(nested=True)
        self._skip(newlines=True)
        self._expect(")")
        self._depth -= 1
        return node

    def _literal(self) -> Node:
        self._at += 1
        characters = []
        while self._peek() != '"':
            characters.append(Chars(_escaped(self._character())))
        self._at += 1
        return characters[0] if len(characters) == 1 else Sequence(tuple(characters))

    def _class(self) -> Node:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges = []
        while self._peek() != "]":
            first = self._character()
            last = first
            if self._peek() == "-" and self._peek(2) != "-]":
                self._at += 1
                last = self._character()
            if last < first:
                raise self._mistake(f"the range {shown(first)} to {shown(last)} is empty")
            ranges.append(_escaped(first) + ("" if last == first else f"-{_escaped(last)}"))
        self._at += 1
        if not ranges:
            return Chars(r"(?s:.)" if negated else r"[^\x{0}-\x{10ffff}]")
        return Chars(f"[{'^' if negated else ''}{''.join(ranges)}]")

    def _character(self) -> str:
        character = self._peek()
        if not character:
            raise self._mistake("the text ends within quotes or brackets")
        self._at += 1
        if character != "\\":
            return character
        kind = self._peek()
        self._at += 1
        if kind in _HEX:
            digits = self._match(f"[0-9a-fA-F]{{{_HEX[kind]}}}", f"\\{kind} and {_HEX[kind]} hexadecimal digits")
            code = int(digits, 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise self._mistake(f"\\{kind}{digits} is not a character")
            return chr(code)
        if not kind or kind not in '"\\[]nrt-^':
            raise self._mistake(f"\\{kind} is not known")
        return _ESCAPES.get(kind, kind)

    def _token(self) -> Node:
        negated = self._peek() == "!"
        self._at += negated
        text = self._match(r"<[^<>\s]+>", "a token, such as <|eot_id|> or <[13]>,")
        if negated:
            number = re.fullmatch(r"<\[(\d+)\]>", text)
            if not number:
                raise self._mistake(f"!{text} is not known; only a number can be excluded, as in !<[13]>")
            return Token(f"<[^{number[1]}]>")
        return Token(text)

    def _repeated(self, node: Node) -> Node:
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1), "{": (0, None)}[self._peek()]
        if self._peek() == "{":
            bounds = self._match(r"\{\s*\d+\s*(?:,\s*\d*\s*)?\}", "{n}, {n,} or {n,m}").strip("{}").split(",")
            low = int(bounds[0])
            high = low if len(bounds) == 1 else int(bounds[1]) if bounds[1].strip() else None
            if (high is not None and high < low) or max(low, high or 0) > _MOST_REPEATS:
                raise self._mistake(f"the bounds {low} and {high} are not in order, or above {_MOST_REPEATS}")
        else:
            self._at += 1
        return Repeat(node, low, high)


def _references(node: Node) -> set[str]:
    match node:
        case Reference(name):
            return {name}
        case Sequence(parts):
            return set().union(*map(_references, parts))
        case Choice(options):
            return set().union(*map(_references, options))
        case Repeat(inner, _, _):
            return _references(inner)
        case _:
            return set()


def _holds_token(node: Node) -> bool:
    match node:
        case Token():
            return True
        case Sequence(parts):
            return any(map(_holds_token, parts))
        case Choice(options):
            return any(map(_holds_token, options))
        case Repeat(inner, _, _):
            return _holds_token(inner)
        case _:
            return False


class _Writer:
    """Rules as Lark."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._regular = self._regular_rules()
        self._patterns: dict[str, str] = {}
        names = [name for name in rules if name not in self._regular]
        self._lark_name = {name: "start" if name == "root" else f"rule_{i}" for i, name in enumerate(names)}

    def lark(self) -> str:
        if "root" in self._regular:
            return f"start: {_terminal(self._pattern(Reference('root')))}\n"
        lines = [f"{lark}: {self._rule(self._rules[name])}" for name, lark in self._lark_name.items()]
        return "\n".join(lines) + "\n"

    def _regular_rules(self) -> set[str]:
        """Rules that neither they nor what they refer to is recursive, or names a token."""
        regular: set[str] = set()
        while True:
            more = {
                name
                for name, node in self._rules.items()
                if name not in regular and _references(node) <= regular and not _holds_token(node)
            }
            if not more:
                return regular
            regular |= more

    def _is_regular(self, node: Node) -> bool:
        return _references(node) <= self._regular and not _holds_token(node)

    def _pattern(self, node: Node) -> str:
        """A regular expression for a node that refers to regular rules only."""
        match node:
            case Chars(pattern):
                return pattern
            case Reference(name):
                if name not in self._patterns:
                    self._patterns[name] = f"(?:{self._pattern(self._rules[name])})"
                    _check_size(self._patterns[name])
                return self._patterns[name]
            case Sequence(parts):
                return "".join(f"(?:{self._pattern(p)})" if isinstance(p, Choice) else self._pattern(p) for p in parts)
            case Choice(options):
                return "|".join(map(self._pattern, options))
            case Repeat(inner, low, high):
                return f"(?:{self._pattern(inner)}){_bounds(low, high)}"
            case Token():
                raise AssertionError("a token is no regular expression")

    def _rule(self, node: Node) -> str:
        """Lark's notation for a node of which a part is recursive."""
        if self._is_regular(node):
            return _terminal(self._pattern(node))
        match node:
            case Reference(name):
                return self._lark_name[name]
            case Token(text):
                return text
            case Sequence(parts):
                return " ".join(self._runs(parts))
            case Choice(options):
                return "(" + " | ".join(map(self._rule, options)) + ")"
            case Repeat(inner, low, high):
                return f"({self._rule(inner)}){_bounds(low, high)}"
            case Chars():
                raise AssertionError("a character is regular")

    def _runs(self, parts: tuple[Node, ...]) -> list[str]:
        """The parts of a sequence, regular neighbours as one terminal."""
        written: list[str] = []
        run: list[Node] = []
        for part in (*parts, None):
            if part is not None and self._is_regular(part):
                run.append(part)
                continue
            if run:
                written.append(_terminal(self._pattern(Sequence(tuple(run)))))
                run = []
            if part is not None:
                written.append(self._rule(part))
        return written


_MOST_PATTERN = 1 << 20


def _check_size(pattern: str) -> None:
    if len(pattern) > _MOST_PATTERN:
        raise ArgumentError(f"The grammar's regular part is longer than {_MOST_PATTERN} characters when written out.")


def _bounds(low: int, high: int | None) -> str:
    return {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high), f"{{{low},{'' if high is None else high}}}")


def _terminal(pattern: str) -> str:
    """A regular expression in Lark's slashes; an empty one is Lark's empty string."""
    _check_size(pattern)
    return f"/{pattern}/" if pattern else '""'


def _escaped(character: str) -> str:
    return character if re.fullmatch("[a-zA-Z0-9_]", character) else f"\\x{{{ord(character):x}}}"
