"""Draws a training run's loss, learning rate and gradient norm to a PNG."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, or its metrics.jsonl")
    parser.add_argument("-o", "--out", type=Path, metavar="PNG", help="the picture; default: RUN/metrics.png")
    parser.add_argument("--title", metavar="TEXT", help="above the picture; default: the run's name")


def run(arguments: argparse.Namespace) -> None:
    from training.plot import plot_run

    print(plot_run(arguments.run, arguments.out, arguments.title))
