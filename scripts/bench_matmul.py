"""Products of a few rows of activations with weights, bfloat16 and packed: TB/s of weight bytes.

    python scripts/bench_matmul.py --types Q4_0 Q4_K --rows 1 4 16
    python scripts/bench_matmul.py --types Q4_K --sweep

Each time is of one program that multiplies with several weights in turn, more bytes than the card's cache holds, each
product feeding the next, so that neither launches nor caches count. `--sweep` tries blocks of the kernel that serves
the number of rows. The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import benchmark
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from random_model import random_packed

from llama_jax.kernels.backend import default_kernels
from llama_jax.kernels.quantized_matmul import VECTOR_ROWS, Blocks, quantized_matmul
from llama_jax.quantization import PACKED_TYPES, row_bytes
from llama_jax.roofline import peak_bandwidth

SHAPES = [(4096, 28672), (14336, 4096), (4096, 6144), (4096, 128256)]  # in x out
DENSE = {"bf16-einsum": "bi,oi->bo", "bf16-reduce": None}
VECTOR_SWEEP = ((1, 2, 4, 8), (32, 64, 128, 256, 512), (1, 2, 4), (1,))  # rows, groups, warps, stages
TILE_SWEEP = ((64, 128), (8, 16, 32), (4, 8), (1, 2))
CACHE_BYTES = 200e6


def dense_product(kind: str, x: Array, weight: Array) -> Array:
    """A bfloat16 product as XLA makes it: a matrix product, or one multiply-and-reduce per row."""
    if DENSE[kind] is not None:
        return jnp.einsum(DENSE[kind], x, weight, preferred_element_type=jnp.float32).astype(x.dtype)
    wide = x[:, None].astype(jnp.float32) * weight[None].astype(jnp.float32)
    return wide.sum(axis=-1).astype(x.dtype)


def seconds_each(product: Callable[[Array, Any], Array], x: Array, weights: list[Any], repeats: int) -> float:
    """Seconds of one product, from a program with several rounds over all weights."""
    rounds = 4

    @jax.jit
    def run(x: Array, weights: list[Any]) -> Array:
        def one_round(_: Any, x: Array) -> Array:
            for weight in weights:
                # The next product needs one number of this one; x stays what it was.
                x = x + (product(x, weight)[:, :1] * 0).astype(x.dtype)
            return x

        return jax.lax.fori_loop(0, rounds, one_round, x)

    return benchmark.median_seconds(lambda: run(x, weights), repeats) / (rounds * len(weights))


def bench(kind: str, shape: tuple[int, int], rows: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Lines of results for one kind of weight of a shape [out, in] and a number of rows."""
    packed = kind in PACKED_TYPES
    out, columns = shape
    size = out * row_bytes(kind if packed else "BF16", columns)
    n = min(32, max(2, int(np.ceil(CACHE_BYTES / size))))
    if packed:
        weights = [random_packed(kind, shape, seed) for seed in range(n)]
    else:
        weights = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(n)]
    x = jax.random.normal(jax.random.key(n), (rows, columns), jnp.bfloat16)
    nbytes = weights[0].nbytes
    sweep = itertools.product(*(VECTOR_SWEEP if rows <= VECTOR_ROWS else TILE_SWEEP)) if arguments.sweep else []
    candidates = [Blocks(*blocks) for blocks in sweep] if packed and arguments.sweep else [None]
    results = []
    for blocks in candidates:
        product = (
            functools.partial(quantized_matmul, blocks=blocks) if packed else functools.partial(dense_product, kind)
        )
        line = dict(kind=kind, inputs=columns, outputs=out, rows=rows, blocks=blocks and blocks._asdict())
        try:
            seconds = seconds_each(product, x, weights, arguments.repeats)
        except jax.errors.JaxRuntimeError as error:  # blocks that do not fit in registers or shared memory
            print(f"{kind} {blocks}: {str(error).splitlines()[0][:100]}")
            results.append(line | dict(error=str(error).splitlines()[0]))
            continue
        rate, peak = nbytes / seconds, peak_bandwidth()
        share = rate / peak if peak else None
        results.append(line | dict(microseconds=1e6 * seconds, tb_per_second=rate / 1e12, share_of_limit=share))
        limit = f", {100 * share:.0f} % of the limit" if share else ""
        note = f" {tuple(blocks)}" if blocks else ""
        print(f"{kind:11} {columns} x {out}, {rows} rows{note}: {1e6 * seconds:.1f} us, {rate / 1e12:.3f} TB/s{limit}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [*DENSE, *PACKED_TYPES]
    parser.add_argument(
        "--types", nargs="+", choices=kinds, default=[*DENSE, "Q8_0", "Q4_0", "Q4_K", "Q6_K"], metavar="TYPE"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="rows of activations")
    parser.add_argument("--shapes", nargs="+", default=[f"{i}x{o}" for i, o in SHAPES], help="inputs x outputs")
    parser.add_argument("--sweep", action="store_true", help="try many blocks of the kernel")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    print(f"packed weights: {default_kernels().packed_products}")
    results = []
    for text in arguments.shapes:
        columns, out = (int(number) for number in text.split("x"))
        for kind, rows in itertools.product(arguments.types, arguments.rows):
            results += bench(kind, (out, columns), rows, arguments)
    best = [line for line in results if "tb_per_second" in line]
    if arguments.sweep and best:
        for key, lines in itertools.groupby(best, lambda line: (line["kind"], line["inputs"], line["outputs"])):
            top = max(lines, key=lambda line: line["tb_per_second"])
            print(f"best of {key}: {top['blocks']}, {top['tb_per_second']:.3f} TB/s")
    benchmark.report("matmul", results)


if __name__ == "__main__":
    main()
