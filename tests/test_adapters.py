"""Adapters of a loaded model, from Python and from the command line."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import llama_jax
from llama_jax.cli import options
from llama_jax.cli.main import main
from llama_jax.linear import LoraWeight
from llama_jax.lora import init_lora, merge_lora, with_lora
from llama_jax.quantization import QuantizedTensor
from tests.tiny import tiny_config, tiny_gguf

CONFIG = tiny_config(vocab_size=64, d_ff=32, n_layers=1, head_dim=16)
PROMPT = [1, 5, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """exact.gguf, model.gguf (Q8_0), adapter.gguf and a PEFT folder with the same adapter, other.gguf."""
    folder = tmp_path_factory.mktemp("adapters")
    for name, types in (("exact", "F32"), ("model", "Q8_0")):
        assert tiny_gguf(folder / f"{name}.gguf", types) == CONFIG
    for name, seed in (("adapter", 1), ("other", 2)):
        adapter = make_adapter(seed)
        llama_jax.save_lora_gguf(folder / f"{name}.gguf", adapter, CONFIG)
        llama_jax.save_peft(folder / name, adapter)
    return folder


def make_adapter(seed):
    adapter = init_lora(jax.random.key(seed), CONFIG, rank=2, targets=["wq", "wk", "w_down"])
    return {
        path: dataclasses.replace(f, b=jax.random.normal(jax.random.key(seed), f.b.shape))
        for path, f in adapter.items()
    }


FORWARD = jax.jit(llama_jax.forward, static_argnames="config")


def logits(model):
    return np.asarray(FORWARD(model.params, jnp.asarray([PROMPT], jnp.int32), CONFIG)[0])


def expected(params, *scaled):
    for adapter, scale in scaled:
        params = with_lora(params, adapter, scale)
    return np.asarray(FORWARD(merge_lora(params), jnp.asarray([PROMPT], jnp.int32), CONFIG)[0])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("merge", [False, True])
def test_files_are_applied_with_their_scales(folder, packed, merge):
    base = llama_jax.load(folder / "model.gguf").params
    wanted = expected(base, (make_adapter(1), 1.0), (make_adapter(2), -0.5))
    sources = [folder / "adapter.gguf", (str(folder / "other"), -0.5)]
    model = llama_jax.load(folder / "model.gguf", packed=packed, lora=sources, merge_lora=merge)
    np.testing.assert_allclose(logits(model), wanted, atol=1e-4, rtol=0)
    assert np.abs(wanted - expected(base)).max() > 0.1
    wq, wo = model.params.layers[0].wq, model.params.layers[0].wo
    assert isinstance(wo, QuantizedTensor) is packed
    assert isinstance(wq, LoraWeight) is not merge
    if not merge:
        assert isinstance(wq.base.base, QuantizedTensor) is packed
    else:
        assert isinstance(wq, jax.Array)


def test_a_base_file_gives_the_weights_that_adapters_change(folder):
    model = llama_jax.load(folder / "model.gguf", lora=[folder / "adapter.gguf"], lora_base=folder / "exact.gguf")
    exact, quantized = (llama_jax.load(folder / f"{name}.gguf").params.layers[0] for name in ("exact", "model"))
    layer = model.params.layers[0]
    np.testing.assert_array_equal(layer.wq.base, exact.wq)
    np.testing.assert_array_equal(layer.wo, quantized.wo)
    assert not np.array_equal(exact.wq, quantized.wq)
    assert not np.array_equal(exact.wo, quantized.wo)


def test_a_mesh_holds_the_factors_beside_their_weights(folder):
    mesh = llama_jax.tensor_mesh(2)
    one = llama_jax.load(folder / "model.gguf", lora=[folder / "adapter"])
    two = llama_jax.load(folder / "model.gguf", lora=[folder / "adapter"], mesh=mesh)
    assert two.params.layers[0].wq.b.sharding.mesh == mesh
    np.testing.assert_allclose(logits(two), logits(one), atol=1e-5, rtol=0)


def test_scales_change_without_loading_again(folder):
    sources = [folder / "adapter.gguf", folder / "other.gguf"]
    model = llama_jax.load(folder / "model.gguf", lora=sources)
    before = model.generate(PROMPT, max_tokens=6, temperature=0.0)
    running = model.stream(PROMPT, max_tokens=6, temperature=0.0)
    first = next(running)
    model.set_lora_scales([0.5, 0])
    assert model.adapters.scales == (0.5, 0.0)
    np.testing.assert_allclose(
        logits(model), logits(llama_jax.load(folder / "model.gguf", lora=[(sources[0], 0.5)])), atol=1e-5
    )
    assert first + "".join(running) == before
    assert model.generate(PROMPT, max_tokens=6, temperature=0.0) != before  # nothing of the old cache is left
    with pytest.raises(llama_jax.ArgumentError, match="1 scales were given for 2 adapters"):
        model.set_lora_scales([1.0])
    with pytest.raises(llama_jax.ArgumentError, match="A LoRA scale is inf; it must be a finite number"):
        model.set_lora_scales([1.0, float("inf")])
    with pytest.raises(
        llama_jax.ArgumentError, match=r"The model has no adapters beside its weights; load it with lora="
    ):
        llama_jax.load(folder / "model.gguf").set_lora_scales([])


def test_adapters_follow_layers_to_other_devices_and_to_host_memory(tmp_path):
    config = tiny_gguf(tmp_path / "m.gguf", n_layers=2)
    adapter = init_lora(jax.random.key(1), config, rank=2, targets=["wq", "w_down"])
    adapter = {path: dataclasses.replace(f, b=jnp.ones_like(f.b)) for path, f in adapter.items()}
    llama_jax.save_lora_gguf(tmp_path / "a.gguf", adapter, config)

    def prefill(**options):
        model = llama_jax.load(tmp_path / "m.gguf", n_ctx=16, lora=[tmp_path / "a.gguf"], **options)
        return model.params, np.asarray(model.new_session().prefill([PROMPT]))

    _, expected = prefill()
    devices = tuple(jax.devices()[:2])
    params, spread = prefill(placement=llama_jax.Placement(devices=devices, split_mode="layer"))
    assert params.layers[0].wq.b.devices() != params.layers[1].wq.b.devices()
    np.testing.assert_allclose(spread, expected, atol=1e-5)
    params, streamed = prefill(placement=llama_jax.Placement(devices=devices[:1], gpu_layers=1))
    assert params.layers[0].wq.a.sharding.memory_kind == "pinned_host"
    np.testing.assert_allclose(streamed, expected, atol=1e-5)


@pytest.fixture
def command(monkeypatch, capsys):
    monkeypatch.setattr(options, "cache_compiled_programs", lambda: None)

    def call(*arguments):
        return main([str(argument) for argument in arguments]), *capsys.readouterr()

    return call


def test_options_reach_the_model(folder, command):
    def text(*arguments):
        code, out, err = command(
            "generate", "-m", folder / "model.gguf", "-p", "HELLO", "-n", 8, "--temp", 0, *arguments
        )
        assert code == 0, err
        return out

    adapter, other = folder / "adapter.gguf", folder / "other.gguf"
    both = text("--lora", f"{adapter},{other}")
    assert text("--lora", adapter, "--lora-scaled", f"{folder / 'other'}:1", "--lora-merge") == both
    assert text("--lora-scaled", f"{adapter}:0,{other}:0", "--lora-base", folder / "exact.gguf") != both


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--lora-scaled", "x.gguf"], "--lora-scaled is 'x.gguf'; it must be PATH:SCALE, as in adapter.gguf:0.5."),
        (["--lora-scaled", "x:y"], "--lora-scaled is 'x:y'; it must be PATH:SCALE, as in adapter.gguf:0.5."),
        (["--lora-scaled", "{}/adapter.gguf:nan"], "A LoRA scale is nan; it must be a finite number."),
        (["--lora", "{}/none.gguf"], "{}/none.gguf does not exist."),
        (
            ["--lora", "{}/model.gguf"],
            "{}/model.gguf: general.type is None; an adapter for this model has 'adapter'.",
        ),
    ],
)
def test_wrong_options_are_one_sentence(folder, command, arguments, sentence):
    arguments = [argument.replace("{}", str(folder)) for argument in arguments]
    code, out, err = command("generate", "-m", folder / "model.gguf", "-p", "A", *arguments)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "llama-jax: " + sentence.replace("{}", str(folder))


def test_wrong_sources_are_refused(folder, tmp_path):
    with pytest.raises(llama_jax.ArgumentError, match="it must be a list of paths or"):
        llama_jax.load(folder / "model.gguf", lora=str(folder / "adapter.gguf"))
    tiny_gguf(tmp_path / "other.gguf", d_ff=64)
    with pytest.raises(llama_jax.FormatError, match=r"layers\.0\.w_down have shapes \(2, 32\) and \(32, 2\)"):
        llama_jax.load(tmp_path / "other.gguf", lora=[folder / "adapter.gguf"])
    with pytest.raises(llama_jax.ArgumentError, match=r"has a layers\.0\.w_down of shape \(32, 64\); the model's has"):
        llama_jax.load(folder / "model.gguf", lora=[folder / "adapter.gguf"], lora_base=tmp_path / "other.gguf")
