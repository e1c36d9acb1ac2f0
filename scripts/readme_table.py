"""Write README.md's table of measurements from docs/measurements/*.json; a second run changes nothing.

    python scripts/bench_decode.py | tail -n 1 > docs/measurements/decode.json
    python scripts/readme_table.py

Each file holds the last line of a benchmark: {"benchmark": ..., "environment": {...}, "results": [...]}.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MEASUREMENTS = ROOT / "docs" / "measurements"
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"

# Benchmark -> what its lines are about, filled in from the fields of a result. Other benchmarks go by their name.
TITLES = {
    "cpu": "SmolLM2-135M, float32, one sequence",
    "decode": "decoding, {shape} shape, {weights} weights, {batch} x {context} tokens",
    "prefill": "prompt, {shape} shape, {weights} weights, {tokens} tokens in chunks of {chunk}",
    "attention": "{kernel}, {kernels}, {size}",
    "placement": "{weights} weights, {gpu_layers} gpu layers ({units}), {shape} shape",
    "sampling": "{what} with the {chain} chain, {batch} sequence of {vocabulary} logits",
    "demo_model": "training the shipped model",
    "sharded": "{case}, {shape} shape, {weights} weights, on {devices}",
    "training": "training, {shape} shape, {batch} x {tokens} tokens, {variant}",
}

# Benchmark -> the fields to show and what to call them, in order. Other benchmarks show every field.
FIELDS = {
    "cpu": {
        "load_seconds": "load",
        "first_token_seconds": "first token from process start, second start,",
        "tokens_per_second": "generate",
        "decode_tokens_per_second": "decode",
        "gb_per_second": "memory",
        "share_of_limit": "share of the memory's limit",
        "transformers_tokens_per_second": "transformers' generate",
    },
    "decode": {
        "tokens_per_second": "",
        "milliseconds": "step",
        "gb_per_second": "memory",
        "share_of_limit": "share of the memory's limit",
        "peak_bytes": "peak memory",
        "compile_seconds": "compiling",
    },
    "prefill": {
        "tokens_per_second": "",
        "tflop_per_second": "arithmetic",
        "share_of_limit": "share of the arithmetic's limit",
        "peak_bytes": "peak memory",
    },
    "attention": {
        "milliseconds": "",
        "microseconds": "",
        "tflop_per_second": "",
        "tb_per_second": "",
        "share_of_limit": "share of the limit",
    },
    "placement": {
        "decode_tokens_per_second": "decode",
        "prompt_tokens_per_second": "prompt",
        "reported_bytes": "VRAM",
    },
    "sampling": {
        "microseconds": "",
        "speed_against_greedy": "of greedy's speed",
    },
    "sharded": {
        "tokens_per_second": "",
        "speed_up": "of one GPU:",
        "efficiency": "efficiency",
        "collective_milliseconds": "collectives",
        "peak_bytes": "peak memory of a GPU",
        "error": "failed:",
    },
    "training": {
        "tokens_per_second": "",
        "milliseconds": "step",
        "tflop_per_second": "arithmetic",
        "share_of_limit": "share of the arithmetic's limit",
        "peak_bytes": "peak memory",
        "compile_seconds": "compiling",
    },
    "demo_model": {
        "held_out_nats_per_character": "held-out play",
        "nats_per_token": "that is",
        "parameters": "parameters",
        "file_bytes": "file",
        "steps": "steps",
        "seconds": "time",
    },
}

# End of a field's name -> how its value reads, longest match first.
UNITS = {
    "nats_per_character": "{:.4f} nats per character",
    "nats_per_token": "{:.4f} nats per token",
    "tokens_per_second": "{:,.1f} tok/s",
    "gb_per_second": "{:,.1f} GB/s",
    "tflop_per_second": "{:,.0f} TFLOP/s",
    "milliseconds": "{:.3f} ms",
    "microseconds": "{:,.1f} us",
    "tb_per_second": "{:.2f} TB/s",
    "speed_against_greedy": "{:.1%}",
    "share_of_limit": "{:.0%}",
    "speed_up": "{:.2f} times",
    "efficiency": "{:.0%}",
    "seconds": "{:,.2f} s",
}


def value_text(name: str, value: Any) -> str:
    """A value with its unit, which the end of its name tells."""
    if name.endswith("bytes"):
        return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"
    for end, form in sorted(UNITS.items(), key=lambda item: -len(item[0])):
        if name.endswith(end):
            return form.format(value)
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _label(name: str) -> str:
    """A field's name in words, without what its unit says."""
    return re.sub("_(milliseconds|seconds|bytes)$", "", name).replace("_", " ")


def row(benchmark: str, environment: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """One line of the table. Fields that are null were not measured and are left out."""
    fields = FIELDS.get(benchmark) or {name: _label(name) for name in result}
    shown = [
        f"{label} {value_text(name, result[name])}".strip()
        for name, label in fields.items()
        if result.get(name) is not None
    ]
    device = environment["device"]
    if device == "cpu" and environment.get("cores"):
        device = f"CPU, {environment['cores']} cores"
    place = [device, f"jax {environment['jax']}", environment["date"]]
    title = TITLES.get(benchmark, benchmark.replace("_", " ")).format(**result)
    return f"| {title} | {', '.join(shown)} | {', '.join(place)} |"


def table(folder: Path = MEASUREMENTS) -> str:
    """The whole table, files in the order of their names."""
    lines = ["| what | measured | where |", "|---|---|---|"]
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text())
        lines += [row(report["benchmark"], report["environment"], result) for result in report["results"]]
    return "\n".join(lines)


def with_table(readme: str, new: str) -> str:
    """The README's text with `new` between its two markers."""
    before, found, rest = readme.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise SystemExit(f"README.md lacks the marker {END if found else BEGIN}; the table belongs between the two.")
    return f"{before}{BEGIN}\n{new}\n{END}{after}"


def main() -> None:
    temporary = README.with_suffix(".tmp")
    temporary.write_text(with_table(README.read_text(), table()))
    os.replace(temporary, README)


if __name__ == "__main__":
    main()
