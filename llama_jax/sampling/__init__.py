"""Choosing the next token: pure functions of logits, options and state, one set of options per row, on the device.

`params` checks the options, `chain` applies them, `state` is what a row remembers from token to token. The samplers
themselves stand in `penalties`, `truncation`, `temperature` and `mirostat`, each from its definition.
"""

from llama_jax.sampling.chain import distribution, sample
from llama_jax.sampling.logprobs import Logprobs, log_probabilities
from llama_jax.sampling.params import (
    SAMPLERS,
    SamplingParams,
    join_params,
    random_seed,
    sampling_params,
)
from llama_jax.sampling.state import SamplerState, recent_tokens, start_state

__all__ = [
    "SAMPLERS",
    "Logprobs",
    "SamplerState",
    "SamplingParams",
    "distribution",
    "join_params",
    "log_probabilities",
    "random_seed",
    "recent_tokens",
    "sample",
    "sampling_params",
    "start_state",
]
