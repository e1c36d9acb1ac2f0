"""How fast models run on 1 to 512 GPUs, on paper: step time from bytes, operations and link speed, for each mesh.

    python scripts/scaling.py            # writes the tables into docs/scaling.md; the last line is JSON

Nothing here is measured but what `Machine` says so of. The model of a step:

  memory      bytes that a GPU reads / its bandwidth
  arithmetic  operations of a GPU / its speed
  links       what it sends over NVLink or between hosts / their bandwidth, and a latency for each collective

A step takes the larger of memory and arithmetic, and then the links that nothing hides: the all-reduces of a tensor
mesh, two a layer, stand between products. FSDP's gathers of the next layer's weights and its scattered gradients run
beside the arithmetic, so there the larger counts.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llama_jax.config import PRESETS, LlamaConfig

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "scaling.md"
BEGIN, END = "<!-- computed -->", "<!-- /computed -->"

MODELS = {"8B": "llama-3.1-8b", "70B": "llama-3.1-70b", "405B": "llama-3.1-405b"}
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXT = 8192  # tokens that each sequence holds while decoding, or of a prompt or a training row
SEQUENCES = 32  # decoded together by one copy of the model, where throughput counts
STEP_TOKENS = 4 << 20  # of a training step; on few GPUs in several parts one after another


@dataclasses.dataclass(frozen=True)
class Machine:
    """An H200 in hosts of eight. Bandwidths a GPU, in bytes a second and direction; latencies in seconds.

    Attributes:
      memory_share, prompt_share: of the data sheet's limits, as measured on one card (README.md): decoding one sequence
        of 2048 tokens, and a prompt of 2048 tokens.
      train_share: of the arithmetic's limit; assumed, less than a prompt's since backward products are smaller.
      latency, host_latency: of an all-reduce within a host and between hosts; assumed.
    """

    memory: float = 141e9
    bandwidth: float = 4.8e12
    operations: float = 989e12
    nvlink: float = 450e9
    network: float = 50e9
    host: int = 8
    memory_share: float = 0.75
    prompt_share: float = 0.60
    train_share: float = 0.40
    latency: float = 12e-6
    host_latency: float = 30e-6


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Sizes of the axes; `tensor` stays within a host."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in dataclasses.asdict(self).items() if size > 1) or "one GPU"


MACHINE = Machine()


def _all_reduce(size: float, n: int, machine: Machine = MACHINE) -> float:
    """Seconds of an all-reduce of `size` bytes over the `n` GPUs of a host, as a ring."""
    return 0.0 if n == 1 else 2 * (n - 1) / n * size / machine.nvlink + machine.latency


def tensor_seconds(config: LlamaConfig, tokens: float, logits_rows: float, n: int) -> float:
    """Collectives of one forward pass of `tokens` tokens in bfloat16: two a layer, the embedding's, the logits."""
    each = _all_reduce(tokens * config.d_model * 2, n)
    return (2 * config.n_layers + 1) * each + _all_reduce(logits_rows * config.vocab_size * 4, n) / 2


def weight_bytes(config: LlamaConfig) -> float:
    """Of all weights in bfloat16."""
    return 2.0 * config.n_parameters


def _product_weights(config: LlamaConfig) -> float:
    """Weights that a token is multiplied with: all but the embedding, which gives a row."""
    return config.n_parameters - (0 if config.tied_embeddings else config.vocab_size * config.d_model)


def _attention_operations(config: LlamaConfig, queries: float, keys: float) -> float:
    return 4.0 * queries * keys * config.n_heads * config.head_dim * config.n_layers


def decode_seconds(config: LlamaConfig, sequences: int, tensor: int) -> float | None:
    """Of one step of `sequences` sequences on one copy of the model; None where it does not fit."""
    m = MACHINE
    cache = sequences * CONTEXT * config.kv_bytes_per_token(2)
    if (weight_bytes(config) + cache) / tensor > 0.92 * m.memory:
        return None
    read = (2 * _product_weights(config) + cache) / tensor / (m.bandwidth * m.memory_share)
    work = 2 * _product_weights(config) * sequences + _attention_operations(config, sequences, CONTEXT)
    arithmetic = work / tensor / (m.operations * m.prompt_share)
    return max(read, arithmetic) + tensor_seconds(config, sequences, sequences, tensor)


