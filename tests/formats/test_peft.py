"""Adapters that PEFT saved, and what PEFT makes of ours: the same logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax.formats.load import load_params, open_model
from llama_jax.formats.lora import load_lora
from llama_jax.formats.save_lora import save_lora_gguf, save_peft
from llama_jax.lora import LAYER_MATRICES, init_lora, with_lora
from llama_jax.model import forward

torch = pytest.importorskip("torch", reason="needs torch, transformers and peft")
transformers = pytest.importorskip("transformers", reason="needs torch, transformers and peft")
peft = pytest.importorskip("peft", reason="needs torch, transformers and peft")

BASE = dict(
    vocab_size=131,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
)
MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "all matrices": dict(r=4, lora_alpha=8, target_modules=MATRICES),
    "rslora and patterns": dict(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=MATRICES,
        rank_pattern={"q_proj": 2, r"layers\.1\.mlp\.(up|down)_proj": 7},
        alpha_pattern={"model.layers.0.self_attn.k_proj": 3, "up_proj": 5},
    ),
    "embedding and head": dict(r=3, lora_alpha=9, target_modules=["embed_tokens", "lm_head", "v_proj"]),
}
TOKENS = np.random.default_rng(0).integers(0, 131, (2, 12))


def base(folder, **changes):
    """A random model, saved; as torch's and as ours."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(BASE | changes))).eval()
    model.save_pretrained(folder)
    with open_model(folder) as file:
        params = load_params(file, np.float32, lambda path, array: jnp.asarray(array))
        return model, params, file.config


def torch_logits(model):
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.numpy()


def logits(params, config):
    return np.asarray(forward(params, jnp.asarray(TOKENS, jnp.int32), config)[0])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_what_peft_saved(tmp_path, name, tied):
    model, params, config = base(tmp_path / "model", tie_word_embeddings=tied)
    plain = torch_logits(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **CASES[name]))
    for weight_name, weight in adapted.named_parameters():
        if "lora_" in weight_name:
            torch.nn.init.normal_(weight, std=0.3)
    adapted.eval().save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    expected = torch_logits(adapted)
    assert np.abs(expected - plain).max() > 0.5
    adapter = load_lora(tmp_path / "adapter", config)
    np.testing.assert_allclose(logits(with_lora(params, adapter), config), expected, atol=2e-3, rtol=0)
    save_lora_gguf(tmp_path / "adapter.gguf", adapter, config)
    again = load_lora(tmp_path / "adapter.gguf", config)
    np.testing.assert_allclose(logits(with_lora(params, again), config), expected, atol=2e-3, rtol=0)


@pytest.mark.filterwarnings("ignore")
def test_what_peft_reads(tmp_path):
    model, params, config = base(tmp_path / "model")
    adapter = init_lora(jax.random.key(0), config, rank=4, targets=(*LAYER_MATRICES, "embedding", "output_head"))
    adapter |= init_lora(jax.random.key(1), config, rank=6, alpha=5.0, rslora=True, targets=["wk", "w_up"])
    rng = np.random.default_rng(0)
    adapter = {
        path: dataclasses.replace(f, b=rng.normal(size=f.b.shape).astype(np.float32) * 0.1)
        for path, f in adapter.items()
    }
    save_peft(tmp_path / "adapter", adapter)
    read = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    np.testing.assert_allclose(logits(with_lora(params, adapter), config), torch_logits(read), atol=2e-3, rtol=0)
