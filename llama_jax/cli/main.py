"""The command `llama-jax`: finds the sub-command and turns a user's mistakes into one sentence."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from llama_jax import __version__
from llama_jax.errors import LlamaJaxError

# Sub-command -> what it does. Each is a module of this package with `add_arguments(parser)` and `run(arguments)`,
# imported only when it is called: `llama-jax --help` starts no jax.
COMMANDS = {
    "generate": "continue a prompt",
    "chat": "talk with a model",
    "tokenize": "show the tokens of a text",
    "detokenize": "show the text of token ids",
    "info": "show what a model file holds, without loading its weights",
    "perplexity": "score a text",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llama-jax",
        description="LLaMA inference as pure JAX functions.",
        epilog="commands:\n" + "\n".join(f"  {name:12} {text}" for name, text in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"llama-jax {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="llama-jax COMMAND --help lists them")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0, 1 for a user's mistake, 130 after Ctrl-C. Exits with 2 on wrong usage."""
    top = _parser().parse_args(argv)
    module = importlib.import_module(f"llama_jax.cli.{top.command}")
    parser = argparse.ArgumentParser(prog=f"llama-jax {top.command}", description=module.__doc__)
    module.add_arguments(parser)
    arguments = parser.parse_args(top.arguments)
    logging.basicConfig(stream=sys.stderr, format="%(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("llama_jax").setLevel(logging.INFO)
    try:
        module.run(arguments)
        sys.stdout.flush()
    except LlamaJaxError as error:
        print(f"llama-jax: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has had enough, as in `llama-jax generate | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
