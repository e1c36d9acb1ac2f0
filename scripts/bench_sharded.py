"""Models divided over the GPUs of one host, random weights: decoding, prompts and training steps for each number.

    python scripts/bench_sharded.py                                   # on 1, 2, 4, 8 GPUs, as many as there are
    python scripts/bench_sharded.py --shapes llama-3.1-70b --weights dense --devices 8 --cases decode:1 --training
    python scripts/bench_sharded.py --cases --training llama-3-8b:fsdp:2 --devices 8 --profile 20
    JAX_NUM_CPU_DEVICES=8 python scripts/bench_sharded.py --shapes smollm2-135m --layers 2 --devices 1 8 \\
        --cases decode:2 prefill:64 --context 64 --steps 2 --repeats 2 --tokens 32 --training smollm2-135m:fsdp:1

A case is decode:SEQUENCES or prefill:TOKENS, of every shape and kind of weights; --training takes SHAPE:AXIS:ROWS with
the rows of a batch on each GPU, so that more GPUs train on more rows. One GPU runs what `load` makes for it, with some
products joined; several run a mesh whose axis `tensor`, or AXIS in training, has all of them. Weights are made in their
shards, whole on no device and not on the host.

Each model and number of GPUs has a process of its own. What fails, for lack of memory say, is a line; after --limit
seconds the process is ended, and what is missing is named. Time in collectives is that of their kernels in a trace of
its own run, waiting for the other devices included, and the mean of the devices. The peak is the process's: it includes
the cases before it; program_bytes is one device's need for the case alone. NVLink multicast is off. Last line: JSON.
"""

from __future__ import annotations

import os

os.environ["NCCL_NVLS_ENABLE"] = "0"  # before jax starts NCCL
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import argparse
import collections
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import benchmark
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from random_model import QUANTIZATIONS, made_params, packed_rows, type_of

from llama_jax import PRESETS, Params, by_path, init_params, param_shardings, parameter_specs, place_cache, tensor_mesh
from llama_jax.config import LlamaConfig
from llama_jax.generate import decode, prefill, start_decoding
from llama_jax.model import ParameterSpec
from llama_jax.placement import default_dtype, device_mesh, with_vocabulary
from llama_jax.placement.sharding import packed_sharding, part_shardings
from llama_jax.sampling import sampling_params, start_state
from training.optimizer import OptimizerOptions, make_optimizer
from training.sharding import place_batch, state_shardings
from training.step import StepOptions, init_state, make_train_step
from training.train_text_from_scratch import best_attention

RESULT = "result: "  # a child's line that is for its parent
COLLECTIVE = re.compile(
    "nccl|all[-_]?reduce|all[-_]?gather|reduce[-_]?scatter|collective[-_]?permute|all[-_]?to[-_]?all", re.IGNORECASE
)


@dataclass(frozen=True)
class Run:
    """A program to be timed: `call()` runs it and gives arrays to wait for; it handles `tokens` in `steps` steps."""

    call: Callable[[], Any]
    compiled: Any
    tokens: int
    steps: int


# Weights


@cache
def _repeater(shape: tuple[int, ...], sharding: NamedSharding) -> Callable[[Any], jax.Array]:
    """A program that fills an array of `shape` with the rows it is given, each device its own shard."""
    rows, *_, columns = sharding.shard_shape(shape)

    def fill(some: jax.Array) -> jax.Array:
        return jnp.resize(some[..., :columns], (rows, *some.shape[1:-1], columns))

    filled = jax.shard_map(fill, mesh=sharding.mesh, in_specs=PartitionSpec(), out_specs=sharding.spec, check_vma=False)
    return jax.jit(filled)


@cache
def _dense_rows(columns: int, dtype: Any) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (0.02 * rng.standard_normal((256, columns), np.float32)).astype(dtype)


_packed_rows = cache(packed_rows)


def sharded_params(config: LlamaConfig, weights: str, mesh: Mesh) -> Params:
    """Random weights of "dense" or a type on a mesh, as `load` places them; shards are equal, their rows repeat."""
    places = by_path(param_shardings(config, mesh, pad_vocabulary=True))
    padded = config.vocab_size + -config.vocab_size % mesh.shape["tensor"]

    def make(path: str, spec: ParameterSpec) -> Any:
        place = places[path]
        if len(spec.shape) == 1:
            return jnp.ones(spec.shape, jnp.float32, device=place)
        out = padded if path in ("embedding", "output_head") else spec.shape[0]
        if weights == "dense":
            return _repeater((out, spec.shape[1]), place)(_dense_rows(spec.shape[1], default_dtype()))
        some = _packed_rows(type_of(path, weights, config), spec.shape[1], 0)
        some = replace(some, sharding=packed_sharding(some, place))
        return jax.tree.map(
            lambda part, where: _repeater((out, *part.shape[1:]), where)(part), some, part_shardings(some)
        )

    specs = parameter_specs(config)
    structure = jax.tree.structure(specs, is_leaf=lambda leaf: isinstance(leaf, ParameterSpec))
    params = jax.tree.unflatten(structure, [make(path, spec) for path, spec in by_path(specs).items()])
    return with_vocabulary(params, config)


