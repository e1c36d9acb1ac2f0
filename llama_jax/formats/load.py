"""Opening a model, whatever its format, and loading its parameters one tensor at a time."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from llama_jax.config import LlamaConfig
from llama_jax.errors import ArgumentError, FormatError, plain, shown
from llama_jax.formats import names
from llama_jax.formats.config_gguf import config_from_gguf
from llama_jax.formats.config_hf import config_from_hf
from llama_jax.formats.files import TensorInfo, first_bytes
from llama_jax.formats.gguf import GGUFFile
from llama_jax.formats.safetensors import INDEX_FILE, SINGLE_FILE, SafetensorsFolder, read_json
from llama_jax.model import Layer, Params
from llama_jax.quantization import BFLOAT16, BLOCK_TYPES, as_plain, dequantize, dequantize_into, row_bytes
from llama_jax.quantization.packed import PACKED_TYPES, pack, packed_nbytes

_CHUNK_VALUES = 1 << 20  # rotary rows are put in order in pieces of about this many values
_MAX_DIVISOR_BYTES = 1 << 16


class ModelFile(ABC):
    """An open model: its constants, its tensors by parameter path, its tokenizer.

    Attributes:
      path: the file or folder.
      config: the model's constants.
      metadata: the GGUF keys, or the contents of config.json.
      tensors: parameter path to `TensorInfo`; `Layer` and `Params` name the paths, as "layers.3.wq".
      other_tensors: names in the file that are no parameters.
    """

    path: Path
    config: LlamaConfig
    metadata: Mapping[str, Any]
    tensors: dict[str, TensorInfo]
    other_tensors: list[str]

    @abstractmethod
    def _raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor of the file, uint8 [nbytes], a view."""

    @abstractmethod
    def _tokenizer(self) -> Any:
        """As `tokenizer`; an error need not name the file."""

    def tokenizer(self) -> Any:
        """The model's tokenizer, see `llama_jax.text.tokenizer`.

        Raises:
          FormatError: there is none, or it is damaged.
        """
        try:
            return self._tokenizer()
        except FormatError as error:
            if str(self.path) in str(error):
                raise
            raise FormatError(f"{self.path}: {error}") from error

    @abstractmethod
    def close(self) -> None:
        """Close the files; arrays that were read stay valid."""

    def _interleaved_heads(self, path: str) -> int | None:
        """Heads of a weight whose rows the file keeps in interleaved rotary order, None where they need no change."""
        return None

    def read_packed(self, path: str) -> np.ndarray:
        """The bytes of a parameter as the file packs them, rotary rows put in half-split order.

        Returns:
          uint8 [out, bytes of a row]; of a vector [1, nbytes]. A view of the file unless rows had to move. The type
          is `tensors[path].type_name`.

        Raises:
          ArgumentError: the file has no such parameter.
        """
        info = self._info(path)
        rows = self._rows(info)
        heads = self._checked_heads(path, info)
        return rows if heads is None else half_split_rows(rows, heads)

    def read(self, path: str, dtype: DTypeLike | None = None) -> np.ndarray:
        """A parameter as numbers.

        Args:
          path: a key of `tensors`.
          dtype: float32, bfloat16 or float16; None keeps the file's own, and float32 for quantized types.

        Returns:
          The array in the orientation [out, in], rotary rows in half-split order. A read-only view of the file where
          nothing has to change; else a new array, beside which only a few MiB are used while it is made.

        Raises:
          ArgumentError: the file has no such parameter, or the dtype is another one.
          FormatError: the tensor's type holds no weights, or a rotary weight has the wrong shape.
        """
        info = self._info(path)
        t = BLOCK_TYPES.get(info.type_name)
        if t is None or (t.dtype is not None and t.name not in ("F32", "F16", "BF16", "F64")):
            raise FormatError(
                f"{info.file}: tensor {shown(info.name)} has type {info.type_name}, which holds no weights."
            )
        wanted = np.dtype(dtype if dtype is not None else (t.dtype or np.float32))
        if dtype is not None and wanted not in (np.float32, np.float16, BFLOAT16):
            raise ArgumentError(f"The dtype is {wanted}; it must be float32, bfloat16 or float16.")
        heads = self._checked_heads(path, info)
        if heads is None and t.dtype == wanted:
            return as_plain(self._raw(info.name), info.type_name, info.shape)
        out = np.empty(info.shape, wanted)
        rows = self._rows(info)
        if heads is None:
            dequantize_into(rows, info.type_name, out)
            return out
        head_dim = self.config.head_dim
        step = max(1, _CHUNK_VALUES // (head_dim * info.shape[1])) * head_dim
        for start in range(0, len(rows), step):
            piece = rows[start : start + step]
            piece = half_split_rows(piece, len(piece) // head_dim)
            dequantize_into(piece, info.type_name, out[start : start + step])
        return out

    def _checked_heads(self, path: str, info: TensorInfo) -> int | None:
        heads = self._interleaved_heads(path)
        if heads is not None and info.shape != (heads * self.config.head_dim, self.config.d_model):
            raise _wrong_shape(info, (heads * self.config.head_dim, self.config.d_model))
        return heads

    def _info(self, path: str) -> TensorInfo:
        if path not in self.tensors:
            raise ArgumentError(f"{self.path} has no parameter {shown(path)}.")
        return self.tensors[path]

    def _rows(self, info: TensorInfo) -> np.ndarray:
        columns = info.shape[-1] if info.shape else 1
        return self._raw(info.name).reshape(math.prod(info.shape[:-1]), row_bytes(info.type_name, columns))

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class GGUFModel(ModelFile):
    """A model in a GGUF file of architecture `llama`, whose query and key rows are in interleaved order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        try:
            self.metadata = self._file.metadata
            if self.metadata.get("general.type") == "adapter":
                raise FormatError(f"{path} is an adapter; name its model, and it with --lora (load(lora=...)).")
            found = self._file.tensors
            self.tensors = {p: info for name, info in found.items() if (p := names.path_of_gguf(name))}
            self.other_tensors = [
                name for name in found if not names.path_of_gguf(name) and name != names.GGUF_ROPE_DIVISORS
            ]
            divisors = None
            if (info := found.get(names.GGUF_ROPE_DIVISORS)) is not None:
                if info.nbytes > _MAX_DIVISOR_BYTES:
                    raise FormatError(
                        f"{path}: tensor {shown(info.name)} has shape {info.shape}; it must be half a head wide."
                    )
                divisors = dequantize(self._file.raw(info.name), info.type_name, info.shape)
            shapes = {name: info.shape for name, info in found.items()}
            self.config = config_from_gguf(self.metadata, shapes, divisors, str(path))
        except BaseException:
            self.close()
            raise

    def _raw(self, name: str) -> np.ndarray:
        return self._file.raw(name)

    def _interleaved_heads(self, path: str) -> int | None:
        return names.rotary_heads(path, self.config)

    def _tokenizer(self) -> Any:
        from llama_jax.text.tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(self.metadata)

    def close(self) -> None:
        self._file.close()


class HuggingFaceModel(ModelFile):
    """A model in a folder with config.json and safetensors files, whose rotary rows are in half-split order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config_path = path / "config.json"
        if not config_path.exists():
            raise FormatError(f"{path} holds no config.json.")
        self.metadata = read_json(config_path)
        self.config = config_from_hf(self.metadata, str(config_path))
        self._folder = SafetensorsFolder(path)
        found = dict(self._folder.tensors)
        if self.config.tied_embeddings:
            # Some checkpoints repeat the embedding here; transformers ignores the copy, too.
            found.pop(names.HF_TOP["output_head"], None)
        self.tensors = {p: info for name, info in found.items() if (p := names.path_of_hf(name))}
        self.other_tensors = [n for n in found if not names.path_of_hf(n) and not names.is_derived_hf(n)]

    def _raw(self, name: str) -> np.ndarray:
        return self._folder.raw(name)

    def _tokenizer(self) -> Any:
        from llama_jax.text.tokenizer import tokenizer_from_folder

        return tokenizer_from_folder(self.path)

    def close(self) -> None:
        self._folder.close()


def open_model(path: str | Path) -> ModelFile:
    """Open a .gguf file, one of the formats before GGUF, or a Hugging Face folder.

    Raises:
      ArgumentError: the path does not exist.
      FormatError: it is neither, damaged, or a model that this package does not compute.
    """
    path = Path(path)
    if os.path.isdir(path):
        if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
            raise FormatError(f"{path} is an adapter; name its model, and it with --lora (load(lora=...)).")
        if not any((path / name).exists() for name in ("config.json", SINGLE_FILE, INDEX_FILE)):
            raise FormatError(f"{path} is a folder without config.json; name a Hugging Face folder or a .gguf file.")
        return HuggingFaceModel(path)
    if path.suffix == ".safetensors":
        raise ArgumentError(f"{path} is one file of a Hugging Face model; name the folder that holds it.")
    from llama_jax.formats.ggjt import MAGICS, LegacyModel

    return LegacyModel(path) if first_bytes(path, 4) in MAGICS else GGUFModel(path)


def check_tensors(file: ModelFile) -> None:
    """Refuse a model with missing, unknown or misshapen tensors; `FormatError` names the first of them."""
    if file.config.n_layers > len(file.tensors):
        raise FormatError(
            f"{file.path} holds {len(file.tensors)} parameters; a model of {file.config.n_layers} layers has more."
        )
    expected = names.parameter_shapes(file.config)
    missing = [path for path in expected if path not in file.tensors]
    if missing:
        raise FormatError(f"{file.path} lacks {_some(missing)}; a model with {file.config.n_layers} layers needs them.")
    unknown = [info.name for path, info in file.tensors.items() if path not in expected] + file.other_tensors
    if unknown:
        raise FormatError(f"{file.path} holds tensors that a LLaMA model has no use for: {_some(unknown)}.")
    for path, shape in expected.items():
        info = file.tensors[path]
        if info.shape != shape:
            raise _wrong_shape(info, shape)


def load_params(file: ModelFile, dtype: DTypeLike, place: Callable[[str, Any], Any], *, packed: bool = False) -> Params:
    """Read all parameters, one at a time.

    Args:
      file: an open model.
      dtype: of the matrices: float32, bfloat16 or float16. Norm vectors are always float32.
      place: called with each parameter path and its host array, gives the array to keep. The host array is a
        read-only view of the file where it needs no change, and is dropped after the call.
      packed: keep quantized matrices packed: `place` gets a `QuantizedTensor` of numpy arrays. The dtype is then that
        of the other matrices and of the activations.

    Raises:
      FormatError: tensors are missing, unknown or misshapen.
    """
    check_tensors(file)

    def get(path: str) -> Any:
        info = file.tensors[path]
        if packed and info.type_name in PACKED_TYPES and not names.is_norm(path):
            return place(path, pack(file.read_packed(path), info.type_name, info.shape, np.dtype(dtype)))
        return place(path, file.read(path, np.float32 if names.is_norm(path) else dtype))

    config = file.config
    return Params(
        embedding=get("embedding"),
        layers=tuple(
            Layer(**{field: get(f"layers.{n}.{field}") for field in names.GGUF_LAYER}) for n in range(config.n_layers)
        ),
        output_norm=get("output_norm"),
        output_head=None if config.tied_embeddings else get("output_head"),
    )


def weight_bytes(file: ModelFile, dtype: DTypeLike, packed: bool = False) -> dict[str, int]:
    """Bytes of each parameter by path, as `load_params` hands it to `place`."""

    def size(path: str, info: TensorInfo) -> int:
        if packed and info.type_name in PACKED_TYPES and not names.is_norm(path):
            return packed_nbytes(info.type_name, info.shape)
        return math.prod(info.shape) * (4 if names.is_norm(path) else np.dtype(dtype).itemsize)

    return {path: size(path, info) for path, info in file.tensors.items()}


def loaded_bytes(file: ModelFile, dtype: DTypeLike, packed: bool = False) -> int:
    """Bytes of all parameters as `load_params` hands them to `place`."""
    return sum(weight_bytes(file, dtype, packed).values())


def half_split_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rotary rows from interleaved pairs (0 1)(2 3)... to half-split order 0 2 4 ... 1 3 5 ..., head by head; a copy.

    Args:
      rows: [heads * E, anything].
    """
    # [heads, E/2, 2, ...] -> [heads, 2, E/2, ...]
    return np.ascontiguousarray(rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2)).reshape(rows.shape)


def interleave_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `half_split_rows`."""
    # [heads, 2, E/2, ...] -> [heads, E/2, 2, ...]
    return np.ascontiguousarray(rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2)).reshape(rows.shape)


def _wrong_shape(info: TensorInfo, shape: tuple[int, ...]) -> FormatError:
    return FormatError(
        f"{info.file}: tensor {shown(info.name)} has shape {info.shape}; the model's constants need {shape}."
    )


def _some(items: list[str]) -> str:
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return ", ".join(map(plain, items[:3])) + more
