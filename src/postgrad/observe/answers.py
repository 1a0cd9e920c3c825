"""Shows answers while a model writes them, two of them side by side on a wide terminal.

A model's text is untrusted: it is never markup, and terminal control characters are escaped.
"""

from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import Console as Rich
from rich.console import ConsoleOptions
from rich.live import Live
from rich.table import Table
from rich.text import Text

from postgrad.observe.console import visible

WIDE = 100  # columns from which two answers stand beside each other
REFRESH = 8.0  # times a second
GAP = 2  # columns between them
REST = 4  # lines of the screen that are not the answers'


class AnswerDisplay:
    """Shows answers on a stream, piece by piece as they arrive."""

    def __init__(self, stream: TextIO) -> None:
        self._rich = Rich(file=stream, highlight=False, soft_wrap=True)

    def show(self, names: Sequence[str], answers: Sequence[Iterator[str]]) -> None:
        """Shows the pieces of each answer under its name, until all answers have ended."""
        terminal = self._rich.is_terminal and not self._rich.is_dumb_terminal
        if len(answers) > 1 and terminal and self._rich.width >= WIDE:
            self._beside(names, answers)
            return
        for name, pieces in zip(names, answers, strict=True):
            if len(answers) > 1:
                self._rich.print(self._text(f"[{name}]", "bold"))
            for piece in pieces:
                if piece:
                    self._rich.print(self._text(piece), end="")
                    self._rich.file.flush()
            self._rich.print()

    def _beside(self, names: Sequence[str], answers: Sequence[Iterator[str]]) -> None:
        columns = _SideBySide([self._text(name, "bold") for name in names])
        live = Live(columns, console=self._rich, refresh_per_second=REFRESH, transient=True)
        with live:  # the ends of both, while they grow
            under_way = dict(enumerate(answers))
            while under_way:
                for number, pieces in list(under_way.items()):
                    piece = next(pieces, None)
                    if piece is None:
                        del under_way[number]
                    else:
                        columns.texts[number] += self._text(piece).plain
        self._rich.print(columns.complete(self._rich.width))

    def _text(self, text: str, style: str = "") -> Text:
        return Text(visible(text, self._rich.encoding), style=style)


class _SideBySide:
    """Columns of growing texts under titles. While live, each shows the end of its text."""

    def __init__(self, titles: Sequence[Text]) -> None:
        self._titles = titles
        self.texts = [""] * len(titles)

    def __rich_console__(self, console: Rich, options: ConsoleOptions) -> Iterator[Table]:
        most, width = max(1, console.height - REST), self._each(options.max_width)
        ends = [Text(text).wrap(console, width, overflow="fold")[-most:] for text in self.texts]
        yield self._table(options.max_width, [Text("\n").join(lines) for lines in ends])

    def complete(self, width: int) -> Table:
        """The table with the complete texts, for when they have ended."""
        return self._table(width, [Text(text) for text in self.texts])

    def _table(self, width: int, cells: Sequence[Text]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
        for title in self._titles:
            table.add_column(title, width=self._each(width), overflow="fold")
        table.add_row(*cells)
        return table

    def _each(self, width: int) -> int:
        return (width - 1) // len(self._titles) - GAP
