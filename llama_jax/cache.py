"""The KV cache: keys and values of the tokens seen so far.

One buffer per layer, so that each is donated and updated in place on its own: a stacked buffer inside a scan measured
2.8 times slower. A row's slot number is its token's position; slots from `lengths` on hold nothing that is ever read.
The model reaches the cache only through `append_and_attend` and `advance`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from llama_jax.config import LlamaConfig
from llama_jax.errors import ArgumentError
from llama_jax.kernels.attention import attention
from llama_jax.kernels.backend import XLA, Kernels, default_kernels
from llama_jax.kernels.decode_attention import decode_attention
from llama_jax.offload import back_home, map_through_device, to_device
from llama_jax.quantization.heads import QuantizedHeads, quantize_heads
from llama_jax.rope import apply_rope, rotate_back

CACHE_TYPES = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16, "q8_0": jnp.int8}  # llama.cpp's names
Buffer = Array | QuantizedHeads


@struct.dataclass
class KVCache:
    """Keys (after rotation) and values, L buffers each [B, K, S, E]; `lengths` [B] int32, the slots filled per row.

    A buffer is an array or, where the cache is quantized, `QuantizedHeads`.

    `kernels` names what serves attention, see `llama_jax.kernels.backend`. `stages` holds the first layer of each
    stretch that has a device of its own, see `llama_jax.stages`; it is empty where one program sees all layers.
    `sharding` says how a mesh divides [B, K, ...]; None on one device.
    """

    k: tuple[Buffer, ...]
    v: tuple[Buffer, ...]
    lengths: Array
    kernels: Kernels = struct.field(pytree_node=False, default=XLA)
    stages: tuple[int, ...] = struct.field(pytree_node=False, default=())
    sharding: NamedSharding | None = struct.field(pytree_node=False, default=None)

    @property
    def capacity(self) -> int:
        """S, the most tokens that a row can hold."""
        return self.k[0].shape[2]

    @property
    def batch(self) -> int:
        """B, the number of rows."""
        return self.k[0].shape[0]


def cache_type(name: str) -> jnp.dtype:
    """The dtype for `init_cache` that a name of `CACHE_TYPES` stands for.

    Raises:
      ArgumentError: there is no such type.
    """
    if name not in CACHE_TYPES:
        raise ArgumentError(f"The cache type is {name!r}; it must be one of {', '.join(CACHE_TYPES)}.")
    return jnp.dtype(CACHE_TYPES[name])


def init_cache(
    config: LlamaConfig,
    batch: int,
    capacity: int,
    dtype: DTypeLike | tuple[DTypeLike, ...],
    kernels: Kernels | None = None,
) -> KVCache:
    """An empty cache for `batch` sequences of at most `capacity` tokens, on one device.

    Args:
      dtype: of keys and values, or a pair for each; int8 keeps them as bytes with a scale for each token and head.
      kernels: None takes what the default device runs best.
    """
    if batch < 1 or capacity < 1:
        raise ArgumentError(
            f"A KV cache of {batch} sequences x {capacity} tokens was asked for; both must be at least 1."
        )
    shape = (batch, config.n_kv_heads, capacity, config.head_dim)
    dtypes = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    k, v = (tuple(_empty(shape, each) for _ in range(config.n_layers)) for each in dtypes)
    return KVCache(k=k, v=v, lengths=jnp.zeros(batch, jnp.int32), kernels=kernels or default_kernels())


def _empty(shape: tuple[int, ...], dtype: DTypeLike) -> Buffer:
    if jnp.dtype(dtype) == jnp.int8:
        return QuantizedHeads(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32))
    return jnp.zeros(shape, dtype)


def _values(buffer: Buffer, dtype: DTypeLike) -> Array:
    """The numbers of a buffer; those of a quantized one as `dtype`."""
    return buffer.values(dtype) if isinstance(buffer, QuantizedHeads) else buffer


def append(cache: KVCache, layer: int, k: Array, v: Array, counts: Array) -> KVCache:
    """Writes the first `counts[b]` of row b's T new keys and values, each [B, T, K, E], behind its filled slots.

    What does not fit into the buffer is dropped, never written over another slot. `lengths` stays as it is, since every
    layer of a forward pass writes to the same slots; `advance` moves it once.
    """
    B, T, K, _ = k.shape
    i = jnp.arange(T, dtype=jnp.int32)
    slots = jnp.where(i < counts[:, None], cache.lengths[:, None] + i, cache.capacity)  # [B, T]
    rows = jnp.arange(B, dtype=jnp.int32)[:, None, None]
    heads = jnp.arange(K, dtype=jnp.int32)[:, None]

    def write(buffer: Buffer, new: Array) -> Buffer:
        new = new.swapaxes(1, 2)  # [B, K, T, E]
        parts = quantize_heads(new) if isinstance(buffer, QuantizedHeads) else new

        def put(old: Array, new: Array) -> Array:
            return old.at[rows, heads, slots[:, None, :]].set(new.astype(old.dtype), mode="drop")

        return jax.tree.map(put, buffer, parts)

    return replace(
        cache,
        k=_replaced(cache.k, layer, write(cache.k[layer], k)),
        v=_replaced(cache.v, layer, write(cache.v[layer], v)),
    )


def _replaced(buffers: tuple[Buffer, ...], index: int, buffer: Buffer) -> tuple[Buffer, ...]:
    return (*buffers[:index], buffer, *buffers[index + 1 :])


def append_and_attend(
    cache: KVCache,
    layer: int,
    q: Array,
    k: Array,
    v: Array,
    rotations: tuple[Array, Array],
    counts: Array,
    window: int | None,
) -> tuple[Array, KVCache]:
    """`append`s the keys and values and lets their queries `q` [B, T, H, E] attend to all slots up to their own.

    Args:
      q, k: not rotated yet; `rotations` are those of their positions, see `llama_jax.rope.rope_rotations`.

    Returns:
      out: [B, T, H, E], meaningless where nothing was appended.
      cache: with `lengths` unchanged.
    """
    if cache.sharding is not None:
        return _on_each_device(cache, layer, q, k, v, rotations, counts, window)
    if cache.kernels.decode_attention == "triton" and q.shape[1] == 1:
        out, k_buffer, v_buffer = decode_attention(
            q[:, 0], k[:, 0], v[:, 0], cache.k[layer], cache.v[layer], cache.lengths, counts, rotations, window
        )
        k_buffers, v_buffers = _replaced(cache.k, layer, k_buffer), _replaced(cache.v, layer, v_buffer)
        return out[:, None], replace(cache, k=k_buffers, v=v_buffers)
    q, k = apply_rope(q, rotations), apply_rope(k, rotations)
    cache = append(cache, layer, k, v, counts)
    kv_lengths = cache.lengths + counts
    k_buffer, v_buffer = (_values(buffer, q.dtype) for buffer in (cache.k[layer], cache.v[layer]))
    kernels = cache.kernels.attention
    return attention(q, k_buffer, v_buffer, cache.lengths, window, kv_lengths=kv_lengths, kernels=kernels), cache


def fetch_layer(cache: KVCache | None, layer: int, after: Array) -> KVCache | None:
    """`cache` with a layer's buffers on the device: those in host memory are brought there once `after` is computed."""
    if cache is None:
        return None
    k, v = to_device((cache.k[layer], cache.v[layer]), after)
    return replace(cache, k=_replaced(cache.k, layer, k), v=_replaced(cache.v, layer, v))


