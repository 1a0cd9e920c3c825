"""A stream that may break when a terminal is closed or a pipe's reader ends: the run goes on."""

from typing import TextIO


class Lasting:
    """Writes to `stream` until that fails, and drops everything from then on. Nothing is lost: the
    run directory has it, too. `gone`: whether the stream has failed.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.gone = False

    @property
    def encoding(self) -> str:
        """The stream's encoding, "utf-8" where it has none."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The stream's file descriptor; OSError where it has none."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Writes `text`, or drops it once the stream has failed; returns its length."""
        if not self.gone:
            try:
                self._stream.write(text)
            except UnicodeError:
                raise
            except (OSError, ValueError):  # EIO, EPIPE; a closed file
                self.gone = True
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, unless it has failed."""
        if not self.gone:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self.gone = True
