"""Random tiny models saved by transformers give the same logits here."""

import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax import forward
from llama_jax import model as model_module
from llama_jax.formats.load import load_params, open_model

torch = pytest.importorskip("torch", reason="needs torch and transformers")
transformers = pytest.importorskip("transformers", reason="needs torch and transformers")

BASE = dict(
    vocab_size=131,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    max_position_embeddings=16384,
    rms_norm_eps=1e-5,
    initializer_range=0.2,
    attn_implementation="eager",
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    original_max_position_embeddings=4096,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=2048)
CASES = {
    "llama3 scaling": ("Llama", dict(rope_parameters=LLAMA3)),
    "yarn scaling": ("Llama", dict(rope_parameters=YARN)),
    "linear scaling, tied": (
        "Llama",
        dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0), tie_word_embeddings=True),
    ),
    "mistral with a window": ("Mistral", dict(sliding_window=7)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("start", [0, 8185])
@pytest.mark.filterwarnings("ignore")
def test_logits_equal_transformers(name, start, tmp_path, monkeypatch):
    kind, changes = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(BASE | changes))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.save_pretrained(tmp_path)
    with open_model(tmp_path) as file:
        params = load_params(file, np.float32, lambda path, array: jnp.asarray(array))
        own_config = file.config
    tokens = np.random.default_rng(0).integers(0, 131, (2, 30))
    positions = torch.arange(start, start + 30)[None].expand(2, -1)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens), position_ids=positions).logits.numpy()
    # Here positions count from 0; to reach 8214 without 8184 tokens before, every position is moved on.
    rotations = model_module.rope_rotations
    monkeypatch.setattr(model_module, "rope_rotations", lambda positions, c: rotations(positions + start, c))
    got, _ = forward(params, jnp.asarray(tokens, jnp.int32), own_config)
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)
