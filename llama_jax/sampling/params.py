"""The options of sampling: their checks, their defaults (llama.cpp's), and their form on the device."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from llama_jax import checks
from llama_jax.errors import ArgumentError

# What a chain may consist of, in the order that it has unless another is asked for: llama.cpp's of today, and tail-free
# sampling where it stood there before it was given up. By default all are off but top-k, top-p, min-p and temperature.
SAMPLERS = (
    "penalties", "dry", "top_n_sigma", "top_k", "tfs_z", "typ_p", "top_p", "min_p", "xtc", "temperature",
)  # fmt: skip
CHANGE_LOGITS = ("penalties", "dry")  # the rest only takes tokens out, or tempers all
_ALIASES = {
    "typical_p": "typ_p", "typical": "typ_p", "tfs": "tfs_z", "tail_free": "tfs_z", "temp": "temperature",
    "top-k": "top_k", "top-p": "top_p", "min-p": "min_p", "top-n-sigma": "top_n_sigma", "nucleus": "top_p",
}  # fmt: skip
_LETTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p",
    "x": "xtc", "t": "temperature", "f": "tfs_z",
}  # fmt: skip

_CANDIDATE_BUCKETS = (64, 256, 1024)
_MOST_REMEMBERED = 2**20
_MOST_LOGPROBS = 1024

# Optional fields, with what turns them off for one row of a batch in which another row uses them.
_OFF: dict[str, float] = dict(
    top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, tfs_z=1.0, top_n_sigma=-1.0, min_keep=0,
    dynatemp_range=0.0, dynatemp_exponent=1.0, xtc_probability=0.0, xtc_threshold=1.0,
    repeat_last_n=0, repeat_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0, exempt_id=-1,
    dry_last_n=0, dry_multiplier=0.0, dry_base=1.0, dry_allowed_length=0,
    mirostat=0, mirostat_tau=0.0, mirostat_eta=0.0,
)  # fmt: skip
_TABLES = dict(bias_ids=checks.MOST, bias=0, dry_breakers=0, dry_sequences=-1)  # [B, N ...], and what fills them up


@struct.dataclass
class SamplingParams:
    """Options of B rows. Make it with `sampling_params`, which checks the values.

    Arrays are [B] if nothing else is said. None means that no row uses the option, and its sampler is not in the
    compiled program; the last fields are static and shape that program, too.
    """

    seed: Array  # uint32 [B, 2], the halves of a 64-bit seed
    temperature: Array  # float32; 0 takes the best token, the lowest id among equals
    top_k: Array | None = None  # int32; 0 keeps all
    top_p: Array | None = None  # float32
    min_p: Array | None = None
    typical_p: Array | None = None
    tfs_z: Array | None = None
    top_n_sigma: Array | None = None  # 0 and less: off
    min_keep: Array | None = None  # int32, the fewest tokens that top-p, min-p, typical, tail-free and XTC leave
    dynatemp_range: Array | None = None
    dynatemp_exponent: Array | None = None
    xtc_probability: Array | None = None
    xtc_threshold: Array | None = None
    repeat_last_n: Array | None = None  # int32, how many recent tokens the three penalties look at
    repeat_penalty: Array | None = None
    frequency_penalty: Array | None = None
    presence_penalty: Array | None = None
    exempt_id: Array | None = None  # int32, a token that penalties leave alone (the newline), -1: none
    dry_last_n: Array | None = None  # int32
    dry_multiplier: Array | None = None
    dry_base: Array | None = None
    dry_allowed_length: Array | None = None  # int32
    dry_breakers: Array | None = None  # int32 [B, N], bits of the tokens over which no repetition reaches
    dry_sequences: Array | None = None  # int32 [B, S, M], the same of several tokens, filled up with -1
    mirostat: Array | None = None  # int32, version 1 or 2, 0: off
    mirostat_tau: Array | None = None  # bits
    mirostat_eta: Array | None = None
    bias_ids: Array | None = None  # int32 [B, N], ids that do not exist fill it up
    bias: Array | None = None  # float32 [B, N], -inf bans
    samplers: tuple[str, ...] = struct.field(pytree_node=False, default=())  # their order
    greedy: bool = struct.field(pytree_node=False, default=False)  # temperature 0 in every row
    n_candidates: int = struct.field(pytree_node=False, default=0)  # at least every row's top_k; 0: whole vocabulary
    mirostat_versions: tuple[int, ...] = struct.field(pytree_node=False, default=(0,))  # of all rows, 0: the chain
    window: int = struct.field(pytree_node=False, default=0)  # W, tokens that a row remembers
    vocab_limit: int | None = struct.field(pytree_node=False, default=None)  # ids from here on pad the vocabulary
    logprobs: int | None = struct.field(pytree_node=False, default=None)  # most likely tokens to tell, None: nothing

    @property
    def batch(self) -> int:
        """B."""
        return self.seed.shape[0]


def random_seed() -> int:
    """A 32-bit seed from the operating system."""
    return secrets.randbits(32)


def sampler_order(samplers: str | Sequence[str]) -> tuple[str, ...]:
    """Names of samplers in order, from names, "top_k;temperature", or letters, "kt" (e d s k f y p m x t).

    Raises:
      ArgumentError: an unknown or repeated name.
    """
    if isinstance(samplers, str):
        parts = [part.strip() for part in samplers.replace(",", ";").split(";") if part.strip()]
        if len(parts) == 1 and set(parts[0]) <= set(_LETTERS):
            parts = list(parts[0])
    else:
        parts = list(samplers)
    names = []
    for part in parts:
        name = _ALIASES.get(part, _LETTERS.get(part, part)) if isinstance(part, str) else part
        if name not in SAMPLERS:
            raise ArgumentError(f"samplers holds {part!r}; it must be of {', '.join(SAMPLERS)}.")
        if name in names:
            raise ArgumentError(f"samplers holds {name!r} twice; each may stand there once.")
        names.append(name)
    return tuple(names)


def sampling_params(
    batch: int = 1,
    *,
    temperature: float = 0.8,
    dynatemp_range: float = 0.0,
    dynatemp_exponent: float = 1.0,
    top_k: int = 40,
    top_p: float = 0.95,
    min_p: float = 0.05,
    typical_p: float = 1.0,
    tfs_z: float = 1.0,
    top_n_sigma: float = -1.0,
    min_keep: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    repeat_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    repeat_last_n: int = 64,
    exempt_id: int | None = None,
    dry_multiplier: float = 0.0,
    dry_base: float = 1.75,
    dry_allowed_length: int = 2,
    dry_penalty_last_n: int = 64,
    dry_breakers: Sequence[Sequence[int]] = (),
    mirostat: int = 0,
    mirostat_tau: float = 5.0,
    mirostat_eta: float = 0.1,
    logit_bias: Mapping[int, float] | None = None,
    samplers: str | Sequence[str] | None = None,
    seed: int | Sequence[int] | None = None,
    vocab_limit: int | None = None,
    logprobs: int | None = None,
) -> SamplingParams:
    """The same options for `batch` rows, with llama.cpp's defaults of today.

    The chain is: logit bias; penalties, DRY, top-n-sigma, top-k, tail-free, typical, top-p, min-p, XTC and temperature
    in the order of `samplers`; a draw. What comes before temperature sees probabilities at temperature 1.

    Args:
      temperature: 0 takes the best token after bias and penalties, the lowest id among equals, whatever the other
        samplers say.
      dynatemp_range: the temperature is up to so much higher or lower, by entropy; 0 is off.
      top_k: the best tokens that stay; 0 and less keeps all.
      top_p: the shortest head with this probability stays; 1 is off.
      min_p: tokens with this share of the best one's probability stay; 0 is off.
      typical_p: locally typical sampling; 1 is off.
      tfs_z: tail-free sampling, between top-k and typical; 1 is off.
      top_n_sigma: tokens so many standard deviations of the logits below the best stay; 0 and less is off.
      min_keep: tokens that top-p, min-p, typical, tail-free and XTC leave at least.
      xtc_probability: how often XTC takes all tokens of at least `xtc_threshold` out but the least likely of them.
      repeat_penalty, frequency_penalty, presence_penalty: of the last `repeat_last_n` tokens of prompt and answer.
      exempt_id: a token that these penalties leave alone, such as the newline.
      dry_multiplier: strength of the DRY penalty for repeated sequences; 0 is off.
      dry_breakers: sequences of token ids over which no repetition reaches.
      mirostat: version 1 or 2 takes the place of the whole chain except for bias and temperature; 0 is off.
      mirostat_tau, mirostat_eta: target surprise in bits; learning rate.
      logit_bias: token id to what is added to its logit; -inf bans it.
      samplers: names in order, or "top_k;temperature", or letters; None is the default order. A sampler that is not
        named is off; without "temperature" every temperature above 0 counts as 1.
      seed: a 64-bit integer, or one per row; a single one is counted up from row to row, so that rows differ and row 0
        gives what a batch of one gives. None or -1 takes a random one.
      vocab_limit: number of ids that stand for something; None means all rows of the embedding.
      logprobs: the number of most likely tokens that are told with each token and its log-probability; None tells
        nothing.

    Raises:
      ArgumentError: a value is out of range.
    """
    number, integer = checks.number, checks.integer
    any_integer = f"an integer from -{checks.MOST} to {checks.MOST}; 0 or below keeps all tokens"
    named = sampler_order(samplers) if samplers is not None else None
    values: dict[str, float] = dict(
        top_k=max(integer("top_k", top_k, -checks.MOST, allowed=any_integer), 0),
        top_p=number("top_p", top_p, 0, 1, allowed="above 0 and at most 1", positive=True),
        min_p=number("min_p", min_p, 0, 1, allowed="from 0 to 1"),
        typical_p=number("typical_p", typical_p, 0, 1, allowed="above 0 and at most 1", positive=True),
        tfs_z=number("tfs_z", tfs_z, 0, 1, allowed="above 0 and at most 1", positive=True),
        top_n_sigma=number("top_n_sigma", top_n_sigma, -3e38, allowed="a number, 0 or below for off"),
        min_keep=integer("min_keep", min_keep, 0),
        dynatemp_range=number("dynatemp_range", dynatemp_range, 0, allowed="0 or above"),
        dynatemp_exponent=number("dynatemp_exponent", dynatemp_exponent, 0, allowed="above 0", positive=True),
        xtc_probability=number("xtc_probability", xtc_probability, 0, 1, allowed="from 0 to 1"),
        xtc_threshold=number("xtc_threshold", xtc_threshold, 0, 1, allowed="from 0 to 1"),
        repeat_penalty=number("repeat_penalty", repeat_penalty, 0, allowed="above 0", positive=True),
        frequency_penalty=number("frequency_penalty", frequency_penalty, -1e6, 1e6, allowed="from -1e6 to 1e6"),
        presence_penalty=number("presence_penalty", presence_penalty, -1e6, 1e6, allowed="from -1e6 to 1e6"),
        repeat_last_n=integer("repeat_last_n", repeat_last_n, 0, _MOST_REMEMBERED),
        exempt_id=-1 if exempt_id is None else integer("exempt_id", exempt_id, 0),
        dry_multiplier=number("dry_multiplier", dry_multiplier, 0, 1e6, allowed="from 0 to 1e6"),
        dry_base=number("dry_base", dry_base, 1, 1e6, allowed="from 1 to 1e6"),
        dry_allowed_length=integer("dry_allowed_length", dry_allowed_length, 0),
        dry_last_n=integer("dry_penalty_last_n", dry_penalty_last_n, 0, _MOST_REMEMBERED),
        mirostat=integer("mirostat", mirostat, 0, 2),
        mirostat_tau=number("mirostat_tau", mirostat_tau, 0, 1e6, allowed="from 0 to 1e6"),
        mirostat_eta=number("mirostat_eta", mirostat_eta, 0, 1e6, allowed="from 0 to 1e6"),
    )
    temperature = number("temperature", temperature, 0, allowed="a finite number, 0 or above")
    if logprobs is not None:
        logprobs = integer("logprobs", logprobs, 0, _MOST_LOGPROBS)
    if vocab_limit is not None:
        vocab_limit = integer("vocab_limit", vocab_limit, 1)
    order = SAMPLERS if named is None else named
    if mirostat:
        order = ("temperature",)
    if "temperature" not in order and temperature > 0:
        temperature = 1.0
    if temperature == 0:  # no truncation takes the best token out, so that only what precedes a penalty matters
        order = order[: 1 + max((i for i, name in enumerate(order) if name in CHANGE_LOGITS), default=-1)]
    used = _used(values, order)
    fields: dict[str, Any] = {name: _rows(batch, name, values[name]) for name in used}
    fields |= _bias(batch, logit_bias)
    if "dry_multiplier" in used:
        fields |= _breakers(batch, dry_breakers)
    return SamplingParams(
        seed=jnp.asarray(_seed_halves(batch, seed)),
        temperature=jnp.full(batch, temperature, jnp.float32),
        **fields,
        samplers=tuple(name for name in order if _is_on(name, used)),
        greedy=temperature == 0,
        n_candidates=next((n for n in _CANDIDATE_BUCKETS if "top_k" in used and 0 < values["top_k"] <= n), 0),
        mirostat_versions=(int(values["mirostat"]),) if "mirostat" in used else (0,),
        window=int(max(values[name] if name in used else 0 for name in ("repeat_last_n", "dry_last_n"))),
        vocab_limit=vocab_limit,
        logprobs=logprobs,
    )


# Sampler -> its fields, the one that turns it on first.
_FIELDS = {
    "penalties": ("repeat_last_n", "repeat_penalty", "frequency_penalty", "presence_penalty"),
    "dry": ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_last_n"),
    "top_n_sigma": ("top_n_sigma",),
    "top_k": ("top_k",),
    "tfs_z": ("tfs_z",),
    "typ_p": ("typical_p",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "xtc": ("xtc_probability", "xtc_threshold"),
    "temperature": ("dynatemp_range", "dynatemp_exponent"),
}


def _used(values: Mapping[str, float], order: Sequence[str]) -> set[str]:
    """Names of the optional fields that change anything."""
    used: set[str] = set()
    if values["mirostat"]:
        used |= {"mirostat", "mirostat_tau", "mirostat_eta"}
    for name in order:
        first, *rest = _FIELDS[name]
        if name == "penalties":
            on = values[first] > 0 and any(values[field] != _OFF[field] for field in rest)
        elif name == "top_n_sigma":
            on = values[first] > 0
        elif name == "temperature":
            on = values[first] != _OFF[first] and not values["mirostat"]
        else:
            on = values[first] != _OFF[first] and values.get(f"{name}_last_n", 1) > 0
        if on:
            used |= {first, *rest}
    if "repeat_last_n" in used and values["exempt_id"] >= 0:
        used.add("exempt_id")
    if values["min_keep"] > 1:
        used.add("min_keep")
    return used


def _is_on(sampler: str, used: set[str]) -> bool:
    return sampler == "temperature" or _FIELDS[sampler][0] in used


def _rows(batch: int, name: str, value: float) -> Array:
    return jnp.full(batch, value, jnp.int32 if isinstance(_OFF[name], int) else jnp.float32)


def _bias(batch: int, logit_bias: Mapping[int, float] | None) -> dict[str, Array]:
    if not logit_bias:
        return {}
    if not isinstance(logit_bias, Mapping):
        raise ArgumentError(f"logit_bias is {logit_bias!r}; it must be a mapping of token ids to numbers.")
    ids = [checks.integer("A token id of logit_bias", i, 0, checks.MOST - 1) for i in logit_bias]
    banned = float("-inf")
    bias = [
        banned if b == banned else checks.number("logit_bias", b, -3e38, allowed="a number or -inf")
        for b in logit_bias.values()
    ]
    return dict(
        bias_ids=jnp.tile(jnp.asarray(ids, jnp.int32), (batch, 1)),
        bias=jnp.tile(jnp.asarray(bias, jnp.float32), (batch, 1)),
    )


def _breakers(batch: int, breakers: Sequence[Sequence[int]]) -> dict[str, Array]:
    """Single tokens as bits, longer sequences as a table."""
    for sequence in breakers:
        for token in sequence:
            checks.integer("A token id of dry_breakers", token, 0, 2**24)
    single = np.array([s[0] for s in breakers if len(s) == 1], np.int64)
    words = np.zeros(max(1, (int(single.max(initial=0)) + 32) // 32), np.uint32)
    np.bitwise_or.at(words, single // 32, (np.uint32(1) << (single % 32).astype(np.uint32)))
    fields = dict(dry_breakers=jnp.asarray(np.tile(words.view(np.int32), (batch, 1))))
    longer = [s for s in breakers if len(s) > 1]
    if longer:
        table = np.full((len(longer), max(map(len, longer))), -1, np.int32)
        for row, sequence in zip(table, longer, strict=True):
            row[: len(sequence)] = sequence
        fields["dry_sequences"] = jnp.asarray(np.tile(table, (batch, 1, 1)))
    return fields


def _seed_halves(batch: int, seed: int | Sequence[int] | None) -> np.ndarray:
    single = None if isinstance(seed, (Sequence, np.ndarray)) else -1 if seed is None else seed
    if single is not None:
        first = checks.integer("seed", single, -(2**63), 2**64 - 1, "a 64-bit integer")
        first = random_seed() if first == -1 else first
        seeds = [first + row for row in range(batch)]
    else:
        assert isinstance(seed, (Sequence, np.ndarray))
        seeds = [checks.integer("seed", value, -(2**63), 2**64 - 1, "a 64-bit integer") for value in seed]
    if len(seeds) != batch:
        raise ArgumentError(f"{len(seeds)} seeds were given for {batch} rows; give one seed, or one per row.")
    return np.array([[(value >> 32) & 0xFFFFFFFF, value & 0xFFFFFFFF] for value in seeds], np.uint32)


def join_params(rows: Sequence[SamplingParams]) -> SamplingParams:
    """One batch of the rows of several: what a row draws does not depend on the rows that it is joined with.

    Raises:
      ArgumentError: nothing is given, the orders of their samplers contradict each other, or they pad vocabularies of
        different sizes.
    """
    if not rows:
        raise ArgumentError("There are 0 sampling options to join; at least 1 is needed.")
    limits = {row.vocab_limit for row in rows}
    if len(limits) > 1:
        raise ArgumentError(f"vocab_limit is {sorted(limits, key=str)} in one batch; it must be the same in all rows.")
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(SamplingParams):
        arrays = [getattr(row, field.name) for row in rows]
        if field.name in _OFF and any(a is not None for a in arrays):
            arrays = [
                _rows(row.batch, field.name, _OFF[field.name]) if a is None else a
                for row, a in zip(rows, arrays, strict=True)
            ]
            fields[field.name] = jnp.concatenate(arrays)
        elif field.name in _TABLES and any(a is not None for a in arrays):
            fields[field.name] = _joined_tables(rows, arrays, _TABLES[field.name])
    order = _common_order([row.samplers for row in rows])
    n_candidates = [row.n_candidates for row in rows if not _takes_any_candidates(row, order)]
    logprobs = [row.logprobs for row in rows if row.logprobs is not None]
    return SamplingParams(
        seed=jnp.concatenate([row.seed for row in rows]),
        temperature=jnp.concatenate([row.temperature for row in rows]),
        **fields,
        samplers=order,
        greedy=all(row.greedy for row in rows),
        n_candidates=0 if 0 in n_candidates else max(n_candidates, default=0),
        mirostat_versions=tuple(sorted({v for row in rows for v in row.mirostat_versions})),
        window=max(row.window for row in rows),
        vocab_limit=rows[0].vocab_limit,
        logprobs=max(logprobs, default=None),
    )


def _takes_any_candidates(row: SamplingParams, order: tuple[str, ...]) -> bool:
    """Whether it makes no difference to `row` how many candidates a chain of this order keeps."""
    if row.mirostat is not None:
        return True
    changed_late = "top_k" in order and any(name in order[order.index("top_k") :] for name in CHANGE_LOGITS)
    return row.greedy and set(row.samplers) <= set(CHANGE_LOGITS) and not (row.samplers and changed_late)


def _joined_tables(rows: Sequence[SamplingParams], tables: Sequence[Array | None], filling: int) -> Array:
    """Tables [B, N ...] of different widths below each other."""
    given = [table for table in tables if table is not None]
    width = tuple(max(sizes) for sizes in zip(*(table.shape[1:] for table in given), strict=True))
    padded = []
    for row, table in zip(rows, tables, strict=True):
        if table is None:
            padded.append(jnp.full((row.batch, *width), filling, given[0].dtype))
            continue
        padding = [(0, 0), *((0, wide - n) for wide, n in zip(width, table.shape[1:], strict=True))]
        padded.append(jnp.pad(table, padding, constant_values=filling))
    return jnp.concatenate(padded)


def _common_order(orders: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """An order that contains every one of `orders`."""
    names = {name for order in orders for name in order}
    common: list[str] = []
    while names:
        # The first in the default order that no row has behind another that is still to come.
        free = [n for n in SAMPLERS if n in names and not any(_stands_behind(n, order, names) for order in orders)]
        if not free:
            raise ArgumentError(
                f"The samplers of one batch stand in contradicting orders: {', '.join(map(str, sorted(set(orders))))}."
            )
        common.append(free[0])
        names.remove(free[0])
    return tuple(common)


def _stands_behind(name: str, order: tuple[str, ...], names: set[str]) -> bool:
    return name in order and any(other in names for other in order[: order.index(name)])
