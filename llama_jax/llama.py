"""A loaded model that takes and gives text."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from llama_jax import checks
from llama_jax.completion import Completion, complete
from llama_jax.config import LlamaConfig
from llama_jax.embeddings import Pooling, embed_texts
from llama_jax.errors import ArgumentError, shown
from llama_jax.grammar import Constraint, ConstraintCompiler, Grammar
from llama_jax.model import Params
from llama_jax.placement import (
    Plan,
    memory_report,
)
from llama_jax.prompt_cache import PromptCache, Snapshot
from llama_jax.sampling import SamplingParams, sampling_params
from llama_jax.sampling.from_text import resolve_options
from llama_jax.session import Session, Timings, check_prompt
from llama_jax.speculative import Speculation
from llama_jax.text.chat import encode_chat
from llama_jax.text.detokenize import StreamDetokenizer

if TYPE_CHECKING:
    from llama_jax.adapters import AppliedAdapters
    from llama_jax.placement.devices import MemoryReport
    from llama_jax.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT = 4096
_MOST_CHOICES = 1024
SHIPPED_MODEL = "shakespeare.gguf"


def shipped_model() -> Path:
    """The small model inside the package: Shakespeare's plays, made by scripts/train_demo_model.py."""
    return Path(str(resources.files("llama_jax") / "assets" / SHIPPED_MODEL))


def default_context(config: LlamaConfig) -> int:
    """Tokens per sequence where the user names no number."""
    return min(config.context_length, DEFAULT_CONTEXT)


def context_length(config: LlamaConfig, n_ctx: int | None) -> int:
    """Tokens per sequence: the user's number, the model's own for 0, the default for None."""
    return default_context(config) if n_ctx is None else n_ctx or config.context_length


