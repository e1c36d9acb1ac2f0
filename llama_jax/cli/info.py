"""Shows what a model file holds and the memory it needs, without loading its weights."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from typing import Any

from llama_jax.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_option(parser)
    parser.add_argument("-c", "--ctx-size", type=int, metavar="N", help="tokens of context that memory is stated for")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--metadata", action="store_true", help="list the file's metadata")


def _short(value: Any) -> str:
    """A metadata value in at most about a line."""
    if isinstance(value, str):
        text = repr(value)
    elif hasattr(value, "__len__"):
        text = (
            f"{len(value)} values: {', '.join(repr(item) for item in list(value[:6]))}" if len(value) else "no values"
        )
    else:
        text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _size(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"


def run(arguments: argparse.Namespace) -> None:
    from llama_jax.errors import ArgumentError
    from llama_jax.formats.hub import resolve_path
    from llama_jax.formats.load import check_tensors, open_model
    from llama_jax.llama import default_context, shipped_model

    if arguments.ctx_size is not None and arguments.ctx_size < 0:
        raise ArgumentError(f"-c is {arguments.ctx_size}; it must be 0 (the model's own context) or above.")
    with open_model(shipped_model() if arguments.model is None else resolve_path(arguments.model)) as file:
        check_tensors(file)
        config = file.config
        print(f"{file.path}")
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if field.name == "rope_scaling":
                value = {k: v for k, v in dataclasses.asdict(value).items() if v is not None}
                value = ", ".join(f"{k} {v}" for k, v in value.items()) if value["kind"] != "none" else "none"
            print(f"  {field.name:18} {_short(value) if isinstance(value, tuple) else value}")
        types = Counter(info.type_name for info in file.tensors.values())
        sizes = Counter[str]()
        for info in file.tensors.values():
            sizes[info.type_name] += info.nbytes
        print(f"\n{len(file.tensors)} tensors, {config.n_parameters:,} parameters, {_size(sizes.total())}")
        for name, count in types.most_common():
            print(f"  {name:6} {count:5} tensors  {_size(sizes[name])}")
        n_ctx = default_context(config) if arguments.ctx_size is None else arguments.ctx_size or config.context_length
        print(f"\nmemory for one sequence of {n_ctx} tokens")
        for name, itemsize in (("float32", 4), ("bfloat16", 2)):
            weights, cache = config.n_parameters * itemsize, n_ctx * config.kv_bytes_per_token(itemsize)
            print(f"  {name:9} weights {_size(weights)}, KV cache {_size(cache)}, together {_size(weights + cache)}")
        if arguments.metadata:
            print("\nmetadata")
            for key, value in file.metadata.items():
                print(f"  {key} = {_short(value)}")
        if arguments.tensors:
            print("\ntensors")
            for path, info in file.tensors.items():
                shape = " x ".join(map(str, info.shape))
                print(f"  {path:28} {info.name:40} {shape:>16}  {info.type_name:5} {_size(info.nbytes)}")
