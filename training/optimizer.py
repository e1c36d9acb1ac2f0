"""Optimisers and learning-rate schedules, built from optax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jax import Array

from llama_jax import checks
from llama_jax.errors import ArgumentError

OptimizerName = Literal["adamw", "muon", "sgd", "lbfgs"]
Schedule = Callable[[Any], Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """What changes the weights, and how fast.

    Attributes:
      name: "adamw" (Loshchilov and Hutter 2019, arXiv:1711.05101); "muon" (Jordan et al. 2024: matrices by orthogonal
        steps, the rest by AdamW); "sgd" with momentum `beta1`; "lbfgs" on full batches, which has no schedule.
      learning_rate: the highest.
      warmup: steps in which the rate rises to it linearly; the first step already takes 1 / warmup of it.
      decay_steps: length of the first cosine; 0 keeps the rate constant after the warm-up.
      decay_restart: each cosine is so many times longer than the one before; 0 means one cosine only, after which the
        rate stays at its lowest (Loshchilov and Hutter 2017, arXiv:1608.03983).
      decay_alpha: the lowest rate as a share of the highest.
      weight_decay: share of a weight that is taken away per step, times the learning rate.
      decay_embedding: whether it falls on the embedding, too, and not on the layers' matrices and the head only.
      decay_all: whether it falls on everything, norms included.
      beta1, beta2, epsilon: of Adam's averages.
      history: pairs of steps and gradients that L-BFGS remembers.
      steps_per_batch: optimiser steps on each batch.
      ggml_2023: llama.cpp's schedule and decay of June 2023: the rate starts at 0, cycles never grow (their factor was
        cut to an integer), all steps of a batch have its first one's rate, of the first batch only one step is made,
        and the decay is not multiplied by the learning rate.
    """

    name: OptimizerName = "adamw"
    learning_rate: float = 1e-3
    warmup: int = 100
    decay_steps: int = 1000
    decay_restart: float = 0.0
    decay_alpha: float = 0.0
    weight_decay: float = 0.1
    decay_embedding: bool = False
    decay_all: bool = False
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    history: int = 10
    steps_per_batch: int = 1
    ggml_2023: bool = False

    def __post_init__(self) -> None:
        if self.name not in get_args(OptimizerName):
            raise ArgumentError(
                f"The optimiser is {self.name!r}; it must be one of {', '.join(get_args(OptimizerName))}."
            )
        checks.number("learning_rate", self.learning_rate, 0.0, allowed="a finite number, 0 or above")
        checks.integer("warmup", self.warmup, 0)
        checks.integer("decay_steps", self.decay_steps, 0)
        if self.decay_restart:
            checks.number("decay_restart", self.decay_restart, 1.0, allowed="0 or a finite number from 1")
        checks.number("decay_alpha", self.decay_alpha, 0.0, 1.0, allowed="from 0 to 1")
        checks.number("weight_decay", self.weight_decay, 0.0, allowed="a finite number, 0 or above")
        for name in ("beta1", "beta2"):
            checks.number(name, getattr(self, name), 0.0, 0.9999999, allowed="from 0 to below 1")
        checks.number("epsilon", self.epsilon, 0.0, allowed="a finite number above 0", positive=True)
        checks.integer("history", self.history, 1)
        checks.integer("steps_per_batch", self.steps_per_batch, 1)


def learning_rate_schedule(options: OptimizerOptions) -> Schedule:
    """Optimiser step (int32 [], from 0) to learning rate (float32 [])."""

    def rate(step: Array) -> Array:
        step = jnp.asarray(step, jnp.int32)
        if options.ggml_2023:
            batch = jnp.maximum(step - 1, 0) // options.steps_per_batch
            step = jnp.where(step == 0, 0, 1 + batch * options.steps_per_batch)
        warm = (step + (0 if options.ggml_2023 else 1)).astype(jnp.float32) / max(options.warmup, 1)
        factor = jnp.where(step < options.warmup, warm, _cosine(step - options.warmup, options))
        return options.learning_rate * factor

    return rate


def _cosine(step: Array, options: OptimizerOptions) -> Array:
    """The share of the highest rate, `step` steps behind the warm-up."""
    length = options.decay_steps
    if not length:
        return jnp.ones((), jnp.float32)
    progress = _cycle_progress(step.astype(jnp.float32), options)
    return options.decay_alpha + (1 - options.decay_alpha) * 0.5 * (1 + jnp.cos(math.pi * progress))


def _cycle_progress(step: Array, options: OptimizerOptions) -> Array:
    """How far into its cosine a step is, 0 to 1. The next one begins after the step that is at 1."""
    length, growth = float(options.decay_steps), options.decay_restart
    if options.ggml_2023:
        growth = max(1.0, float(int(growth)))
    if not growth:
        return jnp.clip(step / length, 0.0, 1.0)
    # Cycle n begins behind length * (1 + growth + ... + growth^(n-1)).
    n = 64 if growth > 1 else 1
    begins, lengths = [0.0], [length]
    for _ in range(n - 1):
        begins.append(begins[-1] + lengths[-1])
        lengths.append(min(lengths[-1] * growth, 1e30))
    if growth == 1:
        inside = step - length * jnp.maximum(jnp.ceil(step / length) - 1, 0)
        return inside / length
    table = jnp.asarray(begins, jnp.float32)
    cycle = jnp.maximum(jnp.searchsorted(table, step, side="left") - 1, 0)
    return (step - table[cycle]) / jnp.asarray(lengths, jnp.float32)[cycle]


def _decayed(params: Any, options: OptimizerOptions) -> Any:
    """Which leaves the decay falls on: matrices but the embedding, unless all were asked for."""

    def decays(path: tuple[Any, ...], leaf: Array) -> bool:
        spared = not options.decay_embedding and "embedding" in jax.tree_util.keystr(path)
        return options.decay_all or (leaf.ndim >= 2 and not spared)

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(options: OptimizerOptions) -> optax.GradientTransformationExtraArgs:
    """The optax transformation; clipping is the training step's. Its state is all that an optimiser remembers."""

    def mask(params: Any) -> Any:
        return _decayed(params, options)

    schedule = learning_rate_schedule(options)
    decay = options.weight_decay
    if options.name == "lbfgs":
        return _under_standard_promotion(optax.lbfgs(memory_size=options.history))
    if options.name == "sgd":
        rule = optax.trace(decay=options.beta1, nesterov=True) if options.beta1 else optax.identity()
    else:
        rule = optax.scale_by_adam(b1=options.beta1, b2=options.beta2, eps=options.epsilon)
    if options.ggml_2023 and options.learning_rate:
        decay /= options.learning_rate
    rest = optax.chain(rule, optax.add_decayed_weights(decay, mask=mask), optax.scale_by_learning_rate(schedule))
    if options.name == "muon":
        muon = optax.contrib.muon(schedule, weight_decay=decay, consistent_rms=0.2)
        rest = optax.partition({"matrix": muon, "rest": rest}, _kinds)
    return _under_standard_promotion(rest)


def _under_standard_promotion(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The same where jax forbids implicit promotion of types, which optax relies on."""
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return inner.init(params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _kinds(params: Any) -> Any:
    """The label "matrix" for what Muon is for, the layers' matrices; "rest" for embedding, head and norms."""

    def kind(path: tuple[Any, ...], leaf: Array) -> str:
        return "matrix" if leaf.ndim == 2 and "layers" in jax.tree_util.keystr(path) else "rest"

    return jax.tree_util.tree_map_with_path(kind, params)
