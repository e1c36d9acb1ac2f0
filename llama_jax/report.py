"""What a generation tells about itself: times, counts and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llama_jax.sampling import Logprobs


@dataclass
class Timings:
    """Tokens and seconds of one generation; what was compiled on the way counts in."""

    prompt_tokens: int = 0  # run through the model, without those found in the cache
    cached_tokens: int = 0
    prompt_seconds: float = 0.0  # until the first token is known
    generated_tokens: int = 0
    decode_seconds: float = 0.0  # from the first token to the last
    drafted_tokens: int = 0  # of the generated ones and those that were drafted in vain
    accepted_tokens: int = 0  # drafts that were right
    shifts: int = 0  # times that a full context lost its older half
    context_full: bool = False  # a row ended for lack of room

    @property
    def prompt_speed(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_speed(self) -> float:
        """New tokens per second, without the first of each row, which the prompt pays for."""
        return self.generated_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's probabilities at one place of the text, before any sampler; finite numbers."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most likely tokens, best first


def token_logprobs(ids: Sequence[int], logprobs: Logprobs, row: int) -> list[TokenLogprobs]:
    """For people: of the first tokens `ids` of a row, from arrays [B, T, ...] on the host."""
    return [
        TokenLogprobs(
            token=token,
            logprob=float(logprobs.token[row, i]),
            top=tuple(zip(logprobs.top_ids[row, i].tolist(), logprobs.top[row, i].tolist(), strict=True)),
        )
        for i, token in enumerate(ids)
    ]
