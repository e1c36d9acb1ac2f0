"""Text files to batches: documents behind each other in rows of T tokens, every token a target once an epoch."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llama_jax import checks
from llama_jax.errors import ArgumentError, shown

if TYPE_CHECKING:
    from llama_jax.text.tokenizer import Tokenizer

logger = logging.getLogger("llama_jax.train")

SUFFIXES = (".txt", ".jsonl", ".md")
"""What is read of a directory."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenStream:
    """Documents as token ids, one behind the other.

    Attributes:
      tokens: int32 [N], each document with its BOS and EOS where the vocabulary has them.
      documents: int32 [N], the number of each token's document, from 1.
      counts: bool [N], whether a token is a target; a document's first token never is. None: all are.
    """

    tokens: np.ndarray
    documents: np.ndarray
    counts: np.ndarray | None = None

    @property
    def n_targets(self) -> int:
        """Tokens that are predicted in one epoch."""
        targets = self.documents[1:] == self.documents[:-1]
        return int(np.sum(targets if self.counts is None else targets & self.counts[1:]))


def list_files(paths: Iterable[str | Path]) -> list[Path]:
    """The files that some paths mean: a directory stands for all its .txt, .jsonl and .md files, at any depth, sorted.

    Raises:
      ArgumentError: a path does not exist, a directory holds no such file, or no path was given.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
            if not found:
                raise ArgumentError(f"The folder {str(path)!r} holds no {', '.join(SUFFIXES)} file.")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise ArgumentError(f"{str(path)!r} is no file or folder; training data is text or .jsonl.")
    if not files:
        raise ArgumentError("There is no training data; name a file or folder.")
    return files


def read_documents(paths: Iterable[str | Path]) -> Iterator[str]:
    """The texts of all files: a .jsonl file holds one a line, as a string or as `text` of an object; others hold one.

    Raises:
      ArgumentError: a file is empty or cannot be read, or a line is no such object.
    """
    for path in list_files(paths):
        n = 0
        if path.suffix == ".jsonl":
            for line, value in read_jsonl(path):
                text = value.get("text") if isinstance(value, dict) else value
                if not isinstance(text, str):
                    raise ArgumentError(f"{path}, line {line}: {shown(value)} is neither a string nor has a `text`.")
                if text:
                    n += 1
                    yield text
        else:
            text = _read(path).decode("utf-8", errors="replace")
            if text:
                n += 1
                yield text
        if not n:
            raise ArgumentError(f"{path} is empty; there is nothing to learn from it.")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}.") from None


def read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    """`(line number, value)` of every line that is not blank."""
    for number, line in enumerate(_read(path).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise ArgumentError(f"{path}, line {number}: {shown(line)} is not JSON.") from None
        yield number, value


def encode_documents(texts: Iterable[str], tokenizer: Tokenizer) -> TokenStream:
    """Every text between BOS and EOS, as far as the vocabulary has them."""
    bos, eos = tokenizer.bos_id is not None, tokenizer.eos_id is not None
    return join_documents(
        (np.array(tokenizer.encode(text, add_bos=bos, add_eos=eos), np.int32), None) for text in texts
    )


def join_documents(documents: Iterable[tuple[np.ndarray, np.ndarray | None]]) -> TokenStream:
    """One stream of `(tokens, which of them count or None for all)` of several documents.

    Raises:
      ArgumentError: there are not two tokens, of which the second could be predicted from the first.
    """
    tokens, counts = [], []
    for ids, count in documents:
        tokens.append(ids)
        counts.append(np.ones(len(ids), bool) if count is None else count)
    if sum(map(len, tokens)) < 2:
        raise ArgumentError("The training data has fewer than two tokens; there is nothing to predict.")
    numbers = np.repeat(np.arange(1, len(tokens) + 1, dtype=np.int32), [len(ids) for ids in tokens])
    together = np.concatenate(counts)
    return TokenStream(np.concatenate(tokens), numbers, None if together.all() else together)


def split_stream(stream: TokenStream, share: float) -> tuple[TokenStream, TokenStream | None]:
    """The stream without its last `share` of tokens, and those; None where it is 0.

    The last training token is the first token of the other part, which predicts what follows: no target is in both.
    """
    checks.number("The validation split", share, 0.0, 0.9, allowed="from 0 to 0.9")
    n = round(len(stream.tokens) * share)
    if not n:
        return stream, None
    cut = len(stream.tokens) - n
    if cut < 2:
        raise ArgumentError(f"A validation split of {share} leaves {cut} tokens to train on; at least 2 are needed.")

    def part(begin: int, end: int) -> TokenStream:
        counts = None if stream.counts is None else stream.counts[begin:end]
        return TokenStream(stream.tokens[begin:end], stream.documents[begin:end], counts)

    return part(0, cut), part(cut - 1, len(stream.tokens))


class Rows:
    """A stream cut into rows of T inputs with their targets, differently in every epoch; any row can be asked for.

    The cuts of an epoch are all moved by the same random distance, so that tokens meet different contexts; the rows of
    an epoch together have every target once. With `line_ids` rows are shorter and begin behind one of these ids. With
    `begin_id`, the vocabulary's BOS, that is what stands first in every row, in the place of a token: so the model
    learns to begin anywhere, as a prompt does.
    """

    def __init__(
        self,
        stream: TokenStream,
        T: int,
        seed: int = 0,
        *,
        moved: bool = True,
        line_ids: Sequence[int] = (),
        begin_id: int | None = None,
    ) -> None:
        self._begin_id = begin_id
        self.stream, self.T, self.seed = stream, checks.integer("The context", T, 1), seed
        n = len(stream.tokens) - 1  # inputs that have a target
        self._moved = moved and n > 8 * T and not line_ids
        self._starts = _line_starts(stream.tokens, T, line_ids) if line_ids else None
        self._n_rows = len(self._starts) if self._starts is not None else -(-n // T) + self._moved

    def __len__(self) -> int:
        return self._n_rows

    @property
    def packed(self) -> bool:
        """Whether rows may hold parts of several documents, which must not see each other."""
        return bool(self.stream.documents[0] != self.stream.documents[-1])

    def row(self, index: int, epoch: int = 0) -> dict[str, np.ndarray]:
        """tokens, targets int32 [T], weights float32 [T], and segments int32 [T] if `packed`. Padding has weight 0."""
        T, stream = self.T, self.stream
        N = len(stream.tokens)
        if self._starts is not None:
            start = int(self._starts[index])
            stop = int(self._starts[index + 1]) if index + 1 < len(self) else N - 1
        else:
            shift = int(np.random.default_rng([self.seed, epoch]).integers(T)) if self._moved else 0
            start = index * T - shift
            stop = min(start + T, N - 1)
        begin = max(start, 0)
        length = max(stop - begin, 0)
        tokens, targets, segments = (np.zeros(T, np.int32) for _ in range(3))
        weights = np.zeros(T, np.float32)
        here, there = slice(begin, begin + length), slice(begin + 1, begin + length + 1)
        tokens[:length], targets[:length] = stream.tokens[here], stream.tokens[there]
        segments[:length] = stream.documents[here]
        if self._begin_id is not None:
            tokens[0] = self._begin_id
        weights[:length] = stream.documents[there] == stream.documents[here]
        if stream.counts is not None:
            weights[:length] *= stream.counts[there]
        row = dict(tokens=tokens, targets=targets, weights=weights)
        return row | dict(segments=segments) if self.packed else row


def _line_starts(tokens: np.ndarray, T: int, line_ids: Sequence[int]) -> np.ndarray:
    """Where rows begin: behind the last of `line_ids` that lets the row have at most T inputs, if there is one."""
    borders = np.flatnonzero(np.isin(tokens, line_ids)) + 1
    starts, start, last = [], 0, len(tokens) - 1
    while start < last:
        starts.append(start)
        i = np.searchsorted(borders, start + T, side="right") - 1
        border = int(borders[i]) if i >= 0 else 0
        start = border if border > start else start + T
    return np.array(starts, np.int64)


def newline_ids(stream: TokenStream, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a stream whose text ends a line."""
    ids = [i for i in np.unique(stream.tokens).tolist() if tokenizer.token_bytes(i).endswith(b"\n")]
    if not ids:
        raise ArgumentError("The training data has no token that ends a line; samples cannot begin behind one.")
    return ids


