"""Loading a model with its tokenizer: where each weight goes, adapters, and what runs best on the device."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from llama_jax.adapters import AppliedAdapters, LoraSource, load_adapters, with_base
from llama_jax.cache import cache_type
from llama_jax.errors import ArgumentError
from llama_jax.formats.hub import resolve_path
from llama_jax.formats.load import check_tensors, load_params, open_model, weight_bytes
from llama_jax.llama import Llama, checked_limits, context_length, shipped_model
from llama_jax.lora import merge_lora as merged
from llama_jax.model import join_projections
from llama_jax.placement import (
    Place,
    Placement,
    check_devices,
    default_dtype,
    memory_sizes,
    place_params,
    plan_mesh,
    resolve,
    sharding_notes,
    with_vocabulary,
)

logger = logging.getLogger(__name__)


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    dtype: DTypeLike | None = None,
    n_ctx: int | None = None,
    n_batch: int = 512,
    mesh: Mesh | None = None,
    placement: Placement | None = None,
    packed: bool | None = None,
    cache_type_k: str | None = None,
    cache_type_v: str | None = None,
    lora: Sequence[LoraSource] = (),
    lora_base: str | os.PathLike[str] | None = None,
    merge_lora: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Llama:
    """Loads a model with its tokenizer.

    Args:
      path: a GGUF file (any part of a split one), a Hugging Face folder, or "hf:owner/name[:file]", which downloads
        through huggingface-hub. None is the small model that ships with the package.
      dtype: of weights and activations; None is bfloat16 on a GPU and float32 on a CPU.
      n_ctx: most tokens per sequence, prompt and answer together. None is the model's own context, at most 4096;
        0 is the model's own.
      n_batch: most prompt tokens in one run of the model.
      mesh: devices to divide the model over, from `llama_jax.tensor_mesh` or `device_mesh`; None leaves it to
        `placement`.
      placement: what lives on which GPU and what stays in host memory; None puts everything on all GPUs.
      packed: keep quantized weights as small as in the file and unpack them as they are multiplied. None does so on a
        GPU; a CPU is faster with unpacked float32 weights, if they fit.
      cache_type_k, cache_type_v: of the KV cache, a name of `llama_jax.CACHE_TYPES`; None is `dtype`.
      lora: adapters to apply, each a path (GGUF, PEFT folder, or the ggla files of 2023) or (path, scale).
      lora_base: a model file to read the weights from that adapters change, where `path` is a quantized one.
      merge_lora: add the adapters into the weights instead of computing with them beside.
      progress: called with (bytes placed, bytes in all) after each weight.

    Raises:
      FormatError: the file is damaged or of an unsupported kind.
      ArgumentError: an argument is out of range or the path does not exist.
    """
    n_ctx, n_batch = checked_limits(n_ctx, n_batch)
    if mesh is not None and placement is not None:
        raise ArgumentError("mesh and placement were both given; give one of them.")
    check_devices()
    try:
        dtype = np.dtype(dtype or default_dtype())
    except TypeError:
        raise ArgumentError(f"dtype is {dtype!r}; it must be float32, bfloat16 or float16.") from None
    cache_dtype = tuple(dtype if name is None else cache_type(name) for name in (cache_type_k, cache_type_v))
    on_gpu = jax.default_backend() == "gpu"
    packed = on_gpu if packed is None else packed
    with open_model(resolve_path(path) if path is not None else shipped_model()) as file:
        check_tensors(file)  # before anything grows with what the file only claims to hold
        tokenizer = file.tokenizer()
        config, sizes, plan = file.config, weight_bytes(file, dtype, packed), None
        adapters = load_adapters(lora, config)
        if mesh is None:
            needs = memory_sizes(
                config, sizes, n_ctx=context_length(config, n_ctx), n_batch=n_batch, itemsize=dtype.itemsize
            )
            plan = resolve(placement or Placement(), config.n_layers, needs)
            mesh, n_batch = plan_mesh(plan), plan.batch_size(n_batch)
        for note in sharding_notes(config, mesh):
            logger.info("%s", note)
        place = place_params(config, mesh, plan, pad_vocabulary=True)
        counted = place
        if progress is not None:
            counted = _with_progress(place, sum(sizes.values()), progress)
        params = with_vocabulary(load_params(file, dtype, counted, packed=packed), config)
        if lora_base is not None:
            params = with_base(params, resolve_path(lora_base), adapters, config, dtype, place)
        if merge_lora:
            params, adapters = merged(AppliedAdapters(params, adapters).params()), []
        if mesh is None and on_gpu:
            params = join_projections(params)
        applied = AppliedAdapters(params, adapters)
        model = Llama(
            config,
            applied.params(),
            tokenizer,
            n_ctx=n_ctx,
            n_batch=n_batch,
            cache_dtype=cache_dtype,
            mesh=mesh,
            plan=plan,
        )
        model.adapters = applied
        return model


def _with_progress(place: Place, total: int, progress: Callable[[int, int], None]) -> Place:
    done = 0

    def place_and_tell(path: str, weight: Any) -> Any:
        nonlocal done
        placed = place(path, weight)
        done += weight.nbytes
        progress(done, total)
        return placed

    return place_and_tell