def prefill_seconds(config: LlamaConfig, tensor: int) -> float | None:
    """Of one prompt of CONTEXT tokens on one copy of the model; None where it does not fit."""
    m = MACHINE
    if (weight_bytes(config) + CONTEXT * config.kv_bytes_per_token(2)) / tensor > 0.92 * m.memory:
        return None
    work = 2 * _product_weights(config) * CONTEXT + _attention_operations(config, CONTEXT, CONTEXT / 2)
    return work / tensor / (m.operations * m.prompt_share) + tensor_seconds(config, CONTEXT, 1, tensor)


def train_seconds(config: LlamaConfig, shape: MeshShape) -> float | None:
    """Of a training step of STEP_TOKENS tokens in rows of CONTEXT; None where it does not fit.

    Weights, gradients and AdamW's moments with a float32 copy take 16 bytes a parameter, divided over `fsdp` and
    `tensor`; every layer's input is kept and the layer computed again in the backward pass.
    """
    m = MACHINE
    held = 16.0 * config.n_parameters / (shape.fsdp * shape.tensor)
    kept = 2.0 * CONTEXT * config.d_model * config.n_layers
    working = 2.0 * CONTEXT * (8 * config.d_model + 6 * config.d_ff / shape.tensor) + 4 * 2**25
    gathered = 0.0 if shape.fsdp == 1 else 2 * weight_bytes(config) / config.n_layers / shape.tensor
    rows = STEP_TOKENS // CONTEXT
    if held + kept + working + gathered > 0.92 * m.memory or rows % (shape.data * shape.fsdp):
        return None
    rounds = rows // (shape.data * shape.fsdp)  # one row on each group of GPUs at a time
    work = 8.0 * _product_weights(config) * CONTEXT + 4 * _attention_operations(config, CONTEXT, CONTEXT / 2)
    arithmetic = work / shape.tensor / (m.operations * m.train_share)
    links = 4 * tensor_seconds(config, CONTEXT, 0, shape.tensor)  # forward, again, and twice backward
    within = shape.fsdp * shape.tensor <= m.host
    moved = 3 * weight_bytes(config) / shape.tensor * (shape.fsdp - 1) / shape.fsdp  # two gathers, one scatter
    sharding = moved / (m.nvlink if within else m.network)
    sharding += 0 if shape.fsdp == 1 else 3 * config.n_layers * (m.latency if within else m.host_latency)
    local = 4.0 * config.n_parameters / (shape.fsdp * shape.tensor)  # a gradient in float32
    across = m.network if shape.devices > m.host else m.nvlink
    reduce = 2 * (shape.data - 1) / shape.data * local / across
    return rounds * (max(arithmetic, sharding) + links) + reduce


def tensor_sizes(config: LlamaConfig, n: int) -> Iterator[int]:
    """Sizes of a `tensor` axis for `n` GPUs: within a host, dividing the key/value heads."""
    for size in (1, 2, 4, 8):
        if size <= min(n, MACHINE.host) and n % size == 0 and config.n_kv_heads % size == 0:
            yield size


