"""Shows the text of token ids."""

from __future__ import annotations

import argparse

from llama_jax.cli import options
from llama_jax.errors import ArgumentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_option(parser)
    parser.add_argument("ids", nargs="+", type=int, help="token ids")


def run(arguments: argparse.Namespace) -> None:
    tokenizer = options.open_tokenizer(arguments)
    for token in arguments.ids:
        if not 0 <= token < tokenizer.vocab_size:
            raise ArgumentError(f"The token id {token} is not in the vocabulary, 0 to {tokenizer.vocab_size - 1}.")
    print(tokenizer.decode(arguments.ids))
