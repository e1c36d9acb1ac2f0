"""Train a LLaMA model on text: from scratch, from a model, or on from a checkpoint.

    python -m training.train_text_from_scratch --train-data shakespeare.txt --vocab-train 1024 \\
        --ctx 64 --embd 256 --head 8 --layer 16 -b 16 -n 500

`llama-jax train` is the same program. The run's folder (--checkpoint-out) holds checkpoints, metrics.jsonl, which
`llama-jax plot` draws, and the model; the same command again goes on where it ended.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_jax.cli.main import leave
from llama_jax.errors import ArgumentError, FormatError, plain, shown
from training.arguments import add_arguments
from training.program import check_output, run_program

logger = logging.getLogger("llama_jax.train")

CONFIG, VOCABULARY = "config.json", "vocabulary.json"
SIGNALLED = 128  # plus a signal's number: the exit code of what it ended


def feed_forward_width(d_model: int, mult: int) -> int:
    """8/3 of the width, rounded up to a multiple: llama.cpp's rule, which gives LLaMA's published shapes."""
    return -(-(2 * (4 * d_model) // 3) // mult) * mult


def new_config(arguments: argparse.Namespace, vocab_size: int) -> Any:
    """The configuration that the options describe."""
    from llama_jax import checks
    from llama_jax.config import LlamaConfig

    embd, head, layer, mult = (
        default if given is None else given
        for given, default in (
            (arguments.embd, 256), (arguments.head, 8), (arguments.layer, 16), (arguments.mult, 256)
        )
    )  # fmt: skip
    checks.integer("--embd", embd, 2)
    checks.integer("--head", head, 1)
    checks.integer("--mult", mult, 1)
    if embd % head:
        raise ArgumentError(f"--embd is {embd}; it must be a multiple of --head, {head}.")
    head_dim = embd // head
    if arguments.rotmax is not None and arguments.rotmax < head_dim:
        raise ArgumentError(
            f"--rotmax is {arguments.rotmax}; it must be at least {head_dim}, the width of a head, since inference "
            "turns all of it."
        )
    return LlamaConfig(
        vocab_size=vocab_size,
        d_model=embd,
        d_ff=feed_forward_width(embd, mult),
        n_layers=layer,
        n_heads=head,
        n_kv_heads=head if arguments.head_kv is None else arguments.head_kv,
        head_dim=head_dim,
        context_length=arguments.ctx,
        norm_epsilon=1e-6 if arguments.compat else 1e-5,
        tied_embeddings=arguments.tied,
    )


def check_shape(arguments: argparse.Namespace, config: Any, origin: object) -> None:
    """Raises ArgumentError where an option that was given asks for another shape than the model has."""
    mult = arguments.mult
    options = (
        ("--embd", arguments.embd, config.d_model),
        ("--head", arguments.head, config.n_heads),
        ("--head-kv", arguments.head_kv, config.n_kv_heads),
        ("--layer", arguments.layer, config.n_layers),
        ("the feed-forward width of --mult", mult and feed_forward_width(config.d_model, mult), config.d_ff),
        ("--tied", arguments.tied or None, config.tied_embeddings),
    )
    different = [f"{name} is {given}, not {own}" for name, given, own in options if given not in (None, own)]
    if different:
        raise ArgumentError(
            f"The model of {str(origin)!r} has another shape: {', '.join(different)}; leave these options out to go on "
            "with it."
        )


def check_type(types: str) -> None:
    """Raises ArgumentError where a model cannot be written in this type."""
    from llama_jax.formats.save import GGUF_TYPES

    if types not in GGUF_TYPES:
        raise ArgumentError(f"--model-type is {shown(types)}; it must be one of {', '.join(GGUF_TYPES)}.")


def check_blocks(types: str, config: Any) -> None:
    """Raises ArgumentError where rows of the model's matrices are not whole blocks of the type."""
    from llama_jax.quantization import BLOCK_TYPES

    block = BLOCK_TYPES[types].block_size
    for width in (config.d_model, config.d_ff, config.n_heads * config.head_dim):
        if width % block:
            raise ArgumentError(
                f"--model-type {types} needs rows of a multiple of {block} values; the model has rows of {width}."
            )