def inference_line(name: str, config: LlamaConfig, n: int) -> dict[str, Any]:
    """The best mesh for one sequence, for many, and for prompts."""
    line: dict[str, Any] = dict(model=name, gpus=n)
    single = [(s, t) for t in tensor_sizes(config, n) if (s := decode_seconds(config, 1, t))]
    many = [(s / (n // t), t) for t in tensor_sizes(config, n) if (s := decode_seconds(config, SEQUENCES, t))]
    prompt = [(s / (n // t), t) for t in tensor_sizes(config, n) if (s := prefill_seconds(config, t))]
    if single:
        seconds, tensor = min(single)
        line |= dict(one_mesh=str(MeshShape(tensor=tensor)), one_milliseconds=1e3 * seconds)
    if many:
        seconds, tensor = min(many)
        line |= dict(many_mesh=str(MeshShape(data=n // tensor, tensor=tensor)), many_rate=SEQUENCES / seconds)
    if prompt:
        seconds, tensor = min(prompt)
        line |= dict(prompt_mesh=str(MeshShape(data=n // tensor, tensor=tensor)), prompt_rate=CONTEXT / seconds)
    return line


def training_line(name: str, config: LlamaConfig, n: int) -> dict[str, Any]:
    """The fastest mesh for a training step."""
    shapes = [
        MeshShape(data=n // tensor // fsdp, fsdp=fsdp, tensor=tensor)
        for tensor in tensor_sizes(config, n)
        for fsdp in (2**i for i in range(10))
        if n % (tensor * fsdp) == 0
    ]
    found = [(s, -shape.data, str(shape)) for shape in shapes if (s := train_seconds(config, shape))]
    line: dict[str, Any] = dict(model=name, gpus=n)
    if not found:
        return line
    seconds, _, mesh = min(found)
    useful = 6 * config.n_parameters * STEP_TOKENS / n / MACHINE.operations
    return line | dict(mesh=mesh, seconds=seconds, rate=STEP_TOKENS / seconds, share=useful / seconds)


def _cell(line: dict[str, Any], name: str, form: str) -> str:
    return form.format(line[name]) if name in line else "does not fit"


def tables() -> tuple[str, list[dict[str, Any]]]:
    """The text between the document's markers, and its lines as data."""
    inference = [inference_line(name, PRESETS[preset], n) for name, preset in MODELS.items() for n in GPUS]
    training = [training_line(name, PRESETS[preset], n) for name, preset in MODELS.items() for n in GPUS]
    text = [
        f"### Decoding and prompts, bfloat16, {CONTEXT} tokens a sequence",
        "",
        f"| model | GPUs | one sequence: mesh | ms a token | {SEQUENCES} sequences a copy: mesh | tok/s in all "
        "| prompts: mesh | tok/s in all |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in inference:
        cells = [
            line["model"], str(line["gpus"]), _cell(line, "one_mesh", "{}"), _cell(line, "one_milliseconds", "{:.2f}"),
            _cell(line, "many_mesh", "{}"), _cell(line, "many_rate", "{:,.0f}"),
            _cell(line, "prompt_mesh", "{}"), _cell(line, "prompt_rate", "{:,.0f}"),
        ]  # fmt: skip
        text.append(f"| {' | '.join(cells)} |")
    text += [
        "",
        f"### Training, AdamW, {STEP_TOKENS:,} tokens a step in rows of {CONTEXT}",
        "",
        "| model | GPUs | mesh | s a step | tok/s | share of 989 TFLOP/s |",
        "|---|---|---|---|---|---|",
    ]
    for line in training:
        cells = [
            line["model"], str(line["gpus"]), _cell(line, "mesh", "{}"), _cell(line, "seconds", "{:,.1f}"),
            _cell(line, "rate", "{:,.0f}"), _cell(line, "share", "{:.0%}"),
        ]  # fmt: skip
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text), inference + training


def with_tables(document: str, new: str) -> str:
    """The document's text with `new` between its two markers."""
    before, found, rest = document.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise SystemExit(f"docs/scaling.md lacks the marker {END if found else BEGIN}.")
    return f"{before}{BEGIN}\n{new}\n{END}{after}"


def main() -> None:
    text, lines = tables()
    temporary = DOCUMENT.with_suffix(".tmp")
    temporary.write_text(with_tables(DOCUMENT.read_text(), text))
    os.replace(temporary, DOCUMENT)
    print(text)
    print(json.dumps(dict(benchmark="scaling", machine=dataclasses.asdict(MACHINE), results=lines)))


if __name__ == "__main__":
    main()
