"""A program in a pseudo-terminal, typed to and looked at as a person would."""

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import pyte


class Terminal:
    """Runs `command` until the block is left. output: every byte that it wrote."""

    def __init__(
        self, command: Sequence[str], columns: int = 100, rows: int = 40, **env: str
    ) -> None:
        self.output = b""
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._process, self._handle = pty.fork()
        if self._process == 0:
            size = struct.pack("HHHH", rows, columns, 0, 0)
            fcntl.ioctl(1, termios.TIOCSWINSZ, size)
            controlled = ("NO_COLOR", "COLUMNS", "LINES")  # workers of pytest-xdist have them
            environment = {
                name: value for name, value in os.environ.items() if name not in controlled
            }
            environment |= {"TERM": "xterm", "PYTHONUTF8": "1"} | env
            os.execvpe(command[0], [*command], environment)
        self._code: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._code is None:
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
        os.close(self._handle)

    @property
    def lines(self) -> list[str]:
        """What is on the screen, without empty lines."""
        return [line.rstrip() for line in self._screen.display if line.strip()]

    def type(self, keys: str) -> None:
        os.write(self._handle, keys.encode())

    def wait_for(self, wanted: str | Callable[[list[str]], bool], seconds: float = 120.0) -> None:
        """Until a text, or whatever `what` looks for, is on the screen."""
        seen = wanted if callable(wanted) else lambda lines: any(wanted in line for line in lines)
        deadline = time.monotonic() + seconds
        while not seen(self.lines):
            if not self._read(deadline - time.monotonic()):
                raise AssertionError("it is not there:\n" + "\n".join(self.lines))

    def ended(self, seconds: float = 120.0) -> int:
        """The exit code, once it has ended by itself; AssertionError if it does not."""
        deadline = time.monotonic() + seconds
        while self._read(deadline - time.monotonic()):
            pass
        if time.monotonic() > deadline:
            raise AssertionError("it did not end:\n" + "\n".join(self.lines))
        self._code = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
        return self._code

    def _read(self, seconds: float) -> bool:
        """Feeds the screen what comes next; False where nothing does."""
        if not select.select([self._handle], [], [], max(0.0, seconds))[0]:
            return False
        try:
            data = os.read(self._handle, 65536)
        except OSError:  # EIO: the other end is closed
            return False
        self.output += data
        self._stream.feed(data)
        return bool(data)