def return_layer(cache: KVCache | None, layer: int, home: KVCache | None) -> KVCache | None:
    """`cache` with a layer's buffers in host memory again where those of `home` are there."""
    if cache is None or home is None:
        return cache
    k, v = back_home((cache.k[layer], cache.v[layer]), (home.k[layer], home.v[layer]))
    return replace(cache, k=_replaced(cache.k, layer, k), v=_replaced(cache.v, layer, v))


def _on_each_device(
    cache: KVCache,
    layer: int,
    q: Array,
    k: Array,
    v: Array,
    rotations: tuple[Array, Array],
    counts: Array,
    window: int | None,
) -> tuple[Array, KVCache]:
    """`append_and_attend` where a mesh divides the cache: rows and heads have nothing to do with each other.

    Left to itself, XLA would gather keys, values and slots for the scatter into the buffers.
    """
    assert cache.sharding is not None
    mesh, (batch, heads) = cache.sharding.mesh, cache.sharding.spec
    by_token, by_row = PartitionSpec(batch, None, heads), PartitionSpec(batch)
    buffers = replace(cache, k=(cache.k[layer],), v=(cache.v[layer],), sharding=None)
    specs = replace(buffers, k=cache.sharding.spec, v=cache.sharding.spec, lengths=by_row)

    def attend(cache: KVCache, q: Array, k: Array, v: Array, rotations: tuple[Array, Array], counts: Array) -> Any:
        return append_and_attend(cache, 0, q, k, v, rotations, counts, window)

    out, new = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(specs, by_token, by_token, by_token, by_row, by_row),
        out_specs=(by_token, specs),
        check_vma=False,
    )(buffers, q, k, v, rotations, counts)
    return out, replace(cache, k=_replaced(cache.k, layer, new.k[0]), v=_replaced(cache.v, layer, new.v[0]))


