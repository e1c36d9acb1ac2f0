"""Reading LoRA adapters: GGUF files, PEFT folders, and the ggla files of 2023.

Sources: https://github.com/ggml-org/llama.cpp/blob/master/convert_lora_to_gguf.py for GGUF,
https://huggingface.co/docs/peft/developer_guides/checkpoint for PEFT.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llama_jax.config import LlamaConfig, is_finite
from llama_jax.errors import FormatError, plain, shown
from llama_jax.formats import names
from llama_jax.formats.config_gguf import ARCHITECTURE
from llama_jax.formats.files import MappedFile, describe_kind
from llama_jax.formats.gguf import GGUFFile
from llama_jax.formats.load import half_split_rows
from llama_jax.formats.safetensors import read_header, read_json
from llama_jax.lora import Adapter, LoraFactors
from llama_jax.quantization import BLOCK_TYPES, as_plain, dequantize

PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
GGLA_MAGIC = b"algg"

_PEFT_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"}
_PEFT_HARMLESS = {
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "target_modules",
    "exclude_modules",
    "lora_dropout",
    "layers_to_transform",
    "layers_pattern",
    "megatron_config",
    "megatron_core",
    "qalora_group_size",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "runtime_config",
    "ensure_weight_tying",
}
_PEFT_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Ways to initialise that leave the model's own weights alone."""

_PEFT_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+?)\.lora_(?:embedding_)?(?P<side>[AB])(?:\.weight)?")
_MAX_PATTERNS = 1000
_MAX_PATTERN_LENGTH = 200

Halves = dict[str, dict[str, np.ndarray]]  # parameter path -> "a" and "b" -> factor


def load_lora(path: str | Path, config: LlamaConfig) -> Adapter:
    """Reads an adapter for a model with these constants.

    Args:
      path: a GGUF adapter, a ggla file, or a PEFT folder with adapter_config.json and adapter_model.safetensors.

    Returns:
      Numpy arrays in the file's dtype, rotary rows in half-split order.

    Raises:
      ArgumentError: the path does not exist.
      FormatError: it is no adapter, damaged, made for a model of another shape, or of a kind that changes more than
        products of factors can say.
    """
    path = Path(path)
    if os.path.isdir(path):
        return _from_peft(path, config)
    mapped = MappedFile(path)
    try:
        head = mapped.map[:64]
        if head[:4] == b"GGUF":
            return _from_gguf(path, config)
        if head[:4] == GGLA_MAGIC:
            return _from_ggla(mapped, config)
    finally:
        mapped.close()
    if path.suffix == ".safetensors":
        raise FormatError(f"{path} is one file of a PEFT adapter; name the folder that holds it.")
    raise FormatError(f"{path}: this is not a LoRA adapter but {describe_kind(head)}.")


def _from_gguf(path: Path, config: LlamaConfig) -> Adapter:
    with GGUFFile(path) as file:
        for key, wanted in (
            ("general.type", "adapter"),
            ("general.architecture", ARCHITECTURE),
            ("adapter.type", "lora"),
        ):
            if file.metadata.get(key) != wanted:
                value = shown(file.metadata.get(key))
                raise FormatError(f"{path}: {key} is {value}; an adapter for this model has {shown(wanted)}.")
        if "adapter.alora.invocation_tokens" in file.metadata:
            raise FormatError(f"{path} is an adapter that certain tokens activate (aLoRA); that is not supported.")
        alpha = _alpha(file.metadata.get("adapter.lora.alpha", 0.0), f"{path}: adapter.lora.alpha")
        halves: Halves = {}
        for name, info in file.tensors.items():
            base, _, side = name.rpartition(".lora_")
            parameter = names.path_of_gguf(base)
            if parameter is None or side not in ("a", "b"):
                raise FormatError(f"{path}: tensor {shown(name)} is no LoRA factor of a weight of this model.")
            raw = file.raw(name)
            dense = BLOCK_TYPES[info.type_name].dtype is not None
            values = (as_plain if dense else dequantize)(raw, info.type_name, info.shape)
            if parameter == "embedding":  # GGUF keeps a as [V, r] and b as [D, r]
                side, values = ("b", values) if side == "a" else ("a", values.T)
            halves.setdefault(parameter, {})[side] = np.array(values)
    _half_split(halves, config)
    return _adapter(path, halves, config, lambda _, rank: alpha / rank if alpha else 1.0)


