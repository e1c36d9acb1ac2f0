"""The options of `train_text_from_scratch`, which is `llama-jax train`: names of llama.cpp's program of June 2023."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options; no jax is imported for it."""
    data = parser.add_argument_group("data")
    data.add_argument(
        "--train-data", nargs="+", metavar="PATH", required=True, help="text, .jsonl, or a folder of them"
    )
    data.add_argument("--vocab-model", metavar="PATH", help="a model whose vocabulary is taken; default: shipped")
    data.add_argument(
        "--vocab-train", type=int, metavar="N", help="make a vocabulary of N pieces from the data instead"
    )
    data.add_argument("--val-data", nargs="+", metavar="PATH", help="validation data")
    data.add_argument("--val-split", type=float, default=0.0, metavar="X", help="share of the data kept for validation")
    data.add_argument("--samples-after-nl", action="store_true", help="rows begin behind the end of a line")

    model = parser.add_argument_group("model")
    model.add_argument("--model-in", metavar="PATH", help="a model to go on with instead of a random one")
    model.add_argument("--embd", type=int, metavar="D", help="width; default 256")
    model.add_argument("--head", type=int, metavar="H", help="query heads; default 8")
    model.add_argument("--head-kv", type=int, metavar="K", help="key/value heads; default: as many")
    model.add_argument("--layer", type=int, metavar="L", help="layers; default 16")
    model.add_argument(
        "--mult", type=int, metavar="N",
        help="the feed-forward width is 8/3 D rounded up to a multiple of N; default 256",
    )  # fmt: skip
    model.add_argument("--rotmax", type=int, metavar="N", help="most numbers of a head that turn; all have to")
    model.add_argument("--tied", action="store_true", help="the embedding is the output head, too")

    files = parser.add_argument_group("files")
    files.add_argument(
        "--checkpoint-in", type=Path, metavar="PATH",
        help="the folder of a run to go on with, or a 2023 checkpoint, whose weights are taken; default: the run's own",
    )  # fmt: skip
    files.add_argument(
        "--model-out",
        type=Path,
        metavar="PATH",
        help="a .gguf file, or a folder for safetensors; default RUN/model.gguf",
    )
    files.add_argument("--model-type", default="F32", metavar="TYPE", help="of a .gguf file's matrices; default F32")

    add_run_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that training programs share: the run, the optimiser, the computation."""
    run = parser.add_argument_group("run")
    run.add_argument(
        "--checkpoint-out", type=Path, default=Path("run"), metavar="DIR", help="the run's folder; default run"
    )
    run.add_argument("--save-interval", type=int, default=200, metavar="N", help="batches; default 200")
    run.add_argument("--keep", type=int, default=3, metavar="N", help="newest checkpoints that stay; default 3")
    run.add_argument("--workers", type=int, default=0, metavar="N", help="processes that make batches; default 0")
    run.add_argument("-s", "--seed", type=int, default=0, metavar="N", help="default 0; -1: random")
    run.add_argument("-c", "--ctx", type=int, default=128, metavar="T", help="tokens in a row; default 128")
    run.add_argument("-b", "--batch", type=int, default=8, metavar="B", help="rows in a batch; default 8")
    run.add_argument("-n", "--examples", type=int, default=256, metavar="N", help="batches; default 256")
    run.add_argument("--accumulate", type=int, default=1, metavar="N", help="parts of a batch, one after the other")
    run.add_argument("--eval-interval", type=int, default=100, metavar="N", help="batches; default 100")
    run.add_argument("--patience", type=int, default=0, metavar="N", help="evaluations without a better one, then end")
    run.add_argument("--print-info-interval", type=int, default=1, metavar="N", help="batches; default 1")
    run.add_argument(
        "--print-details-interval", type=int, default=0, metavar="N", help="batches between samples of text; default 0"
    )
    run.add_argument("--predict", type=int, default=64, metavar="N", help="tokens of a sample; default 64")
    run.add_argument("--tensorboard", action="store_true", help="write its events, too")

    optimizer = parser.add_argument_group("optimiser")
    which = optimizer.add_mutually_exclusive_group()
    which.add_argument("--optimizer", choices=("adamw", "muon", "sgd", "lbfgs"), default="adamw", help="default adamw")
    which.add_argument("--use-adam", dest="optimizer", action="store_const", const="adamw", help="AdamW")
    which.add_argument(
        "--use-lbfgs", dest="optimizer", action="store_const", const="lbfgs", help="L-BFGS, all data a step"
    )
    optimizer.add_argument("--adam-iter", type=int, default=1, metavar="N", help="steps on each batch; default 1")
    optimizer.add_argument("--adam-alpha", type=float, default=1e-3, metavar="X", help="learning rate; default 1e-3")
    optimizer.add_argument("--adam-decay", type=float, metavar="X", help="weight decay; default 0.1")
    optimizer.add_argument("--adam-beta1", type=float, default=0.9, metavar="X")
    optimizer.add_argument("--adam-beta2", type=float, metavar="X", help="default 0.95")
    optimizer.add_argument("--lbfgs-iter", type=int, default=16, metavar="N", help="steps of L-BFGS; default 16")
    optimizer.add_argument("--warmup", type=int, default=100, metavar="N", help="steps; default 100")
    optimizer.add_argument("--cos-decay-steps", type=int, metavar="N", help="default: to the end; 0: no decay")
    optimizer.add_argument(
        "--cos-decay-restart", type=float, metavar="X", help="growth of each next cosine; default 0, one"
    )
    optimizer.add_argument("--cos-decay-alpha", type=float, default=0.0, metavar="X", help="lowest share; default 0")
    optimizer.add_argument("--clip", type=float, metavar="X", help="longest gradient; default 1; 0: any")
    optimizer.add_argument("--z-loss", type=float, default=0.0, metavar="X", help="default 0")
    optimizer.add_argument(
        "--dropout", type=float, default=0.0, metavar="X", help="share of dropped weights; default 0"
    )
    optimizer.add_argument("--ema", type=float, default=0.0, metavar="X", help="decay of the weights' average; 0: none")
    optimizer.add_argument(
        "--compat", choices=("ggml-2023",), help="schedule, decay, initialisation and summed loss of June 2023"
    )

    device = parser.add_argument_group("computation")
    flash = device.add_mutually_exclusive_group()
    flash.add_argument(
        "--use-flash", dest="flash", action="store_true", default=True, help="fast attention where there is"
    )
    flash.add_argument("--no-flash", dest="flash", action="store_false", help="attention by plain operations")
    device.add_argument("--dtype", choices=("f32", "bf16"), help="default: bf16 on a GPU, f32 on a CPU")
    device.add_argument("--remat", choices=("none", "products", "block"), default="none", help="less memory, more time")
    device.add_argument("--mesh", metavar="AXES", help="devices, like data=2,fsdp=4,tensor=1")
    hosts = parser.add_argument_group("several hosts", "each runs the same command with a folder that all can reach")
    hosts.add_argument("--coordinator", metavar="ADDRESS", help="address:port of host 0; auto: what SLURM etc. say")
    hosts.add_argument("--num-hosts", type=int, metavar="N", help="how many hosts there are")
    hosts.add_argument("--host-id", type=int, metavar="I", help="this host's number, from 0")
