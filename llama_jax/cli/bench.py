"""Times prompts (pp) and new tokens (tg). Lists of values, with commas or by repetition, give a test for each."""

from __future__ import annotations

import argparse
import collections
import csv
import datetime
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_jax import __version__
from llama_jax.cli import options
from llama_jax.errors import ArgumentError

if TYPE_CHECKING:
    from llama_jax.bench import BenchResult
    from llama_jax.llama import Llama


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


def _pair(text: str) -> list[tuple[int, int]]:
    prompt, gen = text.split(",")
    return [(int(prompt), int(gen))]


for _kind, _name in ((_numbers, "list of integers"), (_names, "list of names"), (_pair, "pair PP,TG")):
    _kind.__name__ = _name  # what argparse calls it in a message about wrong usage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_option(parser)
    options.add_weight_options(parser)

    def add(*names: str, type: Callable[[str], list[Any]] = _numbers, metavar: str = "N,...", help: str) -> None:
        parser.add_argument(*names, type=type, action="extend", default=[], metavar=metavar, help=help)

    add("-p", "--n-prompt", help="prompt tokens; 0: no such test; default 512")
    add("-n", "--n-gen", help="new tokens; 0: no such test; default 128")
    add("-pg", type=_pair, metavar="PP,TG", help="a prompt and new tokens in one test; may be repeated")
    add("-d", "--n-depth", help="tokens that the cache holds before; default 0")
    add("-b", "--batch-size", help="most prompt tokens a run; default 2048")
    add("-ub", "--ubatch-size", help="the same, the smaller counts; default 512")
    add("-ctk", "--cache-type-k", type=_names, metavar="TYPE,...", help="of keys; default: that of the activations")
    add("-ctv", "--cache-type-v", type=_names, metavar="TYPE,...", help="of values; default: that of the activations")
    parser.add_argument("-r", "--repetitions", type=int, default=5, metavar="N", help="timed runs a test; default 5")
    parser.add_argument("--no-warmup", action="store_true", help="time the first run, too, which compiles")
    parser.add_argument("--progress", action="store_true", help="name each test on standard error as it starts")
    parser.add_argument("-o", "--output", choices=tuple(_WRITERS), default="md", help="default md, a table")


def run(arguments: argparse.Namespace) -> None:
    from llama_jax.bench import bench, grid

    batches, ubatches = arguments.batch_size or [2048], arguments.ubatch_size or [512]
    tests = grid(
        arguments.n_prompt or [512],
        arguments.n_gen or [128],
        arguments.pg,
        arguments.n_depth or [0],
        batches,
        ubatches,
        arguments.cache_type_k or [None],
        arguments.cache_type_v or [None],
    )
    if not tests:
        raise ArgumentError("-p 0 -n 0 leaves no test; one of them must be above 0, or -pg given.")
    if arguments.repetitions < 1:
        raise ArgumentError(f"-r is {arguments.repetitions}; it must be at least 1.")
    needed = dict(
        ctx_size=max(test.capacity for test in tests),
        batch_size=max(min(b, u) for b in batches for u in ubatches),
        cache_type_k=None,
        cache_type_v=None,
    )
    model, _ = options.load_model(argparse.Namespace(**vars(arguments) | needed))
    common = _facts(model, arguments)

    def rows() -> Iterable[dict[str, Any]]:
        for i, test in enumerate(tests):
            if arguments.progress:
                print(f"llama-jax bench: {i + 1}/{len(tests)} {test.name}", file=sys.stderr, flush=True)
            for result in bench(model, [test], repeats=arguments.repetitions, warm_up=not arguments.no_warmup):
                yield common | _row(result)

    given = dict(
        n_batch=arguments.batch_size,
        n_ubatch=arguments.ubatch_size,
        type_k=arguments.cache_type_k,
        type_v=arguments.cache_type_v,
        devices=model.mesh,
    )
    _WRITERS[arguments.output](rows(), [name for name, value in given.items() if value])


