"""What every vocabulary shares: token types, special tokens, end of generation, BOS and EOS.

A tokenizer of one family only says how plain text becomes ids (`_encode_plain`) and which bytes a token stands for
(`_plain_bytes`); splitting at special tokens and the rest live here, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from llama_jax.errors import ArgumentError, FormatError


class TokenType(IntEnum):
    """Kinds of tokens; the numbers are those of `tokenizer.ggml.token_type` and of SentencePiece's model.proto."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SILENT_TYPES = frozenset({TokenType.UNKNOWN, TokenType.CONTROL, TokenType.UNUSED})

# Tokens that end a generation whatever the metadata says about them (llama.cpp's list, without its
# exceptions for architectures other than llama).
_ENDS = """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>
    <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <｜end▁of▁sentence｜>
    <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]
    <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
"""
END_OF_GENERATION_TEXTS = frozenset(_ENDS.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tables of a vocabulary.

    `texts` and `types` have one entry per id. Bytes that are not UTF-8 stand in `texts` as surrogate escapes. Build it
    with `make_vocabulary`, which checks it.
    """

    texts: Sequence[str]
    types: Sequence[int]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    eog_ids: tuple[int, ...]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    chat_template: str | None


def make_vocabulary(
    texts: Sequence[str],
    types: Sequence[int],
    *,
    bos_id: int | None = None,
    eos_id: int | None = None,
    unknown_id: int | None = None,
    end_ids: Iterable[int] = (),
    add_bos: bool = False,
    add_eos: bool = False,
    add_space_prefix: bool = False,
    chat_template: str | None = None,
) -> Vocabulary:
    """Check the tables and add what follows from them.

    BOS, EOS and every token that ends a generation become control tokens even where the file calls them normal: such
    files exist, and a user's text must never turn into them.

    Args:
      texts, types: one entry per id.
      end_ids: further ids that end a generation, such as EOT and EOM.

    Raises:
      FormatError: an empty vocabulary, an unknown type, or an id outside of the vocabulary.
    """
    n = len(texts)
    if n == 0:
        raise FormatError("The vocabulary has 0 tokens; at least 1 is needed.")
    if len(types) != n:
        raise FormatError(f"The vocabulary has {n} tokens but {len(types)} token types; the two must agree.")
    for value in set(types) - set(TokenType):
        raise FormatError(f"Token {types.index(value)} has the type {value}; allowed are 1 to 6.")
    end_ids = list(end_ids)
    named = [("BOS", bos_id), ("EOS", eos_id), ("unknown", unknown_id), *(("end-of-turn", i) for i in end_ids)]
    for name, token_id in named:
        if token_id is not None and not 0 <= token_id < n:
            raise FormatError(f"The {name} token has the id {token_id}; allowed are 0 to {n - 1}.")
    ends = {i for i in (eos_id, *end_ids) if i is not None}
    ends |= {i for i, text in enumerate(texts) if text in END_OF_GENERATION_TEXTS and types[i] != TokenType.UNUSED}
    types = list(types)
    for i in ends | ({bos_id} if bos_id is not None else set()):
        if types[i] != TokenType.UNKNOWN:
            types[i] = TokenType.CONTROL
    for rule, token_id, name in ((add_bos, bos_id, "BOS"), (add_eos, eos_id, "EOS")):
        if rule and token_id is None:
            raise FormatError(f"The vocabulary asks to add a {name} token but names none; its id is needed.")
    return Vocabulary(
        texts=texts,
        types=types,
        bos_id=bos_id,
        eos_id=eos_id,
        unknown_id=unknown_id,
        eog_ids=tuple(sorted(ends)),
        add_bos=add_bos,
        add_eos=add_eos,
        add_space_prefix=add_space_prefix,
        chat_template=chat_template,
    )


class VocabularyTokenizer(ABC):
    """A `Tokenizer` (see `llama_jax.text.tokenizer`) over a `Vocabulary`; safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.vocab_size: int = len(vocabulary.texts)
        self.bos_id: int | None = vocabulary.bos_id
        self.eos_id: int | None = vocabulary.eos_id
        self.eog_ids: tuple[int, ...] = vocabulary.eog_ids
        self.add_bos: bool = vocabulary.add_bos
        self.add_eos: bool = vocabulary.add_eos
        self.add_space_prefix: bool = vocabulary.add_space_prefix
        self.chat_template: str | None = vocabulary.chat_template
        controls: dict[str, int] = {}
        user_defined: dict[str, int] = {}
        for i, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.types, strict=True)):
            if kind in (TokenType.CONTROL, TokenType.UNKNOWN) and text:
                controls[text] = i
            elif kind == TokenType.USER_DEFINED and text:
                user_defined[text] = i
        self.special_tokens: Mapping[str, int] = controls
        self._always_split = longest_first(user_defined)
        self._special_split = longest_first(user_defined | controls)

    @abstractmethod
    def _encode_plain(self, text: str) -> list[int]:
        """Ids of a non-empty text without special tokens; adds the space prefix where the vocabulary has one."""

    @abstractmethod
    def _plain_bytes(self, token_id: int) -> bytes:
        """Bytes of a normal or byte token."""

    def encode(
        self,
        text: str,
        *,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        parse_special: bool = False,
        literals: Mapping[str, str] | None = None,
    ) -> list[int]:
        """Token ids of `text`; see `llama_jax.text.tokenizer.Tokenizer.encode`."""
        if add_bos is None:
            add_bos = self.add_bos
        if add_bos and self.bos_id is None:
            raise ArgumentError("add_bos is True, but the vocabulary has no BOS token; only False is allowed.")
        ids = [self.bos_id] if add_bos and self.bos_id is not None else []
        ids += self._encode_text(well_formed(text), parse_special, literals or {})
        if add_eos is None:
            add_eos = self.add_eos
        if add_eos and self.eos_id is None:
            raise ArgumentError("add_eos is True, but the vocabulary has no EOS token; only False is allowed.")
        if add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def _encode_text(self, text: str, parse_special: bool, literals: Mapping[str, str]) -> list[int]:
        specials = self._special_split if parse_special else self._always_split
        ids: list[int] = []
        for fragment in split_specials(text, specials):
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                ids += self._encode_plain(restore_literals(fragment, literals))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; see `llama_jax.text.tokenizer.Tokenizer.decode`."""
        data = b"".join(map(self.token_bytes, ids))
        return (data.removeprefix(b" ") if self.add_space_prefix else data).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that the token adds to a text; control, unknown and unused tokens add none."""
        kind = self._vocabulary.types[self._checked(token_id)]
        if kind in SILENT_TYPES:
            return b""
        if kind == TokenType.USER_DEFINED:
            return raw_bytes(self._vocabulary.texts[token_id])
        return self._plain_bytes(token_id)

    def piece(self, token_id: int) -> str:
        """The token as the vocabulary writes it; bytes that are not UTF-8 become U+FFFD."""
        return raw_bytes(self._vocabulary.texts[self._checked(token_id)]).decode("utf-8", "replace")

    def is_control(self, token_id: int) -> bool:
        """Whether the token is a control token, such as BOS or the end of a turn."""
        return self._vocabulary.types[self._checked(token_id)] == TokenType.CONTROL

    def score(self, token_id: int) -> float:
        """What SentencePiece orders merges by; 0 where a vocabulary has no scores."""
        self._checked(token_id)
        return 0.0

    def token_type(self, token_id: int) -> TokenType:
        """The kind of the token."""
        return TokenType(self._vocabulary.types[self._checked(token_id)])

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < self.vocab_size:
            raise ArgumentError(f"The token id {token_id} does not exist; allowed are 0 to {self.vocab_size - 1}.")
        return token_id


