"""Options that several sub-commands share, and how a model is loaded for them. Names and meanings are llama.cpp's."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from llama_jax.cli.placement import add_placement_options, join_hosts, placement
from llama_jax.errors import ArgumentError

if TYPE_CHECKING:
    from llama_jax.grammar import Grammar
    from llama_jax.llama import Llama
    from llama_jax.prompt_cache import PromptCache
    from llama_jax.speculative import Speculation

_MOST_TEXT = 1 << 28  # bytes; more would be tokenized for minutes
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0")
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """-m, on its own for commands that read no weights."""
    parser.add_argument(
        "-m",
        "--model",
        metavar="PATH",
        help=".gguf file, Hugging Face folder, or hf:owner/name[:file]; default: shipped",
    )


def add_model_options(
    parser: argparse.ArgumentParser, context: str = "tokens of context; default: the model's, at most 4096; 0: all"
) -> None:
    """What `load_model` reads; `context` says what -c means."""
    add_model_option(parser)
    parser.add_argument("-c", "--ctx-size", type=int, metavar="N", help=context)
    parser.add_argument(
        "-b", "--batch-size", type=int, default=512, metavar="N", help="prompt tokens a run; default 512"
    )
    for flag, name, what in (("-ctk", "--cache-type-k", "keys"), ("-ctv", "--cache-type-v", "values")):
        parser.add_argument(flag, name, choices=CACHE_TYPES, help=f"of the cached {what}; default: as --dtype")
    add_weight_options(parser)


def add_weight_options(parser: argparse.ArgumentParser) -> None:
    """How weights are kept and what changes them."""
    parser.add_argument(
        "--packed",
        action=argparse.BooleanOptionalAction,
        help="keep quantized weights as small as in the file; default: on a GPU",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="of weights; default: bf16 on a GPU, f32 on a CPU")
    add_placement_options(parser)
    add_lora_options(parser)


def add_lora_options(parser: argparse.ArgumentParser) -> None:
    """What `lora_options` reads."""
    group = parser.add_argument_group("LoRA adapters (GGUF file, PEFT folder or ggla file)")
    group.add_argument(
        "--lora", action="append", default=[], metavar="PATH", help="an adapter; several with commas or repeated"
    )
    group.add_argument(
        "--lora-scaled", action="append", default=[], metavar="PATH:SCALE", help="the same, each with a scale"
    )
    group.add_argument("--lora-base", metavar="PATH", help="model to read the weights from that adapters change")
    group.add_argument("--lora-merge", action="store_true", help="add the adapters into the weights")


def lora_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `llama_jax.load`."""
    sources: list[Any] = [path for text in arguments.lora for path in text.split(",")]
    for text in (text for several in arguments.lora_scaled for text in several.split(",")):
        path, colon, scale = text.rpartition(":")
        try:
            sources.append((path, float(scale)))
        except ValueError:
            colon = ""
        if not colon or not path:
            raise ArgumentError(f"--lora-scaled is {text!r}; it must be PATH:SCALE, as in adapter.gguf:0.5.")
    return dict(lora=sources, lora_base=arguments.lora_base, merge_lora=arguments.lora_merge)


def add_prompt_options(parser: argparse.ArgumentParser, what: str = "the text; default: standard input") -> None:
    """What `read_prompt` reads."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT", help=what)
    source.add_argument("-f", "--file", type=Path, metavar="FILE", help="a file with the text")
    parser.add_argument(
        "-e",
        "--escape",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=r"read \n \r \t \' \" \\ \xNN in -p as the characters they mean; default: on",
    )


def add_length_options(parser: argparse.ArgumentParser, what: str) -> None:
    """What `length_options` reads; `what` is the thing whose length they limit."""
    help = f"most tokens of {what}; default -1, no limit"
    parser.add_argument("-n", "--n-predict", type=int, default=-1, metavar="N", help=help)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=f"ends {what}; may be repeated")
    parser.add_argument(
        "--context-shift",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="a full context forgets its older half instead of ending the text; default: off",
    )
    parser.add_argument(
        "--keep", type=int, default=0, metavar="N", help="tokens of the prompt that a shift keeps; -1: all; default 0"
    )


def length_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `Llama.stream`: max_tokens, stop, context_shift, keep."""
    return dict(
        max_tokens=None if arguments.n_predict < 0 else arguments.n_predict,
        stop=[unescape(text) if arguments.escape else text for text in arguments.stop],
        context_shift=arguments.context_shift,
        keep=arguments.keep,
    )


