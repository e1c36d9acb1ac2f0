"""Attention of one new token per sequence against the KV cache, which takes the token's key and value on the way.

One query reads its whole cache and computes little, so the kernel is bound by memory. A long sequence is split over
many programs (flash decoding, Dao et al. 2023); each reads only slots that are filled, and a second small kernel joins
the parts. Writing the new key and value in the same kernel saves two scatters a layer.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from llama_jax.kernels.attention import attention_reference
from llama_jax.quantization.heads import QuantizedHeads, quantize_heads
from llama_jax.rope import apply_rope

_NOTHING = -1e30  # the logarithm of no weight at all; finite, so that differences of two stay numbers
_MIN_ROWS = 16  # of a matrix unit's left operand
_MAX_SPLITS = 64


def decode_attention_reference(
    q: Array,
    k_new: Array,
    v_new: Array,
    k_cache: Array | QuantizedHeads,
    v_cache: Array | QuantizedHeads,
    lengths: Array,
    counts: Array,
    rotations: tuple[Array, Array],
    window: int | None = None,
) -> tuple[Array, Any, Any]:
    """What `decode_attention` computes, as plain array operations."""
    B, K, S, _ = k_cache.shape
    q, k_new = apply_rope(q[:, None], rotations)[:, 0], apply_rope(k_new[:, None], rotations)[:, 0]
    slots = jnp.where(counts > 0, lengths, S)[:, None]
    rows, heads = jnp.arange(B, dtype=jnp.int32)[:, None], jnp.arange(K, dtype=jnp.int32)

    def put(cache: Any, new: Array) -> tuple[Any, Array]:
        """The cache with the new token, and its numbers."""
        quantized = isinstance(cache, QuantizedHeads)
        parts = quantize_heads(new) if quantized else new
        cache = jax.tree.map(
            lambda old, new: old.at[rows, heads, slots].set(new.astype(old.dtype), mode="drop"), cache, parts
        )
        return cache, cache.values(q.dtype) if quantized else cache.astype(q.dtype)

    (k_cache, k), (v_cache, v) = put(k_cache, k_new), put(v_cache, v_new)
    out = attention_reference(q[:, None], k, v, lengths, window)
    return out[:, 0], k_cache, v_cache


def _load(ref: Any, at: Any, mask: Array | None, dtype: Any) -> Array:
    return plgpu.load(ref.at[at], mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype)).astype(dtype)


def _stored(new: Array, refs: Any) -> tuple[list[Array], Array]:
    """A new key or value [E] as the parts of a cache, and the numbers that these stand for."""
    if len(refs) == 1:
        return [new.astype(refs[0].dtype)], new
    quantized = quantize_heads(new)
    return [quantized.codes, quantized.scales], quantized.codes.astype(jnp.float32) * quantized.scales


def _split_kernel(
    lengths_ref, counts_ref, cos_ref, sin_ref, q_ref, k_new_ref, v_new_ref, k_refs, v_refs,
    out_ref, lse_ref, k_out_refs, v_out_refs, *, block: int, n_splits: int, window: int | None,
):  # fmt: skip
    """One part of one sequence's slots for the query heads [G, E] of one key/value head."""
    row, split = pl.program_id(0), pl.program_id(2)
    G, E = q_ref.shape
    rows = jnp.arange(max(_MIN_ROWS, pl.next_power_of_2(G)))
    columns = jnp.arange(pl.next_power_of_2(E))
    real = (columns < E)[None, :]
    precision = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None

    position = lengths_ref[row]
    first = jnp.maximum(position - (window - 1), 0) if window is not None else 0
    share = pl.cdiv(pl.cdiv(position - first, n_splits), block) * block
    start = first + split * share
    stop = jnp.minimum(start + share, position)

    # Rotation: each number is turned with its partner, half a head away.
    first_half = columns < E // 2
    partners = jnp.where(first_half, columns + E // 2, columns - E // 2)
    pairs = jnp.where(first_half, columns, columns - E // 2)
    cos = plgpu.load(cos_ref.at[pairs], mask=columns < E, other=0.0)
    sin = plgpu.load(sin_ref.at[pairs], mask=columns < E, other=0.0)
    sin = jnp.where(first_half, -sin, sin)

    def turned(here: jax.Array, partner: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        return (here.astype(jnp.float32) * cos + partner.astype(jnp.float32) * sin).astype(here.dtype)

    heads = (rows < G)[:, None] & real
    q, q_partner = (
        plgpu.load(q_ref.at[rows[:, None], at[None, :]], mask=heads, other=0.0) for at in (columns, partners)
    )
    q = turned(q, q_partner, cos[None, :], sin[None, :])
    k_new, k_partner = (plgpu.load(k_new_ref.at[at], mask=columns < E, other=0.0) for at in (columns, partners))
    k_new = turned(k_new, k_partner, cos, sin)
    v_new = plgpu.load(v_new_ref.at[columns], mask=columns < E, other=0.0)
    # What the cache will hold of the new token, and what later tokens will see.
    k_parts, k_new = _stored(k_new, k_refs)
    v_parts, v_new = _stored(v_new, v_refs)

    # The first part begins with the new token itself, which is in no slot yet.
    score = jnp.sum(q.astype(jnp.float32) * k_new.astype(jnp.float32)[None, :], axis=1) * E**-0.5
    has_new = jnp.full(rows.shape, split) == 0
    m = jnp.where(has_new, score, _NOTHING)
    total = has_new.astype(jnp.float32)
    out = total[:, None] * v_new.astype(jnp.float32)[None, :]

    def body(masked, i, carry):
        m, total, out = carry
        slots = start + i * block + jnp.arange(block)
        filled = slots < stop
        at = (slots[:, None], columns[None, :])
        mask = filled[:, None] & real if masked else None if columns.size == E else jnp.broadcast_to(real, k_shape)
        k, v = (_load(refs[0], at, mask, q.dtype) for refs in (k_refs, v_refs))
        k_scales, v_scales = (
            plgpu.load(refs[1].at[slots], mask=filled, other=0.0)[None, :] if len(refs) == 2 else 1.0
            for refs in (k_refs, v_refs)
        )
        scores = jnp.dot(q, k.T, preferred_element_type=jnp.float32, precision=precision) * (k_scales * E**-0.5)
        if masked:
            scores = jnp.where(filled[None, :], scores, _NOTHING)
        new_m = jnp.maximum(m, jnp.max(scores, axis=1))
        shrink = jnp.exp(m - new_m)
        weights = jnp.exp(scores - new_m[:, None])
        update = jnp.dot(
            (weights * v_scales).astype(q.dtype), v, preferred_element_type=jnp.float32, precision=precision
        )
        return new_m, total * shrink + jnp.sum(weights, axis=1), out * shrink[:, None] + update

    k_shape = (block, columns.size)
    slots_here = jnp.maximum(stop - start, 0)
    whole = slots_here // block
    carry = lax.fori_loop(0, whole, functools.partial(body, False), (m, total, out))
    m, total, out = lax.fori_loop(whole, pl.cdiv(slots_here, block), functools.partial(body, True), carry)
    some = total > 0
    out = out / jnp.where(some, total, 1.0)[:, None]
    plgpu.store(out_ref.at[rows[:, None], columns[None, :]], out.astype(out_ref.dtype), mask=(rows < G)[:, None] & real)
    lse = jnp.where(some, m + jnp.log(jnp.where(some, total, 1.0)), _NOTHING)
    plgpu.store(lse_ref.at[rows], lse, mask=rows < G)

    @pl.when((split == 0) & (counts_ref[row] > 0) & (position < k_refs[0].shape[0]))
    def _():
        for refs, parts in ((k_out_refs, k_parts), (v_out_refs, v_parts)):
            plgpu.store(refs[0].at[position, columns], parts[0], mask=columns < E)
            if len(refs) == 2:
                refs[1][position] = parts[1]


def _join_kernel(parts_ref, lse_ref, out_ref, *, group: int):
    """Weighs one query head's parts [n_splits, G, E] by their shares of the softmax."""
    n_splits, _, E = parts_ref.shape
    g = pl.program_id(1) % group
    splits, columns = jnp.arange(n_splits), jnp.arange(pl.next_power_of_2(E))
    lse = plgpu.load(lse_ref.at[splits, g])
    weights = jnp.exp(lse - jnp.max(lse))
    weights = weights / jnp.sum(weights)
    parts = plgpu.load(parts_ref.at[splits[:, None], g, columns[None, :]], mask=(columns < E)[None, :], other=0.0)
    out = jnp.sum(parts * weights[:, None], axis=0)
    plgpu.store(out_ref.at[columns], out.astype(out_ref.dtype), mask=columns < E)


def split_count(sequences: int, capacity: int, block: int, programs: int = 264) -> int:
    """Parts per sequence and key/value head, a power of two: enough for two programs on each of an H200's 132 units."""
    wanted = pl.next_power_of_2(pl.cdiv(programs, sequences))
    return min(wanted, _MAX_SPLITS, pl.next_power_of_2(pl.cdiv(capacity, block)))


def decode_attention(
    q: Array,
    k_new: Array,
    v_new: Array,
    k_cache: Array | QuantizedHeads,
    v_cache: Array | QuantizedHeads,
    lengths: Array,
    counts: Array,
    rotations: tuple[Array, Array],
    window: int | None = None,
    *,
    block: int = 64,
    n_splits: int | None = None,
    n_warps: int = 4,
    n_stages: int = 2,
    interpret: bool = False,
) -> tuple[Array, Any, Any]:
    """Appends one token per row to the cache and attends to it and all before it, in one pass over the filled slots.

    Args:
      q: [B, H, E], not rotated; head h attends to key/value head h // (H / K).
      k_new, v_new: [B, K, E], of the new tokens; k_new not rotated.
      k_cache, v_cache: [B, K, S, E], updated in place where they are donated; arrays or `QuantizedHeads`.
      lengths: [B] int32, filled slots per row: the new token's position.
      counts: [B] int32; a row with 0 writes nothing, and its result means nothing. Nor does a full row write.
      rotations: cosines and sines that q and k_new are to be turned by, each float32 [B, 1, E/2], see
        `llama_jax.rope.rope_rotations`. The kernel does it, which spares two small ones.
      window: a token sees itself and the `window - 1` tokens before it; None: all.
      block: slots a program reads at once; n_splits: parts per sequence, None for enough to fill the card.
      interpret: run on any device, slowly, for tests.

    Returns:
      out: [B, H, E] in q's dtype, summed in float32.
      k_cache, v_cache: with the new tokens.
    """
    B, H, E = q.shape
    K, S = k_cache.shape[1:3]
    G = H // K
    splits = n_splits or split_count(B * K, S, block)
    one = splits == 1

    def spec(*shape: int | None, at=lambda b, h, s: (b, h, 0, 0)) -> pl.BlockSpec:
        return pl.BlockSpec(shape, at)

    scalars = pl.BlockSpec((B,), lambda b, h, s: (0,))
    angles = spec(None, None, E // 2, at=lambda b, h, s: (b, 0, 0))
    head = spec(None, None, E, at=lambda b, h, s: (b, h, 0))
    k_parts, v_parts = jax.tree.leaves(k_cache), jax.tree.leaves(v_cache)
    slots = [spec(None, None, S, E), spec(None, None, S, at=lambda b, h, s: (b, h, 0))]
    k_slots, v_slots = slots[: len(k_parts)], slots[: len(v_parts)]
    first = 7  # arrays before the caches, of which two come back
    aliases = {first + i: 2 + i for i in range(len(k_parts) + len(v_parts))}
    parts, lse, k_parts, v_parts = pl.pallas_call(
        functools.partial(_split_kernel, block=block, n_splits=splits, window=window),
        grid=(B, K, splits),
        in_specs=[scalars, scalars, angles, angles, spec(None, None, G, E), head, head, k_slots, v_slots],
        out_specs=[
            spec(None, None, None, G, E, at=lambda b, h, s: (b, h, s, 0, 0)),
            spec(None, None, None, G, at=lambda b, h, s: (b, h, s, 0)),
            k_slots,
            v_slots,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((B, K, splits, G, E), q.dtype if one else jnp.float32),
            jax.ShapeDtypeStruct((B, K, splits, G), jnp.float32),
            [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in k_parts],
            [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in v_parts],
        ],
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=n_warps, num_stages=n_stages),
        interpret=interpret,
        name="decode_attention_split",
    )(lengths, counts, *rotations, q.reshape(B, K, G, E), k_new, v_new, k_parts, v_parts)
    k_cache = jax.tree.unflatten(jax.tree.structure(k_cache), k_parts)
    v_cache = jax.tree.unflatten(jax.tree.structure(v_cache), v_parts)
    if one:
        return parts.reshape(B, H, E), k_cache, v_cache
    out = pl.pallas_call(
        functools.partial(_join_kernel, group=G),
        grid=(B, H),
        in_specs=[
            pl.BlockSpec((None, None, splits, G, E), lambda b, h: (b, h // G, 0, 0, 0)),
            pl.BlockSpec((None, None, splits, G), lambda b, h: (b, h // G, 0, 0)),
        ],
        out_specs=pl.BlockSpec((None, None, E), lambda b, h: (b, h, 0)),
        out_shape=jax.ShapeDtypeStruct((B, H, E), q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=n_warps, num_stages=2),
        interpret=interpret,
        name="decode_attention_join",
    )(parts, lse)
    return out, k_cache, v_cache
