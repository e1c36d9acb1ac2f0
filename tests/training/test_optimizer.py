"""Schedules, AdamW and L-BFGS against versions written independently in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from llama_jax.errors import ArgumentError
from tests.tiny import tiny_config, tiny_params
from training.optimizer import OptimizerOptions, learning_rate_schedule, make_optimizer


def rates(steps, **options):
    schedule = learning_rate_schedule(OptimizerOptions(learning_rate=1.0, **options))
    return np.array([float(schedule(s)) for s in steps])


def test_the_rate_rises_then_falls_as_a_cosine():
    got = rates([0, 4, 9, 10, 60, 110, 500], warmup=10, decay_steps=100, decay_alpha=0.1)
    middle = 0.1 + 0.9 * 0.5
    np.testing.assert_allclose(got, [0.1, 0.5, 1.0, 1.0, middle, 0.1, 0.1], rtol=1e-6)


def test_no_cosine_is_constant():
    np.testing.assert_allclose(rates([0, 5, 10**6], warmup=0, decay_steps=0), 1.0)


def test_restarts_grow():
    def reference(step, length=100, growth=1.5):
        while step > length:
            step, length = step - length, length * growth
        return 0.5 * (1 + np.cos(np.pi * step / length))

    steps = [0, 50, 100, 101, 175, 250, 251, 400, 475, 476, 1000, 10**5]
    expected = [reference(s) for s in steps]
    np.testing.assert_allclose(rates(steps, warmup=0, decay_steps=100, decay_restart=1.5), expected, atol=2e-4)


def test_the_schedule_of_june_2023():
    # Seen from the 2023 program with its defaults: the cycles' factor 1.1 was cut to 1, so they never grow.
    got = rates([0, 50, 100, 600, 1100, 1101, 2100], warmup=100, decay_steps=1000, decay_restart=1.1, ggml_2023=True)
    np.testing.assert_allclose(got, [0.0, 0.5, 1.0, 0.5, 0.0, 1.0, 0.0], atol=1e-5)


def test_all_steps_of_a_batch_of_june_2023_have_one_rate():
    got = rates(range(10), warmup=100, decay_steps=1000, ggml_2023=True, steps_per_batch=4)
    np.testing.assert_allclose(got, np.array([0, 1, 1, 1, 1, 5, 5, 5, 5, 9]) / 100, rtol=1e-6)


PARAMS = tiny_params(tiny_config(n_layers=1, vocab_size=17))


def gradients(params, step):
    """Some gradient that depends on the weights and on the step."""
    return jax.tree.map(lambda w: np.sin(3 * np.asarray(w, np.float64) + step) + 0.3 * np.asarray(w), params)


@pytest.mark.parametrize("decay_all", [False, True])
@pytest.mark.parametrize("ggml_2023", [False, True])
def test_adamw_equals_numpy_over_20_steps(decay_all, ggml_2023):
    options = OptimizerOptions(
        learning_rate=1e-2, warmup=5, decay_steps=12, weight_decay=0.1, decay_all=decay_all, ggml_2023=ggml_2023
    )
    optimizer = make_optimizer(options)
    state = optimizer.init(PARAMS)
    update = jax.jit(optimizer.update)
    params = PARAMS
    expected = {p: np.asarray(w, np.float64) for p, w in _named(PARAMS)}
    m = {p: np.zeros_like(w) for p, w in expected.items()}
    v = {p: np.zeros_like(w) for p, w in expected.items()}
    for step in range(20):
        gradient = gradients(params, step)
        change, state = update(jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), gradient), state, params)
        params = optax.apply_updates(params, change)
        if ggml_2023:
            factor = step / 5 if step < 5 else 0.5 * (1 + np.cos(np.pi * _within(step - 5, 12) / 12))
        else:
            factor = (step + 1) / 5 if step < 5 else 0.5 * (1 + np.cos(np.pi * min(step - 5, 12) / 12))
        for path, g in _named(gradient):
            w = expected[path]
            m[path] = 0.9 * m[path] + 0.1 * g
            v[path] = 0.95 * v[path] + 0.05 * g * g
            move = m[path] / (1 - 0.9 ** (step + 1)) / (np.sqrt(v[path] / (1 - 0.95 ** (step + 1))) + 1e-8)
            decays = decay_all or ("norm" not in path and "embedding" not in path)
            decay = 0.1 * (factor if ggml_2023 else 0.01 * factor) if decays else 0.0
            expected[path] = w - decay * w - 0.01 * factor * move
        # The gradient of the next step depends on the weights: take one path, else roundings would grow apart.
        for path, w in _named(params):
            np.testing.assert_allclose(w, expected[path], rtol=2e-5, atol=2e-6, err_msg=path)
        expected = {p: np.asarray(w, np.float64) for p, w in _named(params)}


def _within(step, length):
    while step > length:
        step -= length
    return step


def _named(tree):
    return [(jax.tree_util.keystr(p, simple=True, separator="."), x) for p, x in jax.tree.leaves_with_path(tree)]


def rosenbrock(x):
    return jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


def test_lbfgs_equals_numpy_over_20_steps():
    """The directions are those of the two-loop recursion (Nocedal and Wright, algorithm 7.4), the steps obey Wolfe."""
    with jax.enable_x64():
        optimizer = make_optimizer(OptimizerOptions(name="lbfgs", history=4))
        x = jnp.asarray(np.random.default_rng(0).normal(size=6))
        state = optimizer.init(x)
        value_and_grad = jax.jit(jax.value_and_grad(rosenbrock))
        update = jax.jit(lambda g, s, x, v: optimizer.update(g, s, x, value=v, grad=g, value_fn=rosenbrock))
        pairs, before = [], None
        for step in range(20):
            value, g = value_and_grad(x)
            if before is not None:
                pairs = [*pairs, (np.asarray(x - before[0]), np.asarray(g - before[1]))][-4:]
            before = (x, g)
            change, state = update(g, state, x, value)
            direction = np.asarray(g)
            alphas = []
            for s, y in reversed(pairs):
                alphas.append(s @ direction / (s @ y))
                direction = direction - alphas[-1] * y
            if pairs:
                s, y = pairs[-1]
                direction = direction * (s @ y) / (y @ y)
            for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
                direction = direction + (alpha - y @ direction / (s @ y)) * s
            # optax scales the first direction to length 1 at most; afterwards only the step's length is its own.
            cosine = np.asarray(change) @ -direction / np.linalg.norm(change) / np.linalg.norm(direction)
            assert cosine == pytest.approx(1, abs=1e-9), step
            new_value, new_g = value_and_grad(x + change)
            slope = float(g @ change)
            assert slope < 0
            assert float(new_value) <= float(value) + 1e-4 * slope + 1e-12
            assert abs(float(new_g @ change)) <= 0.9 * abs(slope) + 1e-12
            x = x + change


def test_lbfgs_reaches_scipys_minimum():
    from scipy.optimize import minimize

    matrix = np.random.default_rng(1).normal(size=(12, 5))

    def f(x):
        return jnp.sum(jnp.logaddexp(0.0, jnp.asarray(matrix) @ x)) + 0.1 * jnp.sum(x**2)

    with jax.enable_x64():
        expected = minimize(lambda x: float(f(jnp.asarray(x))), np.ones(5), method="L-BFGS-B", tol=1e-14).fun
        optimizer = make_optimizer(OptimizerOptions(name="lbfgs"))
        x = jnp.ones(5)
        state = optimizer.init(x)

        @jax.jit
        def step(x, state):
            value, g = jax.value_and_grad(f)(x)
            change, state = optimizer.update(g, state, x, value=value, grad=g, value_fn=f)
            return x + change, state

        for _ in range(20):
            x, state = step(x, state)
        assert float(f(x)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_every_optimizer_lowers_a_loss(name):
    optimizer = make_optimizer(OptimizerOptions(name=name, learning_rate=0.02, warmup=0, decay_steps=0))

    def f(params):
        return sum(jnp.sum((w - 0.5) ** 2) for w in jax.tree.leaves(params))

    @jax.jit
    def step(params, state):
        change, state = optimizer.update(jax.grad(f)(params), state, params)
        return optax.apply_updates(params, change), state

    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(10):
        params, state = step(params, state)
    assert float(f(params)) < 0.9 * float(f(PARAMS))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(name="adam"), "The optimiser is 'adam'; it must be one of adamw, muon, sgd, lbfgs."),
        (dict(learning_rate=-1.0), "learning_rate is -1.0; it must be a finite number, 0 or above."),
        (dict(decay_restart=0.5), "decay_restart is 0.5; it must be 0 or a finite number from 1."),
        (dict(beta2=1.0), "beta2 is 1.0; it must be from 0 to below 1."),
        (dict(warmup=-1), "warmup is -1; it must be an integer from 0 to 2147483647."),
    ],
)
def test_wrong_options_are_sentences(options, sentence):
    with pytest.raises(ArgumentError, match="^" + sentence.replace("(", r"\(").replace(".", r"\.") + "$"):
        OptimizerOptions(**options)
