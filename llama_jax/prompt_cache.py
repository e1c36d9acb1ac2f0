"""Prompt caches: what a session holds, in a file that another process goes on from.

A file is a safetensors file. Its tensors are `tokens` [B, n] int32 (-1 behind a row's end), `exact` [B] int32 (slots
that have seen no forgotten token), `kv.0`, `kv.1` ... (every buffer of the KV cache, its first n slots) and, where a
generation can be resumed, `sampler.*`. Its metadata name the format, the model by a fingerprint of all weights, and a
checksum of the tensors.
"""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from llama_jax.config import LlamaConfig
from llama_jax.errors import ArgumentError, FormatError
from llama_jax.formats.files import MappedFile
from llama_jax.formats.safetensors import NUMPY_TYPES, read_header, read_metadata, write_tensors
from llama_jax.generate import DecodeState
from llama_jax.offload import DEVICE

if TYPE_CHECKING:
    from llama_jax.session import Session

logger = logging.getLogger(__name__)

_FORMAT = "llama_jax prompt cache 1"
_SAMPLER = "sampler."


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a session holds, on the host.

    Attributes:
      tokens: of each row.
      exact: slots of each row that have seen no forgotten token.
      kv: every buffer of the cache, [B, K, n, ...], n the longest row's number of tokens.
      sampler: by name, where sampling stands; empty if no generation can be resumed.
    """

    tokens: list[list[int]]
    exact: list[int]
    kv: list[np.ndarray]
    sampler: dict[str, np.ndarray]


@jax.jit
def _sum_of_words(x: Array) -> Array:
    x = jax.device_put(x, DEVICE)
    word = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return jnp.sum(jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32), dtype=jnp.uint32)


def fingerprint(params: Any, config: LlamaConfig) -> str:
    """Tells models apart: a hash of the config and of each weight's name, shape, type and bit pattern's sum."""
    digest = hashlib.sha256(repr(config).encode())
    sums = [
        (jax.tree_util.keystr(path), x.shape, x.dtype.name, _sum_of_words(x))
        for path, x in jax.tree.leaves_with_path(params)
    ]
    for *facts, total in sums:
        digest.update(f"{facts} {int(total)}\n".encode())
    return digest.hexdigest()


def write_snapshot(path: Path, snapshot: Snapshot, model: str) -> None:
    """Writes a prompt cache of the model with the fingerprint `model`; a killed process leaves the old file."""
    tokens = np.full((len(snapshot.tokens), max(map(len, snapshot.tokens))), -1, np.int32)
    for row, ids in zip(tokens, snapshot.tokens, strict=True):
        row[: len(ids)] = ids
    tensors = {"tokens": tokens, "exact": np.asarray(snapshot.exact, np.int32)}
    tensors |= {f"kv.{i}": np.ascontiguousarray(buffer) for i, buffer in enumerate(snapshot.kv)}
    tensors |= {_SAMPLER + name: np.ascontiguousarray(value) for name, value in snapshot.sampler.items()}
    metadata = {"format": _FORMAT, "model": model, "checksum": _checksum(tensors)}
    write_tensors(path, tensors, metadata)


def read_snapshot(path: Path, model: str) -> Snapshot:
    """What `write_snapshot` wrote.

    Raises:
      ArgumentError: the file cannot be read, or belongs to another model.
      FormatError: it is damaged or something else.
    """
    mapped = MappedFile(path)
    try:
        header = read_header(mapped)
        metadata = read_metadata(mapped)
        if not metadata.get("format", "").startswith("llama_jax prompt cache"):
            raise FormatError(f"{path} is a safetensors file but not a prompt cache of llama_jax.")
        if metadata["format"] != _FORMAT:
            raise FormatError(f"{path} is a prompt cache of another version of llama_jax; delete it to make a new one.")
        tensors = {
            name: mapped.array(info.offset, info.nbytes).view(NUMPY_TYPES[info.type_name]).reshape(info.shape)
            for name, info in header.items()
            if info.type_name in NUMPY_TYPES
        }
    finally:
        mapped.close()
    if len(tensors) != len(header) or metadata.get("checksum") != _checksum(tensors):
        raise FormatError(f"{path} is damaged: its checksum does not agree with what it holds; delete it.")
    if metadata.get("model") != model:
        raise ArgumentError(f"{path} is the prompt cache of another model, adapter or --dtype; name another file.")
    n_buffers = sum(name.startswith("kv.") for name in tensors)
    return Snapshot(
        tokens=[row[row >= 0].tolist() for row in tensors["tokens"]],
        exact=tensors["exact"].tolist(),
        kv=[tensors[f"kv.{i}"] for i in range(n_buffers)],
        sampler={name.removeprefix(_SAMPLER): x for name, x in tensors.items() if name.startswith(_SAMPLER)},
    )


def _checksum(tensors: dict[str, np.ndarray]) -> str:
    total = 0
    for name in sorted(tensors):
        array = tensors[name]
        total = zlib.crc32(f"{name} {array.shape} {array.dtype.name}".encode(), total)
        total = zlib.crc32(array.reshape(-1).view(np.uint8).data, total)
    return f"{total:08x}"


def saved_sampler(state: DecodeState) -> dict[str, Any]:
    """What the next steps depend on besides the cache, by name."""
    bare = replace(state, cache=None, logprobs=None)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in jax.tree.leaves_with_path(bare)}


def with_sampler(state: DecodeState, sampler: Mapping[str, Any]) -> DecodeState:
    """The state with what `saved_sampler` took from another one."""

    def taken(path: Any, x: Array) -> Array:
        saved = sampler.get(jax.tree_util.keystr(path, simple=True, separator="."))
        if saved is None or (saved.shape, saved.dtype) != (x.shape, x.dtype):
            raise ArgumentError("The text cannot be resumed: it was sampled with other options, such as penalties.")
        return jnp.asarray(saved)

    bare = jax.tree.map_with_path(taken, replace(state, cache=None, logprobs=None))
    return replace(bare, cache=state.cache, logprobs=state.logprobs)


class PromptCache:
    """The file of --prompt-cache and what may be done to it.

    Args:
      path: need not exist yet.
      all: write the generated text too, when it has ended; otherwise the prompt, as soon as it has been run.
      read_only: never write.

    Raises:
      ArgumentError: the file's folder does not exist.
    """

    def __init__(self, path: str | os.PathLike[str], *, all: bool = False, read_only: bool = False) -> None:
        self.path = Path(path).expanduser()
        self.all = all
        self.read_only = read_only
        self._snapshot: Snapshot | None = None
        self._held: list[list[int]] = []  # tokens in the file
        if not self.path.absolute().parent.is_dir():
            raise ArgumentError(f"The prompt cache {str(self.path)!r} lies in a folder that does not exist.")

    def read(self, session: Session) -> Snapshot | None:
        """What the file holds for the session's model; None if there is no file yet. Raises as `read_snapshot`."""
        if not self.path.exists():
            logger.info("%s does not exist yet", self.path)
            self._snapshot = None
            return None
        snapshot = self._snapshot = read_snapshot(self.path, session.fingerprint)
        self._held = snapshot.tokens
        logger.info("%s holds %d tokens", self.path, sum(map(len, snapshot.tokens)))
        return snapshot

    def restore(self, session: Session) -> None:
        """Gives the session what `read` has found; nothing is given twice."""
        if self._snapshot is not None:
            session.restore(self._snapshot)
            self._snapshot = None

    def prompt_is_done(self, session: Session) -> None:
        """To be called when the session holds a prompt and nothing else."""
        if not self.all:
            self._write(session)

    def text_is_done(self, session: Session) -> None:
        """To be called when a text has ended."""
        if self.all:
            self._write(session)

    def _write(self, session: Session) -> None:
        if self.read_only or (self._held == session.tokens and not self.all):
            return
        self._held = [list(row) for row in session.tokens]
        write_snapshot(self.path, session.snapshot(), session.fingerprint)
