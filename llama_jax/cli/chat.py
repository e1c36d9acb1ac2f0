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
from llama_jax.errors import ArgumentError, LlamaJaxError

if TYPE_CHECKING:
    from llama_jax.llama import Llama

_COMMANDS = ("/exit", "/clear", "/regen", "/read FILE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_options(parser)
    parser.add_argument("-sys", "--system-prompt", metavar="TEXT", help="the system message")
    parser.add_argument("-n", "--n-predict", type=int, default=-1, metavar="N", help="most tokens of an answer")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends an answer; may be repeated")
    options.add_sampling_options(parser)


def read_message() -> str | None:
    """The user's next message, without its last newline; None at the end of input or after two Ctrl-C in a row.

    One Ctrl-C drops what has been typed.
    """
    on_terminal = sys.stdin.isatty()
    lines: list[str] = []
    interrupted = False
    while True:
        try:
            line = input(("... " if lines else "> ") if on_terminal else "")
        except EOFError:
            if on_terminal:
                print()
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:
            print()
            if interrupted:
                return None
            interrupted, lines = True, []
            continue
        interrupted = False
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
        max_tokens=None if arguments.n_predict < 0 else arguments.n_predict,
        stop=[options.unescape(text) for text in arguments.stop],
    )
    system = []
    if arguments.system_prompt:
        system.append({"role": "system", "content": options.unescape(arguments.system_prompt)})
    messages: list[Mapping[str, str]] = [*system]
    while (text := read_message()) is not None:
        command, _, rest = text.strip().partition(" ")
        if not command:
            continue
        if command == "/exit":
            break
        try:
            if command == "/clear":
                messages = [*system]
                continue
            if command == "/regen":
                if not messages or messages[-1]["role"] != "assistant":
                    raise ArgumentError("There is no answer yet to give again.")
                del messages[-1]
                if arguments.seed != -1:
                    arguments.seed += 1  # the same seed would give the same answer
                    stream_options["seed"] = arguments.seed
            elif command == "/read":
                if not rest.strip():
                    raise ArgumentError("/read needs a file: /read FILE.")
                messages.append({"role": "user", "content": options.read_text_file(Path(rest.strip()))})
            elif not command.startswith("/") or "/" in command[1:]:
                messages.append({"role": "user", "content": text})
            else:
                raise ArgumentError(f"{command} is not a command; there are {', '.join(_COMMANDS)}.")
            messages.append({"role": "assistant", "content": answer(model, messages, stream_options)})
        except LlamaJaxError as error:
            hint = " /clear forgets what was said." if "the context holds" in str(error) else ""
            print(f"llama-jax: {error}{hint}", file=sys.stderr)
            while messages and messages[-1]["role"] == "user":
                del messages[-1]
    if model.timings.prompt_tokens:
        print(options.speed_line(model, load_seconds), file=sys.stderr)
