"""Byte-pair vocabularies: the `gpt2` vocabularies of GGUF files and Hugging Face's `tokenizer.json`.

Both run on the tokenizers library. A GGUF file names its pre-tokenizer instead of holding it; `PRE_TOKENIZERS` says
what the names mean.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from llama_jax.errors import FormatError, reason, shown
from llama_jax.text.sentencepiece import SPACE, byte_value
from llama_jax.text.vocabulary import (
    TokenType,
    Vocabulary,
    VocabularyTokenizer,
    raw_bytes,
    well_formed,
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS_AND_DIGITS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How a text is cut into words before merging.

    Attributes:
      patterns: regular expressions applied one after the other; each cuts at its matches, matches and gaps are words.
      ignore_merges: a word that is a token is taken whole, without looking at the merges.
      add_bos: whether BOS is added where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA3 = PreTokenizer(patterns=(_WORDS_AND_DIGITS.replace("DIGITS", "{1,3}"),), ignore_merges=True, add_bos=True)
_SMOLLM = PreTokenizer(patterns=(r"\p{N}", _GPT2))
_QWEN2 = PreTokenizer(patterns=(_WORDS_AND_DIGITS.replace("DIGITS", ""),))
# The pattern of the model's own tokenizer.json; llama.cpp approximates it with ASCII letters.
_TEKKEN = PreTokenizer(
    patterns=(
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    ignore_merges=True,
    add_bos=True,
)
_DEFAULT = PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "mpt", "olmo"), PreTokenizer(patterns=(_GPT2,))),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _SMOLLM),
    "tekken": _TEKKEN,
}


def _byte_characters() -> dict[int, str]:
    """GPT-2's printable character for each byte: itself where it prints in Latin-1, else the next from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}


BYTE_OF_CHARACTER: Mapping[str, int] = {c: b for b, c in _byte_characters().items()}


def byte_level_bytes(text: str) -> bytes:
    """Bytes of a token written in GPT-2's characters; other characters stand for themselves."""
    try:
        return bytes([BYTE_OF_CHARACTER[c] for c in text])
    except KeyError:
        return b"".join(bytes([BYTE_OF_CHARACTER[c]]) if c in BYTE_OF_CHARACTER else raw_bytes(c) for c in text)


class ByteLevelTokenizer(VocabularyTokenizer):
    """A `gpt2` vocabulary of a GGUF file."""

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str], pre_tokenizer: PreTokenizer) -> None:
        super().__init__(vocabulary)
        self._library = build_library_tokenizer(vocabulary, merges, pre_tokenizer)
        self._lacks_bytes = any((self._library.token_to_id(c) or 0) >= self.vocab_size for c in BYTE_OF_CHARACTER)

    def _encode_plain(self, text: str) -> list[int]:
        ids = self._library.encode(text, add_special_tokens=False).ids
        return [i for i in ids if i < self.vocab_size] if self._lacks_bytes else ids

    def _plain_bytes(self, token_id: int) -> bytes:
        return byte_level_bytes(self._vocabulary.texts[token_id])


def build_library_tokenizer(vocabulary: Vocabulary, merges: Sequence[str], pre_tokenizer: PreTokenizer) -> Tokenizer:
    """The library's tokenizer.

    Control and unknown tokens and the merges that lead to them are left out: no text becomes one.

    Bytes that the vocabulary lacks (SmolLM2 lacks 21) get ids beyond it: as in llama.cpp they add nothing to the ids,
    yet keep their neighbours from merging.

    Args:
      merges: "left right" in order of rank.

    Raises:
      FormatError: a merge is not two texts, or one that it names is not in the vocabulary.
    """
    hidden = (TokenType.CONTROL, TokenType.UNKNOWN)
    ids = {t: i for i, t in enumerate(vocabulary.texts) if vocabulary.types[i] not in hidden and well_formed(t) == t}
    for i, missing in enumerate(c for c in BYTE_OF_CHARACTER if c not in ids):
        ids[missing] = len(vocabulary.texts) + i
    try:
        pairs = [(m[: m.index(" ", 1)], m[m.index(" ", 1) + 1 :]) for m in merges]
    except ValueError:
        bad = next(m for m in merges if " " not in m[1:])
        raise FormatError(f"The merge {shown(bad)} is not two texts with a space between them.") from None
    controls = {t for t, kind in zip(vocabulary.texts, vocabulary.types, strict=True) if kind in hidden} - ids.keys()
    pairs = [(a, b) for a, b in pairs if a + b not in controls and a not in controls and b not in controls]
    try:
        model = models.BPE(ids, pairs, ignore_merges=pre_tokenizer.ignore_merges)
    except Exception as error:  # the library raises plain Exception
        raise FormatError(f"The merges do not fit the vocabulary: {reason(error)}.") from error
    tokenizer = Tokenizer(model)
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre_tokenizer.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    return tokenizer


