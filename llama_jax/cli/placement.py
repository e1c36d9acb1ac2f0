"""The options that say what lives where, and which hosts work together."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llama_jax.placement import Placement

# Attribute of the arguments -> the environment variable that speaks where the option is not given.
_PLACEMENT_VARIABLES = {
    "gpu_layers": "LLAMA_ARG_N_GPU_LAYERS",
    "low_vram": "LLAMA_ARG_LOW_VRAM",
    "main_gpu": "LLAMA_ARG_MAIN_GPU",
    "tensor_split": "LLAMA_ARG_TENSOR_SPLIT",
    "split_mode": "LLAMA_ARG_SPLIT_MODE",
}


def add_placement_options(parser: argparse.ArgumentParser) -> None:
    """What `placement` reads."""
    group = parser.add_argument_group("GPUs", "environment: " + ", ".join(_PLACEMENT_VARIABLES.values()))
    group.add_argument(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        metavar="N",
        help="last N layers on the GPU, or all, auto; default all",
    )
    group.add_argument(
        "-lv",
        "--low-vram",
        action="store_const",
        const="1",
        help="keep the KV cache in host memory, run smaller chunks",
    )
    group.add_argument("-mg", "--main-gpu", metavar="I", help="the GPU for what is not divided; default: the first")
    group.add_argument("-ts", "--tensor-split", metavar="A,B,...", help="shares of the GPUs; default: equal")
    group.add_argument("-sm", "--split-mode", metavar="MODE", help="tensor, layer or none; default: by the shares")
    hosts = parser.add_argument_group("several hosts", "each runs the same command; the first one prints")
    hosts.add_argument("--coordinator", metavar="ADDRESS", help="address:port of host 0; auto: what SLURM etc. say")
    hosts.add_argument("--num-hosts", type=int, metavar="N", help="how many hosts there are")
    hosts.add_argument("--host-id", type=int, metavar="I", help="this host's number, from 0")


def join_hosts(arguments: argparse.Namespace) -> None:
    """Joins the hosts that the options name; all but the first print nothing, and all draw the same random seed."""
    from llama_jax.placement import shared_seed, start_hosts

    if arguments.coordinator is None and arguments.num_hosts is None and arguments.host_id is None:
        return
    start_hosts(arguments.coordinator, arguments.num_hosts, arguments.host_id)
    import jax

    if getattr(arguments, "seed", None) == -1:
        arguments.seed = shared_seed()
    if jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open as long as the process)
        logging.getLogger("llama_jax").setLevel(logging.WARNING)


def placement(arguments: argparse.Namespace) -> Placement:
    """What lives where, from the options or, where one is not given, its environment variable."""
    from llama_jax.placement import Placement

    given = {name: getattr(arguments, name) for name in _PLACEMENT_VARIABLES}
    from_environment = {name: os.environ.get(variable) for name, variable in _PLACEMENT_VARIABLES.items()}
    return Placement.parse(
        **{name: from_environment[name] if value is None else value for name, value in given.items()}
    )
