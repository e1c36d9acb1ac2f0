"""A model as programs that run without this package: jax.export artefacts of prefill and decode, and the weights."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax import export as jax_export

from llama_jax.cache import init_cache
from llama_jax.errors import ArgumentError
from llama_jax.formats.files import replacing
from llama_jax.formats.safetensors import write_safetensors
from llama_jax.generate import prefill
from llama_jax.kernels.backend import XLA, default_kernels
from llama_jax.quantization import QuantizedTensor

if TYPE_CHECKING:
    from llama_jax.llama import Llama

logger = logging.getLogger(__name__)

PROGRAM = "run.py"
_TRITON_CALL = "__gpu$xla.gpu.triton"
_FORMAT = 1


def export_model(folder: str | Path, model: Llama) -> None:
    """Writes a model for programs that only have jax.

    The folder gets prefill.jax and decode.jax (`jax.export`), weights.safetensors, model.json with every shape, and
    run.py, a program of forty lines that shows their use:

      prefill(weights, cache, tokens int32 [1, n_batch], counts int32 [1]) -> (logits float32 [1, V], cache)
      decode(weights, cache, tokens int32 [1]) -> (logits float32 [1, V], cache)

    `weights` and `cache` are dicts of arrays; a cache of zeros is empty. The programs run on CPU and CUDA, unless
    packed weights are multiplied by this process's GPU kernels: then on CUDA alone.

    Args:
      folder: made if absent; each file is replaced only when the new one is complete.
      model: on one device; its context and n_batch are the programs'.

    Raises:
      ArgumentError: the model is divided over a mesh, or flatbuffers is not installed (extra `export`).
    """
    if model.mesh is not None:
        raise ArgumentError("The model is divided over a mesh; only one on a single device can be exported (-sm none).")
    if importlib.util.find_spec("flatbuffers") is None:
        raise ArgumentError("Exporting needs the flatbuffers package; pip install 'llama-jax[export]' brings it.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    n_batch = min(model.n_batch, model.n_ctx)
    weights, params_tree = _named(model.params)
    cache, cache_tree = _named(
        jax.eval_shape(lambda: init_cache(model.config, 1, model.n_ctx, model.params.embedding.dtype, XLA))
    )

    def run_prefill(weights: dict[str, Array], cache: dict[str, Array], tokens: Array, counts: Array) -> Any:
        params = jax.tree.unflatten(params_tree, [weights[name] for name in names])
        held = jax.tree.unflatten(cache_tree, [cache[name] for name in cache_names])
        logits, held = prefill(params, tokens, model.config, held, counts)
        return logits, _named(held)[0]

    def run_decode(weights: dict[str, Array], cache: dict[str, Array], tokens: Array) -> Any:
        return run_prefill(weights, cache, tokens[:, None], jnp.ones(1, jnp.int32))

    names, cache_names = list(weights), list(cache)
    kernels = default_kernels().packed_products != "xla" and any(
        isinstance(leaf, QuantizedTensor)
        for leaf in jax.tree.leaves(model.params, is_leaf=lambda leaf: isinstance(leaf, QuantizedTensor))
    )
    platforms = ("cuda",) if kernels else ("cpu", "cuda")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (weights, cache))
    one, chunk = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1, n_batch), jnp.int32)
    checks = [jax_export.DisabledSafetyCheck.custom_call(_TRITON_CALL)] if kernels else []
    for name, function, arguments in (("prefill", run_prefill, (chunk, one)), ("decode", run_decode, (one,))):
        exporting = jax_export.export(jax.jit(function), platforms=platforms, disabled_checks=checks)
        data = exporting(*shapes, *arguments).serialize()
        with replacing(folder / f"{name}.jax") as temporary:
            temporary.write_bytes(data)
    with replacing(folder / "weights.safetensors") as temporary:
        write_safetensors(temporary, weights)
    facts = {
        "format": _FORMAT,
        "jax": jax.__version__,
        "platforms": platforms,
        "vocab_size": model.tokenizer.vocab_size,
        "context": model.n_ctx,
        "prefill_tokens": n_batch,
        "bos_id": model.tokenizer.bos_id,
        "end_ids": model.tokenizer.eog_ids,
        "cache": {name: [x.shape, x.dtype.name] for name, x in cache.items()},
    }
    with replacing(folder / "model.json") as temporary:
        temporary.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    with replacing(folder / PROGRAM) as temporary:
        shutil.copyfile(str(resources.files("llama_jax") / "assets" / "run_exported.py"), temporary)
    logger.info(
        "%s: prefill of %d tokens and decode, context %d, for %s", folder, n_batch, model.n_ctx, " and ".join(platforms)
    )


def _named(tree: Any) -> tuple[dict[str, Any], Any]:
    """The leaves of a pytree by path, in order, and its structure."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}, structure
