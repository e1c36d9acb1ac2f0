"""What has been said: messages for a chat template, or one growing text."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from llama_jax.errors import ArgumentError

if TYPE_CHECKING:
    from llama_jax.llama import Llama


class Conversation(Protocol):
    """The user speaks with `say`, then the model with `answer`, and `end` takes down what it has said."""

    @property
    def prompt(self) -> str:
        """What stands before the user's next words."""
        ...

    def say(self, text: str) -> str:
        """Adds the user's words; returns what the screen shows behind them."""
        ...

    def answer(self, options: Mapping[str, Any]) -> Generator[str]:
        """The model's answer in pieces; options as in `Llama.stream`."""
        ...

    def end(self, answer: str) -> str:
        """Adds the answer; returns what the screen shows behind it."""
        ...

    def retract(self) -> None:
        """Takes the latest answer back, so that another can be given. Raises ArgumentError where there is none."""
        ...

    def undo(self) -> None:
        """Takes words without an answer back."""
        ...

    def clear(self) -> None:
        """Forgets all but the beginning."""
        ...


_NO_ANSWER = "There is no answer yet to give again."


class Messages:
    """A conversation through a chat template.

    Args:
      system: the system message; None for none.
      template: Jinja source; None is the model's own.
      forget: leave out the oldest questions and answers where the context cannot hold them all.
    """

    prompt = "> "

    def __init__(self, model: Llama, *, system: str | None, template: str | None, forget: bool) -> None:
        self._model = model
        self._template = template
        self._forget = forget
        self._beginning = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = [*self._beginning]

    def say(self, text: str) -> str:
        self.messages.append({"role": "user", "content": text})
        return ""

    def answer(self, options: Mapping[str, Any]) -> Generator[str]:
        while self._forget and not self._fits() and len(self.messages) > len(self._beginning) + 1:
            first = len(self._beginning)
            del self.messages[first : first + 2]
        return self._model.stream_chat(self.messages, template=self._template, **options)

    def _fits(self) -> bool:
        from llama_jax.text.chat import encode_chat

        return len(encode_chat(self._model.tokenizer, self.messages, template=self._template)) <= self._model.n_ctx

    def end(self, answer: str) -> str:
        self.messages.append({"role": "assistant", "content": answer})
        return "\n"

    def retract(self) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise ArgumentError(_NO_ANSWER)
        del self.messages[-1]

    def undo(self) -> None:
        while self.messages and self.messages[-1]["role"] == "user":
            del self.messages[-1]

    def clear(self) -> None:
        self.messages = [*self._beginning]


class Text:
    """A conversation as one text that both sides continue, for models without a chat template (llama.cpp's -i).

    Args:
      beginning: what the text starts with.
      prefix, suffix: stand before and after the user's words.
      reverse_prompts: each ends the model's turn and stays in the text, as in "User:".
      forget: leave out the older half of the text where the context cannot hold it.
    """

    def __init__(
        self, model: Llama, *, beginning: str, prefix: str, suffix: str, reverse_prompts: Sequence[str], forget: bool
    ) -> None:
        self._model = model
        self._beginning = beginning
        self._prefix = prefix
        self._suffix = suffix
        self._reverse_prompts = list(reverse_prompts)
        self._forget = forget
        self.text = beginning
        self._before_words = self._before_answer = None

    @property
    def prompt(self) -> str:
        """The line that the model has begun, and the prefix."""
        return self.text.rpartition("\n")[2] + self._prefix

    def say(self, text: str) -> str:
        """A "/" at the end stands for no newline."""
        self._before_words = self.text
        words = text.removesuffix("/") if text.endswith("/") else text + "\n"
        self.text += self._prefix + words + self._suffix
        return self._suffix

    def answer(self, options: Mapping[str, Any]) -> Generator[str]:
        prompt = self._model.tokenize_prompt(self.text)
        while self._forget and len(prompt) > self._model.n_ctx:
            prompt = self._model.without_older_half(prompt, options["keep"])
        with_reverse_prompts: dict[str, Any] = {**options, "stop": [*options["stop"], *self._reverse_prompts]}
        return self._model.stream(prompt, **with_reverse_prompts)

    def end(self, answer: str) -> str:
        ending, rest = self._model.ending, ""
        if ending is not None and ending.stop in self._reverse_prompts:
            rest = ending.stop
        elif ending is not None and ending.kind == "eos" and self._reverse_prompts:
            rest = "\n" + self._reverse_prompts[0]
        elif not answer.endswith("\n"):
            rest = "\n"
        self._before_answer = self.text
        self.text += answer + rest
        return rest

    def retract(self) -> None:
        if self._before_answer is None:
            raise ArgumentError(_NO_ANSWER)
        self.text, self._before_answer = self._before_answer, None

    def undo(self) -> None:
        if self._before_words is not None:
            self.text, self._before_words = self._before_words, None

    def clear(self) -> None:
        self.text = self._beginning
        self._before_words = self._before_answer = None
