"""Training speed of a model shape with random weights: tokens/s, share of the arithmetic's limit (MFU), memory.

    python scripts/bench_training.py --peer                     # TinyLlama-1.1B, 8 x 2048, several variants
    python scripts/bench_training.py --variant attention=cudnn,remat=none,fused=1
    python scripts/bench_training.py --shape llama-3-8b --lora 16 --batch 4
    python scripts/bench_training.py --shape smollm2-135m --layers 2 --batch 2 --tokens 32 --variant dtype=float32

One call tries all variants and prints a line for each. A variant is a list of settings of `training.step.StepOptions`
(dtype, attention, remat, fused, accumulate, z_loss, dropout) and `logits`, the binary logarithm of how many of the
head's logits exist at once. Operations are six per weight (the looked-up embedding aside) and token, and causal
attention. `--peer` times transformers with torch.compile first, in a process of its own. `--xla-flags` runs all
variants in another process with these flags first, and may be repeated; worth trying on a Hopper GPU are
--xla_gpu_enable_cublaslt=true, --xla_gpu_cudnn_gemm_fusion_level=2 and --xla_gpu_enable_triton_gemm=false. `--profile`
prints the kernels that took longest. The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import benchmark
import jax
import jax.numpy as jnp
from random_model import QUANTIZATIONS, random_params

from llama_jax import PRESETS, init_params, losses
from llama_jax.config import LlamaConfig
from llama_jax.lora import init_lora
from llama_jax.roofline import peak_operations
from training.finetune_lora import adapted
from training.optimizer import OptimizerOptions, make_optimizer
from training.step import StepOptions, all_trained, init_state, make_train_step, operations_per_token

VARIANTS = (
    "attention=cudnn,remat=products,fused=1",
    "attention=cudnn,remat=none,fused=1",
    "attention=cudnn,remat=none,fused=0",
    "attention=cudnn,remat=products,fused=1,logits=28",
    "attention=cudnn,remat=block,fused=1",
    "attention=triton,remat=products,fused=1",
)
LORA_VARIANTS = ("attention=cudnn,remat=products", "attention=cudnn,remat=block")
DEFAULTS: dict[str, Any] = dict(dtype="bfloat16", remat="none", attention="xla")

PEER = """
import json, statistics, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
o = json.loads(sys.argv[1])
torch.set_float32_matmul_precision("high")
config = LlamaConfig(
    vocab_size=o["V"], hidden_size=o["D"], intermediate_size=o["F"], num_hidden_layers=o["L"],
    num_attention_heads=o["H"], num_key_value_heads=o["K"], head_dim=o["E"], max_position_embeddings=o["T"],
    tie_word_embeddings=o["tied"], use_cache=False,
)
config._attn_implementation = "sdpa"
torch.set_default_dtype(torch.bfloat16)
with torch.device(o["device"]):
    model = LlamaForCausalLM(config)
torch.set_default_dtype(torch.float32)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=o["device"] == "cuda")
compiled = torch.compile(model)
tokens = torch.randint(0, o["V"], (o["B"], o["T"]), device=o["device"])
def step():
    loss = compiled(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss)
for _ in range(3):
    step()
seconds = []
for _ in range(o["repeats"]):
    began = time.perf_counter()
    for _ in range(o["steps"]):
        step()
    seconds.append((time.perf_counter() - began) / o["steps"])
peak = torch.cuda.max_memory_allocated() if o["device"] == "cuda" else None
import transformers
print(json.dumps(dict(seconds=statistics.median(seconds), peak_bytes=peak,
                      versions=f"torch {torch.__version__}, transformers {transformers.__version__}")))