def _facts(model: Llama, arguments: argparse.Namespace) -> dict[str, Any]:
    """What is the same in every row; names are llama-bench's where it has one."""
    import jax

    from llama_jax.llama import shipped_model

    device = jax.devices()[0]
    path = Path(arguments.model or shipped_model())
    on_cpu = device.platform == "cpu"
    count = model.config.n_parameters
    label = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    return {
        "build_version": __version__,
        "jax_version": jax.__version__,
        "cpu_info": device.device_kind if on_cpu else "",
        "gpu_info": "" if on_cpu else device.device_kind,
        "backends": "CPU" if on_cpu else device.platform.upper(),
        "devices": 1 if model.mesh is None else model.mesh.size,
        "model_filename": str(path),
        "model_type": f"llama {label} {_weight_type(model)}",
        "model_size": sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)),
        "model_n_params": count,
    }


def _weight_type(model: Llama) -> str:
    """What most of the weights' bytes are: the type of packed ones, the dtype of others."""
    import jax

    from llama_jax.quantization import QuantizedTensor

    sizes = collections.Counter[str]()
    for leaf in jax.tree.leaves(model.params, is_leaf=lambda leaf: isinstance(leaf, QuantizedTensor)):
        sizes[leaf.type_name if isinstance(leaf, QuantizedTensor) else leaf.dtype.name] += leaf.nbytes
    return sizes.most_common(1)[0][0]


def _row(result: BenchResult) -> dict[str, Any]:
    test, share = result.test, result.share_of_limit
    nanoseconds = [round(1e9 * s) for s in result.seconds]
    return {
        "n_batch": test.n_batch,
        "n_ubatch": test.n_ubatch,
        "type_k": test.type_k,
        "type_v": test.type_v,
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.n_depth,
        "test": test.name,
        "test_time": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": round(statistics.mean(nanoseconds)),
        "stddev_ns": round(statistics.stdev(nanoseconds)) if len(nanoseconds) > 1 else 0,
        "avg_ts": result.speed,
        "stddev_ts": result.speed_deviation,
        "gb_per_second": result.bandwidth / 1e9,
        "tflop_per_second": result.arithmetic / 1e12,
        "share_of_limit": share[0] if share else None,
        "limit": share[1] if share else None,
        "samples_ns": nanoseconds,
        "samples_ts": result.speeds,
    }


def _write_md(rows: Iterable[dict[str, Any]], asked: Iterable[str]) -> None:
    """A table whose lines appear as they are measured; columns of options that were given stand in it."""
    head = False
    for row in rows:
        cells = {
            "model": row["model_type"],
            "size": f"{row['model_size'] / 2**20:.2f} MiB",
            "params": f"{row['model_n_params'] / 1e6:.2f} M",
            "backend": row["backends"],
            **{name: str(row[name]) for name in asked},
            "test": row["test"],
            "t/s": f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}",
            "GB/s": f"{row['gb_per_second']:.1f}",
            "TFLOP/s": f"{row['tflop_per_second']:.3g}",
            "of the limit": f"{100 * row['share_of_limit']:.0f} % of {row['limit']}" if row["limit"] else "",
        }
        if not head:
            head = True
            print("| " + " | ".join(cells) + " |")
            print("| " + " | ".join("---" if name in ("model", "backend") else "---:" for name in cells) + " |")
        print("| " + " | ".join(cells.values()) + " |", flush=True)
    print(f"\nbuild: llama_jax {__version__}")


def _write_csv(rows: Iterable[dict[str, Any]], asked: Iterable[str]) -> None:
    writer = csv.writer(sys.stdout, quoting=csv.QUOTE_ALL, lineterminator="\n")
    for number, row in enumerate(rows):
        flat = {name: value for name, value in row.items() if not isinstance(value, list)}
        if number == 0:
            writer.writerow(flat)
        writer.writerow(flat.values())
        sys.stdout.flush()


def _write_json(rows: Iterable[dict[str, Any]], asked: Iterable[str]) -> None:
    print(json.dumps(list(rows), indent=2))


def _write_jsonl(rows: Iterable[dict[str, Any]], asked: Iterable[str]) -> None:
    for row in rows:
        print(json.dumps(row), flush=True)


_WRITERS: dict[str, Callable[[Iterable[dict[str, Any]], Iterable[str]], None]] = {
    "md": _write_md,
    "csv": _write_csv,
    "json": _write_json,
    "jsonl": _write_jsonl,
}
