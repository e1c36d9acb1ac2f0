"""Writing LoRA adapters: PEFT folders and GGUF files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.errors import ArgumentError, shown
from llama_jax.formats import names
from llama_jax.formats.config_gguf import ARCHITECTURE
from llama_jax.formats.files import replacing
from llama_jax.formats.load import interleave_rows
from llama_jax.formats.lora import PEFT_CONFIG, PEFT_WEIGHTS
from llama_jax.formats.safetensors import write_tensors
from llama_jax.lora import Adapter, LoraFactors

_GGUF_DTYPES = {"F32": np.float32, "F16": np.float16}


def save_peft(folder: str | Path, adapter: Adapter, *, base_model: str = "") -> None:
    """Writes adapter_config.json and adapter_model.safetensors, which PEFT and `load_lora` read.

    Args:
      folder: made if absent; each file is replaced only when the new one is complete.
      adapter: factors in float32, bfloat16 or float16.
      base_model: name or path of the model, for PEFT's information.

    Raises:
      ArgumentError: the adapter is empty or changes a norm, which PEFT cannot express.
    """
    tensors = {}
    for path, factors in _checked(adapter).items():
        module = _module(path)
        a, b = np.asarray(factors.a), np.asarray(factors.b)
        if path == "embedding":
            tensors[f"base_model.model.{module}.lora_embedding_A"] = np.ascontiguousarray(b.T)
            tensors[f"base_model.model.{module}.lora_embedding_B"] = np.ascontiguousarray(a.T)
        else:
            tensors[f"base_model.model.{module}.lora_A.weight"] = np.ascontiguousarray(a)
            tensors[f"base_model.model.{module}.lora_B.weight"] = np.ascontiguousarray(b)
    ranks = {_module(path): factors.rank for path, factors in adapter.items()}
    alphas = {_module(path): _alpha(factors) for path, factors in adapter.items()}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": list(ranks),
        "rank_pattern": {_exactly(module): r for module, r in ranks.items() if r != rank},
        "alpha_pattern": {_exactly(module): x for module, x in alphas.items() if x != alpha},
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / PEFT_WEIGHTS, tensors, {"format": "pt"})
    with replacing(folder / PEFT_CONFIG) as temporary:
        temporary.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def save_lora_gguf(path: str | Path, adapter: Adapter, config: LlamaConfig, *, types: str = "F32") -> None:
    """Writes a GGUF adapter, as llama.cpp's `--lora` reads it.

    The format has one alpha for all weights: where scales differ, the difference goes into b.

    Args:
      path: of the file; replaced only when the new one is complete.
      config: the model's constants.
      types: of the factors: F32 or F16.

    Raises:
      ArgumentError: the type is another one, the adapter is empty, or a value is not finite in the type.
    """
    from gguf import GGUFWriter

    if types not in _GGUF_DTYPES:
        raise ArgumentError(f"types is {shown(types)}; it must be one of {', '.join(_GGUF_DTYPES)}.")
    alpha = next((_alpha(factors) for factors in _checked(adapter).values() if factors.scale), 1.0)
    with replacing(Path(path)) as temporary:
        writer = GGUFWriter(temporary, ARCHITECTURE)
        try:
            writer.add_string("general.type", "adapter")
            writer.add_string("adapter.type", "lora")
            writer.add_float32("adapter.lora.alpha", alpha)
            for parameter, factors in adapter.items():
                a, b = np.asarray(factors.a, np.float32), np.asarray(factors.b, np.float32)
                b = b * np.float32(_alpha(factors) / alpha)
                heads = names.rotary_heads(parameter, config)
                if heads is not None:
                    b = interleave_rows(b, heads)
                if parameter == "embedding":
                    a, b = b, a.T
                for side, values in (("a", a), ("b", b)):
                    with np.errstate(over="ignore"):
                        values = np.ascontiguousarray(values, _GGUF_DTYPES[types])
                    if not np.isfinite(values).all():
                        raise ArgumentError(f"The factors of {parameter} hold values that are not finite in {types}.")
                    writer.add_tensor(f"{names.gguf_name(parameter)}.lora_{side}", values)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def _checked(adapter: Adapter) -> Adapter:
    wrong = next((path for path in adapter if names.is_norm(path)), None)
    if not adapter or wrong is not None:
        raise ArgumentError(
            f"The adapter {f'changes {wrong}' if wrong else 'is empty'}; factors of matrices are needed."
        )
    return adapter


def _module(path: str) -> str:
    return names.hf_name(path).removesuffix(".weight")


def _exactly(module: str) -> str:
    return module.replace(".", r"\.")


def _alpha(factors: LoraFactors) -> float:
    """What gives the scale when it is divided by r, whatever made the scale."""
    alpha = factors.scale * factors.rank
    return round(alpha) if abs(alpha - round(alpha)) < 1e-9 else alpha