"""


def parse_variant(text: str) -> dict[str, Any]:
    """Settings from "name=value,name=value"; numbers and 0/1 for flags as they are meant."""
    types = {field.name: str(field.type) for field in dataclasses.fields(StepOptions)} | {"logits": "int"}
    chosen: dict[str, Any] = dict(DEFAULTS)
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in types:
            raise SystemExit(f"{name!r} is no setting of a variant; it must be one of {', '.join(types)}.")
        kind = types[name]
        chosen[name] = bool(int(value)) if kind == "bool" else ({"int": int, "float": float}.get(kind, str))(value)
    return chosen


def bench(
    config: LlamaConfig,
    variant: dict[str, Any],
    B: int,
    T: int,
    steps: int,
    repeats: int,
    rank: int,
    weights: str,
    profile: bool,
) -> dict[str, Any]:
    """One line of results; with a rank, an adapter of it is trained beside dense or packed weights."""
    settings = dict(variant)
    losses._LOGITS_AT_ONCE = 2 ** settings.pop("logits", 26)
    options = StepOptions(**settings)
    optimizer = make_optimizer(OptimizerOptions(learning_rate=1e-5))
    fixed = None
    if rank:
        fixed = random_params(config, None if weights == "dense" else weights)
        state = init_state(init_lora(jax.random.key(0), config, rank=rank), optimizer, options)
    else:
        state = init_state(init_params(jax.random.key(0), config), optimizer, options)  # jit would compile each layer
    tokens = jax.random.randint(jax.random.key(1), (B, T + 1), 0, config.vocab_size)
    batch = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=jnp.ones((B, T)))
    key = jax.random.key(2)
    assemble = (adapted if rank else all_trained)(options)
    step = jax.jit(make_train_step(config, optimizer, options, assemble), donate_argnums=0)
    began = time.perf_counter()
    compiled = step.lower(state, fixed, batch, key).compile()
    compile_seconds = time.perf_counter() - began

    def run() -> Any:
        nonlocal state
        metrics = None
        for _ in range(steps):
            state, metrics = compiled(state, fixed, batch, key)
        return metrics

    seconds = benchmark.median_seconds(run, repeats) / steps
    if profile:
        print_kernels(run, steps)
    rate = operations_per_token(config, T, adapter=bool(rank)) * B * T / seconds
    peak = peak_operations()
    memory = compiled.memory_analysis()
    return dict(
        tokens_per_second=B * T / seconds,
        milliseconds=1e3 * seconds,
        tflop_per_second=rate / 1e12,
        share_of_limit=rate / peak if peak else None,
        peak_bytes=memory.argument_size_in_bytes + memory.temp_size_in_bytes if memory else None,
        compile_seconds=compile_seconds,
        loss=float(run()["loss"]),
    )


def print_kernels(run: Callable[[], Any], steps: int, most: int = 30) -> None:
    """The kernels (or, on a CPU, operations) that took longest in `run`, in ms a step."""
    spent = benchmark.kernels(run)
    for name, (count, seconds) in list(spent.items())[:most]:
        print(f"  {1e3 * seconds / steps:8.3f} ms  {count / steps:5.0f} x  {name[:90]}")
    print(f"  {1e3 * sum(each.seconds for each in spent.values()) / steps:8.3f} ms of kernels a step", flush=True)


def with_flags(flags: str, own: list[str]) -> list[dict[str, Any]]:
    """The results of this script with its arguments in a process with these XLA flags."""
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    results: list[dict[str, Any]] = []
    with subprocess.Popen(
        [sys.executable, __file__, *own], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            if line.startswith('{"benchmark"'):
                results = [result | dict(xla_flags=flags) for result in json.loads(line)["results"]]
            else:
                print(f"{flags}: {line}", end="", flush=True)
    return results


def peer(config: LlamaConfig, B: int, T: int, steps: int, repeats: int) -> dict[str, Any] | None:
    """The same step by transformers and torch.compile, None where they are not installed."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        return None
    import torch  # pyright: ignore[reportMissingImports]

    options = dict(
        V=config.vocab_size, D=config.d_model, F=config.d_ff, L=config.n_layers, H=config.n_heads,
        K=config.n_kv_heads, E=config.head_dim, T=T, B=B, tied=config.tied_embeddings, steps=steps, repeats=repeats,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )  # fmt: skip
    command = [sys.executable, "-c", PEER, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"transformers failed: {done.stderr.strip().splitlines()[-1:]}", flush=True)
        return None
    measured = json.loads(done.stdout.strip().splitlines()[-1])
    return dict(
        variant=measured["versions"] + " with torch.compile",
        tokens_per_second=B * T / measured["seconds"],
        milliseconds=1e3 * measured["seconds"],
        tflop_per_second=operations_per_token(config, T) * B * T / measured["seconds"] / 1e12,
        peak_bytes=measured["peak_bytes"],
    )


