"""Continues token ids with the programs beside this file, always by the most likely token.

    python run.py 1 5 9 --tokens 20

Needs jax, numpy, safetensors and flatbuffers.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

FOLDER = Path(__file__).resolve().parent


def load(name):
    """An exported function; the cache is donated, so that it is updated in place."""
    exported = jax.export.deserialize(bytearray((FOLDER / f"{name}.jax").read_bytes()))
    return jax.jit(exported.call, donate_argnums=1)


def main():
    parser = argparse.ArgumentParser(description="Continues token ids with the programs beside this file.")
    parser.add_argument("ids", type=int, nargs="+", help="token ids of the prompt")
    parser.add_argument("--tokens", type=int, default=20, help="most new tokens")
    arguments = parser.parse_args()
    facts = json.loads((FOLDER / "model.json").read_text())
    wrong = [i for i in arguments.ids if not 0 <= i < facts["vocab_size"]]
    if wrong:
        parser.error(f"token id {wrong[0]} is not one of 0 to {facts['vocab_size'] - 1}")
    if len(arguments.ids) > facts["context"]:
        parser.error(f"{len(arguments.ids)} ids do not fit into a context of {facts['context']}")
    weights = {name: jnp.asarray(x) for name, x in load_file(FOLDER / "weights.safetensors").items()}
    cache = {name: jnp.zeros(shape, dtype) for name, (shape, dtype) in facts["cache"].items()}
    prefill, decode = load("prefill"), load("decode")
    size = facts["prefill_tokens"]
    logits = jnp.zeros((1, facts["vocab_size"]))
    for start in range(0, len(arguments.ids), size):
        chunk = arguments.ids[start : start + size]
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(chunk)] = chunk
        logits, cache = prefill(weights, cache, jnp.asarray(tokens), jnp.asarray([len(chunk)], jnp.int32))
    for _ in range(min(arguments.tokens, facts["context"] - len(arguments.ids))):
        token = jnp.argmax(logits[:, : facts["vocab_size"]], axis=-1).astype(jnp.int32)
        print(int(token[0]), flush=True)
        if int(token[0]) in facts["end_ids"]:
            break
        logits, cache = decode(weights, cache, token)


if __name__ == "__main__":
    main()