def training_batches(rows: Rows, batch: int, seed: int, *, seen: int = 0, threads: int = 2, workers: int = 0) -> Any:
    """An endless Grain iterator of batches [B, T].

    Rows come in a new random order every epoch. The same seed gives the same rows in the same order.

    Args:
      batch: B.
      seen: rows that earlier batches have used: where to go on.
      workers: processes that make rows, 0 for threads of this one.
    """
    import grain

    n = len(rows)
    dataset = grain.MapDataset.range(n).seed(seed).shuffle().repeat()
    dataset = dataset.map_with_index(lambda i, row: (int(row), int(i) // n))
    dataset = dataset[seen:].map(lambda item: rows.row(*item)).batch(batch, drop_remainder=True)
    iterator = dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads))
    if workers:
        from absl import flags

        if not flags.FLAGS.is_parsed():  # Grain reads flags of its own, which a program without absl never parses
            flags.FLAGS.mark_as_parsed()
        iterator = iterator.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return iter(iterator)


def all_batches(rows: Rows, batch: int) -> list[dict[str, np.ndarray]]:
    """Every row once, in order; the last batch is filled with rows of weight 0."""
    batches = []
    for first in range(0, len(rows), batch):
        some = [rows.row(i) for i in range(first, min(first + batch, len(rows)))]
        empty = {name: np.zeros_like(array) for name, array in some[0].items()}
        some += [empty] * (batch - len(some))
        batches.append({name: np.stack([row[name] for row in some]) for name in some[0]})
    return batches