# Cases


def _on_mesh(tree: Any, mesh: Mesh | None) -> Any:
    """`tree` with what no mesh has placed yet on every device."""
    if mesh is None:
        return tree
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda a: a if isinstance(a.sharding, NamedSharding) else jax.device_put(a, whole), tree)


def _places(tree: Any, mesh: Mesh | None) -> Any:
    return None if mesh is None else jax.tree.map(lambda a: a.sharding, tree)


def decode_run(params: Params, config: LlamaConfig, mesh: Mesh | None, batch: int, options: Any) -> Run:
    """Greedy steps of `batch` sequences that almost fill their context."""
    steps = options.steps
    held = options.context - steps * (options.repeats + 4)
    if held < 0:
        raise ValueError(f"a context of {options.context} is too short for {options.repeats} + 4 times {steps} steps")
    kv = place_cache(config, batch, options.context, params.embedding.dtype, mesh)
    kv = replace(kv, lengths=jax.device_put(jnp.full(batch, held, jnp.int32), kv.lengths.sharding))
    sampling, eos = _on_mesh((sampling_params(batch, temperature=0.0), jnp.zeros(0, jnp.int32)), mesh)
    logits = jnp.zeros((batch, config.vocab_size))
    start = jax.jit(start_decoding, donate_argnames="cache")
    state = _on_mesh(start(_on_mesh(logits, mesh), kv, _on_mesh(start_state(sampling), mesh), sampling, eos), mesh)
    n_steps = _on_mesh(jnp.int32(steps), mesh)
    places = None if mesh is None else (_places(state, mesh), None, None, None)
    program = jax.jit(decode, static_argnames=("config", "max_steps"), donate_argnames="state", out_shardings=places)
    compiled = program.lower(params, config, state, sampling, eos, steps, n_steps).compile()

    def call() -> Any:
        nonlocal state
        state, tokens, *_ = compiled(params, state, sampling, eos, n_steps)
        return tokens

    return Run(call, compiled, batch * steps, steps)


def prefill_run(params: Params, config: LlamaConfig, mesh: Mesh | None, tokens: int, options: Any) -> Run:
    """One prompt in chunks."""
    chunk = min(options.chunk, tokens)
    if tokens % chunk:
        raise ValueError(f"a prompt of {tokens} tokens does not consist of chunks of {chunk}")
    kv = place_cache(config, 1, tokens, params.embedding.dtype, mesh)
    empty = _on_mesh(jnp.zeros(1, jnp.int32), mesh)
    prompt = jax.random.randint(jax.random.key(1), (1, chunk), 0, config.vocab_size)
    prompt, counts = _on_mesh((prompt, jnp.full(1, chunk, jnp.int32)), mesh)
    places = None if mesh is None else (None, _places(kv, mesh))
    program = jax.jit(prefill, static_argnames="config", donate_argnames="cache", out_shardings=places)
    compiled = program.lower(params, prompt, config, kv, counts).compile()

    def call() -> Any:
        nonlocal kv
        kv = replace(kv, lengths=jnp.copy(empty))
        logits = None
        for _ in range(tokens // chunk):
            logits, kv = compiled(params, prompt, kv, counts)
        return logits

    return Run(call, compiled, tokens, 1)


def training_run(config: LlamaConfig, axis: str, rows: int, n: int, options: Any) -> Run:
    """Steps over `rows` rows a device; all weights are trained, in bfloat16 on a GPU."""
    mesh = None if n == 1 else device_mesh(**{axis: n})
    dtype, on_gpu = str(default_dtype()), jax.default_backend() == "gpu"
    step_options = StepOptions(
        dtype=dtype,
        attention=best_attention(dtype, config.head_dim, options.tokens, mesh) if on_gpu else "xla",
        remat="block" if axis == "fsdp" else "products",
        fused=mesh is None and on_gpu,
    )
    optimizer = make_optimizer(OptimizerOptions(learning_rate=1e-5))

    def make(key: jax.Array) -> Any:
        return init_state(init_params(key, config), optimizer, step_options)

    key = _on_mesh(jax.random.key(0), mesh)
    places = None if mesh is None else state_shardings(jax.eval_shape(make, key), config, mesh)
    state = jax.jit(make, out_shardings=places)(key)
    B, T = rows * n, options.tokens
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (B, T + 1), np.int32)
    batch = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=np.ones((B, T), np.float32))
    batch = place_batch(batch, mesh)
    outputs = None if places is None else (places, None)
    program = jax.jit(make_train_step(config, optimizer, step_options), donate_argnums=0, out_shardings=outputs)
    compiled = program.lower(state, None, batch, key).compile()

    def call() -> Any:
        nonlocal state
        state, metrics = compiled(state, None, batch, key)
        return metrics

    return Run(call, compiled, B * T, 1)