def add_speculation_options(parser: argparse.ArgumentParser) -> None:
    """What `speculate` reads."""
    group = parser.add_argument_group("speculative decoding: faster, the same text")
    group.add_argument("-md", "--model-draft", metavar="PATH", help="a small model with the same vocabulary, to draft")
    group.add_argument(
        "--spec-type",
        choices=["none", "draft-simple", "ngram-simple"],
        help="draft with -md (the default if it is given) or with what has followed the latest words before",
    )
    group.add_argument("--spec-draft-n-max", type=int, default=3, metavar="N", help="most tokens -md drafts; default 3")
    group.add_argument("--spec-draft-n-min", type=int, default=0, metavar="N", help="fewest; default 0")
    group.add_argument(
        "--spec-draft-p-min", type=float, default=0.0, metavar="P", help="least probability in a draft; default 0"
    )
    group.add_argument(
        "--spec-ngram-simple-size-n", type=int, default=12, metavar="N", help="tokens that agree; default 12"
    )
    group.add_argument(
        "--spec-ngram-simple-size-m", type=int, default=48, metavar="M", help="tokens drafted; default 48"
    )


def speculation(arguments: argparse.Namespace) -> Speculation | None:
    """How the options want tokens to be drafted; None for not at all."""
    from llama_jax.speculative import Speculation

    kind = arguments.spec_type or ("none" if arguments.model_draft is None else "draft-simple")
    if (kind == "draft-simple") != (arguments.model_draft is not None):
        raise ArgumentError(f"--spec-type is {kind}; -md PATH goes with draft-simple, which needs it.")
    if kind == "none":
        return None
    if kind == "ngram-simple":
        return Speculation(n_max=arguments.spec_ngram_simple_size_m, ngram=arguments.spec_ngram_simple_size_n)
    return Speculation(
        n_max=arguments.spec_draft_n_max, n_min=arguments.spec_draft_n_min, p_min=arguments.spec_draft_p_min
    )


def speculate(model: Llama, arguments: argparse.Namespace, wanted: Speculation | None) -> None:
    """Makes the model draft as `speculation` has told, with the model of -md if there is one."""
    from llama_jax.loading import load

    draft = None
    if arguments.model_draft is not None:
        draft = load(
            arguments.model_draft,
            dtype=_DTYPES.get(arguments.dtype),
            n_batch=arguments.batch_size,
            packed=arguments.packed,
        )
    if wanted is not None:
        model.speculate(wanted, draft)


def add_prompt_cache_options(parser: argparse.ArgumentParser) -> None:
    """What `prompt_cache` reads."""
    parser.add_argument(
        "--prompt-cache",
        metavar="FILE",
        help="keep the computed prompt there and begin with what is there; with -p '' its text goes on",
    )
    parser.add_argument("--prompt-cache-all", action="store_true", help="keep the generated text there too")
    parser.add_argument("--prompt-cache-ro", action="store_true", help="never write to it")


