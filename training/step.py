"""One training step: gradients of a batch, in parts if need be, and the optimiser's update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from llama_jax import checks
from llama_jax.config import LlamaConfig
from llama_jax.errors import ArgumentError
from llama_jax.kernels.attention import SelfAttention
from llama_jax.linear import Joined
from llama_jax.losses import summed_token_losses
from llama_jax.model import Layer, Params, Remat, hidden_states

Batch = Mapping[str, Array]
"""tokens, targets [B, T] int32, weights [B, T] float32 and, for packed rows, segments [B, T] int32."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """How a step computes.

    Attributes:
      dtype: "bfloat16" or "float32", of activations and of the weights that they meet; the weights that are trained and
        the optimiser's state are float32 whatever it is.
      attention: see `llama_jax.kernels.attention.self_attention`.
      remat: what the gradient computes again instead of keeping it, see `llama_jax.model.Remat`.
      fused: multiply with wq, wk, wv and with w_gate, w_up as one matrix each; for one device.
      accumulate: parts of a batch that are computed one after the other; the result is that of the whole batch.
      clip: largest norm of the gradient, longer ones are shortened to it; 0 leaves all as they are.
      z_loss: see `llama_jax.losses.head_loss`.
      dropout: share of the elements of the layers' matrices that are zero in a part of a batch (DropConnect, Wan et al.
        2013); each part has its own.
      average: decay of an exponential moving average of the weights, which is what is saved; 0 keeps none.
      summed: optimise the sum over tokens instead of the mean, as llama.cpp did in June 2023.
    """

    dtype: str = "float32"
    attention: SelfAttention = "xla"
    remat: Remat = "none"
    fused: bool = False
    accumulate: int = 1
    clip: float = 1.0
    z_loss: float = 0.0
    dropout: float = 0.0
    average: float = 0.0
    summed: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float32"):
            raise ArgumentError(f"The dtype of training is {self.dtype!r}; it must be bfloat16 or float32.")
        checks.integer("accumulate", self.accumulate, 1)
        checks.number("clip", self.clip, 0.0, allowed="a finite number, 0 or above")
        checks.number("z_loss", self.z_loss, 0.0, allowed="a finite number, 0 or above")
        checks.number("dropout", self.dropout, 0.0, 0.99, allowed="from 0 to 0.99")
        checks.number("average", self.average, 0.0, 0.999999, allowed="from 0 to below 1")


@struct.dataclass
class TrainState:
    """What a step changes.

    `params` are the weights that are trained, float32; `average` is their moving average or None; `step` counts batches
    and `skipped` those whose gradient was not finite, both int32 [].
    """

    params: Any
    average: Any
    optimizer: optax.OptState
    step: Array
    skipped: Array


def init_state(params: Any, optimizer: optax.GradientTransformation, options: StepOptions) -> TrainState:
    """The state before the first step."""
    return TrainState(
        params=params,
        average=jax.tree.map(jnp.copy, params) if options.average else None,
        optimizer=optimizer.init(params),
        step=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
    )


Assemble = Callable[[Any, Any, Array], Params]
"""`(trained weights, fixed weights, key) -> all weights as the model takes them`."""


def all_trained(options: StepOptions) -> Assemble:
    """Every weight is trained: in the step's dtype, with dropout, projections fused if asked for."""

    def assemble(trained: Any, fixed: Any, key: Array) -> Params:
        layers = jax.tree.map(lambda w: w.astype(options.dtype) if w.ndim == 2 else w, trained.layers)
        if options.dropout:
            layers = _drop_weights(layers, key, options.dropout)
        params = trained.replace(layers=layers)
        return params.replace(layers=tuple(map(_fused, params.layers))) if options.fused else params

    return assemble


def _fused(layer: Layer) -> Layer:
    """A layer with wq, wk, wv and w_gate, w_up joined: inside the step, so that the gradients are divided again."""

    def joined(*weights: Array) -> Joined:
        return Joined(jnp.concatenate(weights), tuple(weight.shape[0] for weight in weights))

    return dataclasses.replace(
        layer, wq=joined(layer.wq, layer.wk, layer.wv), wk=None, wv=None, w_gate=joined(layer.w_gate, layer.w_up),
        w_up=None,
    )  # fmt: skip


def _drop_weights(layers: Any, key: Array, rate: float) -> Any:
    """The matrices with a share `rate` of their elements zero and the rest larger by 1 / (1 - rate)."""
    weights, structure = jax.tree.flatten(layers)

    def drop(w: Array, key: Array) -> Array:
        kept = jax.random.bits(key, w.shape, jnp.uint8) >= round(256 * rate)
        return jnp.where(kept, w / (1 - rate), jnp.zeros((), w.dtype))

    keys = jax.random.split(key, len(weights))
    dropped = [drop(w, k) if w.ndim == 2 else w for w, k in zip(weights, keys, strict=True)]
    return jax.tree.unflatten(structure, dropped)


def batch_sums(
    params: Params, batch: Batch, config: LlamaConfig, options: StepOptions
) -> tuple[Array, tuple[Array, Array]]:
    """`(total loss, (cross-entropy, weight))` of a batch, each summed over its tokens, float32 []."""
    x, _ = hidden_states(
        params, batch["tokens"], config, segments=batch.get("segments"), dtype=options.dtype,
        kernels=options.attention, remat=options.remat,
    )  # fmt: skip
    total, cross_entropy = summed_token_losses(params, x, batch["targets"], batch["weights"], options.z_loss)
    return total, (cross_entropy, jnp.sum(batch["weights"]))


