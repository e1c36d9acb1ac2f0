"""Attention kernels on their own: time on the device and share of the limit.

    python scripts/bench_attention.py --decode 1x2048 1x8192 32x8192
    python scripts/bench_attention.py --decode 1x8192 --block 32 64 128 --programs 132 264 528 --warps 2 4 8

Decode attention reads the filled slots once: its limit is the memory's. Several caches are used in turn, in one
program, so that neither launches nor the second-level cache count. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import benchmark
import jax
import jax.numpy as jnp
from jax import Array

from llama_jax.kernels.attention import attention
from llama_jax.kernels.decode_attention import decode_attention, split_count
from llama_jax.roofline import peak_bandwidth

HEADS, KV_HEADS, WIDTH = 32, 8, 128
BYTES_IN_TURN = 2e9


def decode_seconds(B: int, S: int, kernels: str, options: dict[str, Any]) -> float:
    """Seconds of one call at a full cache of bfloat16."""
    n = max(2, min(64, int(BYTES_IN_TURN / (4 * B * KV_HEADS * S * WIDTH))))
    keys = jax.random.split(jax.random.key(0), 2 * n + 1)
    caches = [jax.random.normal(key, (B, KV_HEADS, S, WIDTH), jnp.bfloat16) for key in keys[1:]]
    q = jax.random.normal(keys[0], (B, HEADS, WIDTH), jnp.bfloat16)
    lengths = jnp.full(B, S - 1, jnp.int32)
    counts = jnp.ones(B, jnp.int32)

    def all_caches(q: Array, caches: list[Array]) -> tuple[Array, list[Array]]:
        new = jnp.ones((B, KV_HEADS, WIDTH), jnp.bfloat16)
        for i in range(0, 2 * n, 2):
            k, v = caches[i], caches[i + 1]
            if kernels == "triton":
                q, caches[i], caches[i + 1] = decode_attention(q, new, new, k, v, lengths, counts, **options)
            else:
                q = attention(q[:, None], k, v, lengths)[:, 0]
        return q, caches

    step = jax.jit(all_caches, donate_argnums=1)

    def run() -> Array:
        nonlocal caches
        out, caches = step(q, caches)
        return out

    return benchmark.median_seconds(run, 7) / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", nargs="+", default=["1x2048", "1x8192", "32x8192"], metavar="BxS")
    parser.add_argument("--block", type=int, nargs="+", default=[64])
    parser.add_argument("--programs", type=int, nargs="+", default=[264])
    parser.add_argument("--warps", type=int, nargs="+", default=[4])
    parser.add_argument("--xla", action="store_true", help="also the plain operations")
    arguments = parser.parse_args()
    results = []
    for size in arguments.decode:
        B, S = map(int, size.split("x"))
        variants = [("triton", v) for v in itertools.product(arguments.block, arguments.programs, arguments.warps)]
        for kernels, (block, programs, warps) in variants + [("xla", (0, 0, 0))] * arguments.xla:
            splits = split_count(B * KV_HEADS, S, block, programs) if block else 0
            seconds = decode_seconds(B, S, kernels, dict(block=block, n_splits=splits, n_warps=warps))
            rate = 4 * B * KV_HEADS * S * WIDTH / seconds
            peak = peak_bandwidth()
            line = dict(
                kernel="decode_attention", kernels=kernels, sequences=B, slots=S,
                block=block, splits=splits, warps=warps,
                microseconds=1e6 * seconds, tb_per_second=rate / 1e12, share_of_limit=rate / peak if peak else None,
            )  # fmt: skip
            results.append(line)
            print(
                f"decode B{B} S{S} {kernels} block {block} splits {splits} warps {warps}: "
                f"{line['microseconds']:.1f} us, {line['tb_per_second']:.2f} TB/s"
            )
    benchmark.report("attention", results)


if __name__ == "__main__":
    main()
