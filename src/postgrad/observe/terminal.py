"""A stream that may go away: a terminal is closed, a pipe's reader ends. The run goes on."""

from typing import TextIO


class Lasting:
    """Writes to `stream` until that fails, and nowhere from then on: what is said there stands in
    the run directory too.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.gone = False

    @property
    def encoding(self) -> str:
        """Of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Of the stream."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Of the stream."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Writes, where there is still somebody."""
        if not self.gone:
            try:
                self._stream.write(text)
            except UnicodeError:
                raise
            except (OSError, ValueError):  # EIO, EPIPE; a closed file
                self.gone = True
        return len(text)

    def flush(self) -> None:
        """The same."""
        if not self.gone:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self.gone = True
