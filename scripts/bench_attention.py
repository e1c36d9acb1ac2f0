"""Attention kernels on their own: time on the device and share of the limit.

    python scripts/bench_attention.py --decode 1x2048 1x8192 32x8192
    python scripts/bench_attention.py --decode 1x8192 --block 32 64 128 --programs 132 264 528 --warps 2 4 8
    python scripts/bench_attention.py --prefill 4x4096 --cudnn
    python scripts/bench_attention.py --prefill 4x4096 --forward 128x64x8x3 128x128x8x2 --dkv 64x64x4x2 --dq 64x64x4x2

Decode attention reads the filled slots once: its limit is the memory's. Several caches are used in turn, in one
program, so that the second-level cache does not count; what counts is the time of the kernels on the device.

Prompt attention is causal and in bfloat16; 2 B H T^2 E operations forward, 3.5 times that forward and backward. A
program calls it several times. Tiles are queries x keys x warps x stages; each kernel's are varied
alone while the others keep their defaults, the backward ones in forward and backward together. The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import benchmark
import jax
import jax.numpy as jnp
from jax import Array, lax

from llama_jax.kernels.attention import attention
from llama_jax.kernels.decode_attention import decode_attention, split_count
from llama_jax.kernels.flash_attention import Tiles, Tiling, default_tiling, flash_attention
from llama_jax.roofline import peak_bandwidth, peak_operations

HEADS, KV_HEADS, WIDTH = 32, 8, 128
BYTES_IN_TURN = 3e8  # several times the card's cache
CALLS_IN_TURN = 8


def decode_seconds(B: int, S: int, kernels: str, options: dict[str, Any]) -> float:
    """Seconds of one call at a full cache of bfloat16: of the kernels on the device, as the profiler sees them."""
    n = max(2, min(64, int(BYTES_IN_TURN / (4 * B * KV_HEADS * S * WIDTH))))
    keys = jax.random.split(jax.random.key(0), 2 * n + 1)
    caches = [jax.random.normal(key, (B, KV_HEADS, S, WIDTH), jnp.bfloat16) for key in keys[1:]]
    q = jax.random.normal(keys[0], (B, HEADS, WIDTH), jnp.bfloat16)
    lengths = jnp.full(B, S - 1, jnp.int32)
    counts = jnp.ones(B, jnp.int32)

    def all_caches(q: Array, caches: list[Array]) -> tuple[Array, list[Array]]:
        new = jnp.ones((B, KV_HEADS, WIDTH), jnp.bfloat16)
        angles = (jnp.ones((B, 1, WIDTH // 2)), jnp.zeros((B, 1, WIDTH // 2)))
        for i in range(0, 2 * n, 2):
            k, v = caches[i], caches[i + 1]
            if kernels == "triton":
                q, caches[i], caches[i + 1] = decode_attention(q, new, new, k, v, lengths, counts, angles, **options)
            else:
                q = attention(q[:, None], k, v, lengths)[:, 0]
        return q, caches

    step = jax.jit(all_caches, donate_argnums=1)

    def run() -> Array:
        nonlocal caches
        out, caches = step(q, caches)
        return out

    jax.block_until_ready(run())
    spent = benchmark.kernels(run)
    named = [each for name, each in spent.items() if name.startswith("decode_attention")]
    return sum(each.seconds for each in named or spent.values()) / n  # plain operations have no name of their own


def prefill_seconds(
    function: Callable[..., Array], B: int, T: int, shape: tuple[int, int, int], backward: bool, heads_first: bool
) -> float:
    """Seconds of one `function(q, k, v)`, with its gradients if `backward`.

    q is [B, T, H, E], k and v [B, K, T, E] with `heads_first`, else [B, T, K, E].
    """
    H, K, E = shape

    def make(key: Array, *sizes: int) -> Array:
        return jax.random.normal(key, sizes, jnp.bfloat16)

    q, do = (make(key, B, T, H, E) for key in jax.random.split(jax.random.key(0)))
    kv = (B, K, T, E) if heads_first else (B, T, K, E)
    k, v = (make(key, *kv) for key in jax.random.split(jax.random.key(1)))

    def one(_: Any, carry: Any) -> Any:
        (q, k, v, do), _ = lax.optimization_barrier(carry)  # each call waits for the one before
        result = jax.vjp(function, q, k, v)[1](do) if backward else function(q, k, v)
        return (q, k, v, do), result

    start = (q, k, v) if backward else q
    step = jax.jit(lambda inputs: lax.fori_loop(0, CALLS_IN_TURN, one, (inputs, start))[1])
    return benchmark.median_seconds(lambda: step((q, k, v, do)), 7) / CALLS_IN_TURN


def _flash(q: Array, k: Array, v: Array, tiling: Tiling) -> Array:
    return flash_attention(q, k, v, jnp.zeros(q.shape[0], jnp.int32), tiling=tiling)


def _cudnn(q: Array, k: Array, v: Array) -> Array:
    """cuDNN's, called from jax, with k and v [B, T, K, E] as it wants them."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def _tiles(text: str) -> Tiles:
    return Tiles(*map(int, text.split("x")))


