"""Continues a prompt and prints the new text as it comes."""

from __future__ import annotations

import argparse
import sys

from llama_jax.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_options(parser)
    options.add_prompt_options(parser)
    options.add_length_options(parser, "the text")
    options.add_prompt_cache_options(parser)
    parser.add_argument("--display-prompt", action="store_true", help="print the prompt before its continuation")
    options.add_sampling_options(parser)
    instead = parser.add_argument_group("instead of text").add_mutually_exclusive_group()
    instead.add_argument("--mtest", action="store_true", help="run a full batch and the last token; print the memory")
    instead.add_argument("--export", metavar="DIR", help="write programs that run without this package")


def _instead_of_text(arguments: argparse.Namespace) -> None:
    """--mtest and --export."""
    model, _ = options.load_model(arguments)
    if arguments.export is not None:
        from llama_jax.export import export_model

        export_model(arguments.export, model)
        return
    from llama_jax.memory_test import describe, memory_test

    print("\n".join(describe(memory_test(model))))


def run(arguments: argparse.Namespace) -> None:
    if arguments.mtest or arguments.export is not None:
        _instead_of_text(arguments)
        return
    prompt = options.read_prompt(arguments)
    options.check_sampling(arguments)
    cache = options.prompt_cache(arguments)
    model, load_seconds = options.load_model(arguments)
    sampling = options.sampling_options(arguments, model.n_ctx)
    pieces = model.stream(prompt, prompt_cache=cache, **options.length_options(arguments), **sampling)
    options.compile_ahead(model, prompt, sampling)
    if arguments.display_prompt:
        print(prompt, end="", flush=True)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    finally:
        print(flush=True)
    options.note_full_context(model)
    print(options.speed_line(model, load_seconds), file=sys.stderr)
