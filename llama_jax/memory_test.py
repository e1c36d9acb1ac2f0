"""Whether a model fits: a full chunk of a prompt and one token at the end of the context, with their memory."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from llama_jax.generate import prefill

if TYPE_CHECKING:
    from llama_jax.llama import Llama

_prefill_jit = jax.jit(prefill, static_argnames="config", donate_argnames="cache")


@dataclasses.dataclass(frozen=True, slots=True)
class StepReport:
    """One run of the model.

    Attributes:
      tokens: that were run, `position` the place of the first.
      seconds: of the run alone, compiled before.
      temporary_bytes: what the program needs besides weights, cache and results; None where the compiler does not say.
    """

    position: int
    tokens: int
    compile_seconds: float
    seconds: float
    temporary_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryReport:
    """What `memory_test` found; bytes.

    Attributes:
      peak_bytes: the most that the first device has held, or on a CPU the whole process.
    """

    steps: tuple[StepReport, StepReport]
    weight_bytes: int
    cache_bytes: int
    peak_bytes: int | None


def memory_test(model: Llama) -> MemoryReport:
    """Compiles and runs `n_batch` tokens at position 0 and one token at position n_ctx - 1.

    What does not fit raises jax's RESOURCE_EXHAUSTED error.
    """
    session = model.new_session()
    token = model.tokenizer.bos_id or 0
    cache = session.cache
    cache_bytes = _nbytes(cache)
    steps = []
    for position, count in ((0, session.n_batch), (model.n_ctx - 1, 1)):
        tokens = jnp.full((1, count), token, jnp.int32)
        cache = dataclasses.replace(cache, lengths=jnp.full_like(cache.lengths, position))
        counts = jnp.full(1, count, jnp.int32)
        started = time.perf_counter()
        compiled = _prefill_jit.lower(model.params, tokens, model.config, cache, counts).compile()
        compiled_at = time.perf_counter()
        logits, cache = compiled(model.params, tokens, cache, counts)
        jax.block_until_ready((logits, cache))
        ended = time.perf_counter()
        memory = compiled.memory_analysis()
        temporary = memory.temp_size_in_bytes if memory else None
        steps.append(StepReport(position, count, compiled_at - started, ended - compiled_at, temporary))
    return MemoryReport((steps[0], steps[1]), _nbytes(model.params), cache_bytes, peak_bytes())


def describe(report: MemoryReport) -> list[str]:
    """The report as lines for people."""
    lines = []
    for step in report.steps:
        temporary = "" if step.temporary_bytes is None else f", temporaries {_size(step.temporary_bytes)}"
        lines.append(
            f"{step.tokens} token{'s' * (step.tokens != 1)} at position {step.position}: {1e3 * step.seconds:.1f} ms"
            f"{temporary}, compiled in {step.compile_seconds:.1f} s"
        )
    peak = "not known" if report.peak_bytes is None else _size(report.peak_bytes)
    lines.append(
        f"weights {_size(report.weight_bytes)}, KV cache {_size(report.cache_bytes)}, peak memory {peak}"
        f"{' of the process' if jax.default_backend() == 'cpu' else ''}"
    )
    return lines


def peak_bytes() -> int | None:
    """The most that the first device has held; on a CPU, whose allocator does not say, the process."""
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    if jax.default_backend() != "cpu":
        return None
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _size(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
