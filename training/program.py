"""What the programs of this package do around their work: options, the log, one sentence for a user's mistake."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from llama_jax.cli.main import guarded


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
