import jax
import pytest

from llama_jax import ArgumentError
from llama_jax.kernels import backend


@pytest.fixture
def fresh(monkeypatch):
    """The decision as in a new process."""
    monkeypatch.setattr(backend, "default_kernels", backend.default_kernels.__wrapped__)
    return monkeypatch


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU does")
@pytest.mark.parametrize("asked", [None, "auto", "xla"])
def test_a_cpu_is_served_by_xla(fresh, asked, caplog):
    if asked:
        fresh.setenv("LLAMA_JAX_KERNELS", asked)
    with caplog.at_level("INFO", "llama_jax"):
        assert backend.default_kernels() == backend.XLA
    (record,) = caplog.records
    assert record.message.startswith("decode attention: xla; prompt attention: xla; products with packed weights: xla")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU does")
@pytest.mark.parametrize(("asked", "words"), [("triton", "needs an NVIDIA GPU"), ("cuda", "one of auto, triton, xla")])
def test_what_cannot_run_is_refused(fresh, asked, words):
    fresh.setenv("LLAMA_JAX_KERNELS", asked)
    with pytest.raises(ArgumentError, match=words):
        backend.default_kernels()


class FakeGPU:
    platform = "gpu"
    device_kind = "NVIDIA Imaginary"

    def __init__(self, capability: str) -> None:
        self.compute_capability = capability


@pytest.mark.parametrize(
    ("capability", "asked", "expected"),
    [
        ("9.0", "auto", backend.TRITON),
        ("8.0", "triton", backend.TRITON),
        ("9.0", "xla", backend.XLA),
        ("7.5", "auto", backend.XLA),
    ],
)
def test_a_gpu_gets_what_it_can_run(fresh, capability, asked, expected):
    fresh.setenv("LLAMA_JAX_KERNELS", asked)
    fresh.setattr(jax, "devices", lambda: [FakeGPU(capability)])
    assert backend.default_kernels() == expected


def test_an_old_gpu_refuses_triton(fresh):
    fresh.setenv("LLAMA_JAX_KERNELS", "triton")
    fresh.setattr(jax, "devices", lambda: [FakeGPU("7.5")])
    with pytest.raises(ArgumentError, match=r"compute capability 8\.0 or later; this is NVIDIA Imaginary"):
        backend.default_kernels()