def show(line: dict[str, Any]) -> None:
    """A line of results for people."""
    share = f", {100 * line['share_of_limit']:.1f} % of the limit" if line.get("share_of_limit") else ""
    memory = f", {line['peak_bytes'] / 1e9:.1f} GB" if line.get("peak_bytes") else ""
    compiling = f", compiling {line['compile_seconds']:.0f} s" if "compile_seconds" in line else ""
    print(
        f"{line['variant']}: {line['tokens_per_second']:,.0f} tok/s, {line['milliseconds']:.1f} ms, "
        f"{line['tflop_per_second']:.0f} TFLOP/s{share}{memory}{compiling}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=PRESETS, default="tinyllama-1.1b")
    parser.add_argument("--layers", type=int, help="instead of the shape's, for a try")
    parser.add_argument("--batch", type=int, default=8, help="rows")
    parser.add_argument("--tokens", type=int, default=2048, help="in a row")
    parser.add_argument(
        "--lora", type=int, default=0, metavar="R", help="train an adapter of rank R instead of all weights"
    )
    parser.add_argument("--weights", choices=("dense", *QUANTIZATIONS), default="dense", help="beside the adapter")
    parser.add_argument("--variant", action="append", help="may be repeated; default: several for a GPU")
    parser.add_argument("--steps", type=int, default=3, help="in one timing")
    parser.add_argument("--repeats", type=int, default=5, help="timings, of which the median counts")
    parser.add_argument("--profile", action="store_true", help="print the kernels that take longest")
    parser.add_argument("--xla-flags", action="append", default=[], metavar="FLAGS", help="once more with these")
    parser.add_argument("--peer", action="store_true", help="time transformers with torch.compile, too")
    arguments = parser.parse_args()
    config = PRESETS[arguments.shape]
    if arguments.layers:
        config = dataclasses.replace(config, n_layers=arguments.layers)
    size = (arguments.batch, arguments.tokens, arguments.steps, arguments.repeats)
    common: dict[str, Any] = dict(shape=arguments.shape, batch=arguments.batch, tokens=arguments.tokens)
    if arguments.lora:
        common |= dict(lora=arguments.lora, weights=arguments.weights)
    # Other processes come first, before this one takes the device's memory.
    theirs = peer(config, *size) if arguments.peer and not arguments.lora else None
    others: list[dict[str, Any]] = []
    own = ["--shape", arguments.shape, "--batch", str(arguments.batch), "--tokens", str(arguments.tokens)]
    own += ["--steps", str(arguments.steps), "--repeats", str(arguments.repeats), "--weights", arguments.weights]
    own += ["--lora", str(arguments.lora), *(["--layers", str(arguments.layers)] if arguments.layers else [])]
    own += ["--profile"] if arguments.profile else []
    own += [item for text in arguments.variant or () for item in ("--variant", text)]
    for flags in arguments.xla_flags:
        others += with_flags(flags, own)
    results = []
    if theirs is not None:
        limit = peak_operations()
        theirs["share_of_limit"] = theirs["tflop_per_second"] * 1e12 / limit if limit else None
        results.append(common | theirs)
        show(results[-1])
    for text in arguments.variant or (LORA_VARIANTS if arguments.lora else VARIANTS):
        try:
            line = bench(config, parse_variant(text), *size, arguments.lora, arguments.weights, arguments.profile)
        except Exception as error:  # the next variant may still run
            print(f"{text}: failed, {str(error).splitlines()[0]}", flush=True)
            continue
        results.append(common | dict(variant=text) | line)
        show(results[-1])
    benchmark.report("training", results + others)


if __name__ == "__main__":
    main()
