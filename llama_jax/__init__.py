"""LLaMA inference and training as pure JAX functions."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_jax.cache import CACHE_TYPES, KVCache, advance, append, append_and_attend, init_cache
    from llama_jax.completion import Completion
    from llama_jax.config import PRESETS, LlamaConfig, RopeScaling
    from llama_jax.embeddings import embed_texts, pooled_states
    from llama_jax.errors import ArgumentError, FormatError, LlamaJaxError
    from llama_jax.export import export_model
    from llama_jax.formats.load import load_params, open_model
    from llama_jax.formats.lora import load_lora
    from llama_jax.formats.save import save_gguf, save_hf
    from llama_jax.formats.save_lora import save_lora_gguf, save_peft
    from llama_jax.generate import DecodeState, decode, decode_step, generate_tokens, prefill, start_decoding
    from llama_jax.grammar import Constraint, Grammar, gbnf, json_schema, lark, regex
    from llama_jax.llama import Llama
    from llama_jax.loading import load
    from llama_jax.lora import LoraFactors, init_lora, merge_lora, with_lora
    from llama_jax.losses import loss, summed_loss, token_losses
    from llama_jax.memory_test import memory_test
    from llama_jax.model import (
        Layer,
        Params,
        by_path,
        forward,
        hidden_states,
        init_params,
        join_projections,
        parameter_specs,
        unembed,
    )
    from llama_jax.placement.devices import MemoryReport, memory_report
    from llama_jax.placement.distributed import start_hosts
    from llama_jax.placement.plan import Placement, Plan, plan
    from llama_jax.placement.sharding import device_mesh, param_shardings, place_cache, place_params, tensor_mesh
    from llama_jax.prompt_cache import PromptCache
    from llama_jax.report import Timings, TokenLogprobs
    from llama_jax.sampling.chain import distribution, sample
    from llama_jax.sampling.logprobs import Logprobs, log_probabilities
    from llama_jax.sampling.params import SamplingParams, join_params, sampling_params
    from llama_jax.sampling.state import SamplerState, recent_tokens, start_state
    from llama_jax.session import Session
    from llama_jax.speculative import Speculation
    from llama_jax.text.vocab import Vocab

__version__ = "0.1.0"

# Public name -> module. Imported on first use, so that `import llama_jax` alone does not start jax.
_PUBLIC = {
    "cache": ("CACHE_TYPES", "KVCache", "advance", "append", "append_and_attend", "init_cache"),
    "completion": ("Completion",),
    "config": ("PRESETS", "LlamaConfig", "RopeScaling"),
    "embeddings": ("embed_texts", "pooled_states"),
    "errors": ("ArgumentError", "FormatError", "LlamaJaxError"),
    "export": ("export_model",),
    "formats.load": ("load_params", "open_model"),
    "formats.lora": ("load_lora",),
    "formats.save": ("save_gguf", "save_hf"),
    "formats.save_lora": ("save_lora_gguf", "save_peft"),
    "generate": ("DecodeState", "decode", "decode_step", "generate_tokens", "prefill", "start_decoding"),
    "grammar": ("Constraint", "Grammar", "gbnf", "json_schema", "lark", "regex"),
    "llama": ("Llama",),
    "loading": ("load",),
    "lora": ("LoraFactors", "init_lora", "merge_lora", "with_lora"),
    "losses": ("loss", "summed_loss", "token_losses"),
    "memory_test": ("memory_test",),
    "model": (
        "Layer",
        "Params",
        "by_path",
        "forward",
        "hidden_states",
        "init_params",
        "join_projections",
        "parameter_specs",
        "unembed",
    ),
    "placement.devices": ("MemoryReport", "memory_report"),
    "placement.distributed": ("start_hosts",),
    "placement.plan": ("Placement", "Plan", "plan"),
    "placement.sharding": ("device_mesh", "param_shardings", "place_cache", "place_params", "tensor_mesh"),
    "prompt_cache": ("PromptCache",),
    "report": ("Timings", "TokenLogprobs"),
    "sampling.chain": ("distribution", "sample"),
    "sampling.logprobs": ("Logprobs", "log_probabilities"),
    "sampling.params": ("SamplingParams", "join_params", "sampling_params"),
    "sampling.state": ("SamplerState", "recent_tokens", "start_state"),
    "session": ("Session",),
    "speculative": ("Speculation",),
    "text.vocab": ("Vocab",),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'llama_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"llama_jax.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
