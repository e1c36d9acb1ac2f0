"""llama.cpp's chunk rule against float64 numpy."""

import math

import numpy as np
import pytest

from llama_jax import ArgumentError
from llama_jax.perplexity import perplexity
from tests.reference import llama_numpy
from tests.tiny import tiny_config, tiny_params

CONFIG = tiny_config()
PARAMS = tiny_params(CONFIG)
IDS = np.random.default_rng(4).integers(0, 101, 29).tolist()  # three chunks of 8 and a rest of 5


def scored_losses(bos_id: int | None) -> list[np.ndarray]:
    """Losses of tokens 5, 6 and 7 of each chunk of 8: the last, but not the first, of its second half."""
    chunks = []
    for start in (0, 8, 16):
        chunk = IDS[start : start + 8]
        if bos_id is not None:
            chunk[0] = bos_id
        logits = llama_numpy.logits(PARAMS, chunk, CONFIG)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        chunks.append(-log_p[[4, 5, 6], chunk[5:]])
    return chunks


@pytest.mark.parametrize("bos_id", [None, 1])
@pytest.mark.parametrize("n_batch", [1, 16, 512])  # one chunk a run, two with padding behind the third, all at once
def test_each_estimate_is_the_mean_of_the_chunks_so_far(bos_id, n_batch):
    losses = scored_losses(bos_id)
    estimates = list(perplexity(PARAMS, CONFIG, IDS, n_ctx=8, n_batch=n_batch, bos_id=bos_id))
    assert [(e.chunks, e.tokens) for e in estimates] == [(1, 3), (2, 6), (3, 9)]
    for estimate in estimates:
        seen = np.concatenate(losses[: estimate.chunks])
        assert estimate.perplexity == pytest.approx(math.exp(seen.mean()), rel=1e-5)
        error = seen.std() / math.sqrt(len(seen) - 1) * math.exp(seen.mean())
        assert estimate.error == pytest.approx(error, rel=1e-4)


def test_the_ids_given_stay_as_they_are():
    ids = np.array(IDS, np.int32)
    next(perplexity(PARAMS, CONFIG, ids, n_ctx=8, bos_id=1))
    assert ids.tolist() == IDS


@pytest.mark.parametrize(
    ("n_ctx", "message"), [(3, "chunk length is 3; it must be at least 4"), (30, "has 29 tokens; at least one chunk")]
)
def test_wrong_lengths_are_refused(n_ctx, message):
    with pytest.raises(ArgumentError, match=message):
        next(perplexity(PARAMS, CONFIG, IDS, n_ctx=n_ctx))
