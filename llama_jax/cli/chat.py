"""Talks with a model. /exit ends, /clear forgets, /regen answers again, /read FILE sends a file; a line that ends in a
backslash goes on. Ctrl-C stops an answer."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_jax.cli import options
from llama_jax.errors import LlamaJaxError

if TYPE_CHECKING:
    from llama_jax.llama import Llama


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_options(parser)
    parser.add_argument("-sys", "--system-prompt", metavar="TEXT", help="the system message")
    parser.add_argument("-n", "--n-predict", type=int, default=-1, metavar="N", help="most tokens of an answer")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends an answer; may be repeated")
    options.add_sampling_options(parser)


def read_message() -> str | None:
    """The user's next message, without its last newline; None at the end of input."""
    lines = []
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return "\n".join(lines) if lines else None
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line.removesuffix("\\"))


def answer(model: Llama, messages: list[Mapping[str, str]], stream_options: Mapping[str, Any]) -> str:
    """Prints the answer as it comes; Ctrl-C ends it early."""
    pieces: list[str] = []
    stream = model.stream_chat(messages, **stream_options)
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(stream):
        for piece in stream:
            pieces.append(piece)
            print(piece, end="", flush=True)
    print(flush=True)
    return "".join(pieces)


def run(arguments: argparse.Namespace) -> None:
    options.check_sampling(arguments)
    model, load_seconds = options.load_model(arguments)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history in input())
    sampling = options.sampling_options(arguments, model.n_ctx)
    options.compile_ahead(model, arguments.system_prompt or "", sampling)
    stream_options = sampling | dict(
        max_tokens=None if arguments.n_predict < 0 else arguments.n_predict, stop=arguments.stop
    )
    system = [{"role": "system", "content": arguments.system_prompt}] if arguments.system_prompt else []
    messages: list[Mapping[str, str]] = [*system]
    while True:
        try:
            text = read_message()
        except KeyboardInterrupt:
            text = None
        if text is None or text.strip() == "/exit":
            break
        command, _, rest = text.strip().partition(" ")
        if command == "/clear":
            messages = [*system]
            continue
        if not text.strip():
            continue
        try:
            if command == "/regen":
                if not messages or messages[-1]["role"] != "assistant":
                    print("There is no answer yet to give again.", file=sys.stderr)
                    continue
                del messages[-1]
            elif command == "/read":
                messages.append({"role": "user", "content": options.read_text_file(Path(rest.strip()))})
            else:
                messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": answer(model, messages, stream_options)})
        except LlamaJaxError as error:
            print(f"llama-jax: {error}", file=sys.stderr)
            while messages and messages[-1]["role"] == "user":
                del messages[-1]
    if model.timings.prompt_tokens:
        print(options.speed_line(model, load_seconds), file=sys.stderr)
