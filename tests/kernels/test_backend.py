import jax
import pytest

from llama_jax import ArgumentError
from llama_jax.kernels import backend


@pytest.fixture
def fresh(monkeypatch):
    """The decision as in a new process."""
    monkeypatch.setattr(backend, "kernel_backend", backend.kernel_backend.__wrapped__)
    return monkeypatch


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU does")
@pytest.mark.parametrize("asked", [None, "auto", "xla"])
def test_a_cpu_is_served_by_xla(fresh, asked, caplog):
    if asked:
        fresh.setenv("LLAMA_JAX_KERNELS", asked)
    with caplog.at_level("INFO", "llama_jax"):
        assert backend.kernel_backend() == "xla"
    (record,) = caplog.records
    assert "xla (" in record.message


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU does")
@pytest.mark.parametrize(("asked", "words"), [("triton", "needs an NVIDIA GPU"), ("cuda", "one of auto, triton, xla")])
def test_what_cannot_run_is_refused(fresh, asked, words):
    fresh.setenv("LLAMA_JAX_KERNELS", asked)
    with pytest.raises(ArgumentError, match=words):
        backend.kernel_backend()
