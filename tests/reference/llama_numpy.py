"""LLaMA in float64 numpy, one token after the other and one head after the other: slow, and hard to get wrong."""

from __future__ import annotations

import math

import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.model import Params


def _norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / math.sqrt(float(np.mean(x**2)) + epsilon) * weight


def _rotate(head: np.ndarray, position: int, frequencies: np.ndarray) -> np.ndarray:
    half = len(head) // 2
    turned = (head[:half] + 1j * head[half:]) * np.exp(1j * position * frequencies)
    return np.concatenate([turned.real, turned.imag])


def logits(params: Params, tokens: list[int], config: LlamaConfig, frequencies: np.ndarray | None = None) -> np.ndarray:
    """[T, V] for one sequence. `frequencies` [E/2] are the unscaled ones when None."""
    E, H, K = config.head_dim, config.n_heads, config.n_kv_heads
    if frequencies is None:
        frequencies = np.array([config.rope_theta ** (-2 * i / E) for i in range(E // 2)])

    def array(weight) -> np.ndarray:
        return np.asarray(weight, np.float64)

    keys: list[list[np.ndarray]] = [[] for _ in params.layers]
    values: list[list[np.ndarray]] = [[] for _ in params.layers]
    head = array(params.embedding if params.output_head is None else params.output_head)
    rows = []
    for position, token in enumerate(tokens):
        x = array(params.embedding)[token]
        for n, layer in enumerate(params.layers):
            normed = _norm(x, array(layer.attention_norm), config.norm_epsilon)
            q = (array(layer.wq) @ normed).reshape(H, E)
            k = (array(layer.wk) @ normed).reshape(K, E)
            keys[n].append(np.stack([_rotate(h, position, frequencies) for h in k]))
            values[n].append((array(layer.wv) @ normed).reshape(K, E))
            first = 0 if config.sliding_window is None else max(0, position + 1 - config.sliding_window)
            outs = []
            for h in range(H):
                group = h // (H // K)
                turned = _rotate(q[h], position, frequencies)
                scores = np.array([turned @ key[group] for key in keys[n][first:]]) / math.sqrt(E)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                outs.append(sum(w * value[group] for w, value in zip(weights, values[n][first:], strict=True)))
            x = x + array(layer.wo) @ np.concatenate(outs)
            normed = _norm(x, array(layer.ffn_norm), config.norm_epsilon)
            gate, up = array(layer.w_gate) @ normed, array(layer.w_up) @ normed
            x = x + array(layer.w_down) @ (gate / (1 + np.exp(-gate)) * up)
        rows.append(head @ _norm(x, array(params.output_norm), config.norm_epsilon))
    return np.stack(rows)
