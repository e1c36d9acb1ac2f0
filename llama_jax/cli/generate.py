"""Continues a prompt and prints the new text as it comes."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from llama_jax.cli import options
from llama_jax.errors import ArgumentError

if TYPE_CHECKING:
    from llama_jax.llama import Llama
    from llama_jax.session import TokenLogprobs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_options(parser)
    options.add_prompt_options(parser)
    options.add_length_options(parser, "the text")
    options.add_prompt_cache_options(parser)
    parser.add_argument("--display-prompt", action="store_true", help="print the prompt before its continuation")
    parser.add_argument("--choices", type=int, default=1, metavar="N", help="texts to generate; default 1")
    parser.add_argument("--n-probs", type=int, metavar="N", help="tell the N most likely tokens at each place")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per text, in one line; --choices and --n-probs imply it"
    )
    options.add_speculation_options(parser)
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
    wanted = options.speculation(arguments)
    model, load_seconds = options.load_model(arguments)
    options.speculate(model, arguments, wanted)
    sampling = options.sampling_options(arguments, model.n_ctx)
    constraint = options.grammar(arguments)
    if arguments.json or arguments.choices != 1 or arguments.n_probs is not None:
        _print_json(model, prompt, arguments, sampling | dict(constraint=constraint))
        return
    length = options.length_options(arguments)
    pieces = model.stream(prompt, prompt_cache=cache, constraint=constraint, **length, **sampling)
    options.compile_ahead(model, prompt, sampling, constrained=constraint is not None)
    if arguments.display_prompt:
        print(prompt, end="", flush=True)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    finally:
        print(flush=True)
    options.note_full_context(model)
    print(options.speed_line(model, load_seconds), file=sys.stderr)


def _print_json(model: Llama, prompt: str, arguments: argparse.Namespace, sampling: dict[str, Any]) -> None:
    """One line per text: text, finish_reason, tokens, and for each token the most likely ones."""
    length = options.length_options(arguments)
    if length.pop("context_shift") or length.pop("keep") or arguments.prompt_cache is not None:
        raise ArgumentError("--json, --choices and --n-probs do not go with --context-shift, --keep or --prompt-cache.")

    def token(id: int, logprob: float) -> dict[str, Any]:
        # The bytes of several tokens may be one character: only joined they always give the text.
        data = model.tokenizer.token_bytes(id)
        return dict(id=id, token=data.decode("utf-8", "replace"), bytes=list(data), logprob=logprob)

    def told(place: TokenLogprobs) -> dict[str, Any]:
        return token(place.token, place.logprob) | dict(top_logprobs=[token(*one) for one in place.top])

    done = model.complete(prompt, n=arguments.choices, logprobs=arguments.n_probs, **length, **sampling)
    for index, completion in enumerate(done):
        line: dict[str, Any] = dict(
            index=index,
            text=completion.text,
            finish_reason=completion.finish_reason,
            stop=completion.stop,
            tokens=completion.tokens,
        )
        if completion.logprobs is not None:
            line["logprobs"] = [told(place) for place in completion.logprobs]
        print(json.dumps(line))