def checked_limits(n_ctx: Any, n_batch: Any) -> tuple[int | None, int]:
    """The two numbers, if they can be a context's and a batch's; `ArgumentError` says which cannot."""
    if n_ctx is not None:
        n_ctx = checks.integer("n_ctx", n_ctx, 0, allowed=f"an integer from 0 (the model's own) to {checks.MOST}")
    return n_ctx, checks.integer("n_batch", n_batch, 1)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a text has ended: an end-of-generation token, a stop string (which is `stop`), its length, a full context."""

    kind: Literal["eos", "stop", "limit", "context"]
    stop: str | None = None


def _stop_strings(stop: str | Sequence[str]) -> Sequence[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(text, str) for text in stops):
        raise ArgumentError(f"stop is {stop!r}; it must be a string or a list of strings.")
    return stops


class Llama:
    """A model on its devices, with its tokenizer: `generate`, `stream` and `chat`.

    Calls may be interleaved: a stream has a KV cache of its own while it runs. A later call whose prompt starts with
    the same tokens takes over what an earlier one computed.
    """

    def __init__(
        self,
        config: LlamaConfig,
        params: Params,
        tokenizer: Tokenizer,
        *,
        n_ctx: int | None = None,
        n_batch: int = 512,
        cache_dtype: DTypeLike | tuple[DTypeLike, ...] | None = None,
        mesh: Mesh | None = None,
        plan: Plan | None = None,
    ) -> None:
        n_ctx, n_batch = checked_limits(n_ctx, n_batch)
        if tokenizer.vocab_size > config.vocab_size:
            raise ArgumentError(
                f"The tokenizer has {tokenizer.vocab_size} tokens; the model's embedding has only {config.vocab_size}."
            )
        self.config = config
        self.params = params
        self.adapters: AppliedAdapters | None = None  # of `load(lora=...)`
        self.tokenizer = tokenizer
        self.n_ctx = context_length(config, n_ctx)
        if self.n_ctx > config.context_length:
            logger.warning("context %d is longer than the model's own, %d", self.n_ctx, config.context_length)
        self.n_batch = n_batch
        self.cache_dtype = cache_dtype  # see `llama_jax.init_cache`
        self.mesh = mesh
        self.plan = plan
        self.timings = Timings()  # of the latest generation
        self._constraints = ConstraintCompiler(tokenizer)
        self.ending: Ending | None = None  # of the latest generation; None while it runs and after an interrupt
        self._idle_sessions: deque[Session] = deque(maxlen=1)
        self._speculation: tuple[Speculation, Llama | None] | None = None

    def new_session(self, batch: int = 1, **options: Any) -> Session:
        """An empty KV cache for `batch` sequences, for programs that work with token ids themselves.

        Args:
          **options: of `Session`, where they are not to be the model's own: capacity, n_batch, dtype.
        """
        own: dict[str, Any] = dict(
            batch=batch,
            capacity=self.n_ctx,
            n_batch=self.n_batch,
            dtype=self.cache_dtype,
            mesh=self.mesh,
            plan=self.plan,
        )
        own |= options
        if self._speculation is not None and own.keys().isdisjoint({"speculation", "draft"}):
            own["speculation"], draft = self._speculation
            if draft is not None:
                own["draft"] = draft.new_session(batch=own["batch"], capacity=own["capacity"], speculation=None)
        return Session(self.params, self.config, **own)

    def speculate(self, speculation: Speculation | None, draft: Llama | None = None) -> None:
        """From now on drafts tokens and checks several in one run of the model. The text stays what it was.

        Args:
          speculation: how many tokens; None ends it.
          draft: a small model with the same vocabulary; None drafts with `speculation.ngram`.

        Raises:
          ArgumentError: the vocabularies differ, or there are both a draft model and n-grams, or neither.
        """
        if speculation is not None and (draft is None) == (speculation.ngram is None):
            raise ArgumentError("Speculation needs either a draft model or n-grams.")
        if draft is not None and not self._same_vocabulary(draft.tokenizer):
            raise ArgumentError("The draft model has another vocabulary; it must be that of the model.")
        self._idle_sessions.clear()
        self._speculation = None if speculation is None else (speculation, draft)

    def _same_vocabulary(self, other: Tokenizer) -> bool:
        own = self.tokenizer
        return own.vocab_size == other.vocab_size and all(own.piece(i) == other.piece(i) for i in range(own.vocab_size))

    @contextlib.contextmanager
    def _session(self) -> Iterator[Session]:
        """The session of the call before, if no running stream has it; safe among threads."""
        try:
            session = self._idle_sessions.pop()
        except IndexError:
            session = self.new_session()
        try:
            yield session
        finally:
            self.timings = session.timings
            # An interrupt or a lack of memory amid a step loses the caches.
            if session.intact and session.params is self.params:
                self._idle_sessions.append(session)

    def set_lora_scales(self, scales: Sequence[float]) -> None:
        """Other scales for the adapters of `load(lora=...)`, in their order; 0 switches one off.

        Streams that run keep the old ones; what earlier calls computed is not used any more.
        """
        if self.adapters is None or not self.adapters.scales:
            raise ArgumentError("The model has no adapters beside its weights; load it with lora=[...].")
        self.params = self.adapters.rescale(scales)
        self._idle_sessions.clear()

    def sampling(self, **options: Any) -> SamplingParams:
        """`sampling_params` that never takes an id which only pads the vocabulary.

        Options may also speak of text: see `sampling.from_text.resolve_options`.
        """
        options = resolve_options(options, self.tokenizer, self.n_ctx)
        return sampling_params(**options, vocab_limit=self.tokenizer.vocab_size)

    def constraint(self, grammar: Grammar | Constraint | None) -> Constraint | None:
        """`grammar` for this model's vocabulary; raises ArgumentError if it cannot be followed."""
        if grammar is None or isinstance(grammar, Constraint):
            return grammar
        if not isinstance(grammar, Grammar):
            raise ArgumentError(
                f"constraint is of type {type(grammar).__name__}; it must come from llama_jax.regex, json_schema, gbnf "
                "or lark."
            )
        return self._constraints.compile(grammar)

    def tokenize_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt, with the file's rule for the beginning-of-sequence token; never empty.

        Special tokens written in the text stand for themselves, as llama.cpp reads a prompt.
        """
        if not isinstance(prompt, str):
            if isinstance(prompt, (bytes, bytearray)) or not hasattr(prompt, "__iter__"):
                raise ArgumentError(f"The prompt is of type {type(prompt).__name__}; it must be a str or token ids.")
            return [checks.integer("A token id of the prompt", token, -checks.MOST) for token in prompt]
        ids = self.tokenizer.encode(prompt, add_eos=False, parse_special=True)
        if ids:
            return ids
        start = self.tokenizer.bos_id if self.tokenizer.bos_id is not None else self.tokenizer.eos_id
        if start is None:
            raise ArgumentError("The prompt is empty and the vocabulary has no token to begin with; give a prompt.")
        return [start]

    def warm_up(self, prompt: str | Sequence[int], *, constrained: bool = False, **options: Any) -> None:
        """Compiles what `stream(prompt, **options)` needs, with a constraint if `constrained`."""
        with self._session() as session:
            needs: dict[str, Any] = dict(longest_prompt=len(self.tokenize_prompt(prompt)), constrained=constrained)
            session.warm_up(self.sampling(**options), eos_ids=self.tokenizer.eog_ids, **needs)

    def memory_report(self) -> MemoryReport:
        """Bytes on the devices and in host memory; temporaries are those of what `warm_up` has compiled."""
        with self._session() as session:
            return memory_report(self.params, session.cache, session.temporary_bytes)

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = 256,
        stop: str | Sequence[str] = (),
        context_shift: bool = False,
        keep: int = 0,
        prompt_cache: PromptCache | None = None,
        constraint: Grammar | Constraint | None = None,
        **sampling: Any,
    ) -> Generator[str]:
        """Yields the continuation of `prompt` as pieces of text.

        Pieces are whole characters and never part of a stop string. The text ends at an end-of-generation token, before
        the first stop string, after `max_tokens`, or when the context is full.

        Args:
          prompt: text or token ids.
          max_tokens: None goes on until the context is full.
          stop: strings that end the text; they are not part of it.
          context_shift: a full context does not end the text but forgets the older half of it.
          keep: tokens of the prompt that are never forgotten, besides the beginning-of-sequence token; -1: all of them.
          prompt_cache: a file that keeps what has been computed. The beginning that the prompt shares with it is not
            run again; with an empty prompt the text that it holds goes on, as if it had not ended after its max_tokens.
          constraint: what the text must match, from `llama_jax.regex`, `json_schema`, `gbnf` or `lark`. The text ends
            when nothing more may follow.
          **sampling: temperature, top_k, top_p, min_p, repeat_penalty, seed and the rest of `sampling_params`, and
            ignore_eos, penalize_nl, dry_sequence_breakers and texts in logit_bias, as `resolve_options` says.
        """
        saved = None if prompt_cache is None else self._read_cache(prompt_cache)
        resume = False
        if saved is not None and len(prompt) == 0:
            ids, resume = saved.tokens[0], bool(saved.sampler)
            if resume and sampling.get("seed") in (None, -1):
                sampling["seed"] = [int(high) << 32 | int(low) for high, low in saved.sampler["seed"]]
        else:
            ids = self.tokenize_prompt(prompt)
        if resume and constraint is not None:
            raise ArgumentError("A text that a prompt cache holds cannot go on under a constraint; give a prompt.")
        kept = self._kept(ids, keep) if context_shift else None
        options: dict[str, Any] = dict(
            continuation=True, keep=kept, prompt_cache=prompt_cache, resume=resume, constraint=constraint
        )
        return self._checked_stream(ids, max_tokens, stop, sampling, **options)

    def _read_cache(self, prompt_cache: PromptCache) -> Snapshot | None:
        with self._session() as session:
            return prompt_cache.read(session)

    def without_older_half(self, ids: list[int], keep: int) -> list[int]:
        """What a context shift would leave of `ids`; `keep` as in `stream`."""
        start = min(self._kept(ids, keep), len(ids) - 2)
        return ids[:start] + ids[start + (len(ids) - start) // 2 :]

    def _kept(self, ids: list[int], keep: int) -> int:
        keep = checks.integer("keep", keep, -1, allowed=f"from 0 to {checks.MOST}, or -1 for the whole prompt")
        return len(ids) if keep == -1 else min(keep + (ids[:1] == [self.tokenizer.bos_id]), len(ids))

    def _checked_stream(
        self,
        ids: list[int],
        max_tokens: int | None,
        stop: str | Sequence[str],
        sampling: Mapping[str, Any],
        *,
        continuation: bool,
        keep: int | None = None,
        prompt_cache: PromptCache | None = None,
        resume: bool = False,
        constraint: Grammar | Constraint | None = None,
    ) -> Generator[str]:
        """Raises for wrong arguments now, not at the first piece."""
        limit = self._checked_limit(ids, max_tokens)
        text = StreamDetokenizer(self.tokenizer, _stop_strings(stop), continuation=continuation)
        options = self.sampling(**sampling)
        limits: dict[str, Any] = dict(
            max_tokens=limit, eos_ids=self.tokenizer.eog_ids, keep=None if keep is None else [keep]
        )
        if constraint is not None:
            limits["constraints"] = [self.constraint(constraint)]
        return self._stream(None if resume else ids, text, options, limits, prompt_cache)

    def _checked_limit(self, ids: list[int], max_tokens: int | None) -> int:
        check_prompt(ids, self.n_ctx, self.config.vocab_size)
        if max_tokens is None:
            return checks.MOST
        return checks.integer("max_tokens", max_tokens, 0, allowed=f"from 0 to {checks.MOST}, or None for no limit")

    def _stream(
        self,
        ids: list[int] | None,
        text: StreamDetokenizer,
        sampling: SamplingParams,
        limits: Mapping[str, Any],
        prompt_cache: PromptCache | None,
    ) -> Generator[str]:
        """Args: ids: None resumes what `prompt_cache` holds."""
        eog = self.tokenizer.eog_ids
        ending = Ending("limit")
        with self._session() as session:
            self.ending = None
            if prompt_cache is not None:
                prompt_cache.restore(session)
            chunks = session.resume(sampling, **limits) if ids is None else session.generate([ids], sampling, **limits)
            for (new,) in chunks:
                if prompt_cache is not None and session.tokens == [ids]:
                    prompt_cache.prompt_is_done(session)
                piece = ""
                for n, token in enumerate(new, 1):
                    piece += "" if token in eog else text.push(token)
                    if token in eog:
                        ending = Ending("eos")
                    if text.stopped is not None:
                        ending = Ending("stop", text.stopped)
                        session.end_text([len(new) - n])
                        break
                if piece:
                    yield piece
                if text.stopped is not None:
                    break
            if prompt_cache is not None:
                if session.tokens == [ids]:
                    prompt_cache.prompt_is_done(session)
                prompt_cache.text_is_done(session)
            self.ending = Ending("context") if session.timings.context_full else ending
            if tail := text.finish():
                yield tail

    def generate(self, prompt: str | Sequence[int], **options: Any) -> str:
        """The continuation of `prompt`; arguments as in `stream`."""
        return "".join(self.stream(prompt, **options))

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        n: int = 1,
        max_tokens: int | None = 256,
        stop: str | Sequence[str] = (),
        constraint: Grammar | Constraint | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """`n` continuations of `prompt` with their tokens, why they ended and, on demand, log-probabilities.

        Their seeds are counted up from `seed`, so that the first is what `generate` gives.

        Args:
          **sampling: as in `stream`; `logprobs=5` tells the five most likely tokens at each place, too.
        """
        n = checks.integer("n", n, 1, _MOST_CHOICES)
        ids = self.tokenize_prompt(prompt)
        limits: dict[str, Any] = dict(max_tokens=self._checked_limit(ids, max_tokens))
        texts = [StreamDetokenizer(self.tokenizer, _stop_strings(stop), continuation=True) for _ in range(n)]
        options = self.sampling(batch=n, **sampling)
        if constraint is not None:
            limits["constraints"] = [self.constraint(constraint)] * n
        eog = self.tokenizer.eog_ids
        if n == 1:
            with self._session() as session:
                return complete(session, [ids], texts, options, eog, limits)
        session = self.new_session(n)
        try:
            return complete(session, [ids] * n, texts, options, eog, limits)
        finally:
            self.timings = session.timings

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = 256,
        stop: str | Sequence[str] = (),
        context_shift: bool = False,
        keep: int = 0,
        template: str | None = None,
        constraint: Grammar | Constraint | None = None,
        **sampling: Any,
    ) -> Generator[str]:
        """Yields the assistant's answer to `messages`, each {"role": ..., "content": ...}, through the chat template.

        Args:
          template: Jinja source; None is the model's own. The other arguments as in `stream`.
        """
        ids = encode_chat(self.tokenizer, messages, template=template)
        kept = self._kept(ids, keep) if context_shift else None
        limits: dict[str, Any] = dict(keep=kept, constraint=constraint)
        return self._checked_stream(ids, max_tokens, stop, sampling, continuation=False, **limits)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The assistant's answer to `messages`; arguments as in `stream_chat`."""
        return "".join(self.stream_chat(messages, **options))

    def embed(
        self, texts: Sequence[str | Sequence[int]], *, pooling: Pooling = "last", normalize: bool = True
    ) -> list[np.ndarray]:
        """The vector of each text, float32 [D]: its hidden states after the last norm, pooled.

        Args:
          texts: strings, to which the file's rules add BOS and EOS, or token ids.
          pooling: "last" token, "mean" over the tokens, or "none", which gives [tokens, D], never normalised.
          normalize: to a Euclidean length of 1.
        """
        if isinstance(texts, (str, bytes)):
            raise ArgumentError(f"texts is {shown(texts)}; it must be a list of texts.")
        ids = [
            self.tokenizer.encode(text, parse_special=True) if isinstance(text, str) else self.tokenize_prompt(text)
            for text in texts
        ]
        limits = dict(n_ctx=self.n_ctx, n_batch=self.n_batch)
        return list(embed_texts(self.params, self.config, ids, pooling=pooling, normalize=normalize, **limits))
