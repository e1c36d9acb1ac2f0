"""Reading the files that llama.cpp used before GGUF: ggml, ggmf and ggjt (March to August 2023).

A file is a magic, a version (not in ggml), seven numbers, the vocabulary, and tensors until its end; ggjt begins each
tensor's data at a multiple of 32. The first models were split over several files, NAME, NAME.1, NAME.2 and so on. The
layout of quantized blocks changed twice, and only what is still laid out like today can be read.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.errors import ArgumentError, FormatError, shown
from llama_jax.formats import names
from llama_jax.formats.files import MappedFile, TensorInfo
from llama_jax.formats.load import ModelFile
from llama_jax.quantization import BLOCK_TYPES
from llama_jax.quantization.types import BLOCK_TYPES_BY_ID, UNSUPPORTED_TYPE_NAMES

MAGICS = {b"lmgg": "ggml", b"fmgg": "ggmf", b"tjgg": "ggjt"}
_VERSIONS = {"ggml": (0,), "ggmf": (1,), "ggjt": (1, 2, 3)}
_UNCHANGED = {"F32", "F16"}
"""Types whose layout never changed. ggjt 2 changed that of all quantized types, ggjt 3 that of Q4_0, Q4_1 and Q8_0."""
_SAME_SINCE_2 = _UNCHANGED | {"Q5_0", "Q5_1"}
_REMOVED = {4: "Q4_2", 5: "Q4_3"}

_CONTEXT = 2048  # what Llama 1 was trained on; the files do not say
_MAX_PARTS = 16
_MAX_DIMS = 2
_SPLIT_BY_COLUMNS = ("embedding", "wo", "w_down")


class Header(NamedTuple):
    """The numbers at the beginning of a file."""

    n_vocab: int
    n_embd: int
    n_mult: int
    n_head: int
    n_layer: int
    n_rot: int
    ftype: int


class LegacyModel(ModelFile):
    """A model in one or several ggml, ggmf or ggjt files; query and key rows are in interleaved order.

    What the files do not say is what Llama 1 had: norm epsilon 1e-6, rope base 10000, context 2048. Key/value heads
    fewer than query heads mean Llama 2 70B, the only such model of that time, with norm epsilon 1e-5.

    Raises:
      FormatError: the file is damaged, a part is missing, or a tensor's type is not laid out as it is today.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._maps: list[MappedFile] = []
        self._pieces: dict[str, list[TensorInfo]] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        first = self._read_part(self.path)
        header = self._header = first.header
        parts = [first]
        embedding = first.tensors.get(names.LEGACY_TOP["embedding"])
        columns = embedding.shape[-1] if embedding and embedding.shape[-1] else header.n_embd
        n_parts = header.n_embd // columns
        if columns * n_parts != header.n_embd or not 1 <= n_parts <= _MAX_PARTS:
            raise FormatError(
                f"{self.path}: the embedding has {columns} columns; the model's width, {header.n_embd}, must be a "
                f"multiple, at most {_MAX_PARTS} times as large."
            )
        for number in range(1, n_parts):
            other = self.path.with_name(f"{self.path.name}.{number}")
            if not other.is_file():
                raise FormatError(f"{self.path} is the first of {n_parts} files; {other.name} is missing beside it.")
            parts.append(self._read_part(other))
            if parts[-1].header != header or parts[-1].tensors.keys() != first.tensors.keys():
                raise FormatError(f"{other} does not belong to {self.path.name}: its numbers or tensors differ.")
        self.tensors, self.other_tensors = {}, []
        for name in first.tensors:
            parameter = names.path_of_legacy(name)
            self._pieces[name] = [part.tensors[name] for part in parts]
            if parameter is None:
                self.other_tensors.append(name)
            else:
                self.tensors[parameter] = _whole(self._pieces[name], _split_axis(parameter))
        self.metadata = {
            "legacy.format": first.kind,
            "legacy.version": first.version,
            **{f"legacy.{key}": value for key, value in header._asdict().items()},
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": first.texts,
            "tokenizer.ggml.scores": first.scores,
        }
        self.config = self._config()

    def _read_part(self, path: Path) -> _Part:
        self._maps.append(MappedFile(path))
        return _Part(self._maps[-1])

    def _config(self) -> LlamaConfig:
        h = self._header
        missing = [p for p in ("embedding", "layers.0.w_gate", "layers.0.wk") if len(self._shape(p)) != 2]
        if missing:
            raise FormatError(f"{self.path} lacks the matrix {missing[0]}; a LLaMA model needs it.")
        if not h.n_head or h.n_embd % h.n_head:
            raise FormatError(f"{self.path}: n_head is {h.n_head}; it must divide the model's width, {h.n_embd}.")
        head_dim = h.n_embd // h.n_head
        if h.n_rot != head_dim:
            raise FormatError(f"{self.path}: n_rot is {h.n_rot}; it must be the width of a head, {head_dim}.")
        n_kv_heads, rest = divmod(self._shape("layers.0.wk")[0], head_dim)
        if rest:
            raise FormatError(f"{self.path}: layers.0.wk has {self._shape('layers.0.wk')[0]} rows, not whole heads.")
        try:
            return LlamaConfig(
                vocab_size=self._shape("embedding")[0],
                d_model=h.n_embd,
                d_ff=self._shape("layers.0.w_gate")[0],
                n_layers=h.n_layer,
                n_heads=h.n_head,
                n_kv_heads=n_kv_heads,
                head_dim=head_dim,
                context_length=_CONTEXT,
                norm_epsilon=1e-6 if n_kv_heads == h.n_head else 1e-5,
                tied_embeddings="output_head" not in self.tensors,
            )
        except ArgumentError as error:
            raise FormatError(f"{self.path}: {error}") from None

    def _shape(self, parameter: str) -> tuple[int, ...]:
        return self.tensors[parameter].shape if parameter in self.tensors else ()

    def _raw(self, name: str) -> np.ndarray:
        if not self._maps:
            raise ArgumentError(f"{self.path} has been closed.")
        maps = {mapped.path: mapped for mapped in self._maps}
        pieces = self._pieces[name]
        arrays = [maps[info.file].array(info.offset, info.nbytes) for info in pieces]
        axis = _split_axis(names.path_of_legacy(name) or "")
        if axis is None or len(arrays) == 1:
            # Without padding the data may lie at odd addresses, which arrays of numbers should not.
            return arrays[0] if pieces[0].offset % 32 == 0 else arrays[0].copy()
        rows = [array.reshape(info.shape[0], -1) for array, info in zip(arrays, pieces, strict=True)]
        return np.concatenate(rows, axis=axis).reshape(-1)

    def _interleaved_heads(self, path: str) -> int | None:
        return names.rotary_heads(path, self.config)

    def _tokenizer(self) -> Any:
        from llama_jax.text.tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(self.metadata)

    def close(self) -> None:
        for mapped in self._maps:
            mapped.close()
        self._maps.clear()


