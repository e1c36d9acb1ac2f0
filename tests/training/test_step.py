"""A training step against the definition of what it computes."""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from llama_jax.errors import ArgumentError
from llama_jax.losses import loss, summed_loss
from llama_jax.model import by_path, hidden_states
from tests.reference import llama_numpy
from tests.tiny import tiny_config, tiny_params
from training.optimizer import OptimizerOptions, make_optimizer
from training.step import StepOptions, init_state, make_train_step, operations_per_token

CONFIG = tiny_config(n_layers=1)
RNG = np.random.default_rng(5)
KEY = jax.random.key(7)
PARAMS = tiny_params(CONFIG)
QUICK = {"xla_backend_optimization_level": 0}  # compile sooner, run slower
FREE = StepOptions(clip=0.0)


def make_batch(B=4, T=12, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 101, (B, T + 1)).astype(np.int32)
    # Rows differ in how many tokens count: a mean of means would differ from the mean.
    weights = (np.arange(T) < rng.integers(1, T + 1, (B, 1))).astype(np.float32)
    return {k: jnp.asarray(v) for k, v in dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=weights).items()}


@functools.cache
def trainer(options, config=CONFIG, **optimizer_options):
    """`(first state, jitted step)`, one for all tests that ask for the same."""
    plain = dict(name="sgd", beta1=0.0, weight_decay=0.0, learning_rate=0.5, decay_steps=0)
    optimizer = make_optimizer(OptimizerOptions(warmup=0, **(optimizer_options or plain)))
    state = init_state(PARAMS, optimizer, options)
    return state, jax.jit(make_train_step(config, optimizer, options), compiler_options=QUICK)


def run(options, steps=1, **optimizer_options):
    state, step = trainer(options, **optimizer_options)
    metrics = {}
    for _ in range(steps):
        state, metrics = step(state, None, make_batch(), KEY)
    return state, metrics


def close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_equal_central_differences_of_float64_numpy(tied):
    config = tiny_config(n_layers=1, tied_embeddings=tied, vocab_size=31)
    params = tiny_params(config)
    tokens, targets = RNG.integers(0, 31, (2, 1, 7)).astype(np.int32)
    gradient = jax.jit(jax.grad(loss), static_argnums=3)(params, tokens, targets, config)

    def value(path, change):
        params = jax.tree.map(lambda w, p: w + change if p == path else w, wide, _paths(wide))
        logits = llama_numpy.logits(params, tokens[0].tolist(), config)
        return np.mean(np.log(np.exp(logits).sum(-1)) - logits[np.arange(7), targets[0]])

    wide = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    paths = by_path(params)
    assert ("output_head" in paths) != tied
    for path, leaf in by_path(gradient).items():
        direction = RNG.normal(size=leaf.shape)
        expected = (value(path, 1e-5 * direction) - value(path, -1e-5 * direction)) / 2e-5
        assert np.sum(np.asarray(leaf, np.float64) * direction) == pytest.approx(expected, rel=2e-3, abs=2e-6), path


def _paths(params):
    return jax.tree.unflatten(jax.tree.structure(params), list(by_path(params)))


def test_accumulation_is_exactly_one_big_batch():
    parts, _ = run(dataclasses.replace(FREE, accumulate=4))
    close(run(FREE)[0].params, parts.params, rtol=1e-5, atol=1e-6)
    gradient = jax.jit(jax.grad(loss), static_argnames="config")(PARAMS, **make_batch(), config=CONFIG)
    expected = jax.tree.map(lambda w, g: w - 0.5 * g, PARAMS, gradient)
    close(parts.params, expected, rtol=1e-5, atol=1e-6)


def test_an_uneven_accumulation_is_an_error():
    with pytest.raises(ArgumentError, match="A batch of 4 rows cannot be accumulated in 3 parts"):
        run(StepOptions(accumulate=3))


@pytest.mark.parametrize("changes", [dict(fused=True), dict(remat="products"), dict(remat="block")])
def test_what_only_changes_speed_changes_no_number(changes):
    plain, a = run(FREE, steps=2)
    other, b = run(dataclasses.replace(FREE, **changes), steps=2)
    close(plain.params, other.params, rtol=2e-4, atol=2e-5)
    assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-5)


def test_clipping_shortens_to_the_limit():
    free, metrics = run(FREE)
    clipped, _ = run(StepOptions(clip=0.25))
    moves = [float(optax.tree.norm(jax.tree.map(jnp.subtract, s.params, PARAMS))) for s in (free, clipped)]
    assert moves[0] == pytest.approx(0.5 * float(metrics["gradient_norm"]), rel=1e-4)
    assert moves[0] > 0.3
    assert moves[1] == pytest.approx(0.5 * 0.25, rel=1e-4)


