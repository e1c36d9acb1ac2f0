"""Speed and memory of a model shape for each number of layers on the GPU, random weights: decoding and prompts.

    python scripts/bench_placement.py
    python scripts/bench_placement.py --weights Q4_0 --gpu-layers 0 16 low_vram --tokens 512
    python scripts/bench_placement.py --on-cpu 0 16    # layers not on the GPU computed by the CPU instead
    python scripts/bench_placement.py --shape llama-3.2-1b --layers 2 --weights Q4_0 --gpu-layers 0 2 low_vram 5 \
        --on-cpu 1 --context 64 --tokens 32 --steps 2    # a try without a GPU

What is not on the GPU is streamed from pinned host memory inside the program. With `--on-cpu` those layers, in float32,
and their cache are the CPU's work, one dispatch for them and one for the GPU's layers. With `--write-slots` a decoding
step writes only the new token's keys and values into a cache in host memory and does not bring back whole buffers.

Weights are made in host memory, and each kind of weights gets a process of its own, in which lines go from few layers
on the GPU to many: so the device's peak, which only grows, is each line's own. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import benchmark
import jax
import jax.numpy as jnp
import numpy as np
from random_model import QUANTIZATIONS, random_packed, type_of

from llama_jax import (
    PRESETS,
    Params,
    Placement,
    by_path,
    init_cache,
    memory_report,
    model,
    parameter_specs,
    place_cache,
)
from llama_jax.cache import KVCache, advance
from llama_jax.config import LlamaConfig
from llama_jax.generate import prefill
from llama_jax.kernels.backend import XLA
from llama_jax.linear import embed
from llama_jax.model import ParameterSpec, blocks, join_projections, rms_norm, unembed
from llama_jax.offload import HOST, on_host
from llama_jax.placement import Plan, default_dtype, resolve
from llama_jax.placement.sharding import weight_shardings
from llama_jax.quantization.packed import QuantizedTensor, dequantize_packed
from llama_jax.rope import rope_rotations

LOW_VRAM = "low_vram"
Step = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]  # (tokens [1, T], counts [1], cache)


def host_params(config: LlamaConfig, weights: str) -> Params:
    """Random weights on the CPU device; their rows repeat, which no product can notice."""
    dtype, rng = default_dtype(), np.random.default_rng(0)

    def make(path: str, spec: ParameterSpec) -> Any:
        if len(spec.shape) == 1:
            return jnp.ones(spec.shape, jnp.float32)
        if weights != "dense":
            return random_packed(type_of(path, weights, config), (spec.shape[0], spec.shape[1]), 0)
        some = (0.02 * rng.standard_normal((256, spec.shape[1]), np.float32)).astype(dtype)
        return jnp.asarray(np.resize(some, spec.shape))

    specs = parameter_specs(config)
    structure = jax.tree.structure(specs, is_leaf=lambda leaf: isinstance(leaf, ParameterSpec))
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.tree.unflatten(structure, [make(path, spec) for path, spec in by_path(specs).items()])


def write_slots(cache: KVCache | None, layer: int, home: KVCache | None) -> KVCache | None:
    """Stands in for `cache.return_layer` where one row takes one token: the token's slot alone goes back."""
    if cache is None or home is None:
        return cache

    def written(new: Any, old: Any) -> Any:
        if not on_host(old):
            return new
        place = (0, 0, cache.lengths[0], *(0,) * (new.ndim - 3))
        slot = jax.lax.dynamic_slice(new, place, (1, new.shape[1], 1, *new.shape[3:]))
        return jax.lax.dynamic_update_slice(old, jax.device_put(slot, HOST), place)

    k, v = (
        (*buffers[:layer], jax.tree.map(written, buffers[layer], before[layer]), *buffers[layer + 1 :])
        for buffers, before in ((cache.k, home.k), (cache.v, home.v))
    )
    return replace(cache, k=k, v=v)


def plan_of(units: str, config: LlamaConfig) -> Plan:
    """The plan of one line of the table, on the first device whatever it is."""
    low = units == LOW_VRAM
    placement = Placement(gpu_layers="all" if low else int(units), low_vram=low, devices=(jax.devices()[0],))
    return resolve(placement, config.n_layers)


