"""Prints texts as vectors of numbers, one text a line of the input."""

from __future__ import annotations

import argparse
import json

from llama_jax.cli import options
from llama_jax.errors import ArgumentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_options(parser)
    options.add_prompt_options(parser)
    parser.add_argument(
        "--pooling",
        choices=("none", "mean", "last"),
        default="last",
        help="none: every token's vector, not normalised; default last",
    )
    parser.add_argument(
        "--embd-normalize",
        type=int,
        choices=(-1, 2),
        default=2,
        metavar="N",
        help="2: Euclidean length 1; -1: as it is",
    )
    parser.add_argument(
        "--embd-output-format",
        choices=("text", "array", "json"),
        default="text",
        help="text: a line for each vector; array: JSON lists; json: as an OpenAI server answers",
    )
    parser.add_argument("--embd-separator", default="\n", metavar="TEXT", help=r"between texts; default \n")


def run(arguments: argparse.Namespace) -> None:
    separator = options.unescape(arguments.embd_separator) if arguments.escape else arguments.embd_separator
    if not separator:
        raise ArgumentError("--embd-separator is ''; it must be at least one character.")
    texts = options.read_prompt(arguments).split(separator)
    model, _ = options.load_model(arguments)
    ids = [model.tokenizer.encode(text, parse_special=True) for text in texts]
    vectors = model.embed(ids, pooling=arguments.pooling, normalize=arguments.embd_normalize == 2)
    if arguments.embd_output_format == "text":
        for vector in vectors:
            for row in vector.reshape(-1, vector.shape[-1]):
                print(" ".join(f"{x:.7g}" for x in row.tolist()))
        return
    lists = [vector.tolist() for vector in vectors]
    if arguments.embd_output_format == "array":
        print(json.dumps(lists))
        return
    n_tokens = sum(map(len, ids))
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(lists)]
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    print(json.dumps({"object": "list", "model": arguments.model or "shipped", "data": data, "usage": usage}))
