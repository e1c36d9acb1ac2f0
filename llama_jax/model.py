"""The whole LLaMA model: parameters, their initialisation, and the forward pass.

Axis letters, used in einsum strings, shapes and comments everywhere in this package:
  B batch            T query tokens      S cache slots        D model width
  H query heads      K key/value heads   G = H / K            E head width
  F feed-forward     V vocabulary        L layers
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from llama_jax.cache import KVCache, advance, append_and_attend, fetch_layer, return_layer
from llama_jax.config import LlamaConfig
from llama_jax.errors import ArgumentError
from llama_jax.kernels.attention import SelfAttention, self_attention
from llama_jax.linear import embed, join, linear, linears, rows_of, separate
from llama_jax.offload import to_device
from llama_jax.rope import apply_rope, rope_rotations

Remat = Literal["none", "products", "block"]
"""What a gradient computes again instead of keeping it: nothing; all but the products' and attention's results; all but
the input of each block."""


JOINABLE = (("wq", "wk", "wv"), ("w_gate", "w_up"))
"""Weights of a layer that multiply the same input, see `join_projections`."""


@struct.dataclass
class Layer:
    """The weights of one transformer block, each [out, in]; rotary rows of wq and wk in half-split order."""

    attention_norm: Any  # [D]
    wq: Any  # [H*E, D]
    wk: Any  # [K*E, D]
    wv: Any  # [K*E, D]
    wo: Any  # [D, H*E]
    ffn_norm: Any  # [D]
    w_gate: Any  # [F, D]
    w_up: Any  # [F, D]
    w_down: Any  # [D, F]


@struct.dataclass
class Params:
    """All weights of a model. `output_head` is None where the embedding serves as the head.

    `vocab_size` is V where further rows of zeros pad [V, D] so that devices share it evenly, else None.
    """

    embedding: Any  # [V, D]
    layers: tuple[Layer, ...]  # L of them
    output_norm: Any  # [D]
    output_head: Any  # [V, D]
    vocab_size: int | None = struct.field(pytree_node=False, default=None)


class ParameterSpec(NamedTuple):
    """Shape and axis letters of one weight; HE and KE stand for all heads' widths in one axis."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]


def parameter_specs(config: LlamaConfig) -> Params:
    """The declaration of every weight, in the form of `Params`: initialisation, loading and sharding all read it."""
    sizes = {
        "D": config.d_model,
        "F": config.d_ff,
        "V": config.vocab_size,
        "HE": config.n_heads * config.head_dim,
        "KE": config.n_kv_heads * config.head_dim,
    }

    def spec(*axes: str) -> ParameterSpec:
        return ParameterSpec(tuple(sizes[a] for a in axes), axes)

    layer = Layer(
        attention_norm=spec("D"),
        wq=spec("HE", "D"),
        wk=spec("KE", "D"),
        wv=spec("KE", "D"),
        wo=spec("D", "HE"),
        ffn_norm=spec("D"),
        w_gate=spec("F", "D"),
        w_up=spec("F", "D"),
        w_down=spec("D", "F"),
    )
    return Params(
        embedding=spec("V", "D"),
        layers=(layer,) * config.n_layers,
        output_norm=spec("D"),
        output_head=None if config.tied_embeddings else spec("V", "D"),
    )


