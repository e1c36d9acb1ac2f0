"""The user's side of a conversation: lines typed on a terminal or piped in, colours, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator

_USER = "\x1b[1;32m"  # bold green, as in llama.cpp
_PLAIN = "\x1b[0m"


class Terminal:
    """Reads messages from standard input.

    Args:
      color: "on", "off", or "auto": on a terminal where NO_COLOR is not set.
      multiline: a message ends with a line that ends in a backslash, instead of going on behind such lines.
      commands: of the first line's words, those that make it a message of one line in any case.
    """

    def __init__(self, *, color: str, multiline: bool, commands: Collection[str] = ()) -> None:
        self.interactive = sys.stdin.isatty()
        terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._colored = color == "on" or (color == "auto" and terminal)
        self._multiline = multiline
        self._commands = commands
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history in input())

    def show(self, text: str) -> None:
        """Prints what belongs to the screen only: nothing where input is piped in."""
        if self.interactive:
            print(text, end="", flush=True)

    def read(self, prompt: str) -> str | None:
        """The next message, without its last newline; None at the end of input or after two Ctrl-C in a row.

        One Ctrl-C drops what has been typed.

        Args:
          prompt: what stands before the message; its last line may already be on the screen.
        """
        above, _, prompt = prompt.rpartition("\n")
        self.show(f"\r{above}\n" if above else "")
        lines: list[str] = []
        interrupted = False
        while True:
            try:
                line = self._line("... " if lines else prompt)
            except EOFError:
                self.show("\n")
                return "\n".join(lines) if lines else None
            except KeyboardInterrupt:
                print()
                if interrupted:
                    return None
                interrupted, lines = True, []
                continue
            interrupted = False
            goes_on = line.endswith("\\") != self._multiline
            if not lines and line.split(" ", 1)[0] in self._commands:
                goes_on = False
            else:
                line = line.removesuffix("\\")
            lines.append(line)
            if not goes_on:
                return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        if not self.interactive:
            return input()
        if not self._colored:
            return input("\r" + prompt)
        try:
            # readline has to know what takes no room.
            return input(f"\r{prompt}\001{_USER}\002" if "readline" in sys.modules else f"\r{prompt}{_USER}")
        finally:
            print(_PLAIN, end="", flush=True)


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Within it a first Ctrl-C sets the event, so that a computation can end in order; a second one raises."""
    stopped = threading.Event()

    def stop(*_: object) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    try:
        before = signal.signal(signal.SIGINT, stop)
    except ValueError:  # not in the main thread, where no Ctrl-C arrives
        yield stopped
        return
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
