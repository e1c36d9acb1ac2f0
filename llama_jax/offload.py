"""Weights and caches in host memory: brought to the device within the program that needs them, one layer ahead.

Where an array is, its type says (`float32<host>[...]`), so that the model's code asks nobody. A program may read
several layers ahead only if it has room for them: XLA would start all transfers at once, so each waits, by an
optimization barrier, for the activations that enter the layer before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax

HOST = jax.memory.Space.Host
DEVICE = jax.memory.Space.Device


def on_host(array: Any) -> bool:
    """Whether an array, traced or not, is in host memory that a device reads: memory kind `pinned_host`."""
    return jax.typeof(array).memory_space == HOST


def to_device(tree: Any, after: Array) -> Any:
    """`tree` with its arrays in host memory brought to the device, once `after` has been computed."""
    leaves, structure = jax.tree.flatten(tree)
    waiting = [leaf for leaf in leaves if on_host(leaf)]
    if not waiting:
        return tree
    waiting, _ = lax.optimization_barrier((waiting, after))
    arrived = iter(jax.device_put(waiting, DEVICE))
    return jax.tree.unflatten(structure, [next(arrived) if on_host(leaf) else leaf for leaf in leaves])


def back_home(tree: Any, home: Any) -> Any:
    """`tree` with each array in host memory where that of `home`, of the same form, is there."""
    return jax.tree.map(lambda new, old: jax.device_put(new, HOST) if on_host(old) else new, tree, home)


def map_through_device(function: Callable[[Any], Any], trees: Sequence[Any], after: Array) -> tuple[Any, ...]:
    """`function` of each tree, on the device, and back to where it was; one at a time where they are in host memory."""
    results = []
    for tree in trees:
        new = function(to_device(tree, after))
        after = jax.tree.leaves(new)[0]
        results.append(back_home(new, tree))
    return tuple(results)


def through_device(function: Callable[[Any], Array], tree: Any) -> Array:
    """`function` of `tree` on the device; in host memory where some of `tree` is there. For use outside of jit."""
    if not any(map(on_host, jax.tree.leaves(tree))):
        return function(tree)
    return jax.device_put(function(jax.device_put(tree, DEVICE)), HOST)