def _split_axis(parameter: str) -> int | None:
    """The axis along which several files divide a matrix, None for a vector, of which every file has all."""
    if names.is_norm(parameter):
        return None
    return 1 if parameter.rpartition(".")[2] in _SPLIT_BY_COLUMNS else 0


def _whole(pieces: list[TensorInfo], axis: int | None) -> TensorInfo:
    """The tensor that the pieces are, which have equal shapes and types."""
    first = pieces[0]
    if any((piece.shape, piece.type_name) != (first.shape, first.type_name) for piece in pieces):
        raise FormatError(f"{first.file}: the parts of tensor {shown(first.name)} differ in shape or type.")
    if axis is None or len(first.shape) != 2 or len(pieces) == 1:
        return first
    shape = list(first.shape)
    shape[axis] *= len(pieces)
    return dataclasses.replace(first, shape=tuple(shape), nbytes=first.nbytes * len(pieces))


def _usual_score(token: int, text: bytes) -> float:
    """What Llama's vocabulary gives a token: pieces merge in the order of their ids, those of spaces alone last."""
    return -1e9 if token >= 259 and not text.strip(b" ") else min(259.0 - token, 0.0)


class _Part:
    """One file, read from front to back; tensor data stay where they are."""

    def __init__(self, mapped: MappedFile) -> None:
        self.path, self._map, self._size = mapped.path, mapped.map, mapped.size
        self.kind = MAGICS.get(self._map[:4], "")
        if not self.kind:
            raise FormatError(f"{self.path} is no ggml, ggmf or ggjt file.")
        self._at = 4
        self.version = 0 if self.kind == "ggml" else self._take("<I")[0]
        if self.version not in _VERSIONS[self.kind]:
            allowed = " or ".join(map(str, _VERSIONS[self.kind]))
            raise FormatError(f"{self.path}: the {self.kind} version is {self.version}; it must be {allowed}.")
        self.header = Header(*self._take("<7I"))
        self.texts, self.scores = self._read_vocabulary()
        self.tensors: dict[str, TensorInfo] = {}
        while self._at < self._size:
            info = self._read_tensor()
            if info.name in self.tensors:
                raise FormatError(f"{self.path}: the tensor name {shown(info.name)} stands twice.")
            self.tensors[info.name] = info

    def _take(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(form)
        if self._at + size > self._size:
            raise FormatError(f"{self.path}: the file ends at byte {self._size}, so it is cut short or damaged.")
        self._at += size
        return struct.unpack_from(form, self._map, self._at - size)

    def _read_vocabulary(self) -> tuple[list[str | bytes], np.ndarray]:
        n = self.header.n_vocab
        if 4 * n > self._size:
            raise FormatError(f"{self.path}: n_vocab is {n}; a file of {self._size} bytes cannot hold so many tokens.")
        texts: list[str | bytes] = []
        scores = np.empty(n, np.float32)
        for i in range(n):
            (length,) = self._take("<I")
            (text,) = self._take(f"<{length}s") if length <= self._size else (b"",)
            texts.append(text)
            scores[i] = _usual_score(i, text) if self.kind == "ggml" else self._take("<f")[0]
        return texts, scores

    def _read_tensor(self) -> TensorInfo:
        start = self._at
        n_dims, name_length, type_id = self._take("<3I")
        if not 1 <= n_dims <= _MAX_DIMS or not 0 < name_length <= 256:
            raise FormatError(f"{self.path}: no tensor begins at byte {start}, so the file is damaged.")
        shape = self._take(f"<{n_dims}I")[::-1]
        name = self._take(f"<{name_length}s")[0].decode("utf-8", "replace")
        t = BLOCK_TYPES_BY_ID.get(type_id)
        if t is None or (t.dtype is not None and t.name not in _UNCHANGED):
            known = t.name if t else (_REMOVED | UNSUPPORTED_TYPE_NAMES).get(type_id, f"number {type_id}")
            raise FormatError(f"{self.path}: tensor {shown(name)} has type {known}, which cannot be read.")
        readable = {3: set(BLOCK_TYPES), 2: _SAME_SINCE_2}.get(self.version, _UNCHANGED)
        if t.name not in readable:
            raise FormatError(
                f"{self.path}: tensor {shown(name)} has type {t.name} as {self.kind} version {self.version} laid it "
                f"out, which changed later; readable in this version are {', '.join(sorted(readable))}."
            )
        if shape[-1] % t.block_size:
            raise FormatError(
                f"{self.path}: tensor {shown(name)} has rows of {shape[-1]} values; {t.name} needs a multiple of "
                f"{t.block_size}."
            )
        if self.kind == "ggjt":
            self._at = -(-self._at // 32) * 32
        offset, nbytes = self._at, math.prod(shape) // t.block_size * t.block_bytes
        self._at += nbytes
        if self._at > self._size:
            raise FormatError(
                f"{self.path}: the data of tensor {shown(name)} end at byte {self._at} of {self._size}, so the file is "
                "cut short or damaged."
            )
        return TensorInfo(name, shape, t.name, nbytes, offset, self.path)
