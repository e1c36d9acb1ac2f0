"""What the tensors are called: here, in GGUF files, in Hugging Face's, and in those before GGUF.

A parameter path names a leaf of `llama_jax.model.Params`: "embedding", "layers.3.wq", "output_norm", "output_head".
"""

from __future__ import annotations

import re

from llama_jax.config import LlamaConfig
from llama_jax.model import by_path, parameter_specs

GGUF_TOP = {
    "embedding": "token_embd.weight",
    "output_norm": "output_norm.weight",
    "output_head": "output.weight",
}
GGUF_LAYER = {
    "attention_norm": "attn_norm.weight",
    "wq": "attn_q.weight",
    "wk": "attn_k.weight",
    "wv": "attn_v.weight",
    "wo": "attn_output.weight",
    "ffn_norm": "ffn_norm.weight",
    "w_gate": "ffn_gate.weight",
    "w_up": "ffn_up.weight",
    "w_down": "ffn_down.weight",
}
GGUF_TOP_INVERSE = {name: path for path, name in GGUF_TOP.items()}
GGUF_LAYER_INVERSE = {name: path for path, name in GGUF_LAYER.items()}
GGUF_ROPE_DIVISORS = "rope_freqs.weight"

HF_TOP = {
    "embedding": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "output_head": "lm_head.weight",
}
HF_LAYER = {
    "attention_norm": "input_layernorm.weight",
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "wo": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "w_gate": "mlp.gate_proj.weight",
    "w_up": "mlp.up_proj.weight",
    "w_down": "mlp.down_proj.weight",
}
HF_TOP_INVERSE = {name: path for path, name in HF_TOP.items()}
HF_LAYER_INVERSE = {name: path for path, name in HF_LAYER.items()}

LEGACY_TOP = {
    "embedding": "tok_embeddings.weight",
    "output_norm": "norm.weight",
    "output_head": "output.weight",
}
LEGACY_LAYER = {
    "attention_norm": "attention_norm.weight",
    "wq": "attention.wq.weight",
    "wk": "attention.wk.weight",
    "wv": "attention.wv.weight",
    "wo": "attention.wo.weight",
    "ffn_norm": "ffn_norm.weight",
    "w_gate": "feed_forward.w1.weight",
    "w_up": "feed_forward.w3.weight",
    "w_down": "feed_forward.w2.weight",
}
LEGACY_TOP_INVERSE = {name: path for path, name in LEGACY_TOP.items()}
LEGACY_LAYER_INVERSE = {name: path for path, name in LEGACY_LAYER.items()}

_PATH = re.compile(r"layers\.(0|[1-9]\d*)\.(\w+)")
_GGUF = re.compile(r"blk\.(0|[1-9]\d*)\.(.+)")
_LEGACY = re.compile(r"layers\.(0|[1-9]\d*)\.(.+)")
_HF = re.compile(r"model\.layers\.(0|[1-9]\d*)\.(.+)")
_HF_IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def gguf_name(path: str) -> str:
    """The GGUF tensor of a parameter path; `KeyError` for a path that no model has."""
    match = _PATH.fullmatch(path)
    return f"blk.{match[1]}.{GGUF_LAYER[match[2]]}" if match else GGUF_TOP[path]


def hf_name(path: str) -> str:
    """The Hugging Face tensor of a parameter path; `KeyError` for a path that no model has."""
    match = _PATH.fullmatch(path)
    return f"model.layers.{match[1]}.{HF_LAYER[match[2]]}" if match else HF_TOP[path]


def path_of_gguf(name: str) -> str | None:
    """The parameter path of a GGUF tensor, None for a tensor that is no parameter."""
    match = _GGUF.fullmatch(name)
    if match and match[2] in GGUF_LAYER_INVERSE:
        return f"layers.{match[1]}.{GGUF_LAYER_INVERSE[match[2]]}"
    return GGUF_TOP_INVERSE.get(name)


def path_of_legacy(name: str) -> str | None:
    """The parameter path of a tensor of a file before GGUF, None for a tensor that is no parameter."""
    match = _LEGACY.fullmatch(name)
    if match and match[2] in LEGACY_LAYER_INVERSE:
        return f"layers.{match[1]}.{LEGACY_LAYER_INVERSE[match[2]]}"
    return LEGACY_TOP_INVERSE.get(name)


def path_of_hf(name: str) -> str | None:
    """The parameter path of a Hugging Face tensor, None for a tensor that is no parameter."""
    match = _HF.fullmatch(name)
    if match and match[2] in HF_LAYER_INVERSE:
        return f"layers.{match[1]}.{HF_LAYER_INVERSE[match[2]]}"
    return HF_TOP_INVERSE.get(name)


def is_derived_hf(name: str) -> bool:
    """Whether a Hugging Face tensor only repeats what config.json says, as old checkpoints' rotary frequencies do."""
    return _HF_IGNORED.fullmatch(name) is not None


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter path of a model with its shape, in the order in which they are loaded and saved."""
    return {path: spec.shape for path, spec in by_path(parameter_specs(config)).items()}


def is_norm(path: str) -> bool:
    """Whether a parameter is a normalisation's vector; those stay float32 everywhere."""
    return path.endswith("norm")


def rotary_heads(path: str, config: LlamaConfig) -> int | None:
    """Heads among which the rows of a rotary weight divide (H for wq, K for wk), None for other parameters."""
    kind = path.rpartition(".")[2]
    return {"wq": config.n_heads, "wk": config.n_kv_heads}.get(kind)
