import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax import losses
from llama_jax.losses import head_loss, loss, summed_loss
from tests.reference import llama_numpy
from tests.tiny import tiny_config, tiny_params

RNG = np.random.default_rng(2)
TOKENS = RNG.integers(0, 101, (3, 10)).astype(np.int32)
TARGETS = RNG.integers(0, 101, (3, 10)).astype(np.int32)
WEIGHTS = np.where(RNG.random((3, 10)) < 0.5, 0.0, RNG.random((3, 10))).astype(np.float32)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("logits_at_once", [101, 101 * 4 * 3, 2**26])
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
    monkeypatch.setattr(losses, "_LOGITS_AT_ONCE", 101 * 3 * 4)
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
    monkeypatch.setattr(losses, "_LOGITS_AT_ONCE", 101 * 3 * 2)
    config = tiny_config()
    gradient = jax.jit(jax.grad(loss), static_argnums=3)
    text = gradient.lower(tiny_params(config), TOKENS, TARGETS, config).compile().as_text()
    assert "f32[3,2,101]" in text or "f32[6,101]" in text
    for whole in ("f32[3,10,101]", "f32[30,101]", "f32[5,3,2,101]"):
        assert whole not in text


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("positions", [3, 10])
def test_head_loss_gradients_equal_those_of_plain_operations(monkeypatch, z_loss, positions):
    """The backward pass written by hand, in float64, against automatic differentiation of the definition."""
    monkeypatch.setattr(losses, "_LOGITS_AT_ONCE", 23 * 3 * positions)
    with jax.enable_x64():
        x, head = (jnp.asarray(RNG.normal(size=shape)) for shape in ((3, 10, 8), (23, 8)))
        targets, weights = jnp.asarray(TARGETS % 23), jnp.asarray(WEIGHTS, jnp.float64)

        def plain(x, head, weights):
            logits = jnp.einsum("btd,vd->btv", x, head)
            log_sum = jax.nn.logsumexp(logits, axis=-1)
            chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
            return jnp.sum(weights * (log_sum - chosen + z_loss * log_sum**2)) * 3

        def by_chunks(x, head, weights):
            return head_loss(x, head, targets, weights, z_loss)[0] * 3

        expected = jax.value_and_grad(plain, argnums=(0, 1, 2))(x, head, weights)
        got = jax.value_and_grad(by_chunks, argnums=(0, 1, 2))(x, head, weights)
        assert got[1][0].dtype == jnp.float64
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9), got, expected)
        cross_entropy = head_loss(x, head, targets, weights, z_loss)[1]
        assert float(cross_entropy) == pytest.approx(float(plain(x, head, weights)) / 3, rel=1e-9) or z_loss
