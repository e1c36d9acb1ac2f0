"""The command `llama-jax`: finds the sub-command and turns a user's mistakes into one sentence."""

from __future__ import annotations

# The rest is imported where it is used, so that `console` comes soon to say what Ctrl-C does.
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from llama_jax import __version__
from llama_jax.errors import LlamaJaxError

if TYPE_CHECKING:
    from llama_jax.cli.usage import Parser

# Sub-command -> what it does. Each is a module of this package with `add_arguments(parser)` and `run(arguments)`,
# imported only when it is called: `llama-jax --help` starts no jax.
COMMANDS = {
    "generate": "continue a prompt",
    "chat": "talk with a model",
    "embed": "print texts as vectors",
    "tokenize": "show the tokens of a text",
    "detokenize": "show the text of token ids",
    "info": "show what a model file holds, without loading its weights",
    "perplexity": "score a text",
    "bench": "time prompts and new tokens",
    "train": "train a model on text",
    "plot": "draw a training run's loss",
}


def _parser() -> Parser:
    import argparse

    from llama_jax.cli.usage import Parser

    parser = Parser(
        prog="llama-jax",
        description="LLaMA inference as pure JAX functions.",
        epilog="commands:\n" + "\n".join(f"  {name:12} {text}" for name, text in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"llama-jax {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="llama-jax COMMAND --help lists them")
    return parser


def _make_streams_usable() -> None:
    """Closed standard streams lead nowhere; a character that a stream's encoding lacks becomes a question mark."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open as long as the process)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _discard_output() -> None:
    """What is still buffered for stdout goes nowhere, instead of failing again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def guarded(name: str, program: Callable[[], None]) -> int:
    """Runs a program; returns 0, 1 after one sentence about a user's mistake, 130 after Ctrl-C.

    Args:
      name: of the program, which begins the sentence.
    """

    def complain(sentence: object) -> int:
        print(f"{name}: {sentence}", file=sys.stderr)
        return 1

    try:
        program()
        sys.stdout.flush()
    except LlamaJaxError as error:
        return complain(error)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has had enough, as in `llama-jax generate | head`
        _discard_output()
    except OSError as error:
        _discard_output()
        return complain(f"Reading or writing failed: {error}.")
    except Exception as error:
        # By its text, since naming jax's exception class would import jax.
        if "No space left on device" in str(error):  # which tensorstore calls RESOURCE_EXHAUSTED, too
            return complain("Writing failed: No space left on device.")
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0].rstrip(".")
        return complain(f"The device has too little memory; a smaller -c or --dtype needs less ({reason}).")
    return 0


def leave(code: int) -> NoReturn:
    """Ends the process."""
    if code == 130:  # an interrupted computation may still run, and the interpreter's shutdown would pull it down
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0, 1 for a user's mistake, 130 after Ctrl-C. Exits with 2 on wrong usage."""
    import logging

    from llama_jax.cli.usage import Parser

    _make_streams_usable()
    top = _parser().parse_args(argv)
    module = importlib.import_module(f"llama_jax.cli.{top.command}")
    parser = Parser(prog=f"llama-jax {top.command}", description=module.__doc__)
    module.add_arguments(parser)
    arguments = parser.parse_args(top.arguments)
    logging.basicConfig(stream=sys.stderr, format="%(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("llama_jax").setLevel(logging.INFO)
    return guarded("llama-jax", lambda: module.run(arguments))


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Ctrl-C as everywhere, but the end of the process while a module is being imported.

    A KeyboardInterrupt there may be swallowed by a library or leave it half imported.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def console() -> None:
    """The installed command: `main`, then the end of the process."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not so where a shell ignores Ctrl-C
            signal.signal(signal.SIGINT, _interrupt)
        code = main()
    except KeyboardInterrupt:  # before the command has started
        code = 130
    leave(code)


if __name__ == "__main__":
    console()