def _from_ggla(mapped: MappedFile, config: LlamaConfig) -> Adapter:
    """The format of llama.cpp in 2023: magic, version, r, alpha; records of a header, a name, padding to 32, data.

    Names in the style of Meta's checkpoints come from the converter of PEFT adapters, which left the rows of wq and wk
    in half-split order; names in GGUF's style from training in llama.cpp, in interleaved order. `a` is transposed.
    """
    path, at = mapped.path, 4

    def take(form: str) -> tuple[Any, ...]:
        nonlocal at
        size = struct.calcsize(form)
        if at + size > mapped.size:
            raise FormatError(f"{path}: the file ends at byte {mapped.size}, inside of a tensor, so it is cut short.")
        at += size
        return struct.unpack_from(form, mapped.map, at - size)

    version, rank, alpha = take("<3i")
    if version != 1 or rank < 1 or alpha < 0:
        raise FormatError(
            f"{path}: version, rank and alpha are {version}, {rank}, {alpha}; they must be 1, above 0 and not below 0."
        )
    halves: Halves = {}
    interleaved = False
    while at < mapped.size:
        n_dims, name_length, kind = take("<3i")
        if not 1 <= n_dims <= 2 or not 0 < name_length <= 256 or kind not in (0, 1):
            raise FormatError(f"{path}: byte {at - 12} starts no tensor of type F32 or F16, so the file is damaged.")
        shape = take(f"<{n_dims}i")[::-1]
        name = take(f"<{name_length}s")[0].decode("utf-8", "replace")
        base, _, side = name.rpartition(".lora")
        parameter = names.path_of_legacy(base) or names.path_of_gguf(base)
        if parameter is None or side not in ("A", "B") or n_dims != 2 or min(shape) < 0:
            raise FormatError(f"{path}: tensor {shown(name)} is no LoRA factor of a weight of this model.")
        interleaved |= names.path_of_legacy(base) is None and names.rotary_heads(parameter, config) is not None
        at = -(-at // 32) * 32
        nbytes = math.prod(shape) * (4 if kind == 0 else 2)
        if at + nbytes > mapped.size:
            raise FormatError(f"{path}: tensor {shown(name)} ends at byte {at + nbytes} of {mapped.size}.")
        values = np.frombuffer(mapped.map, "<f4" if kind == 0 else "<f2", math.prod(shape), at).reshape(shape)
        halves.setdefault(parameter, {})[side.lower()] = np.array(values.T if side == "A" else values)
        at += nbytes
    if interleaved:
        _half_split(halves, config)
    return _adapter(path, halves, config, lambda *_: alpha / rank)


def _from_peft(folder: Path, config: LlamaConfig) -> Adapter:
    config_path, weights_path = folder / PEFT_CONFIG, folder / PEFT_WEIGHTS
    if not config_path.exists():
        raise FormatError(f"{folder} holds no {PEFT_CONFIG}, so it is no PEFT adapter.")
    if not weights_path.exists():
        raise FormatError(f"{folder} holds no {PEFT_WEIGHTS}; weights in a pickle (.bin) are not read.")
    settings = read_json(config_path)
    _check_peft(settings, str(config_path))
    default_rank = settings.get("r", 8)
    default_alpha = _alpha(settings.get("lora_alpha", 8), f"{config_path}: lora_alpha")
    ranks = _patterns(settings, "rank_pattern", str(config_path))
    alphas = _patterns(settings, "alpha_pattern", str(config_path))
    modules: dict[str, str] = {}  # parameter path -> the module's name
    halves: Halves = {}
    mapped = MappedFile(weights_path)
    try:
        for name, info in read_header(mapped).items():
            match = _PEFT_TENSOR.fullmatch(name)
            parameter = names.path_of_hf(f"{match['module']}.weight") if match else None
            if match is None or parameter is None or info.type_name not in ("F32", "F16", "BF16"):
                raise FormatError(f"{weights_path}: tensor {shown(name)} is no LoRA factor of a weight of this model.")
            values = as_plain(mapped.array(info.offset, info.nbytes), info.type_name, info.shape)
            side = match["side"].lower()
            if parameter == "embedding":  # PEFT keeps A as [r, V] and B as [D, r]
                side, values = "b" if side == "a" else "a", values.T
            halves.setdefault(parameter, {})[side] = np.array(values)
            modules[parameter] = match["module"]
    finally:
        mapped.close()

    def scale(parameter: str, rank: int) -> float:
        wanted = _matching(ranks, modules[parameter], default_rank)
        if wanted != rank:
            raise FormatError(
                f"{folder}: the factors of {modules[parameter]} have rank {rank}; {PEFT_CONFIG} says {shown(wanted)}."
            )
        alpha = _alpha(_matching(alphas, modules[parameter], default_alpha), f"{config_path}: alpha_pattern")
        return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)

    return _adapter(folder, halves, config, scale)