def _text(tiles: Tiles) -> str:
    return f"{tiles.block_q}x{tiles.block_k}x{tiles.n_warps}x{tiles.n_stages}"


def prefill_line(
    name: str, function: Callable[..., Array], B: int, T: int, shape: tuple[int, int, int], backward: bool, cut: str
) -> dict[str, Any] | None:
    """One line of results, which is printed too; None where the device cannot run it, which is said."""
    H, K, E = shape
    passes = "forward+backward" if backward else "forward"
    label = f"prefill B{B} T{T} {name} {passes} {cut}".strip()
    try:
        seconds = prefill_seconds(function, B, T, shape, backward, heads_first=name == "triton")
    except (RuntimeError, ValueError) as error:  # tiles larger than shared memory; no cuDNN
        print(f"{label}: {str(error).splitlines()[0]}", flush=True)
        return None
    rate, peak = 2.0 * B * H * T * T * E * (3.5 if backward else 1.0) / seconds, peak_operations()
    print(f"{label}: {1e3 * seconds:.3f} ms, {rate / 1e12:.0f} TFLOP/s", flush=True)
    return dict(
        kernel=f"attention {passes}", size=f"{B} x {T} tokens, {H} heads on {K}, width {E}", kernels=name,
        sequences=B, tokens=T, heads=H, kv_heads=K, width=E, passes=passes, tiles=cut,
        milliseconds=1e3 * seconds, tflop_per_second=rate / 1e12, share_of_limit=rate / peak if peak else None,
    )  # fmt: skip


def bench_prefill(arguments: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    default = default_tiling(arguments.heads[2], 2)
    cases: list[tuple[str, Callable[..., Array], bool, str]] = []
    for kernel in (None, "forward", "dkv", "dq"):
        for tiles in getattr(arguments, kernel) if kernel else [None]:
            tiling = default if kernel is None else replace(default, **{kernel: tiles})
            cut = " ".join(f"{k} {_text(getattr(tiling, k))}" for k in ("forward", "dkv", "dq"))
            function = functools.partial(_flash, tiling=tiling)
            if kernel in (None, "forward"):
                cases.append(("triton", function, False, cut))
            if kernel != "forward":
                cases.append(("triton", function, True, cut))
    if arguments.cudnn:
        cases += [("cudnn", _cudnn, backward, "") for backward in (False, True)]
    for size in arguments.prefill:
        B, T = map(int, size.split("x"))
        lines = [prefill_line(name, f, B, T, tuple(arguments.heads), backward, cut) for name, f, backward, cut in cases]
        results += [line for line in lines if line]


def bench_decode(arguments: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    for size in arguments.decode:
        B, S = map(int, size.split("x"))
        variants = [("triton", v) for v in itertools.product(arguments.block, arguments.programs, arguments.warps)]
        for kernels, (block, programs, warps) in variants + [("xla", (0, 0, 0))] * arguments.xla:
            splits = split_count(B * KV_HEADS, S, block, programs) if block else 0
            seconds = decode_seconds(B, S, kernels, dict(block=block, n_splits=splits, n_warps=warps))
            rate = 4 * B * KV_HEADS * S * WIDTH / seconds
            peak = peak_bandwidth()
            line = dict(
                kernel="decode attention", size=f"{B} x {S} slots, {HEADS} heads on {KV_HEADS}, width {WIDTH}",
                kernels=kernels, sequences=B, slots=S,
                block=block, splits=splits, warps=warps,
                microseconds=1e6 * seconds, tb_per_second=rate / 1e12, share_of_limit=rate / peak if peak else None,
            )  # fmt: skip
            results.append(line)
            print(
                f"decode B{B} S{S} {kernels} block {block} splits {splits} warps {warps}: "
                f"{line['microseconds']:.1f} us, {line['tb_per_second']:.2f} TB/s"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", nargs="+", default=[], metavar="BxS")
    parser.add_argument("--block", type=int, nargs="+", default=[64])
    parser.add_argument("--programs", type=int, nargs="+", default=[264])
    parser.add_argument("--warps", type=int, nargs="+", default=[4])
    parser.add_argument("--xla", action="store_true", help="decoding by plain operations too")
    parser.add_argument("--prefill", nargs="+", default=[], metavar="BxT")
    parser.add_argument("--heads", type=int, nargs=3, default=[HEADS, KV_HEADS, WIDTH], metavar=("H", "K", "E"))
    for kernel in ("forward", "dkv", "dq"):
        parser.add_argument(f"--{kernel}", type=_tiles, nargs="+", default=[], metavar="QxKxWARPSxSTAGES")
    parser.add_argument("--cudnn", action="store_true", help="prompts by cuDNN too")
    arguments = parser.parse_args()
    if not arguments.decode and not arguments.prefill:
        arguments.decode, arguments.prefill = ["1x2048", "1x8192", "32x8192"], ["4x4096"]
    results: list[dict[str, Any]] = []
    bench_decode(arguments, results)
    bench_prefill(arguments, results)
    benchmark.report("attention", results)


if __name__ == "__main__":
    main()
