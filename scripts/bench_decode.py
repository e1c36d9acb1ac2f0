"""Decode speed of a model shape with random weights: tokens/s, bytes/s and the share of the memory's limit.

    python scripts/bench_decode.py --shape llama-3-8b --weights dense Q8_0 Q4_K_M --batch 1 8 --context 2048

Every sequence starts with the cache filled to `--context` minus the steps that are timed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import replace
from typing import Any

import benchmark
import jax
import jax.numpy as jnp
from random_model import QUANTIZATIONS, made_params

from llama_jax import PRESETS, SamplingParams, init_cache, sampling_params, start_decoding, start_state
from llama_jax.config import LlamaConfig
from llama_jax.generate import decode
from llama_jax.model import Params
from llama_jax.roofline import decode_bytes, peak_bandwidth

STEPS = 32


def bench(
    params: Params,
    config: LlamaConfig,
    batch: int,
    context: int,
    repeats: int,
    sampling: SamplingParams | None = None,
) -> dict[str, Any]:
    """One line of results for `batch` sequences of `context` tokens; without `sampling` they are decoded greedily."""
    dtype = params.embedding.dtype
    cache = init_cache(config, batch, context, dtype)
    filled = context - STEPS * (repeats + 2)
    cache = replace(cache, lengths=jnp.full(batch, filled, jnp.int32))
    sampling = sampling_params(batch, temperature=0.0) if sampling is None else sampling
    eos = jnp.zeros(0, jnp.int32)
    state = start_decoding(jnp.zeros((batch, config.vocab_size)), cache, start_state(sampling), sampling, eos)
    step = jax.jit(decode, static_argnames=("config", "max_steps"), donate_argnames="state")
    started = time.perf_counter()
    compiled = step.lower(params, config, state, sampling, eos, STEPS, jnp.int32(STEPS)).compile()
    compile_seconds = time.perf_counter() - started

    def run() -> jax.Array:
        nonlocal state
        state, tokens, *_ = compiled(params, state, sampling, eos, jnp.int32(STEPS))
        return tokens

    seconds = benchmark.median_seconds(run, repeats) / STEPS
    held = batch * (filled + STEPS * (repeats + 2) / 2)
    rate = decode_bytes(params, config, held, dtype.itemsize) / seconds
    peak = peak_bandwidth()
    memory = compiled.memory_analysis()
    return dict(
        batch=batch,
        context=context,
        dtype=str(dtype),
        tokens_per_second=batch / seconds,
        milliseconds=1e3 * seconds,
        gb_per_second=rate / 1e9,
        share_of_limit=rate / peak if peak else None,
        temporary_bytes=memory.temp_size_in_bytes if memory else None,
        peak_bytes=benchmark.peak_memory(),
        compile_seconds=compile_seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=PRESETS, default="llama-3-8b")
    parser.add_argument(
        "--weights", nargs="+", choices=("dense", *QUANTIZATIONS), default=["dense"], help="dense or a packed type"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, nargs="+", default=[2048])
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    config = PRESETS[arguments.shape]
    results: list[dict[str, Any]] = []
    params = None
    for weights, batch, context in itertools.product(arguments.weights, arguments.batch, arguments.context):
        if params is None or results[-1]["weights"] != weights:
            params = None  # gives the memory back first
            params = jax.block_until_ready(made_params(config, weights))
        line = dict(shape=arguments.shape, weights=weights) | bench(params, config, batch, context, arguments.repeats)
        results.append(line)
        share = f"{100 * line['share_of_limit']:.0f} % of the limit" if line["share_of_limit"] else "limit not known"
        peak = f", peak memory {line['peak_bytes'] / 1e9:.2f} GB" if line["peak_bytes"] else ""
        print(
            f"{arguments.shape} {weights} {line['dtype']}, {batch} x {context}: {line['tokens_per_second']:.1f} tok/s, "
            f"{line['milliseconds']:.3f} ms a step, {line['gb_per_second']:.0f} GB/s, {share}{peak}",
            flush=True,
        )
    benchmark.report("decode", results)


if __name__ == "__main__":
    main()
