"""The weights of a training checkpoint that llama.cpp's train-text-from-scratch wrote in June 2023.

Source: examples/train-text-from-scratch of that time. A checkpoint is: the bytes `pcgg`, version 0, counters of
iterations, samples and tokens, six hyper-parameters, all as u32; then the weights as records (number of axes, length of
the name, type, axes with the fastest first, name, padding to 32 bytes, data). What follows, the optimiser's state,
holds a C structure as that compiler laid it out, and is not read.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.errors import FormatError, shown
from llama_jax.formats.files import MappedFile
from llama_jax.formats.load import half_split_rows
from llama_jax.model import Layer, Params

MAGIC = b"pcgg"
_LAYER = {
    "attention_norm": "attention_norm", "attention.wq": "wq", "attention.wk": "wk", "attention.wv": "wv",
    "attention.wo": "wo", "ffn_norm": "ffn_norm", "feed_forward.w1": "w_gate", "feed_forward.w2": "w_down",
    "feed_forward.w3": "w_up",
}  # fmt: skip
_TOP = {"tok_embeddings": "embedding", "norm": "output_norm", "output": "output_head"}


def is_checkpoint_2023(path: Path) -> bool:
    """Whether the file begins like one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def read_checkpoint_2023(path: Path, context_length: int) -> tuple[LlamaConfig, Params, dict[str, int]]:
    """The model of a checkpoint, as float32 numpy arrays, and its counters.

    Args:
      context_length: what the configuration is to state, since the file does not.

    Raises:
      FormatError: the file is damaged or of another kind.
    """
    file = MappedFile(path)
    try:
        return _read(file, path, context_length)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path} ends amid a tensor or is damaged.") from None
    finally:
        file.close()


def _read(file: MappedFile, path: Path, context_length: int) -> tuple[LlamaConfig, Params, dict[str, int]]:
    if file.map[:4] != MAGIC:
        raise FormatError(f"{path} is no llama.cpp training checkpoint of 2023.")
    (version,) = struct.unpack_from("<I", file.map, 4)
    if version != 0:
        raise FormatError(f"{path} has version {version}; 0 is the only one that is known.")
    iterations, samples, tokens = struct.unpack_from("<3I", file.map, 8)
    counters = dict(iterations=iterations, samples=samples, tokens=tokens)
    V, D, mult, H, L, rot = struct.unpack_from("<6I", file.map, 20)
    if not (0 < H <= D and D % H == 0 and 0 < L < 4096 and 0 < V < 2**24 and mult > 0):
        raise FormatError(f"{path} states V={V}, D={D}, H={H}, L={L}: no possible model.")
    if rot != D // H:
        raise FormatError(f"{path} turns {rot} of {D // H} numbers of a head; only all of them can be computed.")
    tensors: dict[str, np.ndarray] = {}
    at = 44
    for _ in range(9 * L + 3):
        name, values, at = _tensor(file, path, at)
        tensors[name] = values
    F = tensors["layers.0.feed_forward.w1"].shape[0] if "layers.0.feed_forward.w1" in tensors else 0
    config = LlamaConfig(
        vocab_size=V, d_model=D, d_ff=F, n_layers=L, n_heads=H, n_kv_heads=H, head_dim=D // H,
        context_length=context_length, norm_epsilon=1e-6,
    )  # fmt: skip

    def get(name: str, shape: tuple[int, ...], rotary: bool = False) -> np.ndarray:
        if name not in tensors or tensors[name].shape != shape:
            found = tensors[name].shape if name in tensors else "nothing"
            raise FormatError(f"{path} should hold {name} of shape {shape}; it holds {found}.")
        return half_split_rows(tensors[name], H) if rotary else tensors[name]

    shapes = dict(
        attention_norm=(D,), wq=(D, D), wk=(D, D), wv=(D, D), wo=(D, D), ffn_norm=(D,), w_gate=(F, D), w_up=(F, D),
        w_down=(D, F),
    )  # fmt: skip
    layers = tuple(
        Layer(
            **{field: get(f"layers.{n}.{name}", shapes[field], field in ("wq", "wk")) for name, field in _LAYER.items()}
        )
        for n in range(L)
    )
    params = Params(
        embedding=get("tok_embeddings", (V, D)), layers=layers, output_norm=get("norm", (D,)),
        output_head=get("output", (V, D)),
    )  # fmt: skip
    return config, params, counters


def _tensor(file: MappedFile, path: Path, at: int) -> tuple[str, np.ndarray, int]:
    """`(name without ".weight", float32 values, where the next record begins)`."""
    n_axes, n_name, kind = struct.unpack_from("<3I", file.map, at)
    if n_axes not in (1, 2) or n_name > 256 or kind != 0:
        raise FormatError(f"{path} holds a tensor of {n_axes} axes and type {kind}; float32 of 1 or 2 is needed.")
    axes = struct.unpack_from(f"<{n_axes}I", file.map, at + 12)
    at += 12 + 4 * n_axes
    name = file.map[at : at + n_name].decode("utf-8")
    at = -(-(at + n_name) // 32) * 32
    size = int(np.prod(axes, dtype=np.int64)) * 4
    if at + size > file.size:
        raise FormatError(f"{path} ends amid the tensor {shown(name)}.")
    values = file.array(at, size).view(np.float32).reshape(axes[::-1]).copy()
    return name.removesuffix(".weight"), values, at + size
