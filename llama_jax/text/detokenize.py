"""Token ids to text as they are generated: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from llama_jax.errors import ArgumentError
from llama_jax.text.tokenizer import Tokenizer


class StreamDetokenizer:
    """Turns ids into text piece by piece.

    The pieces of `push` and `finish` together are `tokenizer.decode(ids)`, cut before the stop string that is complete
    first (of several that end at the same character, before the longest). A character appears when its last byte is
    there; a text that may become a stop string is withheld until it is clear that it does not. The work per
    character is constant for each stop string.

    Args:
      tokenizer: whose ids are pushed.
      stop: strings that end the text.
      continuation: the ids continue a prompt, so the space before the first word belongs to the text; for ids that
        begin a text, the space that encoding adds is dropped.

    Attributes:
      stopped: the stop string that was found, or None.

    Raises:
      ArgumentError: a stop string is empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, continuation: bool = False) -> None:
        if isinstance(stop, str):
            stop = (stop,)
        if any(not s for s in stop):
            raise ArgumentError("A stop string is ''; only strings of at least one character are allowed.")
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._drop_space = tokenizer.add_space_prefix and not continuation
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [_Matcher(s) for s in dict.fromkeys(stop)]
        self._withheld = ""

    def push(self, token_id: int) -> str:
        """The text that the token makes certain; "" after a stop. Raises ArgumentError for an unknown id."""
        data = self._tokenizer.token_bytes(token_id)
        if self.stopped is not None or not data:
            return ""
        if self._drop_space:
            data, self._drop_space = data.removeprefix(b" "), False
        return self._release(self._utf8.decode(data))

    def finish(self) -> str:
        """The text still withheld; an incomplete character becomes U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self._release(self._utf8.decode(b"", final=True))
        if self.stopped is None:
            text, self._withheld = text + self._withheld, ""
        return text

    def _release(self, new: str) -> str:
        text = self._withheld + new
        for i, character in enumerate(new, start=len(self._withheld) + 1):
            found = [m.stop for m in self._matchers if m.advance(character)]
            if found:
                self.stopped = max(found, key=len)
                self._withheld = ""
                return text[: i - len(self.stopped)]
        keep = max((m.matched for m in self._matchers), default=0)
        self._withheld = text[len(text) - keep :]
        return text[: len(text) - keep]


class _Matcher:
    """Finds one string in a stream of characters (Knuth, Morris and Pratt 1977).

    `matched` is the length of the longest beginning of `stop` that the characters so far end with.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._border = [0]
        length = 0
        for character in stop[1:]:
            while length and character != stop[length]:
                length = self._border[length - 1]
            length += character == stop[length]
            self._border.append(length)

    def advance(self, character: str) -> bool:
        """Take one more character; True when `stop` is complete."""
        while self.matched and character != self.stop[self.matched]:
            self.matched = self._border[self.matched - 1]
        self.matched += character == self.stop[self.matched]
        return self.matched == len(self.stop)
