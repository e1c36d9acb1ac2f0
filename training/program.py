"""What the programs of this package do around their work: options, the log, one sentence for a user's mistake."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from llama_jax.cli.main import guarded
from llama_jax.errors import ArgumentError


def run_program(
    name: str,
    description: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    work: Callable[[argparse.Namespace], None],
    argv: Sequence[str] | None,
) -> int:
    """Reads `argv`, by default the command line, and works: 0, 1 for a user's mistake, 130 after Ctrl-C."""
    from llama_jax.cli.options import cache_compiled_programs

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, format="%(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("llama_jax").setLevel(logging.INFO)
    cache_compiled_programs()
    return guarded(name, lambda: work(arguments))


def check_output(option: str, path: Path, run: Path) -> None:
    """Raises ArgumentError where what the option names could not be written after the training.

    Args:
      path: a .gguf file or a folder, as its name says.
      run: the folder of the run, which the training makes where it is absent.
    """
    folder = path.absolute().parent
    if folder != run.absolute() and not folder.is_dir():
        raise ArgumentError(f"{option} {str(path)!r} lies in a folder that does not exist.")
    if path.exists() and path.is_dir() == (path.suffix == ".gguf"):
        kind = "a folder" if path.is_dir() else "no folder"
        raise ArgumentError(f"{option} {str(path)!r} is {kind}; name a .gguf file or a folder.")
    if folder.is_dir() and not os.access(path if path.is_dir() else folder, os.W_OK):
        raise ArgumentError(f"{option} {str(path)!r} lies in a folder that cannot be written to.")
