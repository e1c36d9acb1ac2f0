"""What choosing a token costs: the sampler chain alone, and within decoding against greedy decoding.

    python scripts/bench_sampling.py --shape llama-3-8b --batch 1 64 --decode-batch 1

The chain alone runs many times within one program, on logits that change from token to token. The last line is JSON.
"""

from __future__ import annotations

import argparse
from typing import Any

import bench_decode
import benchmark
import jax
import jax.numpy as jnp
from random_model import random_params

from llama_jax import PRESETS, SamplingParams, sample, sampling_params, start_state

# Options of `sampling_params` by name; the default chain is top-k 40, top-p 0.95, min-p 0.05, temperature 0.8.
CHAINS: dict[str, dict[str, Any]] = {
    "greedy": dict(temperature=0.0),
    "default": {},
    "penalties": dict(repeat_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1),
    "dry": dict(dry_multiplier=0.8, dry_penalty_last_n=1024, dry_breakers=[[13], [25], [29]]),
    "top_k 1000": dict(top_k=1000),
    "no top_k": dict(top_k=0),
    "min_p alone": dict(top_k=0, top_p=1.0),
    "everything": dict(
        repeat_penalty=1.1, dry_multiplier=0.8, top_n_sigma=2.0, tfs_z=0.95, typical_p=0.9, xtc_probability=0.5,
        dynatemp_range=0.5,
    ),
    "mirostat 1": dict(mirostat=1),
    "mirostat 2": dict(mirostat=2),
    "log-probabilities": dict(logprobs=20),
}  # fmt: skip


def sample_seconds(batch: int, vocab_size: int, params: SamplingParams, steps: int, repeats: int) -> float:
    """Seconds per token of `batch` rows, without a model."""
    logits = 3 * jax.random.normal(jax.random.key(0), (batch, vocab_size), jnp.float32)

    @jax.jit
    def run(logits: jax.Array, params: SamplingParams) -> jax.Array:
        def body(_: int, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            token, state = carry
            # Without the dependence on the token, XLA would do all of it once, before the loop.
            return sample(logits + 1e-6 * token[:, None].astype(jnp.float32), params, state)

        start = (jnp.zeros(batch, jnp.int32), start_state(params))
        return jax.lax.fori_loop(0, steps, body, start)[0]

    return benchmark.median_seconds(lambda: run(logits, params), repeats) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=PRESETS, default="llama-3-8b", help="of the model; it names the vocabulary")
    parser.add_argument("--chains", nargs="+", choices=CHAINS, default=list(CHAINS))
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 64], help="rows of the chain alone")
    parser.add_argument("--decode-batch", type=int, nargs="*", default=[1], help="rows of decoding; none: no decoding")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=200, help="tokens of one run of the chain alone")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    config = PRESETS[arguments.shape]
    results: list[dict[str, Any]] = []

    def add(what: str, chain: str, batch: int, seconds: float) -> None:
        greedy = next((r for r in results if (r["what"], r["chain"], r["batch"]) == (what, "greedy", batch)), None)
        line = dict(what=what, chain=chain, batch=batch, vocabulary=config.vocab_size, microseconds=1e6 * seconds)
        if greedy is not None:
            line["speed_against_greedy"] = greedy["microseconds"] / line["microseconds"]
        results.append(line)
        share = f", {100 * line['speed_against_greedy']:.1f} % of greedy's speed" if greedy is not None else ""
        print(f"{what}, {chain}, {batch} rows: {line['microseconds']:.1f} us{share}", flush=True)

    for batch in arguments.batch:
        for chain in arguments.chains:
            params = sampling_params(batch, seed=1, **CHAINS[chain])
            if params.logprobs is not None:  # the chain does not know of them
                continue
            add(
                "sample",
                chain,
                batch,
                sample_seconds(batch, config.vocab_size, params, arguments.steps, arguments.repeats),
            )
    if arguments.decode_batch:
        weights = jax.block_until_ready(random_params(config, None))
        for batch in arguments.decode_batch:
            for chain in arguments.chains:
                params = sampling_params(batch, seed=1, **CHAINS[chain])
                line = bench_decode.bench(weights, config, batch, arguments.context, arguments.repeats, params)
                add("decode", chain, batch, line["milliseconds"] / 1e3)
    benchmark.report("sampling", results)


if __name__ == "__main__":
    main()