def moved(params: Params, config: LlamaConfig, plan: Plan) -> Params:
    """Copies of `params` with each weight where the plan has it, joined as `load` does it."""
    places = weight_shardings(config, None, plan)

    def move(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return jax.block_until_ready(jax.device_put(leaf, places[name], may_alias=False))

    return join_projections(
        jax.tree.map_with_path(move, params, is_leaf=lambda leaf: isinstance(leaf, QuantizedTensor))
    )


def temporaries(compiled: Any) -> int:
    """Bytes on the device that a program needs besides what it is given and gives."""
    return compiled.memory_analysis().temp_size_in_bytes


def streaming(params: Params, config: LlamaConfig, length: int, cache: KVCache) -> tuple[Step, int]:
    """One program for the whole model, for `length` tokens, and its temporaries."""
    step = jax.jit(prefill, static_argnames="config", donate_argnames="cache")
    tokens = jnp.zeros((1, length), jnp.int32)
    compiled = step.lower(params, tokens, config, cache, jnp.ones(1, jnp.int32)).compile()
    return lambda tokens, counts, cache: compiled(params, tokens, cache, counts), temporaries(compiled)


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def stage(layers: Any, x: jax.Array, config: LlamaConfig, cache: KVCache, counts: jax.Array) -> Any:
    """Consecutive layers, wherever their arrays are."""
    positions = cache.lengths[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)
    x, after = blocks(layers, x, rope_rotations(positions, config), config, cache, counts)
    assert after is not None
    return x, advance(after, counts)


@partial(jax.jit, static_argnames="config")
def head(params: Params, x: jax.Array, counts: jax.Array, config: LlamaConfig) -> jax.Array:
    """Logits after the last token."""
    last = jnp.take_along_axis(x, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    return unembed(params, rms_norm(last, params.output_norm, config.norm_epsilon))


def on_cpu(params: Params, config: LlamaConfig, plan: Plan, capacity: int) -> tuple[Step, tuple[KVCache, KVCache]]:
    """The first layers by the CPU in float32, the others and the head by the GPU; and the caches of both."""
    cpu, gpu = jax.devices("cpu")[0], jax.devices()[0]
    n = config.n_layers - plan.gpu_layers

    def widened(leaf: Any) -> jax.Array:
        leaf = jax.device_put(jax.tree.map(np.asarray, leaf), cpu)
        return dequantize_packed(leaf, jnp.float32) if isinstance(leaf, QuantizedTensor) else leaf.astype(jnp.float32)

    def is_weight(leaf: Any) -> bool:
        return isinstance(leaf, QuantizedTensor)

    first = tuple(jax.tree.map(widened, layer, is_leaf=is_weight) for layer in params.layers[:n])
    rest, params = params.layers[n:], params.replace(layers=())  # type: ignore[attr-defined]
    dtype = params.embedding.dtype

    def caches(layers: int, dtype: Any, device: Any) -> KVCache:
        shape = replace(config, n_layers=max(1, layers))
        kernels = XLA if device.platform == "cpu" else None
        return jax.device_put(init_cache(shape, 1, capacity, dtype, kernels), device)

    def step(tokens: jax.Array, counts: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        first_cache, rest_cache = cache
        x = embed(tokens, params.embedding)
        if first:
            x = jax.device_put(x, cpu).astype(jnp.float32)
            x, first_cache = stage(first, x, config, first_cache, jax.device_put(counts, cpu))
            x = jax.device_put(x.astype(dtype), gpu)
        if rest:
            x, rest_cache = stage(rest, x, config, rest_cache, counts)
        return head(params, x, counts, config), (first_cache, rest_cache)

    return step, (caches(n, jnp.float32, cpu), caches(len(rest), dtype, gpu))


def filled(cache: Any, length: int) -> Any:
    """`cache`, or each of several, as if it held `length` tokens."""
    if not isinstance(cache, KVCache):
        return tuple(filled(c, length) for c in cache)
    lengths = jax.device_put(jnp.full(1, length, jnp.int32), cache.lengths.sharding)
    return replace(cache, lengths=lengths)


def decode_seconds(step: Step, cache: Any, held: int, steps: int) -> tuple[float, Any]:
    """Seconds a greedy step, each waiting for the one before, and the cache."""
    counts = jnp.ones(1, jnp.int32)
    cache, token = filled(cache, held), jnp.zeros((1, 1), jnp.int32)
    logits, cache = step(token, counts, cache)
    jax.block_until_ready(logits)
    started = time.perf_counter()
    for _ in range(steps):
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)[:, None]
        logits, cache = step(token, counts, cache)
    jax.block_until_ready(logits)
    return (time.perf_counter() - started) / steps, cache


def prefill_seconds(step: Step, cache: Any, tokens: int, chunk: int) -> tuple[float, Any]:
    """Seconds for a prompt in chunks, the better of two runs after a first that is not counted."""
    prompt, counts = jnp.ones((1, chunk), jnp.int32), jnp.full(1, chunk, jnp.int32)
    seconds = []
    for run in range(3):
        cache = filled(cache, 0)
        started = time.perf_counter()
        for _ in range(1 if run == 0 else tokens // chunk):
            _, cache = step(prompt, counts, cache)
        jax.block_until_ready(cache)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:]), cache


def bench(params: Params, config: LlamaConfig, plan: Plan, on_the_cpu: bool, options: argparse.Namespace) -> Any:
    """One line of results; `params` are where the plan has them."""
    chunk = min(plan.batch_size(options.batch_size), options.tokens)
    if on_the_cpu:
        step, cache = on_cpu(params, config, plan, options.context)
        decode_step, prefill_step, temporary, report = step, step, None, None
    else:
        cache = place_cache(config, 1, options.context, params.embedding.dtype, None, plan)
        with mock.patch.object(model, "return_layer", write_slots if options.write_slots else model.return_layer):
            decode_step, small = streaming(params, config, 1, cache)
        prefill_step, large = streaming(params, config, chunk, cache)
        temporary = max(small, large)
        report = memory_report(params, cache, temporary)
        print(report.log_line())
    decode, cache = decode_seconds(decode_step, cache, options.context - options.steps - 2, options.steps)
    prompt, cache = prefill_seconds(prefill_step, cache, options.tokens, chunk)
    stats = jax.devices()[0].memory_stats() or {}
    return dict(
        units="/".join(map(str, plan.units)),
        method="cpu" if on_the_cpu else "stream, slots written" if options.write_slots else "stream",
        context=options.context,
        decode_tokens_per_second=1 / decode,
        prompt_tokens_per_second=options.tokens / prompt,
        prompt_tokens=options.tokens,
        chunk=chunk,
        reported_bytes=report.total if report else None,
        temporary_bytes=temporary,
        in_use_bytes=stats.get("bytes_in_use"),
        process_peak_bytes=stats.get("peak_bytes_in_use"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=PRESETS, default="llama-3-8b")
    parser.add_argument("--weights", nargs="+", choices=("dense", *QUANTIZATIONS), default=["dense", "Q4_0"])
    parser.add_argument("--gpu-layers", nargs="+", default=["0", "16", "32", LOW_VRAM, "33", "34", "35"])
    parser.add_argument("--on-cpu", nargs="*", default=["16"], help="gpu layers with the others computed by the CPU")
    parser.add_argument("--write-slots", action="store_true", help="an experiment, see above")
    parser.add_argument("--layers", type=int, help="of the model; default: the shape's")
    parser.add_argument("--limit", type=float, default=240, help="seconds a kind of weights after which no line begins")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt")
    parser.add_argument("--batch-size", type=int, default=512)
    options = parser.parse_args()
    results = []
    for weights in options.weights if len(options.weights) > 1 else ():
        command = [sys.executable, __file__, *sys.argv[1:], "--weights", weights]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        *_, last = (line for line in child.stdout or () if print(line, end="", flush=True) is None)
        if child.wait():
            raise SystemExit(child.returncode)
        results += json.loads(last)["results"]
    if len(options.weights) == 1:
        results = bench_weights(options.weights[0], options)
    benchmark.report("placement", results)


def bench_weights(weights: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All lines of one kind of weights."""
    config = PRESETS[options.shape]
    config = replace(config, n_layers=options.layers or config.n_layers)
    begun, results = time.perf_counter(), []
    originals, params = host_params(config, weights), None
    print(f"{weights}: weights made in {time.perf_counter() - begun:.0f} s", flush=True)
    lines = [(units, False) for units in options.gpu_layers] + [(units, True) for units in options.on_cpu]
    for units, on_the_cpu in lines:
        started = time.perf_counter()
        if started - begun > options.limit:
            print(f"{weights}: {units} and what follows is left out after {options.limit:.0f} s", flush=True)
            break
        plan = plan_of(units, config)
        params = None  # gives the memory back first
        params = moved(originals, config, plan)
        line = dict(shape=options.shape, weights=weights, gpu_layers=units)
        line |= bench(params, config, plan, on_the_cpu, options)
        results.append(line)
        used = f", {line['reported_bytes'] / 1e9:.2f} GB of VRAM" if line["reported_bytes"] else ""
        peak = f", peak {line['process_peak_bytes'] / 1e9:.2f} GB" if line["process_peak_bytes"] else ""
        print(
            f"{options.shape} {weights} {units} ({line['units']}, {line['method']}): "
            f"decode {line['decode_tokens_per_second']:.1f} tok/s, "
            f"prompt {line['prompt_tokens_per_second']:.0f} tok/s{used}{peak}; "
            f"took {time.perf_counter() - started:.0f} s",
            flush=True,
        )
    return results


if __name__ == "__main__":
    main()
