"""Models whose layers are spread over several devices in consecutive stretches, the stages of a `KVCache`.

One program holds devices that all do the same, so each stage is a program of its own and the activations, [B, T, D],
move from device to device between them. The functions here stand in for those of `llama_jax.generate` with the same
arguments and results; embedding, output head and sampling are on the device of the cache's lengths, the main one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import SingleDeviceSharding

from llama_jax import generate
from llama_jax.cache import KVCache, advance, forget
from llama_jax.config import LlamaConfig
from llama_jax.generate import DecodeState, sample_next, start_decoding
from llama_jax.linear import embed
from llama_jax.model import Params, blocks, rms_norm, unembed
from llama_jax.rope import rope_rotations
from llama_jax.sampling import Logprobs, SamplerState, SamplingParams


class ByStages:
    """A jitted function, and what stands in for it where the cache, or the state that holds it, has stages."""

    def __init__(self, program: Any, staged: Callable[..., Any]) -> None:
        self._program = program
        self._staged = staged

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        caches = (getattr(argument, "cache", argument) for argument in arguments)
        stages = next(cache.stages for cache in caches if isinstance(cache, KVCache))
        return (self._staged if stages else self._program)(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)  # `lower` and the like; with stages there is no single program


def _spans(cache: KVCache) -> Iterator[tuple[slice, Any]]:
    """The layers of each stage and its device."""
    for first, last in pairwise((*cache.stages, len(cache.k))):
        (device,) = jax.tree.leaves(cache.k[first])[0].devices()
        yield slice(first, last), device


def _part(cache: KVCache, span: slice, device: Any) -> KVCache:
    lengths = jax.device_put(cache.lengths, device, may_alias=False)  # a stage is given its part to keep
    return replace(cache, k=cache.k[span], v=cache.v[span], lengths=lengths, stages=())


def _joined(cache: KVCache, parts: list[KVCache], lengths: Array) -> KVCache:
    k, v = (tuple(buffer for part in parts for buffer in getattr(part, name)) for name in "kv")
    return replace(cache, k=k, v=v, lengths=lengths)


def _hollow(cache: KVCache) -> KVCache:
    """`cache` with its lengths and capacity, but without contents: what sampling needs of it."""
    (device,) = cache.lengths.devices()
    shapes = jax.tree.map(lambda x: jnp.zeros((*x.shape[:3], 0), x.dtype, device=device), cache.k[0])
    return replace(cache, k=(shapes,), v=(), stages=())


_embed = jax.jit(embed)
_advance = jax.jit(advance)


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _run_stage(
    layers: Any, x: Array, config: LlamaConfig, cache: KVCache, counts: Array
) -> tuple[Array, KVCache | None]:
    positions = cache.lengths[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)
    return blocks(layers, x, rope_rotations(positions, config), config, cache, counts)


@partial(jax.jit, static_argnames="config")
def _head(params: Params, x: Array, counts: Array, config: LlamaConfig) -> Array:
    last = jnp.take_along_axis(x, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    return unembed(params, rms_norm(last, params.output_norm, config.norm_epsilon))


def prefill(params: Params, tokens: Array, config: LlamaConfig, cache: KVCache, counts: Array) -> tuple[Array, KVCache]:
    """`generate.prefill`, one stage after the other."""
    (main,) = cache.lengths.devices()
    ends = params.replace(layers=())  # type: ignore[attr-defined]
    x = _embed(jax.device_put(tokens, main), params.embedding)
    parts = []
    for span, device in _spans(cache):
        x, there = jax.device_put((x, counts), device)
        x, part = _run_stage(params.layers[span], x, config, _part(cache, span, device), there)
        parts.append(part)
    x, counts = jax.device_put((x, counts), main)
    lengths = _advance(_hollow(cache), counts).lengths
    return _head(ends, x, counts, config), _joined(cache, parts, lengths)


@partial(jax.jit, static_argnames="config")
def _run_uncached(layers: Any, x: Array, config: LlamaConfig, counts: Array) -> Array:
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    return blocks(layers, x, rope_rotations(positions, config), config, None, counts)[0]


_norm = jax.jit(rms_norm, static_argnames="epsilon")


def has_stages(params: Params) -> bool:
    """Whether the layers are on different devices."""
    return len({frozenset(layer.attention_norm.devices()) for layer in params.layers}) > 1


def hidden_states(params: Params, tokens: Array, config: LlamaConfig, counts: Array) -> Array:
    """`model.hidden_states` without a cache, one stage after the other: [B, T, D]."""
    (main,) = params.output_norm.devices()
    x = _embed(jax.device_put(tokens, main), params.embedding)
    for (device,), layers in groupby(params.layers, lambda layer: layer.attention_norm.devices()):
        x, there = jax.device_put((x, counts), device)
        x = _run_uncached(tuple(layers), x, config, there)
    return _norm(jax.device_put(x, main), params.output_norm, epsilon=config.norm_epsilon)


def temporary_bytes(params: Params, tokens: Array, config: LlamaConfig, cache: KVCache) -> int:
    """The most bytes that a stage needs on its device besides arguments and results, to `prefill` tokens [B, T]."""

    def needed(span: slice, device: Any) -> int:
        home = SingleDeviceSharding(device)
        x = jax.ShapeDtypeStruct((*tokens.shape, config.d_model), params.embedding.dtype, sharding=home)
        counts = jax.ShapeDtypeStruct(tokens.shape[:1], jnp.int32, sharding=home)
        compiled = _run_stage.lower(params.layers[span], x, config, _part(cache, span, device), counts).compile()
        analysis = compiled.memory_analysis()
        return analysis.temp_size_in_bytes if analysis else 0

    return max(needed(*span) for span in _spans(cache))


def prefill_chunk(
    params: Params, tokens: Array, config: LlamaConfig, cache: KVCache, counts: Array, logits: Array
) -> tuple[Array, KVCache]:
    """`prefill`, in which a row without tokens keeps its `logits`."""
    new, cache = prefill(params, tokens, config, cache, counts)
    return _keep_logits(counts, new, logits), cache


@jax.jit
def _keep_logits(counts: Array, new: Array, old: Array) -> Array:
    return jnp.where((counts > 0)[:, None], new, old)


_start = jax.jit(start_decoding)
_sample = jax.jit(sample_next)


def start(
    logits: Array, cache: KVCache, sampler: SamplerState, sampling: SamplingParams, eos_ids: Array, **options: Any
) -> DecodeState:
    """`generate.start_decoding`."""
    return replace(_start(logits, _hollow(cache), sampler, sampling, eos_ids, **options), cache=cache)


def sample(
    logits: Array, state: DecodeState, sampling: SamplingParams, eos_ids: Array, mask: Array | None = None
) -> DecodeState:
    """`generate.sample_next`."""
    bare = replace(state, cache=_hollow(state.cache))
    return replace(_sample(logits, bare, sampling, eos_ids, mask), cache=state.cache)


def next_logits(params: Params, config: LlamaConfig, state: DecodeState) -> tuple[Array, DecodeState]:
    """`generate.next_logits`."""
    return generate.next_logits(params, config, state, prefill)


def decode(
    params: Params,
    config: LlamaConfig,
    state: DecodeState,
    sampling: SamplingParams,
    eos_ids: Array,
    max_steps: int,
    n_steps: Array,
) -> tuple[DecodeState, Array, Array, Logprobs | None]:
    """`generate.decode`, with the loop on the host."""
    first = state.n_generated
    tokens, logprobs = [], []
    for _ in range(min(int(n_steps), max_steps)):
        if bool(jnp.all(state.done)):
            break
        done = state.done
        logits, state = next_logits(params, config, state)
        state = sample(logits, state, sampling, eos_ids)
        tokens.append(jnp.where(done, 0, state.token))
        logprobs.append(state.logprobs)

    def table(*columns: Array) -> Array:
        stacked = jnp.stack(columns, axis=1)
        return jnp.pad(stacked, [(0, 0), (0, max_steps - len(columns)), *[(0, 0)] * (stacked.ndim - 2)])

    if not tokens:
        empty = jnp.zeros((state.token.shape[0], max_steps), jnp.int32)
        nothing = jax.tree.map(lambda x: jnp.zeros((x.shape[0], max_steps, *x.shape[1:]), x.dtype), state.logprobs)
        return state, empty, state.n_generated - first, nothing
    return state, table(*tokens), state.n_generated - first, jax.tree.map(table, *logprobs)


_forget = jax.jit(forget, static_argnames="config", donate_argnames="cache")


def forget_slots(cache: KVCache, config: LlamaConfig, start: Array, count: Array) -> KVCache:
    """`cache.forget`."""
    parts = []
    for span, device in _spans(cache):
        parts.append(_forget(_part(cache, span, device), config, *jax.device_put((start, count), device)))
    (main,) = cache.lengths.devices()
    return _joined(cache, parts, jax.device_put(parts[0].lengths, main))


def shift_context(state: DecodeState, config: LlamaConfig, start: Array, count: Array) -> DecodeState:
    """`generate.shift_context`."""
    return replace(state, cache=forget_slots(state.cache, config, start, count))