def prompt_cache(arguments: argparse.Namespace) -> PromptCache | None:
    """The cache of --prompt-cache."""
    from llama_jax.prompt_cache import PromptCache

    if arguments.prompt_cache is None:
        return None
    read_only = arguments.prompt_cache_ro
    return PromptCache(arguments.prompt_cache, all=arguments.prompt_cache_all, read_only=read_only)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """What `sampling_options` and `grammar` read."""
    group = parser.add_argument_group("sampling")

    def number(*names: str, default: float, help: str, kind: type = float) -> None:
        letter = "N" if kind is int else "X"
        group.add_argument(*names, type=kind, default=default, metavar=letter, help=f"{help}; default {default}")

    number("-s", "--seed", kind=int, default=-1, help="64-bit seed, -1: random")
    group.add_argument(
        "--samplers",
        metavar="NAMES",
        help="their order; default penalties;dry;top_n_sigma;top_k;tfs_z;typ_p;top_p;min_p;xtc;temperature",
    )
    group.add_argument(
        "--sampler-seq", "--sampling-seq", dest="samplers", metavar="LETTERS", help="the same in letters: edskfypmxt"
    )
    number("--temp", default=0.8, help="temperature, 0 or less: greedy")
    number("--dynatemp-range", default=0.0, help="temperature up to this much lower or higher, by entropy; 0: off")
    number("--dynatemp-exp", default=1.0, help="exponent of that")
    number("--top-k", kind=int, default=40, help="the best N tokens; 0: all")
    number("--top-p", default=0.95, help="the best tokens of this probability; 1: off")
    number("--min-p", default=0.05, help="tokens of this share of the best one's probability; 0: off")
    number("--top-n-sigma", "--top-nsigma", default=-1.0, help="logits this many deviations below the best; -1: off")
    number("--typical", "--typical-p", default=1.0, help="locally typical sampling; 1: off")
    number("--tfs", default=1.0, help="tail-free sampling; 1: off")
    number("--xtc-probability", default=0.0, help="how often XTC takes the likely tokens out; 0: off")
    number("--xtc-threshold", default=0.1, help="the probability that makes a token likely; above 0.5: off")
    number("--min-keep", kind=int, default=0, help="tokens that are left at least")
    number("--repeat-last-n", kind=int, default=64, help="tokens that are penalised; 0: off, -1: context")
    number("--repeat-penalty", default=1.0, help="1: off")
    number("--presence-penalty", default=0.0, help="0: off")
    number("--frequency-penalty", default=0.0, help="0: off")
    group.add_argument("--no-penalize-nl", action="store_true", help="the three penalties leave the newline alone")
    number("--dry-multiplier", default=0.0, help="penalty for repeated sequences; 0: off")
    number("--dry-base", default=1.75, help="its growth with each token")
    number("--dry-allowed-length", kind=int, default=2, help="longest sequence without a penalty")
    number("--dry-penalty-last-n", kind=int, default=64, help="tokens it looks at; 0: off, -1: context")
    group.add_argument(
        "--dry-sequence-breaker",
        action="append",
        metavar="TEXT",
        help=r"no sequence reaches over it; may be repeated; none: no breaker; default: \n : \" *",
    )
    number("--mirostat", kind=int, default=0, help="version 1 or 2 in place of all but the temperature; 0: off")
    number("--mirostat-lr", default=0.1, help="its learning rate")
    number("--mirostat-ent", default=5.0, help="its target, bits")
    group.add_argument(
        "-l",
        "--logit-bias",
        action="append",
        default=[],
        metavar="ID(+/-)X",
        help="15043+1: more likely; 15043-inf: never; may be repeated",
    )
    group.add_argument("--ignore-eos", action="store_true", help="never end the text by itself")
    group = parser.add_argument_group("what the text must match (one of them)").add_mutually_exclusive_group()
    group.add_argument("--grammar", metavar="GBNF", help="a grammar in llama.cpp's notation")
    group.add_argument("--grammar-file", type=Path, metavar="FILE", help="the same from a file")
    group.add_argument("-j", "--json-schema", metavar="SCHEMA", help="a JSON schema; {} takes any JSON")
    group.add_argument("-jf", "--json-schema-file", type=Path, metavar="FILE", help="the same from a file")
    group.add_argument("--regex", metavar="PATTERN", help="a regular expression")


def sampling_options(arguments: argparse.Namespace, n_ctx: int) -> dict[str, Any]:
    """Keyword arguments of `Llama.sampling`."""
    breakers = arguments.dry_sequence_breaker
    options: dict[str, Any] = dict(
        temperature=max(arguments.temp, 0.0),
        dynatemp_range=arguments.dynatemp_range,
        dynatemp_exponent=arguments.dynatemp_exp,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        top_n_sigma=arguments.top_n_sigma,
        typical_p=arguments.typical,
        tfs_z=arguments.tfs,
        xtc_probability=arguments.xtc_probability,
        xtc_threshold=arguments.xtc_threshold,
        min_keep=arguments.min_keep,
        repeat_last_n=n_ctx if arguments.repeat_last_n == -1 else min(arguments.repeat_last_n, n_ctx),
        repeat_penalty=arguments.repeat_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        penalize_nl=not arguments.no_penalize_nl,
        dry_multiplier=arguments.dry_multiplier,
        dry_base=arguments.dry_base,
        dry_allowed_length=arguments.dry_allowed_length,
        dry_penalty_last_n=n_ctx if arguments.dry_penalty_last_n == -1 else min(arguments.dry_penalty_last_n, n_ctx),
        mirostat=arguments.mirostat,
        mirostat_eta=arguments.mirostat_lr,
        mirostat_tau=arguments.mirostat_ent,
        logit_bias=dict(map(_bias, arguments.logit_bias)),
        ignore_eos=arguments.ignore_eos,
        samplers=arguments.samplers,
        seed=arguments.seed,
    )
    if breakers is not None:
        options["dry_sequence_breakers"] = [unescape(text) for text in breakers if text != "none"]
    return options


