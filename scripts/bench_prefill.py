"""Prompt speed of a model shape with random weights: tokens/s, operations/s and the share of the arithmetic's limit.

    python scripts/bench_prefill.py --shape llama-3-8b --tokens 2048 --chunk 2048

Runs `--tokens` of one prompt through the model in chunks, as a session does. The last line is JSON.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import benchmark
import jax
import jax.numpy as jnp
from random_model import QUANTIZATIONS, made_params

from llama_jax import PRESETS, init_cache
from llama_jax.config import LlamaConfig
from llama_jax.generate import prefill
from llama_jax.model import Params
from llama_jax.roofline import peak_operations, prompt_operations


def bench(params: Params, config: LlamaConfig, tokens: int, chunk: int, repeats: int) -> dict[str, Any]:
    """One line of results."""
    cache = init_cache(config, 1, tokens, params.embedding.dtype)
    step = jax.jit(prefill, static_argnames="config", donate_argnames="cache")
    prompt = jax.random.randint(jax.random.key(1), (1, chunk), 0, config.vocab_size)
    counts = jnp.full(1, chunk, jnp.int32)
    started = time.perf_counter()
    compiled = step.lower(params, prompt, config, cache, counts).compile()
    compile_seconds = time.perf_counter() - started

    def run() -> jax.Array:
        nonlocal cache
        cache = replace(cache, lengths=jnp.zeros(1, jnp.int32))
        logits = jnp.zeros(())
        for _ in range(tokens // chunk):
            logits, cache = compiled(params, prompt, cache, counts)
        return logits

    memory = compiled.memory_analysis()
    seconds = benchmark.median_seconds(run, repeats)
    rate = prompt_operations(config, tokens) / seconds
    peak = peak_operations()
    return dict(
        tokens=tokens,
        chunk=chunk,
        dtype=str(params.embedding.dtype),
        tokens_per_second=tokens / seconds,
        milliseconds=1e3 * seconds,
        tflop_per_second=rate / 1e12,
        share_of_limit=rate / peak if peak else None,
        temporary_bytes=memory.temp_size_in_bytes if memory else None,
        peak_bytes=benchmark.peak_memory(),
        compile_seconds=compile_seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=PRESETS, default="llama-3-8b")
    parser.add_argument("--weights", choices=("dense", *QUANTIZATIONS), default="dense", help="dense or a packed type")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048])
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    config = PRESETS[arguments.shape]
    params = jax.block_until_ready(made_params(config, arguments.weights))
    results = []
    for tokens in arguments.tokens:
        chunk = min(arguments.chunk, tokens)
        line = dict(shape=arguments.shape, weights=arguments.weights) | bench(
            params, config, tokens, chunk, arguments.repeats
        )
        results.append(line)
        share = f", {100 * line['share_of_limit']:.0f} % of the limit" if line["share_of_limit"] else ""
        print(
            f"{arguments.shape} {arguments.weights} {line['dtype']}, {tokens} tokens in chunks of {chunk}: "
            f"{line['tokens_per_second']:.0f} tok/s, {line['tflop_per_second']:.0f} TFLOP/s{share}"
        )
    benchmark.report("prefill", results)


if __name__ == "__main__":
    main()
