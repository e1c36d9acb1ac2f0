"""Reading GGUF files, versions 2 and 3, by memory map.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Everything is checked against the file's size
before it is allocated, so that a damaged or hostile file costs one error and nothing else.
"""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from llama_jax.errors import ArgumentError, FormatError, shown
from llama_jax.formats.files import MappedFile, TensorInfo, check_overlaps, describe_kind
from llama_jax.quantization.types import BLOCK_TYPES, BLOCK_TYPES_BY_ID, UNSUPPORTED_TYPE_NAMES

_SCALARS: dict[int, tuple[struct.Struct, str]] = {
    0: (struct.Struct("<B"), "<u1"),
    1: (struct.Struct("<b"), "<i1"),
    2: (struct.Struct("<H"), "<u2"),
    3: (struct.Struct("<h"), "<i2"),
    4: (struct.Struct("<I"), "<u4"),
    5: (struct.Struct("<i"), "<i4"),
    6: (struct.Struct("<f"), "<f4"),
    7: (struct.Struct("<?"), "?"),
    10: (struct.Struct("<Q"), "<u8"),
    11: (struct.Struct("<q"), "<i8"),
    12: (struct.Struct("<d"), "<f8"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MAX_DIMS = 4
_MAX_NAME_BYTES = 63
_DEFAULT_ALIGNMENT = 32
_SMALLEST_KEY_VALUE = 8 + 1 + 4 + 1  # length, one letter, type, one byte
_SMALLEST_TENSOR = 8 + 1 + 4 + 4 + 8  # length, one letter, number of axes, type, offset
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class GGUFFile:
    """An open GGUF file, or the parts of a split one.

    Attributes:
      path: the file that was named.
      metadata: key to value: str (bytes where a string is not UTF-8), int, float, bool, list of strings, or a numpy
        array. Of a split file: the first part's.
      tensors: name to `TensorInfo`, in the order of the file.

    Args:
      path: a .gguf file; of a split model any of its parts, `NAME-00001-of-00003.gguf`, the others beside it.

    Raises:
      FormatError: the file is damaged, of another kind, or uses a type that is not supported.
      ArgumentError: the path does not exist or cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._maps: dict[Path, MappedFile] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        first = self._read_part(self.path)
        count = first.metadata.get("split.count", 0)
        if not isinstance(count, int) or not 0 <= count <= 99999:
            raise FormatError(f"{self.path}: split.count is {shown(count)}; it must be an integer from 0 to 99999.")
        parts = [first] if count <= 1 else self._read_split(first, count)
        self.metadata = parts[0].metadata
        for part in parts:
            for name, info in part.tensors.items():
                if name in self.tensors:
                    raise FormatError(
                        f"{info.file}: tensor {shown(name)} also stands in {self.tensors[name].file.name}."
                    )
                self.tensors[name] = info
        expected = self.metadata.get("split.tensors.count")
        if count > 1 and expected is not None and not _equals(expected, len(self.tensors)):
            raise FormatError(
                f"{self.path}: the parts hold {len(self.tensors)} tensors; the first promises {expected}."
            )

    def _read_split(self, opened: _Part, count: int) -> list[_Part]:
        match = _SPLIT_NAME.fullmatch(self.path.name)
        if match is None or int(match["count"]) != count:
            raise FormatError(
                f"{self.path} is a part of {count}; its name must end in -00001-of-{count:05d}.gguf or alike, "
                "so that the others can be found."
            )
        paths = [self.path.with_name(f"{match['stem']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
        missing = [p.name for p in paths if not p.is_file()]
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise FormatError(f"{self.path} is a part of {count}; missing beside it: {', '.join(missing[:5])}{more}.")
        parts = []
        for i, path in enumerate(paths):
            part = opened if path == self.path else self._read_part(path)
            found = (part.metadata.get("split.no"), part.metadata.get("split.count"))
            if not _equals(found[0], i) or not _equals(found[1], count):
                raise FormatError(f"{path}: split.no and split.count are {found}; the name says {(i, count)}.")
            parts.append(part)
        return parts

    def _read_part(self, path: Path) -> _Part:
        self._maps[path] = MappedFile(path)
        return _Part(self._maps[path])

    def raw(self, name: str) -> np.ndarray:
        """The packed bytes of a tensor: a read-only view of the map, uint8 [nbytes]."""
        if name not in self.tensors:
            raise ArgumentError(f"{self.path} has no tensor {shown(name)}.")
        info = self.tensors[name]
        if info.file not in self._maps:
            raise ArgumentError(f"{self.path} has been closed.")
        return self._maps[info.file].array(info.offset, info.nbytes)

    def close(self) -> None:
        """Close the maps; arrays that `raw` gave stay valid."""
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Part:
    """The header of one file, read from front to back."""

    def __init__(self, mapped: MappedFile) -> None:
        self.path = mapped.path
        self._data = mapped.map
        self._size = mapped.size
        self._at = 0
        self.metadata: dict[str, Any] = {}
        n_tensors, n_values = self._read_start()
        for _ in range(n_values):
            self._read_key_value()
        self.tensors = self._read_tensors(n_tensors)

    def _fail(self, message: str) -> FormatError:
        return FormatError(f"{self.path}: {message}")

    def _need(self, nbytes: int, what: str) -> None:
        if self._at + nbytes > self._size:
            raise self._fail(
                f"the file ends inside {what}; {nbytes} bytes are needed at byte {self._at} of {self._size}."
            )

    def _read_start(self) -> tuple[int, int]:
        head = self._data[:64]
        if head[:4] != b"GGUF":
            raise self._fail(f"this is not a GGUF file but {describe_kind(head)}.")
        self._at = 4
        version = self._scalar(_U32, "the header")
        if version not in (2, 3):
            if version & 0xFFFF == 0 and version:
                raise self._fail("this GGUF file is big-endian; only little-endian files can be read.")
            raise self._fail(f"the GGUF version is {version}; it must be 2 or 3.")
        n_tensors = self._scalar(_U64, "the header")
        n_values = self._scalar(_U64, "the header")
        if n_tensors * _SMALLEST_TENSOR + n_values * _SMALLEST_KEY_VALUE > self._size - self._at:
            raise self._fail(
                f"the header promises {n_values} metadata values and {n_tensors} tensors; "
                f"a file of {self._size} bytes cannot hold them."
            )
        return n_tensors, n_values

    def _scalar(self, kind: struct.Struct, what: str) -> Any:
        self._need(kind.size, what)
        (value,) = kind.unpack_from(self._data, self._at)
        self._at += kind.size
        return value

    def _string(self, what: str) -> str | bytes:
        length = self._scalar(_U64, what)
        self._need(length, what)
        text = self._data[self._at : self._at + length]
        self._at += length
        return _decode(text)

    def _read_key_value(self) -> None:
        key = self._string("a metadata key")
        if not isinstance(key, str) or not key:
            raise self._fail(f"a metadata key is {shown(key)}; it must be non-empty UTF-8 text.")
        if key in self.metadata:
            raise self._fail(f"the metadata key {shown(key)} stands twice.")
        kind = self._scalar(_U32, f"the value of {shown(key)}")
        if kind == _STRING:
            self.metadata[key] = self._string(f"the value of {shown(key)}")
        elif kind == _ARRAY:
            self.metadata[key] = self._array(key)
        elif kind in _SCALARS:
            self.metadata[key] = self._scalar(_SCALARS[kind][0], f"the value of {shown(key)}")
        else:
            raise self._fail(f"the value of {shown(key)} has type {kind}; GGUF knows 0 to 12.")

    def _array(self, key: str) -> list[str | bytes] | np.ndarray:
        what = f"the array {shown(key)}"
        kind = self._scalar(_U32, what)
        count = self._scalar(_U64, what)
        if kind == _STRING:
            self._need(8 * count, what)
            return self._strings(count, what)
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind][1])
            self._need(dtype.itemsize * count, what)
            stored = np.uint8 if dtype == np.bool_ else dtype
            values = np.frombuffer(self._data, stored, count, self._at).astype(dtype)  # a copy, free of the map
            self._at += dtype.itemsize * count
            return values
        if kind == _ARRAY:
            raise self._fail(f"the value of {shown(key)} is an array of arrays; that is not supported.")
        raise self._fail(f"the array {shown(key)} has elements of type {kind}; GGUF knows 0 to 12.")

    def _strings(self, count: int, what: str) -> list[str | bytes]:
        # The hot loop of opening a file: hundreds of thousands of short strings.
        data, at, size = self._data, self._at, self._size
        read_length = _U64.unpack_from
        texts: list[str | bytes] = []
        append = texts.append
        for _ in range(count):
            if at + 8 > size:
                break
            begin = at + 8
            at = begin + read_length(data, at)[0]
            if at > size:
                break
            text = data[begin:at]
            try:
                append(text.decode())
            except UnicodeDecodeError:
                append(text)
        if len(texts) != count:
            raise self._fail(f"the file ends inside {what}, at string {len(texts)} of {count}.")
        self._at = at
        return texts

    def _read_tensors(self, count: int) -> dict[str, TensorInfo]:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._fail(f"general.alignment is {shown(alignment)}; it must be a power of two.")
        headers: dict[str, tuple[tuple[int, ...], str, int, int]] = {}
        for _ in range(count):
            name, header = self._tensor_header(alignment)
            if name in headers:
                raise self._fail(f"the tensor name {shown(name)} stands twice.")
            headers[name] = header
        data_start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, (shape, type_name, nbytes, offset) in headers.items():
            if data_start + offset + nbytes > self._size:
                raise self._fail(
                    f"the data of tensor {shown(name)} end at byte {data_start + offset + nbytes}; "
                    f"the file has {self._size}, so it is cut short or damaged."
                )
            tensors[name] = TensorInfo(name, shape, type_name, nbytes, data_start + offset, self.path)
        check_overlaps(tensors.values())
        return tensors

    def _tensor_header(self, alignment: int) -> tuple[str, tuple[tuple[int, ...], str, int, int]]:
        name = self._string("a tensor name")
        if not isinstance(name, str) or not 0 < len(name.encode()) <= _MAX_NAME_BYTES:
            raise self._fail(f"a tensor name is {shown(name)}; it must be UTF-8 text of 1 to {_MAX_NAME_BYTES} bytes.")
        what = f"the description of tensor {shown(name)}"
        n_dims = self._scalar(_U32, what)
        if n_dims > _MAX_DIMS:
            raise self._fail(f"tensor {shown(name)} has {n_dims} axes; at most {_MAX_DIMS} are allowed.")
        shape = tuple(self._scalar(_U64, what) for _ in range(n_dims))[::-1]
        type_id = self._scalar(_U32, what)
        offset = self._scalar(_U64, what)
        if type_id not in BLOCK_TYPES_BY_ID:
            known = UNSUPPORTED_TYPE_NAMES.get(type_id, f"number {type_id}")
            raise self._fail(f"tensor {shown(name)} has type {known}; supported are {', '.join(BLOCK_TYPES)}.")
        t = BLOCK_TYPES_BY_ID[type_id]
        columns = shape[-1] if shape else 1
        if columns % t.block_size:
            raise self._fail(
                f"tensor {shown(name)} has rows of {columns} values; type {t.name} needs a multiple of {t.block_size}."
            )
        if offset % alignment:
            raise self._fail(f"tensor {shown(name)} lies at offset {offset}; it must be a multiple of {alignment}.")
        return name, (shape, t.name, math.prod(shape) // t.block_size * t.block_bytes, offset)


def _equals(value: Any, number: int) -> bool:
    return isinstance(value, int) and value == number


def _decode(text: bytes) -> str | bytes:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text
