"""Weights and caches in host memory: the same numbers as with everything on the device, and the log tells the truth."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax import Placement, Session, forward, load, memory_report, param_shardings, place_params, sampling_params
from llama_jax.lora import init_lora, merge_lora, with_lora
from llama_jax.model import by_path, join_projections
from llama_jax.offload import on_host
from llama_jax.perplexity import perplexity
from llama_jax.placement import place_beside, plan_mesh, resolve
from llama_jax.prompt_cache import fingerprint
from llama_jax.quantization.packed import pack
from tests.tiny import tiny_config, tiny_params

CONFIG = tiny_config(n_layers=2, vocab_size=96, d_model=64, d_ff=64, n_kv_heads=4)
PROMPTS = [[5, 9, 77, 3, 14, 50, 2, 8, 1, 30], [8, 1]]
CPU = jax.devices()[:1]


def quantized(params):
    """The matrices of the first layer packed."""
    rng = np.random.default_rng(0)

    def matrix(leaf):
        out, columns = leaf.shape
        blocks = rng.integers(0, 256, (out, columns // 32, 18), np.uint8)
        blocks[:, :, :2] = np.full((), 0.02, np.float16).reshape(1).view(np.uint8)
        return pack(blocks, "Q4_0", leaf.shape) if columns % 32 == 0 else leaf

    layers = [jax.tree.map(lambda leaf: matrix(leaf) if leaf.ndim == 2 else leaf, layer) for layer in params.layers[:1]]
    return params.replace(layers=(*layers, *params.layers[1:]))


def placed(params, placement):
    plan = resolve(placement, CONFIG.n_layers)
    place = place_params(CONFIG, plan_mesh(plan), plan)
    is_weight = lambda leaf: hasattr(leaf, "type_name") or isinstance(leaf, jax.Array)  # noqa: E731
    leaves = jax.tree.leaves_with_path(params, is_leaf=is_weight)
    new = [place(jax.tree_util.keystr(p, simple=True, separator="."), as_numpy(leaf)) for p, leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(params, is_leaf=is_weight), new), plan


def as_numpy(tree):
    return jax.tree.map(np.asarray, tree)


def run(params, plan=None, n_batch=4):
    mesh = plan_mesh(plan)
    session = Session(params, CONFIG, batch=2, capacity=32, n_batch=n_batch, mesh=mesh, plan=plan)
    logits = np.asarray(session.prefill(PROMPTS))
    rows = [[], []]
    for new in session.generate(PROMPTS, sampling_params(2, temperature=0.0), max_tokens=12):
        for row, tokens in zip(rows, new, strict=True):
            row.extend(tokens)
    return logits, rows, session


def memory_kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


@functools.cache
def reference(weights):
    params = tiny_params(CONFIG)
    params = quantized(params) if weights == "packed" else params
    return params, *run(params)[:2]


@pytest.mark.parametrize(
    ("weights", "n_devices", "options"),
    [
        ("dense", 1, dict(gpu_layers=1, low_vram=True)),
        ("dense", 2, dict(gpu_layers=4)),  # values on the device, keys in host memory
        ("packed", 2, dict(gpu_layers=0)),
    ],
)
def test_host_memory_changes_no_number(weights, n_devices, options):
    params, logits, rows = reference(weights)
    there, plan = placed(params, Placement(devices=tuple(jax.devices()[:n_devices]), **options))
    new_logits, new_rows, session = run(there, plan)
    np.testing.assert_allclose(new_logits, logits, rtol=1e-5, atol=1e-5)
    assert new_rows == rows
    for index, layer in enumerate(there.layers):
        matrices = [leaf for leaf in jax.tree.leaves(layer) if leaf.ndim >= 2]
        assert memory_kinds(matrices) == {"device" if plan.layer_on_gpu(index) else "pinned_host"}
    assert memory_kinds(there.output_head) == {"device" if plan.output_on_gpu else "pinned_host"}
    assert memory_kinds(there.embedding) == {"device"}
    # After prefill and decoding the cache is where it was, and it was donated all the way.
    assert memory_kinds(session.cache.v) == {"device" if plan.v_cache_on_gpu else "pinned_host"}
    assert memory_kinds(session.cache.k) == {"device" if plan.k_cache_on_gpu else "pinned_host"}


@pytest.mark.parametrize("gpu_layers", range(7))
def test_the_log_says_where_the_arrays_are(gpu_layers, caplog):
    caplog.set_level(logging.INFO, "llama_jax")
    L = CONFIG.n_layers
    params, plan = placed(tiny_params(CONFIG), Placement(gpu_layers=gpu_layers, devices=CPU))
    session = Session(params, CONFIG, capacity=16, plan=plan)
    on_gpu = [all(not on_host(w) for w in jax.tree.leaves(layer)) for layer in params.layers]
    lines = [record.getMessage() for record in caplog.records if record.name == "llama_jax.load"]
    n = sum(on_gpu)
    assert on_gpu == [False] * (L - n) + [True] * n
    output, v, k = (not on_host(x) for x in (params.output_head, session.cache.v[0], session.cache.k[0]))
    assert (f"offloading {n} repeating layers to GPU" in lines) == (n > 0)
    assert ("offloading non-repeating layers to GPU" in lines) == output
    assert ("offloading v cache to GPU" in lines) == v
    assert ("offloading k cache to GPU" in lines) == k
    assert lines[-1] == f"offloaded {n + output + v + k}/{L + 3} layers to GPU"


def test_the_report_counts_real_bytes():
    params, plan = placed(tiny_params(CONFIG), Placement(gpu_layers=1, devices=CPU))
    session = Session(params, CONFIG, capacity=16, plan=plan)
    report = memory_report(params, session.cache, temporaries=2**20)
    layers = sum(leaf.nbytes for leaf in jax.tree.leaves(params.layers[:1]) if leaf.ndim == 2)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert report.host_weights == layers + params.output_head.nbytes
    assert report.weights == total - report.host_weights
    assert report.host_cache == 16 * CONFIG.kv_bytes_per_token(4)
    assert report.cache == 4  # the length
    assert report.total == report.weights + 4 + 2**20
    assert report.log_line().startswith("total VRAM used: 2 MB (weights 1 MB, cache 1 MB, temporaries 1 MB); in host")


def test_each_layer_waits_for_the_one_before():
    """The program has one barrier a layer and one for the head, so that XLA cannot fetch all at once."""
    params, _ = placed(tiny_params(CONFIG), Placement(gpu_layers=0, devices=CPU))
    program = jax.jit(forward, static_argnames="config").lower(params, jnp.zeros((1, 3), jnp.int32), CONFIG)
    assert program.as_text().count("optimization_barrier") == CONFIG.n_layers + 1


def test_projections_in_host_memory_are_not_joined():
    params, _ = placed(tiny_params(CONFIG), Placement(gpu_layers=1, devices=CPU))
    joined = join_projections(params)
    assert [type(layer.wq).__name__ for layer in joined.layers] == ["ArrayImpl", "Joined"]
    assert memory_kinds(joined.layers[0].wq) == {"pinned_host"}


def test_low_vram_runs_smaller_chunks():
    model = load(placement=Placement(low_vram=True, devices=tuple(CPU)), n_ctx=64)
    assert model.n_batch == 128


@pytest.mark.slow
def test_the_shipped_model_writes_the_same_text():
    placement = Placement(gpu_layers=2, low_vram=True, devices=tuple(CPU))
    texts = [load(placement=p, n_ctx=64).generate("ROMEO.\n", max_tokens=8, temperature=0.0) for p in (placement, None)]
    assert texts[0] == texts[1]


def test_options_without_a_gpu_are_ignored_with_a_warning(caplog):
    plan = resolve(Placement(gpu_layers=3, tensor_split=(1, 1)), 4)
    assert plan.devices == ()
    assert [record.getMessage() for record in caplog.records] == [
        "warning: jax finds no GPU (only cpu); --gpu-layers is ignored",
        "warning: jax finds no GPU (only cpu); --tensor-split is ignored",
    ]


def test_names_of_the_parameters_match():
    assert set(by_path(param_shardings(CONFIG, plan_mesh(resolve(Placement(devices=jax.devices()[:2]), 4))))) == set(
        by_path(tiny_params(CONFIG))
    )


@pytest.mark.parametrize("merge", [False, True])
def test_adapters_of_weights_in_host_memory(merge):
    params = tiny_params(CONFIG)
    adapter = init_lora(jax.random.key(1), CONFIG, rank=2, targets=["wq", "w_down", "output_head"])
    adapter = {path: f.replace(b=f.b + 0.1) for path, f in adapter.items()}
    there, _ = placed(params, Placement(gpu_layers=1, devices=CPU))
    weights = by_path(there)
    changed = with_lora(there, {path: place_beside(weights[path], f) for path, f in adapter.items()})
    changed = merge_lora(changed) if merge else changed
    assert memory_kinds(jax.tree.leaves(changed.layers[0].wq)[0]) == {"pinned_host"}
    tokens = jnp.asarray([PROMPTS[0]])
    run = jax.jit(forward, static_argnames="config")
    wanted, _ = run(with_lora(params, adapter), tokens, CONFIG)
    np.testing.assert_allclose(run(changed, tokens, CONFIG)[0], wanted, atol=1e-4)


def test_a_fingerprint_does_not_depend_on_the_memory():
    params = tiny_params(CONFIG)
    there, _ = placed(params, Placement(gpu_layers=0, devices=CPU))
    assert fingerprint(there, CONFIG) == fingerprint(params, CONFIG)


def test_perplexity_wherever_the_layers_are():
    params = tiny_params(CONFIG)
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 24).tolist()

    def score(params):
        return [e.perplexity for e in perplexity(params, CONFIG, ids, n_ctx=12)]

    wanted = score(params)
    for options in (
        dict(gpu_layers=1, devices=CPU),
        dict(tensor_split=(1, 1), split_mode="layer", devices=jax.devices()[:2]),
    ):
        assert score(placed(params, Placement(**options))[0]) == pytest.approx(wanted, rel=1e-5)
