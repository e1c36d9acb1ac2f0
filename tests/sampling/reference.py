"""The samplers in float64 numpy, each as its definition reads, for one row of logits; what is out is -inf."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max())
    return e / e.sum()


def ranking(logits: np.ndarray) -> list[int]:
    """Places of the tokens that are in, best first, equals by place."""
    return [i for i in sorted(range(len(logits)), key=lambda i: (-logits[i], i)) if logits[i] > -np.inf]


def only(logits: np.ndarray, places: Sequence[int]) -> np.ndarray:
    kept = np.full(len(logits), -np.inf)
    kept[list(places)] = logits[list(places)]
    return kept


def top_k(logits, k):
    ranked = ranking(logits)
    return only(logits, ranked[:k] if k > 0 else ranked)


def top_p(logits, p, min_keep=0):
    if p >= 1:
        return logits
    probabilities, total = softmax(logits), 0.0
    ranked = ranking(logits)
    for n, place in enumerate(ranked, 1):
        total += probabilities[place]
        if total >= p and n >= min_keep:
            return only(logits, ranked[:n])
    return logits


def min_p(logits, p, min_keep=0):
    probabilities = softmax(logits)
    ranked = ranking(logits)
    kept = [i for i in ranked if probabilities[i] >= p * probabilities.max()]
    return only(logits, kept if len(kept) >= max(min_keep, 1) else ranked[: max(min_keep, 1)])


def entropy(probabilities):
    p = probabilities[probabilities > 0]
    return -(p * np.log(p)).sum()


def typical(logits, p, min_keep=0):
    if p >= 1:
        return logits
    probabilities = softmax(logits)
    mean = entropy(probabilities)
    nearest = sorted(ranking(logits), key=lambda i: abs(-math.log(probabilities[i]) - mean))
    total = 0.0
    for n, place in enumerate(nearest, 1):
        total += probabilities[place]
        if total > p and n >= min_keep:
            return only(logits, nearest[:n])
    return logits


def tail_free(logits, z, min_keep=0):
    ranked = ranking(logits)
    if z >= 1 or len(ranked) <= 2:
        return logits
    probabilities = softmax(logits)[ranked]
    second = np.abs(np.diff(np.diff(probabilities)))
    share = second / second.sum() if second.sum() > 1e-6 else np.full(len(second), 1 / len(second))
    total = 0.0
    for i, part in enumerate(share):
        total += part
        if total > z and i >= max(min_keep, 1):
            return only(logits, ranked[:i])
    return logits if total <= z else only(logits, ranked)


def top_n_sigma(logits, n):
    real = logits[logits > -np.inf]
    if n <= 0 or len(real) < 2:
        return logits
    return np.where(logits >= real.max() - n * real.std(), logits, -np.inf)


def xtc(logits, probability, threshold, chance, min_keep=0):
    if probability <= 0 or threshold > 0.5 or chance >= probability:
        return logits
    probabilities = softmax(logits)
    ranked = ranking(logits)
    above = [i for i in ranked if probabilities[i] >= threshold]
    if len(above) < 2 or len(ranked) - (len(above) - 1) < min_keep:
        return logits
    return only(logits, [i for i in ranked if i not in above[:-1]])


def dynamic_temperature(logits, temperature, half_range, exponent):
    n = len(ranking(logits))
    if half_range <= 0 or n < 2:
        return temperature
    low, high = max(0.0, temperature - half_range), temperature + half_range
    return low + (high - low) * (entropy(softmax(logits)) / math.log(n)) ** exponent


def penalize(logits, text, last_n, repeat, frequency, presence, exempt=None):
    new = logits.copy()
    recent = text[-last_n:] if last_n else []
    for token in set(recent) - {exempt}:
        logit = logits[token]
        new[token] = (logit / repeat if logit > 0 else logit * repeat) - recent.count(token) * frequency - presence
    return new


def unbroken(text, breakers):
    """How many tokens at the end of `text` come after the latest place where one of `breakers` begins."""
    for start in range(len(text) - 1, -1, -1):
        found = [len(b) for b in breakers if text[start : start + len(b)] == list(b)]
        if found:
            return len(text) - start - max(found)
    return len(text)


def dry(n_vocab, text, multiplier, base, allowed_length, last_n, breakers):
    """The penalty of each token, by trying every repetition."""
    text = text[-last_n:] if last_n else []
    longest: dict[int, int] = {}
    for n in range(1, unbroken(text, breakers) + 1):
        for start in range(len(text) - n):
            if text[start : start + n] == text[-n:]:
                longest[text[start + n]] = n
    penalty = np.zeros(n_vocab)
    for token, n in longest.items():
        if n >= allowed_length:
            penalty[token] = multiplier * base ** (n - allowed_length)
    return penalty


def mirostat_2(logits, mu):
    surprise = -np.log2(np.maximum(softmax(logits), 1e-300))
    kept = [i for i in ranking(logits) if surprise[i] <= mu]
    return only(logits, kept or ranking(logits)[:1])


def mirostat_1(logits, mu, n_vocab, m=100):
    """The k of version 1, as a float."""
    probabilities = softmax(logits)[ranking(logits)]
    i = np.arange(1, min(m, len(probabilities)))
    t = np.log((i + 1) / i)
    b = np.log(probabilities[i - 1] / probabilities[i])
    s = (t * b).sum() / (t * t).sum()
    e = s - 1
    return (e * 2**mu / (1 - n_vocab**-e)) ** (1 / s)


def next_mu(kept, token, mu, tau, eta):
    return mu - eta * (-np.log2(softmax(kept)[token]) - tau)