def test_a_step_that_is_not_finite_is_skipped_and_counted():
    state, step = trainer(StepOptions(average=0.5), learning_rate=0.1)
    bad = make_batch()
    bad["weights"] = bad["weights"].at[0, 0].set(jnp.inf)
    after, metrics = step(state, None, bad, KEY)
    close(after.params, state.params, rtol=0)
    close(after.optimizer, state.optimizer, rtol=0)
    assert (int(after.step), int(after.skipped), float(metrics["skipped"])) == (1, 1, 1.0)
    after, metrics = step(after, None, make_batch(), KEY)
    assert (int(after.step), int(after.skipped), float(metrics["skipped"])) == (2, 1, 0.0)
    assert not np.array_equal(after.params.embedding, state.params.embedding)


def test_z_loss_enters_the_gradient_and_not_the_report():
    plain, a = run(FREE)
    other, b = run(dataclasses.replace(FREE, z_loss=0.1))
    assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-6)
    assert not np.allclose(plain.params.output_norm, other.params.output_norm, atol=1e-6)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32():
    narrow = dataclasses.replace(FREE, dtype="bfloat16")
    state, metrics = run(narrow, steps=3)
    _, reference = run(FREE, steps=3)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))
    assert float(metrics["loss"]) == pytest.approx(float(reference["loss"]), rel=2e-2)
    assert float(metrics["loss"]) != float(reference["loss"])
    _, step = trainer(narrow)
    text = step.lower(state, None, make_batch(), KEY).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line and "tensor<4x12x32x" in line]
    assert products
    assert all("tensor<4x12x32xf32>" not in line for line in products)


def test_the_state_is_updated_in_place():
    optimizer = make_optimizer(OptimizerOptions())
    state = init_state(tiny_params(CONFIG), optimizer, StepOptions())
    step = jax.jit(make_train_step(CONFIG, optimizer, StepOptions()), donate_argnums=0, compiler_options=QUICK)
    compiled = step.lower(state, None, make_batch(), KEY).compile()
    sizes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes >= 0.99 * sizes
    before = state.params.embedding
    compiled(state, None, make_batch(), KEY)
    assert before.is_deleted()


def test_dropout_takes_weights_away_and_differs_between_steps():
    first, step = trainer(StepOptions(dropout=0.5), learning_rate=0.0)
    state = first
    seen = []
    for _ in range(3):
        state, metrics = step(state, None, make_batch(), KEY)
        seen.append(float(metrics["loss"]))
    assert len(set(seen)) == 3
    _, metrics = step(first, None, make_batch(), KEY)
    assert float(metrics["loss"]) == seen[0]


def test_the_average_follows_the_weights():
    options = StepOptions(average=0.5)
    state, _ = run(options, steps=2, learning_rate=0.1)
    first, _ = run(options, steps=1, learning_rate=0.1)
    decay = min(0.5, 2 / 11)
    expected = jax.tree.map(lambda a, w: decay * a + (1 - decay) * w, first.average, state.params)
    close(state.average, expected, rtol=1e-5, atol=1e-6)


def test_packed_rows_equal_separate_rows():
    config = CONFIG
    params = tiny_params(config)
    a, b = RNG.integers(0, 101, (2, 1, 5)).astype(np.int32)
    packed = jnp.concatenate([a, b], axis=1)
    segments = jnp.asarray([[1] * 5 + [2] * 5], jnp.int32)
    forward = jax.jit(hidden_states, static_argnames="config")
    x, _ = forward(params, packed, config, segments=segments)
    for i, part in enumerate((a, b)):
        alone, _ = forward(params, part, config)
        np.testing.assert_allclose(x[:, 5 * i : 5 * i + 5], alone, atol=2e-5)
    together, _ = forward(params, packed, config)
    assert not np.allclose(together[:, 5:], x[:, 5:], atol=1e-3)


def test_operations_of_the_published_shape():
    # 60.6k tok/s are 41.4 % of 989 TFLOP/s for this shape: 6.757e9 operations a token.
    from llama_jax import PRESETS

    assert operations_per_token(PRESETS["tinyllama-1.1b"], 2048) == pytest.approx(0.414 * 989e12 / 60.6e3, rel=2e-3)


def test_summed_loss_is_the_total():
    total, weight = jax.jit(partial(summed_loss, config=CONFIG))(tiny_params(CONFIG), **make_batch())
    _, metrics = run(FREE)
    assert float(metrics["loss"]) == pytest.approx(float(total) / float(weight), rel=1e-5)
    assert float(metrics["tokens"]) == float(weight)
