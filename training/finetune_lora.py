"""Train a low-rank adapter (LoRA) of a model, whose own weights stay as they are: in full, or packed as in its file.

    python -m training.finetune_lora -m model.gguf --train-data chats.jsonl --lora-out adapter/
    python -m training.finetune_lora -m model-Q4_0.gguf --packed --train-data text.txt --lora-out adapter.gguf

A line of a .jsonl file is a conversation, {"messages": [{"role": "user", "content": ...}, ...]}, of which only what the
assistant says is learnt; {"prompt": ..., "response": ...}, the same in short; or {"text": ...}, learnt as a whole, as
other files are. The adapter is written for PEFT (a folder) or for llama.cpp (a .gguf file).
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llama_jax.cli.main import leave
from llama_jax.errors import ArgumentError, shown
from training.arguments import add_run_arguments
from training.program import check_output, run_program

logger = logging.getLogger("llama_jax.train")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options."""
    model = parser.add_argument_group("model and data")
    model.add_argument("-m", "--model", metavar="PATH", help="the model; default: shipped")
    model.add_argument("--packed", action="store_true", help="keep its quantized weights packed (QLoRA)")
    model.add_argument(
        "--train-data", nargs="+", metavar="PATH", required=True, help=".jsonl, text, or a folder of them"
    )
    model.add_argument(
        "--val-split", type=float, default=0.0, metavar="X", help="share of the data kept for validation"
    )
    model.add_argument("--lora-in", metavar="PATH", help="an adapter to go on with")
    model.add_argument(
        "--lora-out", type=Path, metavar="PATH", help="a folder for PEFT or a .gguf file; default RUN/adapter"
    )
    lora = parser.add_argument_group("adapter")
    lora.add_argument("-r", "--rank", type=int, default=16, metavar="R", help="default 16")
    lora.add_argument("--alpha", type=float, default=32.0, metavar="X", help="the change is times X / R; default 32")
    lora.add_argument("--rslora", action="store_true", help="times X / sqrt(R) instead")
    lora.add_argument(
        "--targets", default="wq,wk,wv,wo,w_gate,w_up,w_down", metavar="NAMES",
        help="of wq, wk, wv, wo, w_gate, w_up, w_down, embedding, output_head; default: the layers' matrices",
    )  # fmt: skip
    add_run_arguments(parser)


def read_examples(paths: Sequence[str], tokenizer: Any) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """`(token ids, which of them count as targets or None for all)` of every document."""
    from training.data import list_files, read_documents, read_jsonl

    bos, eos = tokenizer.bos_id is not None, tokenizer.eos_id is not None

    def plain(text: str) -> tuple[np.ndarray, None]:
        return np.array(tokenizer.encode(text, add_bos=bos, add_eos=eos), np.int32), None

    for path in list_files(paths):
        if path.suffix != ".jsonl":
            yield from map(plain, read_documents([path]))
            continue
        for line, value in read_jsonl(path):
            if isinstance(value, dict) and isinstance(value.get("text"), str):
                yield plain(value["text"])
                continue
            messages = _messages(value)
            if messages is None:
                raise ArgumentError(
                    f"{path}, line {line}: {shown(value)} has neither `messages` with an assistant's, nor `prompt` and "
                    "`response`, nor `text`."
                )
            yield encode_conversation(tokenizer, messages)


def _messages(value: Any) -> list[dict[str, Any]] | None:
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("prompt"), str) and isinstance(value.get("response"), str):
        return [dict(role="user", content=value["prompt"]), dict(role="assistant", content=value["response"])]
    messages = value.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        return None
    return messages if any(m.get("role") == "assistant" for m in messages) else None


