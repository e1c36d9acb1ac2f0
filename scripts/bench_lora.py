"""What adapters cost in decoding: a shape with random weights, bare, with one and two adapters beside it, and merged.

    python scripts/bench_lora.py --shape llama-3-8b --weights dense Q4_K_M --rank 16 --batch 1 8

Adapters change every matrix of every layer. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import benchmark
import jax
from bench_decode import bench
from random_model import QUANTIZATIONS, random_params

from llama_jax import PRESETS, init_lora, merge_lora, with_lora
from llama_jax.model import join_projections


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=PRESETS, default="llama-3-8b")
    parser.add_argument("--weights", nargs="+", choices=("dense", *QUANTIZATIONS), default=["dense"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    config = PRESETS[arguments.shape]
    results: list[dict[str, Any]] = []
    for weights, batch in itertools.product(arguments.weights, arguments.batch):
        base = random_params(config, None if weights == "dense" else weights)
        base = jax.block_until_ready(join_projections(base))
        first, second = (init_lora(jax.random.key(i), config, rank=arguments.rank) for i in range(2))
        one = with_lora(base, first)
        cases = {"none": base, "one": one, "two": with_lora(one, second)}
        if weights == "dense":
            cases["merged"] = merge_lora(one)
        for adapters, params in cases.items():
            speed = bench(params, config, batch, arguments.context, arguments.repeats)
            line = dict(shape=arguments.shape, weights=weights, adapters=adapters, rank=arguments.rank) | speed
            results.append(line)
            share = line["tokens_per_second"] / next(
                r["tokens_per_second"] for r in results if (r["weights"], r["batch"]) == (weights, batch)
            )
            print(
                f"{arguments.shape} {weights}, {batch} x {arguments.context}, adapters {adapters}: "
                f"{line['tokens_per_second']:.1f} tok/s, {100 * share:.0f} % of those without",
                flush=True,
            )
    benchmark.report("lora", results)


if __name__ == "__main__":
    main()
