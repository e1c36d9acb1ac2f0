"""SmolLM2-135M in float32 on a CPU: loading, first token from process start, and decoding beside transformers.

    python scripts/fetch_smollm2.py && python scripts/bench_cpu.py

transformers is measured in the same run where it is installed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import benchmark
import jax
import numpy as np

import llama_jax
from llama_jax.roofline import decode_bytes, peak_bandwidth

MODEL = Path(__file__).resolve().parents[1] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "Once upon a time, in a small village by the sea,"
TOKENS = 64


def first_token_seconds(path: Path) -> float:
    """From the start of a process to its first piece of text, when programs have been compiled by a run before."""
    command = [sys.executable, "-m", "llama_jax.cli.main", "generate", "-m", str(path), "-p", PROMPT]
    command += ["-n", "8", "--temp", "0"]
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            seconds = time.perf_counter() - started
            process.stdout.read()
    return seconds


def transformers_speed(model: llama_jax.Llama, repeats: int) -> float | None:
    """Tokens per second of transformers' greedy generate on the same weights; None where it is not installed."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        llama_jax.save_hf(folder, model.params, model.config)
        other = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([model.tokenize_prompt(PROMPT)])
    options = dict(do_sample=False, min_new_tokens=TOKENS, max_new_tokens=TOKENS, attention_mask=torch.ones_like(ids))

    def seconds() -> float:
        started = time.perf_counter()
        other.generate(ids, **options)
        return time.perf_counter() - started

    seconds()
    return TOKENS / float(np.median([seconds() for _ in range(repeats)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    started = time.perf_counter()
    model = llama_jax.load(arguments.model, dtype="float32", n_ctx=512)
    jax.block_until_ready(model.params)
    load_seconds = time.perf_counter() - started
    first_token = first_token_seconds(arguments.model)

    ids = model.tokenize_prompt(PROMPT)
    greedy = model.sampling(temperature=0.0)

    def own_seconds() -> tuple[float, float]:
        """Seconds of a whole generation, and of its decode steps."""
        session = model.new_session()
        started = time.perf_counter()
        for _ in session.generate([ids], greedy, max_tokens=TOKENS):
            pass
        return time.perf_counter() - started, session.timings.decode_seconds

    own_seconds()
    whole, steps = np.median([own_seconds() for _ in range(arguments.repeats)], axis=0)
    own, decode_speed = TOKENS / float(whole), (TOKENS - 1) / float(steps)
    theirs = transformers_speed(model, arguments.repeats)
    rate = decode_bytes(model.params, model.config, len(ids) + TOKENS / 2, 4) * decode_speed
    peak = peak_bandwidth()
    share = rate / peak if peak else None
    print(f"load {load_seconds:.2f} s; first token {first_token:.2f} s after process start (second start)")
    print(
        f"generate {own:.1f} tok/s, prompt included; decoding {decode_speed:.1f} tok/s, {rate / 1e9:.1f} GB/s", end=""
    )
    print(f", {100 * share:.0f} % of the memory's limit" if share else "")
    print(
        "transformers is not installed"
        if theirs is None
        else f"transformers {theirs:.1f} tok/s; ratio {own / theirs:.2f}"
    )
    result = dict(
        load_seconds=load_seconds,
        first_token_seconds=first_token,
        tokens_per_second=own,
        decode_tokens_per_second=decode_speed,
        gb_per_second=rate / 1e9,
        share_of_limit=share,
        transformers_tokens_per_second=theirs,
    )
    benchmark.report("cpu", [result])


if __name__ == "__main__":
    main()
