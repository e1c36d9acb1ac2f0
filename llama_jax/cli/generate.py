"""Continues a prompt and prints the new text as it comes."""

from __future__ import annotations

import argparse
import sys

from llama_jax.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_options(parser)
    options.add_prompt_options(parser)
    parser.add_argument(
        "-n",
        "--n-predict",
        type=int,
        default=-1,
        metavar="N",
        help="most new tokens; default -1, until the context is full",
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be repeated")
    parser.add_argument("--display-prompt", action="store_true", help="print the prompt before its continuation")
    options.add_sampling_options(parser)


def run(arguments: argparse.Namespace) -> None:
    prompt = options.read_prompt(arguments)
    options.check_sampling(arguments)
    model, load_seconds = options.load_model(arguments)
    sampling = options.sampling_options(arguments, model.n_ctx)
    pieces = model.stream(
        prompt,
        max_tokens=None if arguments.n_predict < 0 else arguments.n_predict,
        stop=[options.unescape(text) if arguments.escape else text for text in arguments.stop],
        **sampling,
    )
    options.compile_ahead(model, prompt, sampling)
    if arguments.display_prompt:
        print(prompt, end="", flush=True)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    finally:
        print(flush=True)
    print(options.speed_line(model, load_seconds), file=sys.stderr)