def gradients(
    trained: Any, fixed: Any, batch: Batch, key: Array, assemble: Assemble, config: LlamaConfig, options: StepOptions
) -> tuple[Any, Array, Array, Array]:
    """`(gradient, total, cross-entropy, weight)`, all summed over the batch's tokens, in float32.

    The parts of a batch are added up as sums over tokens, never as means: a part with few tokens counts for few.
    """

    @partial(jax.value_and_grad, has_aux=True)
    def sums(trained: Any, part: Batch, key: Array):
        return batch_sums(assemble(trained, fixed, key), part, config, options)

    n = options.accumulate
    if n == 1:
        (total, (cross_entropy, weight)), gradient = sums(trained, batch, key)
        return gradient, total, cross_entropy, weight

    def add(carry: Any, inputs: Any) -> tuple[Any, None]:
        part, key = inputs
        (total, (cross_entropy, weight)), gradient = sums(trained, part, key)
        return jax.tree.map(jnp.add, carry, (gradient, total, cross_entropy, weight)), None

    zero = jnp.zeros((), jnp.float32)
    carry = (jax.tree.map(jnp.zeros_like, trained), zero, zero, zero)
    return jax.lax.scan(add, carry, (_parts(batch, n), jax.random.split(key, n)))[0]


def total_loss(
    trained: Any, fixed: Any, batch: Batch, key: Array, assemble: Assemble, config: LlamaConfig, options: StepOptions
) -> Array:
    """The loss that `gradients` are of, summed over the batch's tokens, float32 []."""
    parts = _parts(batch, options.accumulate)

    def add(total: Array, inputs: Any) -> tuple[Array, None]:
        part, key = inputs
        return total + batch_sums(assemble(trained, fixed, key), part, config, options)[0], None

    return jax.lax.scan(add, jnp.zeros((), jnp.float32), (parts, jax.random.split(key, options.accumulate)))[0]


def _parts(batch: Batch, n: int) -> Batch:
    """[B, T] to [n, B / n, T]. Row r belongs to part r mod n, so that each part lies on a mesh as the batch does."""
    B = batch["tokens"].shape[0]
    if B % n:
        raise ArgumentError(f"A batch of {B} rows cannot be accumulated in {n} parts of the same size.")
    return {name: array.reshape(B // n, n, *array.shape[1:]).swapaxes(0, 1) for name, array in batch.items()}


def make_train_step(
    config: LlamaConfig,
    optimizer: optax.GradientTransformationExtraArgs,
    options: StepOptions,
    assemble: Assemble | None = None,
    *,
    schedule: Callable[[Array], Array] | None = None,
    line_search: bool = False,
) -> Callable[[TrainState, Any, Batch, Array], tuple[TrainState, dict[str, Array]]]:
    """`step(state, fixed, batch, key) -> (state, metrics)`, to be jitted with `state` donated.

    A step whose loss or gradient is not finite changes nothing but the counts. `fixed` are weights that stay as they
    are (None without adapters). The key is that of the whole run; each step folds its number in.

    Args:
      schedule: the optimiser's, for the report.
      line_search: the optimiser wants the loss as a function, as L-BFGS does; gradients are then never shortened, and
        the batch should be the same in every step.

    Returns:
      metrics: float32 []: loss (nats a token), gradient_norm, tokens (targets that counted), skipped (0 or 1) and, with
        a schedule, learning_rate.
    """
    assemble = assemble or all_trained(options)

    def step(state: TrainState, fixed: Any, batch: Batch, key: Array) -> tuple[TrainState, dict[str, Array]]:
        key = jax.random.fold_in(key, state.step)
        gradient, total, cross_entropy, weight = gradients(state.params, fixed, batch, key, assemble, config, options)
        count = jnp.maximum(weight, 1.0)
        norm = optax.tree.norm(gradient)
        scale = jnp.ones((), jnp.float32) if options.summed else 1 / count
        norm = norm * scale
        finite = jnp.isfinite(norm) & jnp.isfinite(total)
        if options.clip and not line_search:
            scale = scale * jnp.minimum(1.0, options.clip / jnp.maximum(norm, 1e-30))
        gradient = jax.tree.map(lambda g: g * scale, gradient)
        extra = {}
        if line_search:

            def value(params: Any) -> Array:
                return total_loss(params, fixed, batch, key, assemble, config, options) * scale

            extra = dict(value=total * scale, grad=gradient, value_fn=value)
        updates, moments = optimizer.update(gradient, state.optimizer, state.params, **extra)
        params = optax.apply_updates(state.params, updates)
        average = state.average
        if options.average:
            # A young average forgets the first weights sooner.
            age = (state.step - state.skipped).astype(jnp.float32)
            decay = jnp.minimum(options.average, (1 + age) / (10 + age))
            average = jax.tree.map(lambda a, w: decay * a + (1 - decay) * w, average, params)
        new = (params, average, moments)
        old = (state.params, state.average, state.optimizer)
        params, average, moments = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        metrics = dict(
            loss=cross_entropy / count,
            gradient_norm=norm,
            tokens=weight,
            skipped=(~finite).astype(jnp.float32),
        )
        if schedule is not None:
            metrics["learning_rate"] = schedule(state.step - state.skipped)
        return TrainState(
            params=params,
            average=average,
            optimizer=moments,
            step=state.step + 1,
            skipped=state.skipped + (~finite).astype(jnp.int32),
        ), metrics

    return step


def operations_per_token(config: LlamaConfig, T: int, *, adapter: bool = False) -> float:
    """Multiplications and additions that training needs for a token of a row of T: what MFU is stated by.

    Six per weight, the looked-up embedding not counted, and causal attention forward and backward; with an adapter four
    per weight, since the model's own have no gradient.
    """
    weights = config.n_parameters - (0 if config.tied_embeddings else config.vocab_size * config.d_model)
    return (4.0 if adapter else 6.0) * weights + 6.0 * config.n_layers * T * config.n_heads * config.head_dim
