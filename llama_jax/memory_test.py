"""Whether a model fits: a full chunk of a prompt and one token at the end of the context, with their memory."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import TYPE_CHECKING

import jax

from llama_jax.placement import memory_report

if TYPE_CHECKING:
    from llama_jax.llama import Llama
    from llama_jax.placement.devices import MemoryReport


@dataclasses.dataclass(frozen=True, slots=True)
class StepReport:
    """One run of the model.

    Attributes:
      tokens: that were run, `position` the place of the first.
      first_seconds: of the first run, which compiles; `seconds` of the second.
    """

    position: int
    tokens: int
    first_seconds: float
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryTest:
    """What `memory_test` found.

    Attributes:
      memory: bytes of weights, cache and what the programs need besides.
      peak_bytes: the most that the first device has held, or on a CPU the whole process; None where it does not tell.
    """

    steps: tuple[StepReport, ...]
    memory: MemoryReport
    peak_bytes: int | None


def memory_test(model: Llama) -> MemoryTest:
    """Compiles and runs `n_batch` tokens at position 0 and one token at position n_ctx - 1.

    What does not fit raises jax's RESOURCE_EXHAUSTED error.
    """
    session = model.new_session()
    token = model.tokenizer.bos_id or 0
    session.warm_up(model.sampling(batch=1, temperature=0.0), longest_prompt=session.n_batch)
    steps = []
    for position, count in ((0, session.n_batch), (model.n_ctx - 1, 1)):
        seconds = []
        for _ in range(2):
            session._hold([[token] * position])
            started = time.perf_counter()
            session.prefill([[token] * (position + count)]).block_until_ready()
            seconds.append(time.perf_counter() - started)
        steps.append(StepReport(position, count, *seconds))
    memory = memory_report(model.params, session.cache, session.temporary_bytes)
    return MemoryTest(tuple(steps), memory, peak_bytes())


def describe(test: MemoryTest) -> list[str]:
    """The result as lines for people."""
    lines = [
        f"{step.tokens} token{'s' * (step.tokens != 1)} at position {step.position}: {1e3 * step.seconds:.1f} ms, "
        f"the first time {step.first_seconds:.1f} s"
        for step in test.steps
    ]
    m = test.memory
    lines.append(f"weights {_size(m.weights)}, KV cache {_size(m.cache)}, temporaries {_size(m.temporaries)}")
    if m.host_weights or m.host_cache:
        lines.append(f"in host memory: weights {_size(m.host_weights)}, KV cache {_size(m.host_cache)}")
    peak = "not known" if test.peak_bytes is None else _size(test.peak_bytes)
    lines.append(f"peak memory {peak}{' of the process' if jax.default_backend() == 'cpu' else ''}")
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


def _size(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