# Measuring


def measure(run: Run, n: int, options: Any) -> dict[str, Any]:
    """Numbers of one line."""
    seconds = benchmark.median_seconds(run.call, options.repeats)
    spent = {name: each.seconds / n for name, each in benchmark.kernels(run.call).items()}  # the mean of the devices
    collectives: dict[str, float] = collections.defaultdict(float)
    for name, each in spent.items():
        if COLLECTIVE.search(name):
            collectives[re.sub(r"\.\d+$", "", name)] += each
    inside = sum(collectives.values())
    memory = run.compiled.memory_analysis()
    stats = [device.memory_stats() or {} for device in jax.devices()[:n]]
    peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    return dict(
        tokens_per_second=run.tokens / seconds,
        milliseconds=1e3 * seconds / run.steps,
        collective_milliseconds=1e3 * inside / run.steps,
        collective_share=inside / seconds,
        collectives={name[:90]: 1e3 * each / run.steps for name, each in collectives.items()},
        kernels={name[:90]: 1e3 * each / run.steps for name, each in list(spent.items())[: options.profile]},
        peak_bytes=max(peaks, default=None),
        peak_bytes_by_device=peaks or None,
        program_bytes=memory.argument_size_in_bytes + memory.temp_size_in_bytes if memory else None,
    )


def configured(shape: str, options: Any) -> LlamaConfig:
    config = PRESETS[shape]
    return replace(config, n_layers=options.layers or config.n_layers)


def begin(case: str, params: Params | None, config: LlamaConfig, n: int, options: Any) -> Run:
    """The program of a case, compiled; training makes its own weights."""
    kind, *values = case.split(":")
    if params is None:
        return training_run(config, values[0], int(values[1]), n, options)
    mesh = None if n == 1 else tensor_mesh(n)
    return (decode_run if kind == "decode" else prefill_run)(params, config, mesh, int(values[0]), options)


def sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def child(group: dict[str, Any], options: Any) -> None:
    """Measures all cases of one model on one number of devices and prints a result after each."""
    n, config, weights = group["devices"], configured(group["shape"], options), group["weights"]
    params, failed = None, None
    try:
        mesh = tensor_mesh(n)  # which says so if there are fewer
        if not group["cases"][0].startswith("train"):
            params = made_params(config, weights) if n == 1 else sharded_params(config, weights, mesh)
            jax.block_until_ready(params)
    except Exception as error:  # then no case can run, but each gets its line
        failed = sentence(error)
    for case in group["cases"]:
        line = dict(shape=group["shape"], weights=weights, devices=n, case=case)
        began = time.perf_counter()
        if failed is not None:
            line["error"] = failed
        else:
            try:
                line |= measure(begin(case, params, config, n, options), n, options)
            except Exception as error:  # the next case may still run
                line["error"] = sentence(error)
        line["took_seconds"] = time.perf_counter() - began
        print(RESULT + json.dumps(line), flush=True)


# All of it


def groups(options: Any, devices: list[int]) -> Iterator[dict[str, Any]]:
    """What gets a process: a model on a number of devices, with its cases; all numbers of a model follow each other."""
    for shape in options.shapes if options.cases else ():
        for weights in options.weights:
            for n in devices:
                yield dict(shape=shape, weights=weights, devices=n, cases=options.cases)
    for text in options.training:
        shape, axis, rows = text.split(":")
        for n in devices:
            yield dict(shape=shape, weights="dense", devices=n, cases=[f"train:{axis}:{rows}"])


