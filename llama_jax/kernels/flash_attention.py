"""Flash attention, forward and backward, as Pallas kernels that Triton compiles.

Scores exist a tile at a time (Dao 2023, arXiv:2307.08691): the forward pass walks over the keys of a block of queries
with a running maximum and sum, and leaves the result and the logarithm of the sum. The backward pass computes the
scores again from those, once per block of keys for dk and dv and once per block of queries for dq, so that nothing is
added up across programs. Tiles in which every query sees every key are computed without masks; tiles that no query sees
are not read.

Arrays keep the layouts of the model: q [B, T, H, E], k and v [B, K, S, E]. Widths that are no power of two are padded
in registers only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_LOWEST = -1e30  # where a running maximum starts; finite, so that differences of two are numbers
_NO_WEIGHT = 1e30  # log-sum of a query that sees no key: every exp2(score - log-sum) becomes 0
_LOG2_E = math.log2(math.e)
_LEAST_BLOCK = 16  # of a matrix unit's operands, either way


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one kernel is cut: queries and keys per step, warps per program, tiles in flight."""

    block_q: int
    block_k: int
    n_warps: int
    n_stages: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles of the three kernels."""

    forward: Tiles
    dkv: Tiles
    dq: Tiles


# By padded head width and bytes per number. A block of a Hopper GPU has 227 KiB of shared memory: the operands that
# stay (q; k and v; q and do) plus `n_stages` times those that pass by must fit; 256 threads have 255 registers each.
# Those of 16-bit numbers at widths 64 and 128 are the best of several on an H200, see docs/experiments.md.
_TILINGS = {
    (64, 2): Tiling(forward=Tiles(64, 64, 4, 3), dkv=Tiles(64, 64, 4, 3), dq=Tiles(64, 64, 4, 2)),
    (128, 2): Tiling(forward=Tiles(128, 64, 4, 2), dkv=Tiles(64, 64, 4, 2), dq=Tiles(128, 64, 8, 3)),
    (256, 2): Tiling(forward=Tiles(128, 64, 8, 2), dkv=Tiles(32, 64, 8, 2), dq=Tiles(64, 32, 8, 2)),
    (64, 4): Tiling(forward=Tiles(32, 32, 8, 2), dkv=Tiles(32, 32, 8, 1), dq=Tiles(32, 32, 8, 1)),
    (128, 4): Tiling(forward=Tiles(32, 32, 8, 2), dkv=Tiles(32, 32, 8, 1), dq=Tiles(32, 32, 8, 1)),
    (256, 4): Tiling(forward=Tiles(32, 16, 8, 2), dkv=Tiles(16, 16, 8, 1), dq=Tiles(16, 16, 8, 1)),
}


def default_tiling(head_dim: int, itemsize: int) -> Tiling:
    """Tiles for heads of this width in numbers of this many bytes."""
    return _TILINGS[min(256, max(64, pl.next_power_of_2(head_dim))), itemsize]


@dataclass(frozen=True, slots=True)
class _Options:
    causal: bool
    window: int | None
    segmented: bool
    tiling: Tiling
    interpret: bool


def _load(ref: Any, rows: Array, limit: Array | int | None = None, head: Array | None = None) -> Array:
    """Rows [N, E padded] of a ref [.., E] or, with `head`, [.., G, E]; zeros from row `limit` on and beyond E."""
    E = ref.shape[-1]
    columns = jnp.arange(max(_LEAST_BLOCK, pl.next_power_of_2(E)))
    shape = (rows.size, columns.size)
    mask = None if limit is None else jnp.broadcast_to((rows < limit)[:, None], shape)
    if columns.size != E:
        real = jnp.broadcast_to((columns < E)[None, :], shape)
        mask = real if mask is None else mask & real
    at = (rows[:, None], columns[None, :]) if head is None else (rows[:, None], head, columns[None, :])
    return plgpu.load(ref.at[at], mask=mask, other=None if mask is None else 0.0)


def _store(ref: Any, rows: Array, limit: Array | int, values: Array) -> None:
    columns = jnp.arange(values.shape[1])
    mask = (rows < limit)[:, None] & (columns < ref.shape[-1])[None, :]
    plgpu.store(ref.at[rows[:, None], columns[None, :]], values.astype(ref.dtype), mask=mask)


def _dot(a: Array, b: Array) -> Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)


def _exp2(x: Array, options: _Options) -> Array:
    """2^x in one instruction; the exact one spends more on results below 1e-38, which count for nothing here."""
    if options.interpret:
        return jnp.exp2(x)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    asm = "ex2.approx.ftz.f32 $0, $1;"
    return plgpu.elementwise_inline_asm(asm, args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[like])[0]


def _segments(refs: Sequence[Any], side: int, at: Array, limit: Array | int) -> Array | None:
    """Segment numbers of queries (side 0) or keys (side 1), if there are segments."""
    return plgpu.load(refs[side].at[at], mask=at < limit, other=-1) if refs else None


def _hide(
    scores: Array, q_axis: int, rows: Array, slots: Array, start: Array, limit: Array,
    q_segments: Array | None, kv_segments: Array | None, options: _Options,
) -> Array:  # fmt: skip
    """The scores, whose `q_axis` belongs to query rows and the other to key slots, with -inf for what is not seen."""
    k_axis = 1 - q_axis
    rows, slots = jnp.expand_dims(rows, k_axis), jnp.expand_dims(slots, q_axis)
    visible = slots < limit
    if options.causal:
        distance = start + rows - slots
        visible = visible & (distance >= 0)
        if options.window is not None:
            visible = visible & (distance < options.window)
    if q_segments is not None and kv_segments is not None:
        visible = visible & (jnp.expand_dims(q_segments, k_axis) == jnp.expand_dims(kv_segments, q_axis))
    return jnp.where(visible, scores, -jnp.inf)


def _walk(
    body: Callable[..., Any], carry: Any, bounds: tuple[Array | int, ...], segmented: bool, edges: tuple[bool, bool]
):
    """`body(masked, i, carry)` for tiles first .. stop; those from full_first to full_stop need no mask.

    `edges` says whether there can be masked tiles before and behind the full ones.
    """
    first, full_first, full_stop, stop = bounds
    masked = functools.partial(body, True)
    if segmented:
        return lax.fori_loop(first, stop, masked, carry)
    full_first = jnp.clip(full_first, first, stop) if edges[0] else first
    full_stop = jnp.clip(full_stop, full_first, stop) if edges[1] else stop
    if edges[0]:
        carry = lax.fori_loop(first, full_first, masked, carry)
    carry = lax.fori_loop(full_first, full_stop, functools.partial(body, False), carry)
    if edges[1]:
        carry = lax.fori_loop(full_stop, stop, masked, carry)
    return carry


def _key_tiles(options: _Options, tiles: Tiles, start: Array, i0: Array, T: int, length: Array):
    """For queries from row i0: the bounds of the key tiles as `_walk` wants them, and where the keys seen end."""
    low, high = start + i0, start + jnp.minimum(i0 + tiles.block_q, T) - 1
    begin, full_begin, full_end, end = 0, 0, length, length
    if options.causal:
        full_end, end = jnp.minimum(length, low + 1), jnp.minimum(length, high + 1)
    if options.window is not None:
        begin = jnp.maximum(low - options.window + 1, 0)
        full_begin = jnp.maximum(high - options.window + 1, 0)
    block = tiles.block_k
    return (begin // block, pl.cdiv(full_begin, block), full_end // block, pl.cdiv(end, block)), end


def _query_tiles(options: _Options, tiles: Tiles, start: Array, j0: Array, T: int, limit: Array):
    """For keys from slot j0, of which those before `limit` are seen: the bounds of the query tiles that see them."""
    block, last = tiles.block_q, j0 + tiles.block_k - 1
    begin, full_begin, full_end, end = 0, 0, T, T
    if options.causal:
        begin, full_begin = jnp.maximum(j0 - start, 0), jnp.maximum(last - start, 0)
    if options.window is not None:
        full_end = jnp.clip(j0 - start + options.window, 0, T)
        end = jnp.clip(last - start + options.window, 0, T)
    stop = pl.cdiv(end, block) * (j0 < limit).astype(jnp.int32)
    full_first = jnp.where(last < limit, pl.cdiv(full_begin, block), stop)
    return begin // block, full_first, full_end // block, stop


def _forward_kernel(start_ref, lengths_ref, q_ref, k_ref, v_ref, *refs, options: _Options):
    """Result and log-sum of one block of queries [block_q, E] of one head."""
    *segment_refs, out_ref, lse_ref = refs
    tiles = options.tiling.forward
    T, E = q_ref.shape
    b, i0 = pl.program_id(2), (pl.num_programs(0) - 1 - pl.program_id(0)) * tiles.block_q  # the longest work first
    start, length = start_ref[b], jnp.minimum(lengths_ref[b], k_ref.shape[0])
    bounds, end = _key_tiles(options, tiles, start, i0, T, length)
    scale = E**-0.5 * _LOG2_E
    rows = i0 + jnp.arange(tiles.block_q)
    q = _load(q_ref, rows, T)
    q_segments = _segments(segment_refs, 0, rows, T)

    def body(masked, j, carry):
        m, total, out = carry
        slots = j * tiles.block_k + jnp.arange(tiles.block_k)
        limit = end if masked else None
        scores = _dot(q, _load(k_ref, slots, limit).astype(q.dtype).T)
        if masked:
            kv_segments = _segments(segment_refs, 1, slots, end)
            scores = _hide(scores, 0, rows, slots, start, end, q_segments, kv_segments, options)
        new_m = jnp.maximum(m, jnp.max(scores, axis=1))
        shrink = _exp2((m - new_m) * scale, options)
        weights = _exp2(scores * scale - (new_m * scale)[:, None], options)
        v = _load(v_ref, slots, limit).astype(q.dtype)
        out = out * shrink[:, None] + _dot(weights.astype(q.dtype), v)
        return new_m, total * shrink + jnp.sum(weights, axis=1), out

    zeros = jnp.zeros(rows.shape, jnp.float32)
    carry = zeros + _LOWEST, zeros, jnp.zeros(q.shape, jnp.float32)
    m, total, out = _walk(body, carry, bounds, options.segmented, (options.window is not None, True))
    some = total > 0
    total = jnp.where(some, total, 1.0)
    _store(out_ref, rows, T, out / total[:, None])
    lse = jnp.where(some, m * scale + jnp.log(total) * _LOG2_E, _NO_WEIGHT)
    plgpu.store(lse_ref.at[rows], lse, mask=rows < T)


def _dkv_kernel(start_ref, lengths_ref, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, *refs, options: _Options):
    """dk and dv of one block of keys [block_k, E] of one key/value head, from all query heads of its group.

    Everything is computed transposed, keys by queries, so that the weights are left operands as they come.
    """
    *segment_refs, dk_ref, dv_ref = refs
    tiles = options.tiling.dkv
    T, G, E = q_ref.shape
    S = k_ref.shape[0]
    b, j0 = pl.program_id(2), pl.program_id(0) * tiles.block_k
    start, limit = start_ref[b], jnp.minimum(lengths_ref[b], S)
    if options.causal:
        limit = jnp.minimum(limit, start + T)
    bounds = _query_tiles(options, tiles, start, j0, T, limit)
    scale = E**-0.5 * _LOG2_E
    slots = j0 + jnp.arange(tiles.block_k)
    k, v = (_load(ref, slots, limit).astype(q_ref.dtype) for ref in (k_ref, v_ref))
    kv_segments = _segments(segment_refs, 1, slots, limit)

    def head(g, carry):
        def body(masked, i, carry):
            dk, dv = carry
            rows = i * tiles.block_q + jnp.arange(tiles.block_q)
            mask = rows < T if masked else None
            q = _load(q_ref, rows, T if masked else None, g)
            scores = _dot(k, q.T)
            if masked:
                q_segments = _segments(segment_refs, 0, rows, T)
                scores = _hide(scores, 1, rows, slots, start, limit, q_segments, kv_segments, options)
            lse = plgpu.load(lse_ref.at[g, rows], mask=mask, other=_NO_WEIGHT if masked else None)
            weights = _exp2(scores * scale - lse[None, :], options)
            do = _load(do_ref, rows, T if masked else None, g)
            dv = dv + _dot(weights.astype(do.dtype), do)
            delta = plgpu.load(delta_ref.at[g, rows], mask=mask, other=0.0 if masked else None)
            dscores = weights * (_dot(v, do.T) - delta[None, :])
            return dk + _dot(dscores.astype(q.dtype), q), dv

        edges = (True, options.window is not None or T % tiles.block_q != 0)
        return _walk(body, carry, bounds, options.segmented, edges)

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = lax.fori_loop(0, G, head, (zeros, zeros))
    _store(dk_ref, slots, S, dk * E**-0.5)
    _store(dv_ref, slots, S, dv)


def _dq_kernel(start_ref, lengths_ref, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, *refs, options: _Options):
    """dq of one block of queries [block_q, E] of one head."""
    *segment_refs, dq_ref = refs
    tiles = options.tiling.dq
    T, E = q_ref.shape
    b, i0 = pl.program_id(2), (pl.num_programs(0) - 1 - pl.program_id(0)) * tiles.block_q
    start, length = start_ref[b], jnp.minimum(lengths_ref[b], k_ref.shape[0])
    bounds, end = _key_tiles(options, tiles, start, i0, T, length)
    scale = E**-0.5 * _LOG2_E
    rows = i0 + jnp.arange(tiles.block_q)
    q, do = _load(q_ref, rows, T), _load(do_ref, rows, T)
    lse = plgpu.load(lse_ref.at[rows], mask=rows < T, other=_NO_WEIGHT)
    delta = plgpu.load(delta_ref.at[rows], mask=rows < T, other=0.0)
    q_segments = _segments(segment_refs, 0, rows, T)

    def body(masked, j, dq):
        slots = j * tiles.block_k + jnp.arange(tiles.block_k)
        limit = end if masked else None
        k = _load(k_ref, slots, limit).astype(q.dtype)
        scores = _dot(q, k.T)
        if masked:
            kv_segments = _segments(segment_refs, 1, slots, end)
            scores = _hide(scores, 0, rows, slots, start, end, q_segments, kv_segments, options)
        weights = _exp2(scores * scale - lse[:, None], options)
        v = _load(v_ref, slots, limit).astype(q.dtype)
        dscores = weights * (_dot(do, v.T) - delta[:, None])
        return dq + _dot(dscores.astype(q.dtype), k)

    dq = jnp.zeros(q.shape, jnp.float32)
    dq = _walk(body, dq, bounds, options.segmented, (options.window is not None, True))
    _store(dq_ref, rows, T, dq * E**-0.5)


class _Inputs(NamedTuple):
    """What every kernel reads."""

    q_start: Array
    kv_lengths: Array
    q: Array
    k: Array
    v: Array
    segments: tuple[Array, ...]  # of queries and keys, or none


def _launch(
    kernel: Callable[..., None], name: str, tiles: Tiles, inputs: _Inputs, passed: str, more: tuple[Array, ...],
    made: str, options: _Options, grouped: bool = False,
) -> tuple[Array, ...]:  # fmt: skip
    """Runs a kernel for every block of every head and row.

    Programs pick their tiles out of whole rows and heads, since no size need divide evenly. A letter names the kind of
    each further operand (`passed`) and result (`made`): "q" like q, "k" and "v" like these, "l" float32 [B, H, T].
    `grouped` gives a program a key/value head with its group of query heads and a block of keys; else it has one query
    head and a block of queries.
    """
    B, T, H, E = inputs.q.shape
    K, S = inputs.k.shape[1:3]
    group = H // K
    heads, share = (group, 1) if grouped else (None, group)
    kv = pl.BlockSpec((None, None, S, E), lambda i, h, b: (b, h // share, 0, 0))
    specs = {
        "q": pl.BlockSpec((None, T, heads, E), lambda i, h, b: (b, 0, h, 0)),
        "k": kv,
        "v": kv,
        "l": pl.BlockSpec((None, heads, T), lambda i, h, b: (b, h, 0)),
    }
    scalars = pl.BlockSpec((B,), lambda i, h, b: (0,))
    whole = [pl.BlockSpec((None, segments.shape[1]), lambda i, h, b: (b, 0)) for segments in inputs.segments]
    shapes = {
        **{letter: jax.ShapeDtypeStruct(x.shape, x.dtype) for letter, x in zip("qkv", inputs[2:5], strict=True)},
        "l": jax.ShapeDtypeStruct((B, H, T), jnp.float32),
    }
    return pl.pallas_call(
        functools.partial(kernel, options=options),
        grid=(pl.cdiv(S, tiles.block_k) if grouped else pl.cdiv(T, tiles.block_q), K if grouped else H, B),
        in_specs=[scalars, scalars, *(specs[letter] for letter in "qkv" + passed), *whole],
        out_specs=[specs[letter] for letter in made],
        out_shape=[shapes[letter] for letter in made],
        compiler_params=plgpu.CompilerParams(num_warps=tiles.n_warps, num_stages=tiles.n_stages),
        interpret=options.interpret,
        name=name,
    )(*inputs[:5], *more, *inputs.segments)


def _forward(options: _Options, inputs: _Inputs) -> tuple[Array, ...]:
    return _launch(_forward_kernel, "flash_attention_forward", options.tiling.forward, inputs, "", (), "ql", options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(options: _Options, q_start: Array, lengths: Array, q: Array, k: Array, v: Array, segments: tuple) -> Array:
    return _forward(options, _Inputs(q_start, lengths, q, k, v, segments))[0]


def _flash_forward(options: _Options, *arguments: Any):
    inputs = _Inputs(*arguments)
    out, lse = _forward(options, inputs)
    return out, (inputs, out, lse)


def _flash_backward(options: _Options, saved: tuple[_Inputs, Array, Array], do: Array):
    inputs, out, lse = saved
    delta = jnp.einsum("bthe,bthe->bht", do.astype(jnp.float32), out.astype(jnp.float32))
    tiling, more = options.tiling, (do, lse, delta)
    dk, dv = _launch(_dkv_kernel, "flash_attention_dkv", tiling.dkv, inputs, "qll", more, "kv", options, grouped=True)
    (dq,) = _launch(_dq_kernel, "flash_attention_dq", tiling.dq, inputs, "qll", more, "q", options)
    return None, None, dq, dk, dv, None


_flash.defvjp(_flash_forward, _flash_backward)


def _fitted(tiles: Tiles, T: int, S: int) -> Tiles:
    """No larger than the arrays, so that a short prompt does not pay for rows that it has not."""
    q, k = (max(_LEAST_BLOCK, pl.next_power_of_2(size)) for size in (T, S))
    return replace(tiles, block_q=min(tiles.block_q, q), block_k=min(tiles.block_k, k))


def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    q_start: Array,
    *,
    kv_lengths: Array | None = None,
    window: int | None = None,
    q_segments: Array | None = None,
    kv_segments: Array | None = None,
    causal: bool = True,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Array:
    """Softmax attention in memory linear in T and S, differentiable in q, k and v.

    Sums are float32, and so are the products of float32 numbers; narrower ones go through the matrix units. What no
    query sees is not read: keys from `kv_lengths` on, and with `causal` those from `q_start + T` on.

    Args:
      q: [B, T, H, E]; head h attends to key/value head h // (H / K).
      k, v: [B, K, S, E] of any float type; the products are taken in q's.
      q_start: [B] int32, position of each row's first query; key j stands at position j.
      kv_lengths: [B] int32, keys that exist per row; None for all S.
      window: a query sees the key at its own position and the `window - 1` before; None for all before. Needs `causal`.
      q_segments, kv_segments: [B, T] and [B, S] int32, packed sequences that do not see each other; both or neither.
      causal: False lets every query see keys at any position.
      tiling: None for `default_tiling`.
      interpret: run on any device, slowly, for tests.

    Returns:
      [B, T, H, E] in q's dtype; zeros for a query that sees no key.
    """
    B, T, _, E = q.shape
    S = k.shape[2]
    tiling = tiling or default_tiling(E, q.dtype.itemsize)
    tiling = Tiling(*(_fitted(tiles, T, S) for tiles in (tiling.forward, tiling.dkv, tiling.dq)))
    segments = () if q_segments is None or kv_segments is None else (q_segments, kv_segments)
    lengths = jnp.full(B, S, jnp.int32) if kv_lengths is None else kv_lengths
    options = _Options(causal, window, bool(segments), tiling, interpret)
    return _flash(options, q_start, lengths, q, k, v, segments)
