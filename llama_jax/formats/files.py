"""What GGUF and safetensors files share: memory maps, records of tensors, and telling other kinds of files apart."""

from __future__ import annotations

import dataclasses
import mmap
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import numpy as np

from llama_jax.errors import ArgumentError, FormatError, shown


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
      name: in the file.
      shape: in numpy's order, slowest axis first; a matrix is [out, in].
      type_name: a key of `llama_jax.quantization.BLOCK_TYPES`.
      nbytes: of the packed data.
      offset: from the beginning of the file, in bytes.
      file: the path of the file that holds it.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    nbytes: int
    offset: int
    file: Path


class MappedFile:
    """A read-only memory map. Arrays taken from it stay valid after `close`; the map goes with the last of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        check_regular(path)
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size == 0:
                    raise FormatError(f"{path} is empty.")
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ArgumentError(f"{path} cannot be read: {error.strerror}.") from None

    @property
    def map(self) -> mmap.mmap:
        """The map itself; slices of it are bytes."""
        if self._map is None:
            raise ArgumentError(f"{self.path} has been closed.")
        return self._map

    def array(self, offset: int, nbytes: int) -> np.ndarray:
        """A read-only view, uint8 [nbytes]."""
        return np.frombuffer(self.map, np.uint8, nbytes, offset)

    def close(self) -> None:
        """Give the map up; calling twice is fine."""
        if self._map is not None:
            with suppress(BufferError):  # arrays still use it
                self._map.close()
            self._map = None


def check_regular(path: Path) -> int:
    """The size of a file in bytes.

    Raises:
      ArgumentError: there is no such file, or it cannot be reached.
      FormatError: it is a directory, or a pipe, device or socket, which might be read forever.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ArgumentError(f"{path} does not exist.") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte or half a surrogate pair
        raise ArgumentError(f"{path} cannot be read: {getattr(error, 'strerror', error)}.") from None
    if stat.S_ISDIR(status.st_mode):
        raise FormatError(f"{path} is a directory; a single model file is needed here.")
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{path} is not a regular file.")
    return status.st_size


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name in the same folder to write to, which takes the place of `path` if nothing goes wrong."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def first_bytes(path: Path, count: int) -> bytes:
    """At most `count` bytes of the beginning of a file; raises as `check_regular`."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}.") from None


_FOREIGN = (
    (b"lmgg", "an unversioned ggml file of early 2023"),
    (b"fmgg", "a ggmf file of early 2023"),
    (b"tjgg", "a ggjt file of 2023, llama.cpp's format before GGUF"),
    (b"algg", "a ggla LoRA adapter of 2023"),
    (b"pcgg", "a llama.cpp training checkpoint of 2023"),
    (b"PK\x03\x04", "a zip archive, such as a PyTorch checkpoint"),
    (b"\x80\x02", "a Python pickle, such as an old PyTorch checkpoint"),
    (b"\x80\x03", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x80\x05", "a Python pickle"),
    (b"version https://git-lfs", "a git-lfs pointer, not the file it stands for; fetch it with `git lfs pull`"),
    (b"\x1f\x8b", "a gzip archive; unpack it first"),
    (b"\x89HDF", "an HDF5 file"),
    (b"<!DOCTYPE", "a web page, probably a failed download"),
    (b"<html", "a web page, probably a failed download"),
    (b"GGUF", "a GGUF file"),
)


def describe_kind(head: bytes) -> str:
    """What the first bytes of a file show it to be, as words for an error."""
    for magic, words in _FOREIGN:
        if head.startswith(magic):
            return words
    if len(head) > 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 40:
        return "a safetensors file"
    return f"of an unknown kind; its first bytes are {shown(head[:4])}"


def check_overlaps(tensors: Iterable[TensorInfo]) -> None:
    """Refuse two tensors of one file that share bytes."""
    ordered = sorted((t for t in tensors if t.nbytes), key=lambda t: (str(t.file), t.offset))
    for before, after in pairwise(ordered):
        if before.file == after.file and before.offset + before.nbytes > after.offset:
            raise FormatError(f"{after.file}: the data of {shown(before.name)} and {shown(after.name)} overlap.")