def run_group(group: dict[str, Any], seconds: float) -> Iterator[dict[str, Any]]:
    """The lines of one process, which is ended after `seconds`; every case gets one."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child", json.dumps(group)]
    missing = list(group["cases"])
    why = "not enough time is left"
    if seconds > 0:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        for text in process.stdout or ():
            if not text.startswith(RESULT):
                print(text, end="", flush=True)
                continue
            line = json.loads(text.removeprefix(RESULT))
            missing.remove(line["case"])
            yield line
        code = process.wait()
        why = f"the process ended with {code}" if timer.is_alive() else "the time limit ended it"
        timer.cancel()
    for case in missing:
        yield dict(shape=group["shape"], weights=group["weights"], devices=group["devices"], case=case, error=why)


def with_speed_up(line: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """`line` with its speed over one device's and its efficiency: speed a device over that of the fewest measured."""
    same = [r for r in results if all(r[k] == line[k] for k in ("shape", "weights", "case")) and "error" not in r]
    if "error" in line:
        return line
    base = min([*same, line], key=lambda r: r["devices"])
    one = base["tokens_per_second"] if base["devices"] == 1 else None
    each = base["tokens_per_second"] / base["devices"]
    return line | dict(
        speed_up=line["tokens_per_second"] / one if one else None,
        efficiency=line["tokens_per_second"] / line["devices"] / each,
        efficiency_over_devices=base["devices"],
    )


def show(line: dict[str, Any]) -> None:
    """A line of results for people."""
    name = f"{line['shape']} {line['weights']} {line['case']} on {line['devices']}"
    if "error" in line:
        print(f"{name}: failed, {line['error']}", flush=True)
        return
    speed_up = f", {line['speed_up']:.2f} times one" if line["speed_up"] else ""
    peak = f", peak {line['peak_bytes'] / 1e9:.2f} GB" if line["peak_bytes"] else ""
    print(
        f"{name}: {line['tokens_per_second']:,.1f} tok/s, {line['milliseconds']:.3f} ms a step{speed_up}, efficiency "
        f"{100 * line['efficiency']:.0f} % of {line['efficiency_over_devices']}, collectives "
        f"{line['collective_milliseconds']:.3f} ms ({100 * line['collective_share']:.0f} %), program "
        f"{(line['program_bytes'] or 0) / 1e9:.2f} GB{peak}; took {line['took_seconds']:.0f} s",
        flush=True,
    )
    for kernel, milliseconds in line["kernels"].items():
        print(f"  {milliseconds:8.3f} ms  {kernel}", flush=True)


def case_name(text: str) -> str:
    kind, _, value = text.partition(":")
    if kind not in ("decode", "prefill") or not value.isdecimal() or not int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no case; it must be like decode:64 or prefill:2048")
    return text


def training_name(text: str) -> str:
    shape, axis, rows = (*text.split(":"), "", "")[:3]
    if shape not in PRESETS or axis not in ("data", "fsdp") or not rows.isdecimal() or not int(rows):
        raise argparse.ArgumentTypeError(f"{text!r} is no training; it must be like llama-3-8b:fsdp:2 or ...:data:8")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", help="numbers of them; default: 1, 2, 4, 8 up to all")
    parser.add_argument("--shapes", nargs="+", choices=PRESETS, default=["llama-3.1-8b", "llama-3.1-70b"])
    parser.add_argument("--weights", nargs="+", choices=("dense", *QUANTIZATIONS), default=["dense", "Q4_0"])
    parser.add_argument(
        "--cases", nargs="*", type=case_name, default=["decode:1", "prefill:2048", "decode:64", "prefill:32768"]
    )
    parser.add_argument(
        "--training", nargs="*", type=training_name, default=["tinyllama-1.1b:data:8", "llama-3-8b:fsdp:2"]
    )
    parser.add_argument("--layers", type=int, help="of every shape, for a try")
    parser.add_argument("--context", type=int, default=2048, help="of each sequence while decoding")
    parser.add_argument("--steps", type=int, default=32, help="of decoding in one timing")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prompt in one run")
    parser.add_argument("--tokens", type=int, default=2048, help="in a row of training")
    parser.add_argument("--repeats", type=int, default=5, help="timings, of which the median counts")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="list the N kernels that took longest")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which everything ends")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options)
        return
    began = time.perf_counter()
    devices = options.devices
    if not devices:  # asked in a process of its own: one that holds the devices' memory would leave none to the others
        count = subprocess.run(
            [sys.executable, "-c", "import jax; print(jax.device_count())"], stdout=subprocess.PIPE, check=True
        )
        devices = [n for n in (1, 2, 4, 8) if n <= int(count.stdout)]
    results: list[dict[str, Any]] = []
    for group in groups(options, devices):
        for line in run_group(group, options.limit - (time.perf_counter() - began)):
            results.append(with_speed_up(line, results) | dict(nccl_nvls_enable=os.environ["NCCL_NVLS_ENABLE"]))
            show(results[-1])
    benchmark.report("sharded", results)


if __name__ == "__main__":
    main()
