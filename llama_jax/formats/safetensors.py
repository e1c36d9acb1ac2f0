"""Safetensors files: read by memory map, with the index of a Hugging Face folder; and written.

The format: https://github.com/huggingface/safetensors#format. A header is checked as strictly as the safetensors
library does: names unique, data in range, without holes or overlaps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, TypeGuard

import numpy as np

from llama_jax.errors import ArgumentError, FormatError, plain, shown
from llama_jax.formats.files import MappedFile, TensorInfo, check_overlaps, check_regular, describe_kind, replacing
from llama_jax.quantization.types import BLOCK_TYPES

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's limit
_MAX_JSON_BYTES = 100_000_000
_OTHER_ITEM_BYTES = {"BOOL": 1, "U8": 1, "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_ITEM_BYTES = _OTHER_ITEM_BYTES | {t.name: t.block_bytes for t in BLOCK_TYPES.values() if t.dtype is not None}
NUMPY_TYPES = {name: t.dtype for name, t in BLOCK_TYPES.items() if t.dtype is not None}
NUMPY_TYPES |= {"BOOL": np.dtype(bool), "U8": np.dtype("u1"), "U16": np.dtype("<u2"), "U32": np.dtype("<u4")}
"""numpy's types by their names in a header."""
_KINDS = {dtype: name for name, dtype in NUMPY_TYPES.items()}


class SafetensorsFolder:
    """The weights of a Hugging Face folder: `model.safetensors`, or the files that the index names and no others.

    Attributes:
      folder: as given.
      tensors: name to `TensorInfo`; type names are those of safetensors' headers.

    Raises:
      FormatError: there are no weights, a file is damaged, the index names a file outside of the folder or a tensor
        that its file lacks, or two files hold the same tensor.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, TensorInfo] = {}
        self._maps: dict[Path, MappedFile] = {}
        try:
            if (self.folder / SINGLE_FILE).exists():
                self._add(self.folder / SINGLE_FILE)
            elif (self.folder / INDEX_FILE).exists():
                self._add_indexed()
            else:
                raise FormatError(f"{self.folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}.")
        except BaseException:
            self.close()
            raise

    def _add(self, path: Path) -> None:
        mapped = self._maps[path] = MappedFile(path)
        for name, info in read_header(mapped).items():
            if name in self.tensors:
                raise FormatError(f"{path}: tensor {shown(name)} also stands in {plain(self.tensors[name].file.name)}.")
            self.tensors[name] = info

    def _add_indexed(self) -> None:
        index_path = self.folder / INDEX_FILE
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise FormatError(f"{index_path}: weight_map must be an object of tensor names and file names.")
        paths = {file: _inside(self.folder, file, index_path) for file in dict.fromkeys(weight_map.values())}
        missing = [file for file, path in paths.items() if not os.path.isfile(path)]
        if missing:
            raise FormatError(f"{index_path} names files that are missing: {', '.join(map(plain, missing[:5]))}.")
        for path in paths.values():
            self._add(path)
        lacking = [n for n, file in weight_map.items() if n not in self.tensors or self.tensors[n].file != paths[file]]
        if lacking:
            name = lacking[0]
            raise FormatError(f"{index_path} says that {plain(weight_map[name])} holds {shown(name)}; it does not.")

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor: a read-only view of the map, uint8 [nbytes]."""
        if name not in self.tensors:
            raise ArgumentError(f"{self.folder} has no tensor {shown(name)}.")
        info = self.tensors[name]
        if info.file not in self._maps:
            raise ArgumentError(f"{self.folder} has been closed.")
        return self._maps[info.file].array(info.offset, info.nbytes)

    def close(self) -> None:
        """Close the maps; arrays that `raw` gave stay valid."""
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; `FormatError` when it is something else or damaged."""
    try:
        size = check_regular(path)
        if size > _MAX_JSON_BYTES:
            raise FormatError(f"{path} has {size} bytes; at most {_MAX_JSON_BYTES} are allowed.")
        data = path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}.") from None
    return _parse_object(data, str(path))


def read_header(mapped: MappedFile) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file by name, checked against the file's size."""
    path, size = mapped.path, mapped.size
    length = int.from_bytes(mapped.map[:8], "little")
    if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES) or mapped.map[8:9] != b"{":
        head = mapped.map[:64]
        kind = describe_kind(head)
        if kind != "a safetensors file" and not kind.startswith("of an unknown kind"):
            raise FormatError(f"{path}: this is not a safetensors file but {kind}.")
        raise FormatError(
            f"{path}: the header would take {length} bytes of a file of {size}, so it is cut short, damaged or not a "
            "safetensors file."
        )
    header = _parse_object(mapped.map[8 : 8 + length], f"{path}: the header")
    start = 8 + length
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = _entry(name, entry, start, path)
    check_overlaps(tensors.values())
    covered = start + sum(info.nbytes for info in tensors.values())
    end = max((info.offset + info.nbytes for info in tensors.values()), default=start)
    if end > size:
        raise FormatError(f"{path}: the tensors end at byte {end} of {size}, so the file is cut short or damaged.")
    if covered != size:
        raise FormatError(f"{path}: {size - covered} bytes belong to no tensor, so the header is damaged.")
    return tensors


