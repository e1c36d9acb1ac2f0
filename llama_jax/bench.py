"""Speed of a loaded model: prompts, single tokens, or both, at any depth of context; llama-bench's tests."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from llama_jax import checks
from llama_jax.cache import cache_type
from llama_jax.errors import ArgumentError
from llama_jax.roofline import decode_bytes, peak_bandwidth, peak_operations, prompt_operations, unembedding_operations

if TYPE_CHECKING:
    from llama_jax.llama import Llama
    from llama_jax.session import Session


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchTest:
    """What is timed: a prompt of `n_prompt` tokens, then `n_gen` new ones, behind `n_depth` that are there already.

    Attributes:
      n_batch, n_ubatch: most prompt tokens in one run; the smaller of the two counts.
      type_k, type_v: of the cache, names of `llama_jax.cache.CACHE_TYPES`; None is the type of the activations.
    """

    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    type_k: str | None = None
    type_v: str | None = None

    def __post_init__(self) -> None:
        for name in ("n_prompt", "n_gen", "n_depth"):
            checks.integer(name, getattr(self, name), 0)
        for name in ("n_batch", "n_ubatch"):
            checks.integer(name, getattr(self, name), 1)
        if not self.n_prompt and not self.n_gen:
            raise ArgumentError("A test has neither prompt nor new tokens; at least one of them is needed.")
        for name in (self.type_k, self.type_v):
            if name is not None:
                cache_type(name)

    @property
    def name(self) -> str:
        """As in llama-bench's table: pp512, tg128, pp512+tg128, with @ d4096 behind."""
        parts = [f"{kind}{n}" for kind, n in (("pp", self.n_prompt), ("tg", self.n_gen)) if n]
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def capacity(self) -> int:
        """Tokens of context that it needs; the last new token's successor is sampled, too."""
        return max(self.n_depth, 1) + self.n_prompt + self.n_gen + 1


@dataclasses.dataclass(frozen=True, slots=True)
class BenchResult:
    """What was measured.

    Attributes:
      seconds: of each repetition.
      bytes_read: the fewest bytes that a repetition reads: weights once a run, the cache as far as it is filled.
      operations: the fewest multiplications and additions of a repetition.
      devices: that work at the same time.
    """

    test: BenchTest
    seconds: tuple[float, ...]
    bytes_read: float
    operations: float
    devices: int = 1

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each repetition."""
        return [(self.test.n_prompt + self.test.n_gen) / s for s in self.seconds]

    @property
    def speed(self) -> float:
        """Mean tokens per second."""
        return statistics.mean(self.speeds)

    @property
    def speed_deviation(self) -> float:
        """Standard deviation of the tokens per second."""
        return statistics.stdev(self.speeds) if len(self.seconds) > 1 else 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.bytes_read / statistics.mean(self.seconds)

    @property
    def arithmetic(self) -> float:
        """Operations per second."""
        return self.operations / statistics.mean(self.seconds)

    @property
    def share_of_limit(self) -> tuple[float, str] | None:
        """How near to the devices' limit the test came, and which limit: "memory" or "arithmetic"; None if not known.

        The nearer of the two counts. Where the arithmetic's is not known, the memory's is given for new tokens only.
        """
        bandwidth, operations = peak_bandwidth(), peak_operations()
        shares = []
        if bandwidth and (operations or not self.test.n_prompt):
            shares.append((self.bandwidth / self.devices / bandwidth, "memory"))
        if operations:
            shares.append((self.arithmetic / self.devices / operations, "arithmetic"))
        return max(shares, default=None)


def grid(
    prompts: Sequence[int],
    gens: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    depths: Sequence[int],
    batches: Sequence[int] = (2048,),
    ubatches: Sequence[int] = (512,),
    types_k: Sequence[str | None] = (None,),
    types_v: Sequence[str | None] = (None,),
) -> list[BenchTest]:
    """The tests that lists of values ask for: every combination, with 0 for no test of that kind."""
    kinds = [(p, 0) for p in prompts if p] + [(0, n) for n in gens if n] + list(pairs)
    return [
        BenchTest(n_prompt=p, n_gen=n, n_depth=d, n_batch=b, n_ubatch=ub, type_k=k, type_v=v)
        for b, ub, k, v, d, (p, n) in itertools.product(batches, ubatches, types_k, types_v, depths, kinds)
    ]


def bench(model: Llama, tests: Sequence[BenchTest], *, repeats: int = 5, warm_up: bool = True) -> Iterator[BenchResult]:
    """Runs the tests in turn and yields their results.

    Prompts are random tokens; new tokens are the most likely ones, so the vocabulary is searched but not sampled from.

    Args:
      repeats: timed runs of each test.
      warm_up: run each test once before; without it the first repetition pays for compiling.
    """
    repeats = checks.integer("repeats", repeats, 1)
    for test in tests:
        types = (test.type_k, test.type_v)
        own = model.params.embedding.dtype
        dtype = None if types == (None, None) else tuple(own if name is None else cache_type(name) for name in types)
        session = model.new_session(capacity=test.capacity, n_batch=min(test.n_batch, test.n_ubatch), dtype=dtype)
        rng = np.random.default_rng(0)
        depth = rng.integers(0, model.tokenizer.vocab_size, test.n_depth).tolist()
        if depth:
            session.prefill([depth])
        seconds = [_run(model, session, test, depth, i) for i in range(repeats + warm_up)]
        held = session.cache
        per_token = sum(leaf.nbytes for leaf in jax.tree.leaves((held.k, held.v))) / held.capacity
        devices = 1 if model.mesh is None else model.mesh.size
        yield BenchResult(test, tuple(seconds[warm_up:]), *_work(model, session, test, per_token), devices)


def _run(model: Llama, session: Session, test: BenchTest, depth: list[int], number: int) -> float:
    """Seconds of one repetition, whose prompt differs from the one before it from its first token on."""
    vocab_size = model.tokenizer.vocab_size
    rng = np.random.default_rng(number)
    prompt = rng.integers(0, vocab_size, test.n_prompt).tolist()
    if prompt:
        prompt[0] = number % vocab_size
    ids = depth + prompt or [0]
    if not test.n_gen:
        started = time.perf_counter()
        session.prefill([ids]).block_until_ready()
        return time.perf_counter() - started
    greedy = model.sampling(batch=1, temperature=0.0)
    for _ in session.generate([ids], greedy, max_tokens=test.n_gen + 1):  # the prompt pays for the first
        pass
    timings = session.timings
    return timings.decode_seconds + (timings.prompt_seconds if test.n_prompt else 0.0)


def _work(model: Llama, session: Session, test: BenchTest, cache_bytes: float) -> tuple[float, float]:
    """`(bytes_read, operations)` of a repetition."""
    config = model.config
    weights = decode_bytes(model.params, config, 0, 1)
    bytes_read = operations = 0.0
    at = test.n_depth
    for start in range(0, test.n_prompt, session.n_batch):
        count = min(session.n_batch, test.n_prompt - start)
        bytes_read += weights + (at + count) * cache_bytes
        operations += prompt_operations(config, count, at) + unembedding_operations(config)
        at += count
    bytes_read += test.n_gen * (weights + (at + test.n_gen / 2) * cache_bytes)
    operations += prompt_operations(config, test.n_gen, at) + test.n_gen * unembedding_operations(config)
    return bytes_read, operations
