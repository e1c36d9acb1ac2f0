"""A toy in the manner of llama.cpp's baby-llama of 2023: a tiny model learns to draw sine waves, in under a minute.

    python -m training.baby_llama            # all weights
    python -m training.baby_llama --lora 2   # then an adapter of rank 2, which turns the model to steeper waves

A wave is a row of tokens 0 ... 15, the heights of a sine of random phase. The model is shown half of a new wave and
draws the other half.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax import checks
from llama_jax.config import LlamaConfig
from llama_jax.lora import init_lora, with_lora
from llama_jax.model import Params, forward, init_params
from training.finetune_lora import adapted
from training.optimizer import OptimizerOptions, make_optimizer
from training.program import run_program
from training.step import StepOptions, all_trained, init_state, make_train_step

HEIGHTS, T, B = 16, 32, 16
CONFIG = LlamaConfig(
    vocab_size=HEIGHTS, d_model=32, d_ff=96, n_layers=1, n_heads=4, n_kv_heads=4, head_dim=8, context_length=T
)


def waves(seed: int, n: int, frequency: float) -> np.ndarray:
    """[n, T + 1] int32: heights of sines that turn by `frequency` radians from one token to the next."""
    phases = np.random.default_rng(seed).uniform(0, 2 * np.pi, (n, 1))
    sines = np.sin(phases + frequency * np.arange(T + 1))
    return np.round((sines + 1) / 2 * (HEIGHTS - 1)).astype(np.int32)


def learn(trained: Any, fixed: Any, frequency: float, steps: int, assembly: Any = all_trained) -> tuple[Any, float]:
    """The weights after some steps on new waves, and the last loss in nats a token."""
    options = StepOptions()
    optimizer = make_optimizer(OptimizerOptions(learning_rate=1e-2, warmup=10, decay_steps=steps, decay_all=False))
    step = jax.jit(make_train_step(CONFIG, optimizer, options, assembly(options)), donate_argnums=0)
    state = init_state(jax.tree.map(jnp.copy, trained), optimizer, options)
    loss = float("nan")
    for i in range(steps):
        rows = waves(i, B, frequency)
        batch = dict(tokens=jnp.asarray(rows[:, :-1]), targets=jnp.asarray(rows[:, 1:]), weights=jnp.ones((B, T)))
        state, metrics = step(state, fixed, batch, jax.random.key(0))
        loss = float(metrics["loss"])
    return state.params, loss


def draw(params: Params, frequency: float, seed: int = 10**6) -> tuple[np.ndarray, np.ndarray]:
    """A wave's heights and the model's: the first half given, the second drawn token by token, both [T]."""
    wave = waves(seed, 1, frequency)[0, :T]
    drawn = wave.copy()
    heights = jax.jit(lambda params, tokens: jnp.argmax(forward(params, tokens[None], CONFIG)[0][0], axis=-1))
    for i in range(T // 2, T):
        drawn[i] = heights(params, jnp.asarray(drawn))[i - 1]
    return wave, drawn


def picture(wave: np.ndarray, drawn: np.ndarray) -> str:
    """The wave as dots and what was drawn as stars, one token a line."""
    lines = []
    for i, (height, star) in enumerate(zip(wave.tolist(), drawn.tolist(), strict=True)):
        line = [" "] * HEIGHTS
        line[height] = "."
        line[star] = "*" if i >= T // 2 else "."
        lines.append("|" + "".join(line) + "|")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options."""
    parser.add_argument("--steps", type=int, default=300, help="default 300")
    parser.add_argument("--lora", type=int, default=0, metavar="R", help="train an adapter of rank R, too")
    parser.add_argument("--seed", type=int, default=0)


def show(arguments: argparse.Namespace) -> None:
    """Trains, and draws what was learned beside what was to be learned."""
    checks.integer("--steps", arguments.steps, 1)
    params, loss = learn(init_params(jax.random.key(arguments.seed), CONFIG), None, 0.4, arguments.steps)
    wave, drawn = draw(params, 0.4)
    print(f"all weights, {arguments.steps} steps: loss {loss:.3f} nats a token\n{picture(wave, drawn)}")
    if arguments.lora:
        adapter = init_lora(jax.random.key(arguments.seed), CONFIG, rank=arguments.lora, alpha=2.0 * arguments.lora)
        adapter, loss = learn(adapter, params, 0.8, arguments.steps, adapted)
        wave, drawn = draw(with_lora(params, adapter), 0.8)
        print(f"adapter of rank {arguments.lora}: loss {loss:.3f} nats a token\n{picture(wave, drawn)}")


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns 0, or 1 for a user's mistake."""
    return run_program("baby_llama", __doc__, add_arguments, show, argv)


if __name__ == "__main__":
    sys.exit(main())
