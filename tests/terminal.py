"""A command in a pseudo-terminal, for tests of what a person sees and types."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import REPOSITORY

# In the new process, since a function between fork and exec would run under jax's warning of forks.
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Screen:
    """Runs `command` with a terminal of 100 columns for input and output; standard error is kept apart.

    Args:
      programs: a folder for compiled programs.
    """

    def __init__(self, command: Sequence[str], programs: Path) -> None:
        self._own, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XDG_"))}
        environment |= dict(TERM="dumb", XDG_CACHE_HOME=str(programs), PYTHONPATH=str(REPOSITORY))
        self._errors = (programs / "stderr").open("w+b")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *command],
            stdin=its,
            stdout=its,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
            cwd=programs,
        )
        os.close(its)
        self._data = b""
        self._typed_at = 0  # bytes of output that had come when keys were pressed last

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()
        os.close(self._own)

    @property
    def text(self) -> str:
        """What stands on the screen: a carriage return goes back to the line's beginning."""
        lines = []
        for line in self._data.decode().replace("\r\n", "\n").split("\n"):
            shown = ""
            for part in line.split("\r"):
                shown = part + shown[len(part) :]
            lines.append(shown)
        return "\n".join(lines)

    def wait_for(self, end: str, seconds: float = 120.0) -> None:
        """Until what has come since the last key ends with `end`."""
        until = time.monotonic() + seconds
        while not self._data[self._typed_at :].decode(errors="replace").replace("\r\n", "\n").endswith(end):
            if time.monotonic() > until or not self._read(0.2):
                raise AssertionError(f"{end!r} did not come; {self.text!r}\n{self.errors}")

    def type(self, keys: str) -> None:
        """Presses keys; "\\n" is Return, "\\x03" Ctrl-C, "\\x04" Ctrl-D."""
        self._typed_at = len(self._data)
        os.write(self._own, keys.encode())

    def wait_for_lines(self, n: int, seconds: float = 60.0) -> None:
        """Until `n` lines have come since the last key."""
        until = time.monotonic() + seconds
        while self._data.count(b"\n", self._typed_at) < n and time.monotonic() < until:
            self._read(0.2)

    @property
    def errors(self) -> str:
        """Standard error."""
        self._errors.seek(0)
        return self._errors.read().decode()

    def exit_code(self) -> int:
        """Waits for the end."""
        while self._process.poll() is None:
            self._read(0.2)
        while self._read(0.0, ended=True):
            pass
        return self._process.returncode

    def _read(self, seconds: float, ended: bool = False) -> bool:
        """Takes what comes; False when nothing more will."""
        if select.select([self._own], [], [], seconds)[0]:
            with contextlib.suppress(OSError):
                new = os.read(self._own, 65536)
                self._data += new
                return bool(new)
            return False
        return not ended and self._process.poll() is None