def gather_logits(cache: KVCache, logits: Array) -> Array:
    """`logits` [B, V], each row whole on the devices that hold its cache, where sampling then needs no others.

    On several hosts all rows are everywhere, since each host reads all tokens.
    """
    if cache.sharding is None:
        return logits
    mesh, (batch, _) = cache.sharding.mesh, cache.sharding.spec
    n = mesh.shape.get("tensor", 1)
    if n > 1 and logits.shape[1] % n == 0:  # else XLA would gather the output head instead of its product
        logits = jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, PartitionSpec(batch, "tensor")))
    rows = PartitionSpec() if mesh.is_multi_process else PartitionSpec(batch)
    return jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, rows))


def advance(cache: KVCache, counts: Array) -> KVCache:
    """Counts the `counts` [B] tokens that `append` wrote as filled, at most up to the capacity."""
    return replace(cache, lengths=jnp.minimum(cache.lengths + counts, cache.capacity))


def forget(cache: KVCache, config: LlamaConfig, start: Array, count: Array) -> KVCache:
    """Removes the slots from `start` on, `count` of them in each row (both [B] int32); the later ones move up.

    Keys are stored after rotation, so those that move are turned back by `count` positions. They equal keys that were
    rotated for their new positions from the beginning; but from the second layer on, keys and values still stem from
    hidden states that have seen the removed tokens.
    """
    slots = jnp.arange(cache.capacity, dtype=jnp.int32)
    moved = slots >= start[:, None]  # [B, S]
    source = jnp.where(moved, slots + count[:, None], slots)

    def moved_up(buffer: Buffer) -> Any:
        def take(row: Array, slots: Array) -> Array:
            return jnp.take(row, slots, axis=1, mode="clip")

        return jax.tree.map(lambda part: jax.vmap(take)(part, source), buffer)

    def keys(buffer: Buffer) -> Buffer:
        taken = moved_up(buffer)
        turned = rotate_back(_values(taken, jnp.float32), count, config)
        turned = quantize_heads(turned) if isinstance(taken, QuantizedHeads) else turned.astype(taken.dtype)

        def choose(new: Array, old: Array) -> Array:
            return jnp.where(moved.reshape(moved.shape[0], 1, -1, *[1] * (old.ndim - 3)), new, old)

        return jax.tree.map(choose, turned, taken)

    k, v = map_through_device(keys, cache.k, count), map_through_device(moved_up, cache.v, count)
    return replace(cache, k=k, v=v, lengths=cache.lengths - count)