def _bias(text: str) -> tuple[int, float]:
    found = re.fullmatch(r"\s*(\d+)\s*([+-]\s*(?:inf|[\d.]+(?:[eE][+-]?\d+)?))\s*", text)
    try:
        return int(found[1]), float(found[2].replace(" ", ""))  # pyright: ignore[reportOptionalSubscript]
    except (TypeError, ValueError):
        raise ArgumentError(f"--logit-bias is {text!r}; it must be like 15043+1.5 or 15043-inf.") from None


def grammar(arguments: argparse.Namespace) -> Grammar | None:
    """What --grammar, --json-schema, --regex and their files ask for."""
    from llama_jax.grammar import gbnf, json_schema, regex

    if arguments.grammar is not None:
        return gbnf(arguments.grammar)
    if arguments.grammar_file is not None:
        return gbnf(read_text_file(arguments.grammar_file))
    if arguments.json_schema is not None:
        return json_schema(arguments.json_schema)
    if arguments.json_schema_file is not None:
        return json_schema(read_text_file(arguments.json_schema_file))
    return None if arguments.regex is None else regex(arguments.regex)


def check_sampling(arguments: argparse.Namespace) -> None:
    """Raises ArgumentError for wrong sampling options, before a model has been loaded for nothing."""
    from llama_jax.placement import check_devices
    from llama_jax.sampling import sampling_params
    from llama_jax.sampling.from_text import TEXT_OPTIONS

    join_hosts(arguments)
    check_devices()
    options = sampling_options(arguments, n_ctx=1)
    sampling_params(**{name: value for name, value in options.items() if name not in TEXT_OPTIONS})
    grammar(arguments)


_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


def unescape(text: str) -> str:
    r"""Replaces \n \r \t \' \" \\ and \xNN by the characters they mean; any other backslash stays."""

    def character(match: re.Match[str]) -> str:
        return _ESCAPES[match[1]] if match[1] in _ESCAPES else chr(int(match[1][1:], 16))

    return re.sub(r"\\([nrt'\"\\]|x[0-9a-fA-F]{2})", character, text)


def read_text_file(path: Path) -> str:
    """A user's text file, UTF-8, bytes that are not become U+FFFD."""
    try:
        with path.expanduser().open("rb") as file:
            return _read_text(file, f"The file {str(path)!r}")
    except OSError as error:
        raise ArgumentError(f"The file {str(path)!r} cannot be read: {error.strerror}.") from None


def _read_text(file: BinaryIO, name: str) -> str:
    data = file.read(_MOST_TEXT + 1)
    if len(data) > _MOST_TEXT:
        raise ArgumentError(f"{name} is longer than {_MOST_TEXT >> 20} MiB, the most that is read.")
    return data.decode("utf-8", errors="replace")


def read_prompt(arguments: argparse.Namespace) -> str:
    """The text of -p, -f (one newline at its end dropped) or standard input."""
    if arguments.prompt is not None:
        return unescape(arguments.prompt) if arguments.escape else arguments.prompt
    if arguments.file is not None:
        return read_text_file(arguments.file).removesuffix("\n")
    if sys.stdin.isatty():
        raise ArgumentError("There is no prompt; give one with -p TEXT, -f FILE or on standard input.")
    return _read_text(sys.stdin.buffer, "Standard input").removesuffix("\n")


