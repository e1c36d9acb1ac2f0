"""Scores a text by llama.cpp's rule: the second half of each chunk of -c tokens counts."""

from __future__ import annotations

import argparse
from itertools import islice

from llama_jax.cli import options
from llama_jax.errors import ArgumentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_options(parser, context="tokens a chunk; default 512")
    options.add_prompt_options(parser)
    parser.add_argument("--chunks", type=int, default=-1, metavar="N", help="score at most N chunks; default -1, all")
    parser.set_defaults(ctx_size=512)


def run(arguments: argparse.Namespace) -> None:
    if arguments.chunks == 0 or arguments.chunks < -1:
        raise ArgumentError(f"--chunks is {arguments.chunks}; it must be -1 (all) or at least 1.")
    text = options.read_prompt(arguments)
    model, _ = options.load_model(arguments)
    from llama_jax.perplexity import perplexity

    tokenizer = model.tokenizer
    estimates = perplexity(
        model.params,
        model.config,
        tokenizer.encode(text, add_eos=False),
        n_ctx=model.n_ctx,
        n_batch=model.n_batch,
        bos_id=tokenizer.bos_id if tokenizer.add_bos else None,
    )
    estimate = None
    for estimate in islice(estimates, None if arguments.chunks < 0 else arguments.chunks):
        print(f"[{estimate.chunks}]{estimate.perplexity:.4f},", end="", flush=True)
    if estimate is not None:
        print(f"\nFinal estimate: PPL = {estimate.perplexity:.4f} +/- {estimate.error:.5f}")
