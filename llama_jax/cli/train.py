"""Trains a model on text: from scratch, from a model, or on from a checkpoint."""

from __future__ import annotations

import argparse

from llama_jax.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from training.arguments import add_arguments

    add_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    from training.train_text_from_scratch import train

    options.cache_compiled_programs()
    train(arguments)