def read_metadata(mapped: MappedFile) -> dict[str, str]:
    """The texts under `__metadata__` of a file that `read_header` has accepted."""
    length = int.from_bytes(mapped.map[:8], "little")
    metadata = _parse_object(mapped.map[8 : 8 + length], f"{mapped.path}: the header").get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise FormatError(f"{mapped.path}: the header's __metadata__ must be an object of strings.")
    return metadata


def write_safetensors(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes arrays, of which one at a time is in host memory.

    Raises:
      ArgumentError: a dtype is one that the format does not know.
    """
    header: dict[str, Any] = {}
    at = 0
    for name, array in arrays.items():
        kind = _KINDS.get(np.dtype(array.dtype))
        if kind is None:
            raise ArgumentError(
                f"{plain(name)} has dtype {array.dtype}; it must be one of {', '.join(map(str, _KINDS))}."
            )
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)  # the data begin on a 64-byte border
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            values = np.ascontiguousarray(array)
            file.write(values.reshape(-1).view(np.uint8).data)


def _entry(name: str, entry: Any, start: int, path: Path) -> TensorInfo:
    def whole_numbers(value: Any) -> TypeGuard[list[int]]:
        return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**63 for x in value)

    if not isinstance(entry, dict):
        raise FormatError(f"{path}: the header's entry {shown(name)} must be an object.")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise FormatError(f"{path}: tensor {shown(name)} has dtype {shown(dtype)}; known are {', '.join(_ITEM_BYTES)}.")
    if not whole_numbers(shape) or not whole_numbers(offsets) or len(offsets) != 2 or len(shape) > 64:
        raise FormatError(f"{path}: shape and data_offsets of tensor {shown(name)} must be lists of whole numbers.")
    begin, end = offsets
    nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if end - begin != nbytes:
        raise FormatError(f"{path}: tensor {shown(name)} needs {nbytes} bytes; its data_offsets are {begin} to {end}.")
    return TensorInfo(name, tuple(shape), dtype, nbytes, start + begin, path)


def _parse_object(data: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [key for key, _ in pairs]
            twice = next(key for key in result if names.count(key) > 1)
            raise FormatError(f"{what} holds {shown(twice)} twice.")
        return result

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not valid JSON: {plain(error)}.") from None
    if not isinstance(value, dict):
        raise FormatError(f"{what} must be a JSON object.")
    return value


def _inside(folder: Path, name: str, index_path: Path) -> Path:
    """The path of a file that an index names, which must lie in the folder.

    Links may also lead to the `blobs` beside a `snapshots` folder: that is how the Hugging Face cache is built.
    """
    pure = PurePosixPath(name)
    root = folder.resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    usable = name.isprintable() and name and not pure.is_absolute() and ".." not in pure.parts and "\\" not in name
    try:
        target = (folder / name).resolve() if usable else None
    except (OSError, ValueError):  # a name that no file can have
        target = None
    if target is None or not any(target.is_relative_to(place) for place in allowed):
        raise FormatError(f"{index_path} names the file {shown(name)}; it must lie inside of the folder.")
    return folder / name


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file; a killed process leaves the old one.

    Raises:
      ArgumentError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    with replacing(path) as temporary:
        try:
            save_file(dict(tensors), temporary, dict(metadata))
        except SafetensorError as error:
            raise ArgumentError(f"{path} cannot be written: {plain(error)}.") from None
