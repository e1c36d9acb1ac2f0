"""SentencePiece vocabularies: `tokenizer.model` files and the `llama` vocabularies of GGUF files.

Both run on the sentencepiece library. A GGUF file holds only pieces, scores and types, so the model that the library
wants is written here, in the protocol buffer encoding of sentencepiece_model.proto: BPE, no normalization, every space
kept. That gives the ids of llama.cpp: the two neighbours whose union scores highest merge first, the leftmost of equal
ones, and a character without a piece becomes its bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import sentencepiece

from llama_jax.errors import FormatError, reason, shown
from llama_jax.text.vocabulary import TokenType, Vocabulary, VocabularyTokenizer, raw_bytes, raw_text, well_formed

SPACE = "▁"


class SentencePieceTokenizer(VocabularyTokenizer):
    """A tokenizer over a SentencePiece processor whose ids are those of `vocabulary`.

    An id of the processor beyond the vocabulary means "unknown character".
    """

    def __init__(self, vocabulary: Vocabulary, processor: sentencepiece.SentencePieceProcessor) -> None:
        super().__init__(vocabulary)
        self._processor = processor
        self._processor_size: int = processor.get_piece_size()

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        if self._processor_size <= self.vocab_size:
            return ids
        unknown = self._vocabulary.unknown_id
        known = (i if i < self.vocab_size else unknown for i in ids)
        return [i for i in known if i is not None]

    def score(self, token_id: int) -> float:
        """As in the file; 0 for a token that was added to the model."""
        known = self._checked(token_id) < self._processor_size
        return float(self._processor.get_score(token_id)) if known else 0.0

    def _plain_bytes(self, token_id: int) -> bytes:
        text = self._vocabulary.texts[token_id]
        if self._vocabulary.types[token_id] == TokenType.BYTE:
            return bytes([byte_value(text)])
        return raw_bytes(text.replace(SPACE, " "))


def build_processor(vocabulary: Vocabulary, scores: Sequence[float]) -> sentencepiece.SentencePieceProcessor:
    """The library's processor for the pieces of a GGUF file.

    Tokens that text may not become (control, unknown, the earlier ones of equal texts) keep their ids under names that
    cannot occur. One piece is added at the end: the library needs exactly one unknown piece.

    Raises:
      FormatError: a byte token is not written `<0xNN>`, or the library rejects the pieces.
    """
    kinds = vocabulary.types
    byte_ids = {byte_value(text): i for i, text in enumerate(vocabulary.texts) if kinds[i] == TokenType.BYTE}
    byte_fallback = len(byte_ids) == 256
    mergeable = {text: i for i, text in enumerate(vocabulary.texts) if kinds[i] in (TokenType.NORMAL, TokenType.UNUSED)}
    model = bytearray()
    for i, (text, score, kind) in enumerate(zip(vocabulary.texts, scores, kinds, strict=True)):
        data = raw_bytes(text)
        if kind == TokenType.BYTE and byte_fallback and byte_ids[byte_value(text)] == i:
            model += _piece(b"<0x%02X>" % byte_value(text), score, kind)
        elif mergeable.get(text) == i and data and b" " not in data and well_formed(text) == text:
            model += _piece(data, score, kind)
        else:
            model += _piece(b"unused %d" % i, score, TokenType.CONTROL)
    model += _piece(b"unknown character", 0.0, TokenType.UNKNOWN)
    trainer = _field(_MODEL_TYPE, _BPE) + _field(_BYTE_FALLBACK, int(byte_fallback))
    normalizer = (
        _field(_NORMALIZER_NAME, b"identity")
        + _field(_ADD_DUMMY_PREFIX, int(vocabulary.add_space_prefix))
        + _field(_REMOVE_EXTRA_WHITESPACES, 0)
        + _field(_ESCAPE_WHITESPACES, 1)
    )
    return load_processor(bytes(model) + _field(_TRAINER, trainer) + _field(_NORMALIZER, normalizer), "the vocabulary")


def load_processor(model: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    """The library's processor for a serialized model.

    Raises:
      FormatError: the library rejects it; `name` says in the message what it was.
    """
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, ValueError, OSError) as error:
        raise FormatError(f"The sentencepiece library rejects {name}: {reason(error)}.") from error


def read_model(path: Path) -> tuple[bytes, list[str], list[int], bool]:
    """Read a `tokenizer.model` file: (its bytes, texts, types, whether it puts a space before a text).

    User-defined pieces come with real spaces in place of `▁`, as they are searched in a text that has real ones.

    Raises:
      FormatError: the file is not a SentencePiece model.
    """
    data = path.read_bytes()
    texts: list[str] = []
    types: list[int] = []
    dummy_prefix = True
    try:
        for number, value in _read_fields(data):
            if number == _PIECES and isinstance(value, bytes):
                piece = dict(_read_fields(value))
                text, kind = piece.get(_PIECE_TEXT, b""), piece.get(_PIECE_TYPE, TokenType.NORMAL)
                if not isinstance(text, bytes) or not isinstance(kind, int):
                    raise ValueError("a piece has fields of the wrong kind")
                decoded = raw_text(text)
                texts.append(decoded.replace(SPACE, " ") if kind == TokenType.USER_DEFINED else decoded)
                types.append(kind)
            elif number == _NORMALIZER and isinstance(value, bytes):
                dummy_prefix = bool(dict(_read_fields(value)).get(_ADD_DUMMY_PREFIX, 1))
    except (IndexError, ValueError) as error:
        raise FormatError(f"{path} is not a SentencePiece model: {reason(error)}.") from error
    if not texts:
        raise FormatError(f"{path} is not a SentencePiece model: it holds no pieces.")
    return data, texts, types, dummy_prefix


def byte_value(text: str) -> int:
    """The byte that a byte token stands for: `<0xNN>`, or in legacy files the raw byte itself."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return int(text[3:5], 16)
        except ValueError:
            pass
    data = raw_bytes(text)
    if len(data) != 1:
        raise FormatError(f"The byte token {shown(text)} is not written as <0x00> to <0xFF>.")
    return data[0]


# Field numbers of sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK = 3, 35
_NORMALIZER_NAME, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_WHITESPACES, _ESCAPE_WHITESPACES = 1, 3, 4, 5
_BPE = 2


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    return _varint(number << 3) + _varint(value)


def _piece(text: bytes, score: float, kind: int) -> bytes:
    body = _field(_PIECE_TEXT, text) + _field(_PIECE_SCORE, float(score)) + _field(_PIECE_TYPE, int(kind))
    return _field(_PIECES, body)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number is longer than 64 bits")


def _read_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) in order: integers for varints, bytes for strings, messages and fixed widths."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _read_varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _read_varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"the wire type {kind} at byte {at} is unknown")
        if at + size > len(data):
            raise ValueError(f"a field at byte {at} runs past the end")
        yield key >> 3, data[at : at + size]
        at += size