def encode_conversation(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """A conversation's ids and which of them count: those that the assistant's turns add behind what asks for them."""
    from llama_jax.text.chat import encode_chat

    ids = encode_chat(tokenizer, messages, add_generation_prompt=False)
    counts = np.zeros(len(ids), bool)
    for i, message in enumerate(messages):
        if message.get("role") == "assistant":
            asked = encode_chat(tokenizer, messages[:i], add_generation_prompt=True) if i else []
            answered = encode_chat(tokenizer, messages[: i + 1], add_generation_prompt=False)
            counts[_common(ids, asked) : _common(ids, answered)] = True
    return np.array(ids, np.int32), counts


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two sequences begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def adapted(options: Any) -> Any:
    """The assembly of a step (see `training.step.Assemble`) that puts the adapter beside the model's weights.

    Dropout leaves out inputs of the factors a, the same ones for all tokens of a part of a batch.
    """
    import jax
    import jax.numpy as jnp

    from llama_jax.lora import with_lora

    def drop(factors: Any, key: Any) -> Any:
        kept = jax.random.bernoulli(key, 1 - options.dropout, factors.a.shape[1:])
        return dataclasses.replace(factors, a=jnp.where(kept, factors.a / (1 - options.dropout), 0.0))

    def assemble(adapter: Any, model: Any, key: Any) -> Any:
        if options.dropout:
            keys = jax.random.split(key, len(adapter))
            adapter = {path: drop(adapter[path], k) for path, k in zip(sorted(adapter), keys, strict=True)}
        return with_lora(model, adapter)

    return assemble


def finetune(arguments: argparse.Namespace) -> None:
    """Runs a training as the options say; raises SystemExit where a signal ended it."""
    import jax
    import jax.numpy as jnp

    from llama_jax.formats.lora import load_lora
    from llama_jax.formats.save_lora import save_lora_gguf, save_peft
    from llama_jax.loading import load
    from llama_jax.lora import init_lora
    from training.data import Rows, join_documents, split_stream
    from training.loop import RunOptions, Trainer, check_extras
    from training.train_text_from_scratch import SIGNALLED, optimizer_options, step_options

    if arguments.mesh or arguments.coordinator or arguments.optimizer == "lbfgs" or arguments.compat:
        raise ArgumentError("--mesh, --coordinator, --use-lbfgs and --compat are not for adapters; leave them out.")
    check_extras()
    out = arguments.lora_out or arguments.checkpoint_out / "adapter"
    check_output("--lora-out", out, arguments.checkpoint_out)
    targets = [name.strip() for name in arguments.targets.split(",")]
    dtype = {"f32": "float32", "bf16": "bfloat16", None: None}[arguments.dtype]
    model = load(arguments.model, dtype=dtype, packed=arguments.packed)
    config, tokenizer = model.config, model.tokenizer
    stream, held = split_stream(join_documents(read_examples(arguments.train_data, tokenizer)), arguments.val_split)
    seed = arguments.seed if arguments.seed >= 0 else secrets.randbits(31)
    if arguments.lora_in is not None:
        adapter = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), load_lora(arguments.lora_in, config))
    else:
        adapter = init_lora(
            jax.random.key(seed), config, rank=arguments.rank, alpha=arguments.alpha, rslora=arguments.rslora,
            targets=targets,
        )  # fmt: skip
    rows = Rows(stream, arguments.ctx, seed)
    step = dataclasses.replace(step_options(arguments, config, None), fused=False)
    if arguments.packed and arguments.remat == "none":
        step = dataclasses.replace(step, remat="block")  # else the gradient would keep every unpacked weight
    optimizer = dataclasses.replace(optimizer_options(arguments, arguments.examples), decay_all=True)
    if arguments.adam_decay is None:
        optimizer = dataclasses.replace(optimizer, weight_decay=0.0)
    trainer = Trainer(
        arguments.checkpoint_out, config, rows, optimizer, step,
        RunOptions(
            batches=arguments.examples, batch=arguments.batch, seed=seed, save_every=arguments.save_interval,
            evaluate_every=arguments.eval_interval, print_every=arguments.print_info_interval, keep=arguments.keep,
            patience=arguments.patience, workers=arguments.workers, tensorboard=arguments.tensorboard,
        ),
        validation=Rows(held, arguments.ctx, moved=False) if held is not None else None, fixed=model.params,
        assembly=adapted,
    )  # fmt: skip
    logger.info(
        "%s tokens, of which %s count, in %d documents; %s weights of the adapter beside %s",
        f"{len(stream.tokens):,}", f"{stream.n_targets:,}", stream.documents[-1],
        f"{sum(leaf.size for leaf in jax.tree.leaves(adapter)):,}", f"{config.n_parameters:,}",
    )  # fmt: skip
    with trainer:
        shapes = jax.eval_shape(lambda: adapter)
        if trainer.has_checkpoint():
            logger.info("going on behind batch %d", trainer.resume(shapes))
        else:
            trainer.start(adapter)
        ended_by = trainer.run()
        if not ended_by:
            result = jax.device_get(trainer.weights())
            if out.suffix == ".gguf":
                save_lora_gguf(out, result, config)
            else:
                save_peft(out, result, base_model=arguments.model or "")
            logger.info("wrote %s", out)
    if ended_by:
        raise SystemExit(SIGNALLED + ended_by)


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns 0, 1 for a user's mistake, 130 after Ctrl-C."""
    return run_program("finetune_lora", __doc__, add_arguments, finetune, argv)


if __name__ == "__main__":
    leave(main())