def by_path(tree: Params) -> dict[str, Any]:
    """The leaves of anything in the form of `Params` by path: "embedding", "layers.3.wq", "output_norm"."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, ParameterSpec))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def init_params(key: Array, config: LlamaConfig, dtype: DTypeLike = jnp.float32, scale: float = 0.02) -> Params:
    """Random weights for training from scratch.

    Matrices are normal with standard deviation `scale`; those that write into the residual stream (wo, w_down) are
    smaller by sqrt(2 L), so that the stream's variance does not grow with depth (Radford et al. 2019). Norm weights are
    ones, in float32.
    """
    specs = by_path(parameter_specs(config))

    def init(key: Array, path: str, spec: ParameterSpec) -> Array:
        if len(spec.shape) == 1:
            return jnp.ones(spec.shape, jnp.float32)
        residual = path.endswith(("wo", "w_down"))
        deviation = scale / (2 * config.n_layers) ** 0.5 if residual else scale
        return (deviation * jax.random.normal(key, spec.shape, jnp.float32)).astype(dtype)

    leaves = [init(k, *item) for k, item in zip(jax.random.split(key, len(specs)), specs.items(), strict=True)]
    structure = jax.tree.structure(parameter_specs(config), is_leaf=lambda leaf: isinstance(leaf, ParameterSpec))
    return jax.tree.unflatten(structure, leaves)


def join_projections(params: Params) -> Params:
    """The same model with wq, wk and wv as one product and w_gate and w_up as another: fewer and larger kernels.

    For decoding on one device; what is joined cannot be used as single weights any more, see `llama_jax.linear.join`.
    """
    layers = []
    for layer in params.layers:
        for names in JOINABLE:
            joined = join(*(getattr(layer, name) for name in names))
            layer = replace(layer, **dict(zip(names, joined, strict=True)))
        layers.append(layer)
    return replace(params, layers=tuple(layers))


def weight_at(params: Params, path: str) -> Any:
    """The weight at a path of `by_path`, of whatever kind; one that is joined with others comes as a copy."""
    layer, _, name = path.rpartition(".")
    if not layer:
        weight = getattr(params, name)
        return rows_of(weight, 0, params.vocab_size) if name in ("embedding", "output_head") else weight
    names = next((names for names in JOINABLE if name in names), (name,))
    weights = (getattr(params.layers[int(layer.split(".")[1])], each) for each in names)
    return separate(*weights)[names.index(name)]


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """`x` [..., D] over its root mean square (Zhang and Sennrich 2019), times `weight` [D]; float32 inside."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    return (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype)


def _project(
    layer: Layer, x: Array, rotations: tuple[Array, Array] | None, *, config: LlamaConfig
) -> tuple[Array, Array, Array]:
    """Queries [B, T, H, E], keys and values [B, T, K, E]; turned if there are rotations."""
    B, T, _ = x.shape
    x = rms_norm(x, layer.attention_norm, config.norm_epsilon)
    q, k, v = (heads.reshape(B, T, -1, config.head_dim) for heads in linears(x, layer.wq, layer.wk, layer.wv))
    return (q, k, v) if rotations is None else (apply_rope(q, rotations), apply_rope(k, rotations), v)


def _finish(layer: Layer, x: Array, attended: Array, *, config: LlamaConfig) -> Array:
    """The rest of a block: what attention adds to the residual stream `x` [B, T, D], and the feed-forward layer."""
    with jax.named_scope("attention"):
        x = checkpoint_name(x + linear(attended.reshape(*x.shape[:2], -1), layer.wo), "middle")
    with jax.named_scope("feed_forward"):
        gate, up = linears(rms_norm(x, layer.ffn_norm, config.norm_epsilon), layer.w_gate, layer.w_up)
        gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
        return x + linear(jax.nn.silu(gate) * up, layer.w_down)


def _block(
    layer: Layer,
    x: Array,
    rotations: tuple[Array, Array],
    cache: KVCache | None,
    counts: Array,
    segments: Array | None,
    *,
    config: LlamaConfig,
    index: int,
    kernels: SelfAttention,
    remat: Remat,
) -> tuple[Array, KVCache | None]:
    project, finish = functools.partial(_project, config=config), functools.partial(_finish, config=config)
    if remat == "products":  # attention stays outside: its kernels keep what their backward pass needs
        project = jax.checkpoint(project)
        finish = jax.checkpoint(finish, policy=jax.checkpoint_policies.save_only_these_names("middle", "gate", "up"))
    with jax.named_scope("attention"):
        q, k, v = project(layer, x, rotations if cache is None else None)
        if cache is None:
            attended = self_attention(q, k, v, config.sliding_window, segments, kernels)
        else:
            attended, cache = append_and_attend(cache, index, q, k, v, rotations, counts, config.sliding_window)
    return finish(layer, x, attended), cache