def _check_peft(settings: Mapping[str, Any], file: str) -> None:
    """Refuses settings under which an adapter is more than products of factors."""
    if settings.get("peft_type") != "LORA":
        raise FormatError(f"{file}: peft_type is {shown(settings.get('peft_type'))}; it must be 'LORA'.")
    init = settings.get("init_lora_weights")
    if init not in _PEFT_INITS:
        raise FormatError(
            f"{file}: init_lora_weights is {shown(init)}, which changes the model's own weights; convert the adapter "
            "to plain LoRA with PEFT first."
        )
    for key, value in settings.items():
        if key in _PEFT_READ or key in _PEFT_HARMLESS or not value or (key, value) == ("bias", "none"):
            continue
        raise FormatError(f"{file}: {plain(key)} is {shown(value)}; only adapters without it are supported.")


def _patterns(settings: Mapping[str, Any], key: str, file: str) -> list[tuple[re.Pattern[str], Any]]:
    """The regular expressions of a pattern setting, as PEFT reads them: for the end of a module's name.

    A file must not be able to make matching slow: repeated groups and many repetitions are refused.
    """
    value = settings.get(key) or {}
    if not isinstance(value, dict) or len(value) > _MAX_PATTERNS:
        raise FormatError(f"{file}: {key} is {shown(value)}; it must be an object of at most {_MAX_PATTERNS} patterns.")
    patterns = []
    for text, number in value.items():
        slow = len(text) > _MAX_PATTERN_LENGTH or re.search(r"\)[*+{]", text) or len(re.findall(r"[*+{]", text)) > 3
        try:
            compiled = None if slow else re.compile(rf"(?:.*\.)?(?:{text})")
        except (re.error, OverflowError, RecursionError):
            compiled = None
        if compiled is None:
            raise FormatError(
                f"{file}: {key} holds {shown(text)}; it must be a regular expression of at most "
                f"{_MAX_PATTERN_LENGTH} characters and three repetitions, none of them of a group."
            )
        patterns.append((compiled, number))
    return patterns


def _matching(patterns: Iterable[tuple[re.Pattern[str], Any]], module: str, default: Any) -> Any:
    return next((number for pattern, number in patterns if pattern.fullmatch(module)), default)


def _alpha(value: Any, what: str) -> float:
    if not is_finite(value) or value < 0:
        raise FormatError(f"{what} is {shown(value)}; it must be a number from 0.")
    return float(value)


def _half_split(halves: Halves, config: LlamaConfig) -> None:
    """Puts the rows of b of query and key weights, as a GGUF file orders them, into half-split order."""
    for parameter, sides in halves.items():
        heads = names.rotary_heads(parameter, config)
        if heads is not None and "b" in sides and len(sides["b"]) == heads * config.head_dim:
            sides["b"] = half_split_rows(sides["b"], heads)


def _adapter(path: Path, halves: Halves, config: LlamaConfig, scale: Callable[[str, int], float]) -> Adapter:
    """Checks the factors and puts them in the model's order. `scale(path, rank)` gives each weight's."""
    shapes = names.parameter_shapes(config)
    shapes.setdefault("output_head", shapes["embedding"])
    if not halves:
        raise FormatError(f"{path} holds no LoRA factors.")
    unknown = [parameter for parameter in halves if parameter not in shapes]
    if unknown:
        raise FormatError(f"{path} changes {unknown[0]}; the model has {config.n_layers} layers.")
    adapter = {}
    for parameter in (p for p in shapes if p in halves):
        sides = halves[parameter]
        if len(sides) != 2:
            raise FormatError(f"{path} lacks one of the two factors of {parameter}.")
        a, b = sides["a"], sides["b"]
        n_out, n_in = (1, *shapes[parameter])[-2:]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] < 1 or (b.shape, a.shape) != ((n_out, len(a)), (len(a), n_in)):
            raise FormatError(
                f"{path}: the factors of {parameter} have shapes {a.shape} and {b.shape}; a model of this shape needs "
                f"[r, {n_in}] and [{n_out}, r]."
            )
        if not np.isfinite(a).all() or not np.isfinite(b).all():
            raise FormatError(f"{path}: the factors of {parameter} hold values that are not finite.")
        adapter[parameter] = LoraFactors(a=a, b=b, scale=scale(parameter, len(a)))
    return adapter
