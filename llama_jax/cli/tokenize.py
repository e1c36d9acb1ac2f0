"""Shows the tokens of a text, one a line: id and piece."""

from __future__ import annotations

import argparse

from llama_jax.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_option(parser)
    options.add_prompt_options(parser)
    parser.add_argument("--ids", action="store_true", help="print one list of ids instead")
    parser.add_argument("--show-count", action="store_true", help="print the number of tokens last")
    parser.add_argument("--no-bos", action="store_true", help="add no beginning-of-sequence token")
    parser.add_argument("--no-parse-special", action="store_true", help="special tokens in the text are plain text")


def run(arguments: argparse.Namespace) -> None:
    text = options.read_prompt(arguments)
    tokenizer = options.open_tokenizer(arguments)
    ids = tokenizer.encode(
        text, add_bos=False if arguments.no_bos else None, parse_special=not arguments.no_parse_special
    )
    if arguments.ids:
        print(ids)
    else:
        for token in ids:
            print(f"{token:6d} -> {tokenizer.piece(token)!r}")
    if arguments.show_count:
        print(f"Total number of tokens: {len(ids)}")