def read_config(folder: Path) -> Any:
    """The configuration of a run."""
    from llama_jax.config import LlamaConfig, RopeScaling

    try:
        fields = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        divisors = fields["rope_divisors"]
        fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
        return LlamaConfig(**fields | dict(rope_divisors=None if divisors is None else tuple(divisors)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{str(folder / CONFIG)!r} describes no model: {error}") from None


def write_json(path: Path, value: Any) -> None:
    """Replaces a file when the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(value) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def ggml_params(key: Any, config: Any) -> Any:
    """The random weights of June 2023: normal, cut to +-1, over sqrt of the sum of a matrix's sides; norms, too."""
    import jax
    import jax.numpy as jnp

    from llama_jax.model import init_params

    shapes = jax.eval_shape(lambda: init_params(key, config))
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(key, len(leaves))

    def init(key: Any, leaf: Any) -> Any:
        return jnp.clip(jax.random.normal(key, leaf.shape), -1.0, 1.0) * sum(leaf.shape) ** -0.5

    return jax.tree.unflatten(structure, [init(*pair) for pair in zip(keys, leaves, strict=True)])


def vocabulary(arguments: argparse.Namespace) -> Any:
    """The vocabulary that the options ask for; one that was made of the data is kept in the run's folder."""
    import jax

    from llama_jax.text.tokenizer import tokenizer_from_gguf
    from training.data import read_documents
    from training.vocabulary import VocabularySource, vocabulary_from_texts, vocabulary_of

    if arguments.vocab_train is None:
        return vocabulary_of(arguments.vocab_model or arguments.model_in)
    if arguments.vocab_model is not None:
        raise ArgumentError("--vocab-model and --vocab-train were both given; one of them makes the vocabulary.")
    kept, model = arguments.checkpoint_out / VOCABULARY, arguments.checkpoint_out / "tokenizer.model"
    if kept.exists() and model.exists():
        try:
            metadata = json.loads(kept.read_text(encoding="utf-8"))
            size = len(metadata["tokenizer.ggml.tokens"])
            tokenizer = tokenizer_from_gguf(metadata)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FormatError(f"The vocabulary {str(kept)!r} is damaged: {plain(error)}.") from None
        if size == arguments.vocab_train:
            return VocabularySource(tokenizer, metadata, model=model.read_bytes())
        if _has_begun(arguments.checkpoint_out):
            raise ArgumentError(
                f"--vocab-train is {arguments.vocab_train}; the run in {str(arguments.checkpoint_out)!r} has a "
                f"vocabulary of {size} pieces."
            )
    source = vocabulary_from_texts(read_documents(arguments.train_data), arguments.vocab_train)
    if jax.process_index() == 0:
        write_json(kept, source.metadata)
        model.write_bytes(source.model or b"")
    return source


def optimizer_options(arguments: argparse.Namespace, batches: int) -> Any:
    """What the options say of the optimiser, with the defaults of today or of June 2023."""
    from training.optimizer import OptimizerOptions

    old = arguments.compat is not None
    if old and arguments.optimizer != "adamw":
        raise ArgumentError(f"--compat {arguments.compat} goes with AdamW only, the one that worked at the time.")

    def default(value: Any, today: Any, then: Any) -> Any:
        return value if value is not None else then if old else today

    steps = batches * arguments.adam_iter
    return OptimizerOptions(
        name=arguments.optimizer,
        learning_rate=arguments.adam_alpha,
        warmup=arguments.warmup if old else min(arguments.warmup, steps // 2),
        decay_steps=default(arguments.cos_decay_steps, max(1, steps - min(arguments.warmup, steps // 2)), 1000),
        decay_restart=default(arguments.cos_decay_restart, 0.0, 1.1),
        decay_alpha=arguments.cos_decay_alpha,
        weight_decay=default(arguments.adam_decay, 0.1, 1e-3),
        decay_all=old,
        beta1=arguments.adam_beta1,
        beta2=default(arguments.adam_beta2, 0.95, 0.999),
        steps_per_batch=arguments.adam_iter,
        ggml_2023=old,
    )


def step_options(arguments: argparse.Namespace, config: Any, mesh: Any) -> Any:
    """How steps compute: what the options say, and what this device is best at."""
    import jax

    from training.step import StepOptions

    on_gpu = jax.default_backend() == "gpu"
    dtype = {"f32": "float32", "bf16": "bfloat16", None: "bfloat16" if on_gpu else "float32"}[arguments.dtype]
    old = arguments.compat is not None
    return StepOptions(
        dtype=dtype,
        attention=best_attention(dtype, config.head_dim, arguments.ctx, mesh) if arguments.flash else "xla",
        remat=arguments.remat,
        fused=mesh is None and on_gpu,
        accumulate=arguments.accumulate,
        clip=arguments.clip if arguments.clip is not None else 0.0 if old else 1.0,
        z_loss=arguments.z_loss,
        dropout=arguments.dropout,
        average=arguments.ema,
        summed=old,
    )


def best_attention(dtype: str, head_dim: int, T: int, mesh: Any = None) -> Any:
    """Plain operations where no kernels run; else cuDNN's for 16-bit numbers and shapes that it takes, else Triton's.

    Triton's see one device only, so that a mesh has cuDNN's or plain operations.
    """
    from llama_jax.kernels.backend import default_kernels

    if default_kernels().attention == "xla":
        return "xla"
    if dtype == "bfloat16" and head_dim % 8 == 0 and head_dim <= 128 and T % 2 == 0:
        return "cudnn"
    return "triton" if mesh is None else "xla"


def save_model(path: Path, params: Any, config: Any, source: Any, types: str) -> None:
    """Writes a .gguf file or a Hugging Face folder with the vocabulary."""
    from llama_jax.formats.save import save_gguf, save_hf

    if path.suffix == ".gguf":
        save_gguf(path, params, config, metadata=dict(source.metadata), types=types)
    else:
        save_hf(path, params, config, dtype="float32")
        if not source.save(path):
            logger.info("%s holds no tokenizer: this vocabulary came from a GGUF file", path)
    logger.info("wrote %s", path)


def sampler(config: Any, source: Any, length: int, seed: int) -> Any:
    """`sample(params) -> text` that the model writes from nothing."""
    import jax

    def sample(params: Any) -> str:
        from llama_jax.llama import Llama

        params = jax.device_put(params, jax.local_devices()[0])
        model = Llama(config, params, source.tokenizer, n_ctx=config.context_length)
        return model.generate("", max_tokens=min(length, config.context_length - 1), temperature=0.8, seed=seed)

    return sample


def train(arguments: argparse.Namespace) -> None:
    """Runs a training as the options say; raises SystemExit where a signal ended it."""
    import jax

    from llama_jax.cli.placement import join_hosts
    from llama_jax.placement import check_devices, device_mesh
    from training.checkpoint_2023 import is_checkpoint_2023, read_checkpoint_2023
    from training.data import Rows, encode_documents, newline_ids, read_documents, split_stream
    from training.loop import RunOptions, Trainer, check_extras
    from training.sharding import parse_mesh

    check_extras()
    join_hosts(arguments)
    check_devices()
    run, origin = arguments.checkpoint_out, arguments.checkpoint_in
    mesh = device_mesh(**parse_mesh(arguments.mesh)) if arguments.mesh else None
    source = vocabulary(arguments)
    out = arguments.model_out or run / ("model.gguf" if source.metadata else "model")
    if out.suffix == ".gguf" and not source.metadata:
        raise ArgumentError(
            f"{str(out)!r} needs a vocabulary from a GGUF file or --vocab-train; name a folder instead."
        )
    check_type(arguments.model_type)
    check_output("--model-out", out, run)
    stream = encode_documents(read_documents(arguments.train_data), source.tokenizer)
    stream, held = split_stream(stream, arguments.val_split)
    if arguments.val_data:
        held = encode_documents(read_documents(arguments.val_data), source.tokenizer)

    old = origin if origin is not None and is_checkpoint_2023(origin) else None
    resumed = None if old else _folder_to_resume(run, origin)
    params, config = None, None
    if resumed is not None:
        config = read_config(resumed)
        if arguments.model_in is None and config.context_length != arguments.ctx:
            logger.warning(
                "--ctx is %d, but the run in %s began with %d: rows are now of another length",
                arguments.ctx, resumed, config.context_length,
            )  # fmt: skip
    elif old is not None:
        config, params, counters = read_checkpoint_2023(old, arguments.ctx)
        logger.info(
            "weights of a 2023 checkpoint after %d iterations; its optimiser's state is not read",
            counters["iterations"],
        )
    elif arguments.model_in is not None:
        config, params = _read_model(arguments.model_in, arguments.ctx)
    else:
        config = new_config(arguments, source.tokenizer.vocab_size)
    check_shape(arguments, config, resumed or old or arguments.model_in)
    if out.suffix == ".gguf":
        check_blocks(arguments.model_type, config)
    if config.vocab_size < source.tokenizer.vocab_size:
        raise ArgumentError(
            f"The vocabulary has {source.tokenizer.vocab_size} tokens; the model has only {config.vocab_size}."
        )

    seed = arguments.seed if arguments.seed >= 0 else secrets.randbits(31)
    lbfgs = arguments.optimizer == "lbfgs"
    batches = arguments.lbfgs_iter if lbfgs else arguments.examples
    lines = newline_ids(stream, source.tokenizer) if arguments.samples_after_nl else ()
    bos = source.tokenizer.bos_id
    rows = Rows(stream, arguments.ctx, seed, moved=not lbfgs, line_ids=lines, begin_id=bos)
    options = RunOptions(
        batches=batches, batch=arguments.batch, seed=seed, save_every=arguments.save_interval,
        evaluate_every=arguments.eval_interval, sample_every=arguments.print_details_interval,
        print_every=arguments.print_info_interval, keep=arguments.keep, patience=arguments.patience,
        workers=arguments.workers, tensorboard=arguments.tensorboard,
    )  # fmt: skip
    trainer = Trainer(
        run, config, rows, optimizer_options(arguments, batches), step_options(arguments, config, mesh), options,
        validation=Rows(held, arguments.ctx, moved=False, begin_id=bos) if held is not None else None, mesh=mesh,
        sample=sampler(config, source, arguments.predict, seed),
    )  # fmt: skip
    logger.info(
        "%s tokens in %d documents, %d rows of %d; %s weights; %s; attention: %s",
        f"{len(stream.tokens):,}", stream.documents[-1], len(rows), arguments.ctx, f"{config.n_parameters:,}",
        jax.devices()[0].device_kind, trainer.step_options.attention,
    )  # fmt: skip
    with trainer:
        _begin(trainer, resumed, run, config, params, seed, arguments)
        ended_by = trainer.run()
        if not ended_by:
            seen = arguments.eval_interval and trainer.done % arguments.eval_interval == 0
            if held is not None and not seen:
                logger.info("validation loss %.4f", trainer.validation_loss())
            weights = trainer.host_weights()
            if jax.process_index() == 0:
                save_model(out, weights, config, source, arguments.model_type)
                if arguments.predict:
                    print(sampler(config, source, arguments.predict, seed)(weights))
    if ended_by:
        raise SystemExit(SIGNALLED + ended_by)


def _has_begun(run: Path) -> bool:
    """Whether a folder is a run's and has a complete checkpoint."""
    from training.checkpoint import FOLDER

    return (run / CONFIG).exists() and any(path.name.isdigit() for path in (run / FOLDER).glob("[0-9]*"))


def _folder_to_resume(run: Path, origin: Path | None) -> Path | None:
    """The run to go on with: the one that was named, which must exist, or this one if it has begun."""
    folder = origin or run
    if _has_begun(folder):
        return folder
    if origin is not None:
        raise ArgumentError(
            f"--checkpoint-in {str(origin)!r} is neither a run's folder with checkpoints nor one of 2023."
        )
    return None


def _read_model(path: str, context: int) -> tuple[Any, Any]:
    import jax.numpy as jnp
    import numpy as np

    from llama_jax.formats.hub import resolve_path
    from llama_jax.formats.load import load_params, open_model

    with open_model(resolve_path(path)) as file:
        params = load_params(file, np.float32, lambda _, array: jnp.array(array))
        return dataclasses.replace(file.config, context_length=max(context, file.config.context_length)), params


def _begin(
    trainer: Any, resumed: Path | None, run: Path, config: Any, params: Any, seed: int, arguments: argparse.Namespace
) -> None:
    import jax

    from llama_jax.model import init_params
    from training.checkpoint import Checkpoints

    if resumed != run and trainer.has_checkpoint():
        raise ArgumentError(
            f"{str(run)!r} already holds a run; leave --checkpoint-in out to go on with it, or name another "
            "--checkpoint-out."
        )
    if jax.process_index() == 0:
        write_json(run / CONFIG, dataclasses.asdict(config))
    if resumed is not None:
        shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
        other = Checkpoints(resumed) if resumed != run else None
        try:
            logger.info("going on behind batch %d of %s", trainer.resume(shapes, other), resumed)
        finally:
            if other is not None:
                other.close()
        return
    if params is None:
        init = ggml_params if arguments.compat else init_params
        params = jax.jit(init, static_argnums=1)(jax.random.fold_in(jax.random.key(seed), 1), config)
    trainer.start(params)


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns 0, 1 for a user's mistake, 130 after Ctrl-C."""
    return run_program("train_text_from_scratch", __doc__, add_arguments, train, argv)


if __name__ == "__main__":
    leave(main())