def _positions_in_segments(segments: Array) -> Array:
    """[B, T] int32: how far each token is behind the first of its run of equal `segments` [B, T]."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


def hidden_states(
    params: Params,
    tokens: Array,
    config: LlamaConfig,
    cache: KVCache | None = None,
    counts: Array | None = None,
    *,
    segments: Array | None = None,
    dtype: DTypeLike | None = None,
    kernels: SelfAttention = "xla",
    remat: Remat = "none",
) -> tuple[Array, KVCache | None]:
    """The residual stream after the last norm.

    Args:
      tokens: [B, T] int32. Row b continues what the cache holds of it.
      cache: keys and values of earlier tokens; None starts at position 0 and keeps nothing.
      counts: [B] int32, real tokens in each row of `tokens`; the rest is padding at the end, which takes no position,
        is never attended to and leaves no trace in the cache. None means all T.
      segments: [B, T] int32, runs of equal numbers are sequences packed into a row, each with positions from 0, that do
        not see each other; without a cache only.
      dtype: of the activations; None is the embedding's.
      kernels: what computes attention without a cache, see `self_attention`.
      remat: what a gradient computes again, see `Remat`.

    Returns:
      x: [B, T, D], meaningless at padding.
      cache: with the new tokens, or None.
    """
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ArgumentError(f"tokens has shape {tokens.shape}; it must be [B, T] with at least one token a row.")
    if remat not in get_args(Remat):
        raise ArgumentError(f"remat is {remat!r}; it must be one of {', '.join(get_args(Remat))}.")
    if cache is not None and segments is not None:
        raise ArgumentError("Segments were given beside a cache; packed rows are for training, without one.")
    B, T = tokens.shape
    if cache is not None and counts is None and cache.capacity < T:
        raise ArgumentError(f"{T} tokens a row were given for a cache that holds {cache.capacity}.")
    counts = jnp.full(B, T, jnp.int32) if counts is None else counts
    if segments is None:
        start = jnp.zeros(B, jnp.int32) if cache is None else cache.lengths
        positions = start[:, None] + jnp.arange(T, dtype=jnp.int32)
    else:
        positions = _positions_in_segments(segments)
    rotations = rope_rotations(positions, config)
    x = embed(tokens, params.embedding)
    x = x if dtype is None else x.astype(dtype)
    x, cache = blocks(params.layers, x, rotations, config, cache, counts, segments, kernels=kernels, remat=remat)
    x = rms_norm(x, params.output_norm, config.norm_epsilon)
    return x, None if cache is None else advance(cache, counts)


def blocks(
    layers: tuple[Layer, ...],
    x: Array,
    rotations: tuple[Array, Array],
    config: LlamaConfig,
    cache: KVCache | None,
    counts: Array,
    segments: Array | None = None,
    *,
    kernels: SelfAttention = "xla",
    remat: Remat = "none",
) -> tuple[Array, KVCache | None]:
    """The residual stream `x` [B, T, D] through consecutive layers, whose keys and values `cache` holds.

    Weights and caches in host memory arrive while the layer before is computed, see `llama_jax.offload`. The other
    arguments are as in `hidden_states`.
    """
    earlier = x
    for index, layer in enumerate(layers):
        block = functools.partial(_block, config=config, index=index, kernels=kernels, remat=remat)
        if remat == "block":
            block = jax.checkpoint(block)
        with jax.named_scope(f"layer_{index}"):
            home = cache
            layer, cache = to_device(layer, earlier), fetch_layer(cache, index, earlier)
            earlier = x
            x, cache = block(layer, x, rotations, cache, counts, segments)
            cache = return_layer(cache, index, home)
    return x, cache


def unembed(params: Params, x: Array) -> Array:
    """Logits [..., V] float32 of the hidden states `x` [..., D]."""
    head = params.embedding if params.output_head is None else params.output_head
    with jax.named_scope("output_head"):
        return linear(x, to_device(head, x), dtype=jnp.float32)[..., : params.vocab_size]


def forward(
    params: Params,
    tokens: Array,
    config: LlamaConfig,
    cache: KVCache | None = None,
    counts: Array | None = None,
) -> tuple[Array, KVCache | None]:
    """Logits for every position: `(logits [B, T, V] float32, cache)`. Arguments as in `hidden_states`.

    Generation wants the last position only and training a chunk at a time: compose `hidden_states` and `unembed` there.
    """
    x, cache = hidden_states(params, tokens, config, cache, counts)
    return unembed(params, x), cache