class JsonTokenizer(VocabularyTokenizer):
    """A `tokenizer.json`, encoded by the library exactly as the file says."""

    def __init__(self, vocabulary: Vocabulary, library: Tokenizer) -> None:
        super().__init__(vocabulary)
        self._library = library
        self._lock = threading.Lock()
        self._byte_level = is_byte_level(library)
        added = library.get_added_tokens_decoder()
        for text, i in self.special_tokens.items():
            token = added.get(i)
            if token is None or not token.special:  # the file calls it plain text; see `make_vocabulary`
                strips = {"lstrip": token.lstrip, "rstrip": token.rstrip} if token else {}
                library.add_special_tokens([AddedToken(text, special=True, normalized=False, **strips)])
        self.add_space_prefix = b"".join(map(self.token_bytes, self._encode_plain("a"))).startswith(b" ")

    def _encode_text(self, text: str, parse_special: bool, literals: Mapping[str, str]) -> list[int]:
        if not literals:
            return self._encode_with_library(text, parse_special)
        return super()._encode_text(text, parse_special, literals)

    def _encode_plain(self, text: str) -> list[int]:
        return self._encode_with_library(text, parse_special=False)

    def _encode_with_library(self, text: str, parse_special: bool) -> list[int]:
        with self._lock:  # the switch belongs to the tokenizer, not to the call
            self._library.encode_special_tokens = not parse_special
            return self._library.encode(text, add_special_tokens=False).ids

    def _plain_bytes(self, token_id: int) -> bytes:
        text = self._vocabulary.texts[token_id]
        if self._vocabulary.types[token_id] == TokenType.BYTE:
            return bytes([byte_value(text)])
        return byte_level_bytes(text) if self._byte_level else raw_bytes(text.replace(SPACE, " "))


def load_json(path: Path) -> Tokenizer:
    """The library's tokenizer of a `tokenizer.json`, without truncation or padding.

    Raises:
      FormatError: the library rejects the file.
    """
    try:
        library = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise FormatError(f"The tokenizers library rejects {path}: {reason(error)}.") from error
    library.no_truncation()
    library.no_padding()
    return library


def json_tables(library: Tokenizer) -> tuple[list[str], list[int]]:
    """(texts, types) of a library tokenizer; ids without a token become unused `[PADn]`."""
    entries = library.get_vocab(with_added_tokens=True)
    size = max(entries.values(), default=-1) + 1
    texts = [f"[PAD{i}]" for i in range(size)]
    types = [int(TokenType.UNUSED)] * size
    for text, i in entries.items():
        texts[i], types[i] = text, int(TokenType.NORMAL)
    if getattr(library.model, "byte_fallback", False):
        for text in (f"<0x{b:02X}>" for b in range(256)):
            if text in entries:
                types[entries[text]] = int(TokenType.BYTE)
    unknown = getattr(library.model, "unk_token", None)
    for i, token in library.get_added_tokens_decoder().items():
        types[i] = int(TokenType.CONTROL if token.special else TokenType.USER_DEFINED)
    if unknown in entries:
        types[entries[unknown]] = int(TokenType.UNKNOWN)
    return texts, types


def is_byte_level(library: Tokenizer) -> bool:
    """Whether the vocabulary is written in GPT-2's byte characters."""
    return library.decoder is not None and "ByteLevel" in json.dumps(_state(library.decoder))


def _state(component: Any) -> Any:
    return json.loads(component.__getstate__())