def longest_first(specials: Mapping[str, int]) -> list[tuple[str, int]]:
    """Special tokens in the order in which they claim their places in a text."""
    return sorted(specials.items(), key=lambda item: -len(raw_bytes(item[0])))


def split_specials(text: str, specials: Iterable[tuple[str, int]]) -> list[str | int]:
    """Cut `text` at special tokens: ids where one stood, the non-empty text between them.

    Earlier entries of `specials` win where two overlap, wherever they stand in the text; within one entry the leftmost
    place wins.
    """
    fragments: list[str | int] = [text] if text else []
    for special, token_id in specials:
        if special not in text:
            continue
        cut: list[str | int] = []
        for fragment in fragments:
            if isinstance(fragment, int):
                cut.append(fragment)
                continue
            for i, part in enumerate(fragment.split(special)):
                if i:
                    cut.append(token_id)
                if part:
                    cut.append(part)
        fragments = cut
    return fragments


def restore_literals(text: str, literals: Mapping[str, str]) -> str:
    """Put the texts back that single characters stand for."""
    return text.translate(str.maketrans(dict(literals))) if literals else text


def well_formed(text: str) -> str:
    """`text` with lone surrogates, which UTF-8 cannot hold, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def raw_text(value: str | bytes) -> str:
    """A vocabulary entry as a string; bytes that are not UTF-8 become surrogate escapes."""
    return value if isinstance(value, str) else bytes(value).decode("utf-8", "surrogateescape")


def raw_bytes(text: str) -> bytes:
    """The inverse of `raw_text`."""
    return text.encode("utf-8", "surrogateescape")
