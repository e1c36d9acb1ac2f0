"""Random blocks of every quantized type."""

from __future__ import annotations

import numpy as np

from llama_jax.quantization import BLOCK_TYPES

# Bytes at which the float16 scales of a block stand.
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def random_rows(name: str, out: int, columns: int, seed: int = 0) -> np.ndarray:
    """Bytes of a weight [out, columns], uint8 [out, bytes of a row]: any codes, scales from a normal distribution."""
    rng = np.random.default_rng(seed)
    t = BLOCK_TYPES[name]
    blocks = rng.integers(0, 256, (out * columns // t.block_size, t.block_bytes), np.uint8)
    for start in SCALES[name]:
        blocks[:, start : start + 2] = rng.normal(size=(len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(out, -1)