def cache_compiled_programs() -> None:
    """Keeps every compiled program on disk, so that a second start compiles nothing; jax's own settings come first."""
    import jax

    if not jax.config.values["jax_compilation_cache_dir"]:
        root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
        folder = root / "llama_jax" / "programs"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logging.getLogger("llama_jax.cli").info("compiled programs are not kept: %s", error)
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _progress_bar() -> tuple[Callable[[int, int], None], Callable[[], None]]:
    """`(update, close)` of a bar on a terminal's stderr; both do nothing elsewhere."""
    from tqdm import tqdm

    bar = tqdm(desc="loading", unit="B", unit_scale=True, disable=not sys.stderr.isatty(), leave=False)

    def update(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return update, bar.close


def load_model(arguments: argparse.Namespace) -> tuple[Llama, float]:
    """The model that the options ask for, and the seconds that loading took."""
    import jax

    from llama_jax.loading import load

    join_hosts(arguments)
    started = time.perf_counter()
    cache_compiled_programs()
    update, close = _progress_bar()
    try:
        model = load(
            arguments.model,
            dtype=_DTYPES.get(arguments.dtype),
            n_ctx=arguments.ctx_size,
            n_batch=arguments.batch_size,
            packed=arguments.packed,
            cache_type_k=arguments.cache_type_k,
            cache_type_v=arguments.cache_type_v,
            placement=placement(arguments),
            **lora_options(arguments),
            progress=update,
        )
        jax.block_until_ready(model.params)
    finally:
        close()
    seconds = time.perf_counter() - started
    device = jax.devices()[0]
    dtype = model.params.embedding.dtype
    logging.getLogger("llama_jax.load").info(
        "%.1f M parameters in %s on %s, context %d, loaded in %.2f s",
        model.config.n_parameters / 1e6, dtype, device.device_kind, model.n_ctx, seconds,
    )  # fmt: skip
    return model, seconds


def compile_ahead(model: Llama, prompt: str, sampling: dict[str, Any], *, constrained: bool = False) -> None:
    """Compiles what `model.stream(prompt, **sampling)` needs, and says so on a terminal."""
    on_terminal = sys.stderr.isatty()
    if on_terminal:
        print("compiling ...", end="\r", file=sys.stderr, flush=True)
    model.warm_up(prompt, constrained=constrained, **sampling)
    if on_terminal:
        print(" " * len("compiling ..."), end="\r", file=sys.stderr, flush=True)
    if model.plan is not None and model.plan.devices:
        logging.getLogger("llama_jax.load").info("%s", model.memory_report().log_line())


def open_tokenizer(arguments: argparse.Namespace) -> Any:
    """The tokenizer of -m, without the weights."""
    from llama_jax.formats.hub import resolve_path
    from llama_jax.formats.load import open_model
    from llama_jax.llama import shipped_model

    with open_model(shipped_model() if arguments.model is None else resolve_path(arguments.model)) as file:
        return file.tokenizer()


def note_full_context(model: Llama) -> None:
    """Says why a text has ended or what it has forgotten, where that was for lack of room."""
    logger = logging.getLogger("llama_jax.generate")
    if model.timings.shifts:
        logger.info("the context of %d tokens was shifted %d times", model.n_ctx, model.timings.shifts)
    elif model.timings.context_full:
        logger.info("the context of %d tokens is full; --context-shift goes on, -c N makes it longer", model.n_ctx)


def speed_line(model: Llama, load_seconds: float) -> str:
    """Load, prompt and generation speed of the latest generation, and how near the memory's limit it came."""
    from llama_jax.roofline import decode_bytes, peak_bandwidth

    timings = model.timings
    parts = [
        f"load {load_seconds:.2f} s",
        f"prompt {timings.prompt_tokens} tokens, {timings.prompt_speed:.1f} tok/s",
        f"generation {timings.generated_tokens} tokens, {timings.decode_speed:.1f} tok/s",
    ]
    if timings.generated_tokens and not timings.drafted_tokens:
        held = timings.prompt_tokens + timings.cached_tokens + timings.generated_tokens / 2
        itemsize = model.params.embedding.dtype.itemsize
        rate = decode_bytes(model.params, model.config, held, itemsize) * timings.decode_speed
        peak = peak_bandwidth()
        share = f", {100 * rate / peak:.0f} % of the memory's {peak / 1e9:.0f}" if peak else ""
        parts.append(f"{rate / 1e9:.1f} GB/s{share}")
    if timings.drafted_tokens:
        share = 100 * timings.accepted_tokens / timings.drafted_tokens
        parts.append(f"draft {timings.drafted_tokens} tokens, {timings.accepted_tokens} accepted ({share:.0f} %)")
    return "; ".join(parts)
