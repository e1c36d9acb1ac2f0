import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax import losses
from llama_jax.losses import loss, summed_loss
from tests.reference import llama_numpy
from tests.tiny import tiny_config, tiny_params

RNG = np.random.default_rng(2)
TOKENS = RNG.integers(0, 101, (3, 10)).astype(np.int32)
TARGETS = RNG.integers(0, 101, (3, 10)).astype(np.int32)
WEIGHTS = np.where(RNG.random((3, 10)) < 0.5, 0.0, RNG.random((3, 10))).astype(np.float32)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("logits_at_once", [101, 101 * 4, 2**25])
def test_loss_equals_float64(monkeypatch, tied, logits_at_once):
    monkeypatch.setattr(losses, "_LOGITS_AT_ONCE", logits_at_once)
    config = tiny_config(tied_embeddings=tied)
    params = tiny_params(config)
    logits = np.stack([llama_numpy.logits(params, row.tolist(), config) for row in TOKENS])
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    per_token = -np.take_along_axis(log_p, TARGETS[..., None], -1)[..., 0]
    total, weight = summed_loss(params, TOKENS, TARGETS, config, WEIGHTS)
    assert float(total) == pytest.approx((per_token * WEIGHTS).sum(), rel=1e-5)
    assert float(weight) == pytest.approx(WEIGHTS.sum(), rel=1e-6)
    assert float(loss(params, TOKENS, TARGETS, config)) == pytest.approx(per_token.mean(), rel=1e-5)


def test_gradients_do_not_depend_on_the_chunk(monkeypatch):
    config = tiny_config()
    params = tiny_params(config)
    whole = jax.jit(jax.grad(loss), static_argnames="config")(params, TOKENS, TARGETS, config=config, weights=WEIGHTS)
    monkeypatch.setattr(losses, "_LOGITS_AT_ONCE", 101 * 7)
    parts = jax.jit(jax.grad(loss), static_argnames="config")(params, TOKENS, TARGETS, config=config, weights=WEIGHTS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-4), whole, parts)


def test_no_weight_is_no_loss():
    config = tiny_config()
    nothing = jnp.zeros((3, 10))
    value, gradients = jax.jit(jax.value_and_grad(loss), static_argnums=3)(
        tiny_params(config), TOKENS, TARGETS, config, nothing
    )
    assert value == 0.0
    assert all(not leaf.any() for leaf in jax.tree.leaves(gradients))


def test_all_logits_never_exist_at_once(monkeypatch):
    monkeypatch.setattr(losses, "_LOGITS_AT_ONCE", 101 * 4)
    config = tiny_config()
    gradient = jax.jit(jax.grad(loss), static_argnums=3)
    text = gradient.lower(tiny_params(config), TOKENS, TARGETS, config).compile().as_text()
    assert "f32[4,101]" in text
    for whole in ("f32[3,10,101]", "f32[30,101]", "f32[8,4,101]", "f32[32,101]"):
        assert whole not in text.replace("f32[32,101]{1,0} parameter", "")
