"""On a real GPU: host memory is streamed, and VRAM falls by what the log says."""

import jax
import pytest

from llama_jax import Placement, load

pytestmark = pytest.mark.gpu

PROMPT = "KING HENRY.\n"


def run(**options):
    before = in_use()
    model = load(dtype="float32", packed=False, n_ctx=256, placement=Placement(**options))
    text = model.generate(PROMPT, max_tokens=40, temperature=0.0)
    report = model.memory_report()
    return text, report, in_use() - before, model.plan


def in_use() -> int:
    return jax.devices()[0].memory_stats()["bytes_in_use"]


@pytest.fixture(scope="module")
def everything():
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
    return run()


@pytest.mark.parametrize("below", range(1, 8))
def test_fewer_layers_on_the_gpu_give_the_same_text(below, everything):
    text, report, held, plan = everything
    units = max(0, plan.n_layers + 3 - below)
    new_text, new_report, new_held, new_plan = run(gpu_layers=units)
    assert new_text == text
    assert new_plan.units == (units, plan.n_layers + 3)
    assert held - new_held == pytest.approx(report.total - new_report.total, abs=2**20)
    assert new_report.host_weights + new_report.host_cache == pytest.approx(report.total - new_report.total, abs=2**20)


def test_low_vram(everything):
    text, _, held, _ = everything
    new_text, new_report, new_held, _ = run(low_vram=True)
    assert new_text == text
    assert new_report.host_cache > 0
    assert held - new_held == pytest.approx(new_report.host_cache, abs=2**20)


def test_nothing_on_the_gpu_but_what_passes_through(everything):
    text, *_ = everything
    assert run(gpu_layers=0, low_vram=True)[0] == text


def test_auto_takes_all_of_a_small_model(everything):
    assert run(gpu_layers="auto")[3].units == everything[3].units
