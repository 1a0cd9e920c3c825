"""The block at the foot of a live terminal, and the lines that scroll away above it."""

import threading
import time
from collections.abc import Iterator
from typing import Any, Self

from rich.console import Console as Rich
from rich.console import ConsoleOptions
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from postgrad.observe.board import Board

PERIOD_SECONDS = 1.0  # between two drawings: the times in the block are whole seconds


class LiveBlock:
    """Draws a board in a thread every PERIOD_SECONDS. A drawing costs a millisecond, so the lines
    of steps, which may come faster, wait for the next one. Warnings and notes do not wait.
    """

    def __init__(self, board: Board, rich: Rich) -> None:
        self._rich = rich
        self._live = Live(_Drawn(board), console=rich, auto_refresh=False, transient=True)
        self._in_order = threading.RLock()
        self._waiting: list[Text] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="block", daemon=True)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        try:
            self.draw()
        finally:
            self._live.stop()

    def soon(self, line: Text) -> None:
        """Prints a line above the block at the next drawing."""
        with self._in_order:
            self._waiting.append(line)

    def print(self, *renderables: Any) -> None:
        """Prints what rich can print above the block now, after the lines that waited."""
        with self._in_order:
            lines, self._waiting = self._waiting, []
            if lines:
                self._rich.print(*lines, sep="\n")
            self._rich.print(*renderables)

    def draw(self) -> None:
        """Draws the block as it is now, and above it the lines that waited."""
        with self._in_order:
            lines, self._waiting = self._waiting, []
            if lines:
                self._rich.print(*lines, sep="\n")  # draws the block too
            else:
                self._live.refresh()

    def _redraw(self) -> None:
        while not self._over.wait(PERIOD_SECONDS):
            self.draw()


class _Drawn:
    """A rich renderable of a board at the time of drawing. The lines fit the width already: to lay
    them out again would double the cost of a drawing.
    """

    def __init__(self, board: Board) -> None:
        self._board = board

    def __rich_console__(self, console: Rich, options: ConsoleOptions) -> Iterator[Segment]:
        for line in self._board.lines(options.max_width, time.monotonic()):
            yield from line.render(console, end="\n")
