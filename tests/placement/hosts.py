"""One of several hosts, for test_distributed.py: python -m tests.placement.hosts ADDRESS NUM_HOSTS HOST_ID."""

import json
import os
import sys

os.environ["JAX_NUM_CPU_DEVICES"] = "2"

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from llama_jax import LlamaConfig, Params, Session, device_mesh, loss, param_shardings, sampling_params, start_hosts
from llama_jax.model import by_path
from llama_jax.placement import place_params, with_vocabulary
from tests.tiny import tiny_config, tiny_params

CONFIG = tiny_config(n_kv_heads=4, vocab_size=101, d_ff=64)
PROMPTS = [[5, 9, 77, 3, 14, 50, 2], [8, 1]]


def generation(params: Params, config: LlamaConfig, mesh) -> list[list[int]]:
    """Greedy tokens of the tiny model."""
    session = Session(params, config, batch=2, capacity=32, mesh=mesh)
    rows: list[list[int]] = [[], []]
    for new in session.generate(PROMPTS, sampling_params(2, temperature=0.0), max_tokens=12):
        for row, tokens in zip(rows, new, strict=True):
            row.extend(tokens)
    return rows


def training_step(params: Params, config: LlamaConfig, rows) -> tuple[float, float]:
    """The loss, and again after one step of SGD."""
    optimizer = optax.sgd(0.1)

    @jax.jit
    def step(params, state, rows):
        value, gradient = jax.value_and_grad(loss)(params, rows[:, :-1], rows[:, 1:], config)
        updates, state = optimizer.update(gradient, state, params)
        return value, optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    first, params, state = step(params, state, rows)
    second, *_ = step(params, state, rows)
    return float(first), float(second)


def batch() -> np.ndarray:
    return np.random.default_rng(0).integers(0, CONFIG.vocab_size, (4, 17), np.int32)


def main() -> None:
    address, num_hosts, host_id = sys.argv[1:]
    start_hosts(address, int(num_hosts), int(host_id))
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    assert jax.process_count() == int(num_hosts)
    params = jax.device_get(tiny_params(CONFIG))
    mesh = device_mesh(tensor=jax.device_count())
    place = place_params(CONFIG, mesh, pad_vocabulary=True)
    leaves = [place(path, leaf) for path, leaf in by_path(params).items()]
    divided = with_vocabulary(jax.tree.unflatten(jax.tree.structure(params), leaves), CONFIG)
    tokens = generation(divided, CONFIG, mesh)

    mesh = device_mesh(data=jax.device_count() // 2, tensor=2)  # the batch over the hosts
    shardings = param_shardings(CONFIG, mesh)
    weights = jax.tree.map(
        lambda leaf, s: jax.make_array_from_callback(leaf.shape, s, lambda i: leaf[i]), params, shardings
    )
    rows = batch()
    over_hosts = NamedSharding(mesh, PartitionSpec("data"))
    losses = training_step(weights, CONFIG, jax.make_array_from_callback(rows.shape, over_hosts, lambda i: rows[i]))
    print(
        json.dumps(
            dict(
                tokens=tokens,
                losses=losses,
                shard=divided.layers[0].w_gate.addressable_shards[0].data.shape,
                devices=jax.device_count(),
            )
        )
    )


if __name__ == "__main__":
    main()
