"""The console: a live block in a terminal, plain lines in a file, warnings only where asked."""

import math
import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TextIO, cast

from rich import box
from rich.cells import cell_len
from rich.console import Console as Rich
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from postgrad.core.text import fixed, in_lines
from postgrad.observe.board import Board, LiveBlock, PhaseShown, step_seconds, telling

Mode = Literal["auto", "plain", "quiet", "json"]
# Control characters but tab and newline; Unicode's line separators and changes of text direction.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
SLOW_SECONDS = 20.0  # a phase that lasts longer has a line in plain mode, too
CUT = 24  # characters of a longer word, such as a path, that a table may cut in several lines
SHORT_SECONDS = 0.2  # a shorter phase is not shown at all: it would only flicker

# The line of a step, where its metrics have them: metric, label as in docs/metrics.md, format.
SHOWN = (
    ("reward", "reward", "{:.3f}"),
    ("loss", "loss", "{:.4f}"),
    ("reward_model/accuracy", "accuracy", "{:.0%}"),
    ("policy/accuracy", "accuracy", "{:.0%}"),
    ("reward_model/margin", "margin", "{:.3f}"),
    ("policy/reward_margin", "margin", "{:.3f}"),
    ("critic/loss", "critic loss", "{:.4f}"),
    ("policy/entropy", "entropy", "{:.3f}"),
    ("sampled_entropy", "entropy", "{:.3f}"),
    ("policy/kl", "kl", "{:.4f}"),
    ("kl/token_mean", "kl", "{:.4f}"),
    ("policy/clip_fraction", "clipped", "{:.1%}"),
    ("policy/grad_norm", "grad norm", "{:.3f}"),
    ("reward_model/grad_norm", "grad norm", "{:.3f}"),
    ("response_length", "length", "{:.1f}"),
    ("groups/equal_fraction", "zero-std groups", "{:.0%}"),
    ("truncated_fraction", "truncated", "{:.0%}"),
    ("response_tokens_per_second", "sampled", "{:,.0f} tok/s"),
    ("train_tokens_per_second", "trained", "{:,.0f} tok/s"),
)
LEAST_FIRST = (  # metrics that a narrow terminal leaves out, in this order
    "train_tokens_per_second",
    "response_tokens_per_second",
    "groups/equal_fraction",
    "truncated_fraction",
    "policy/grad_norm",
    "reward_model/grad_norm",
    "policy/clip_fraction",
    "policy/entropy",
    "sampled_entropy",
    "critic/loss",
    "response_length",
    "policy/kl",
    "kl/token_mean",
    "reward_model/margin",
    "policy/reward_margin",
    "loss",
    "reward_model/accuracy",
    "policy/accuracy",
    "reward",
)


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


class Phase:
    """A phase under way; `advance` moves its progress on the screen, where it is shown."""

    def __init__(
        self,
        move: Callable[[int], None] = lambda n: None,
        count: Callable[[str, int, int | None], None] = lambda work, done, total: None,
    ) -> None:
        self._move = move
        self._count = count

    def advance(self, n: int = 1) -> None:
        """Counts `n` more as done."""
        self._move(n)

    def count(self, work: str, done: int, total: int | None) -> None:
        """Shows `done` of `total`, where the phase has no total of its own. work: "rows read".
        total: None where nobody knows it.
        """
        self._count(work, done, total)


@contextmanager
def _shown_if_it_lasts(progress: Progress) -> Generator[None]:
    """Starts drawing in a thread after SHORT_SECONDS, so that a short phase shows nothing."""
    timer = threading.Timer(SHORT_SECONDS, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it is starting, or never will
        if progress.live.is_started:
            progress.stop()


class Console:
    """Prints for people. Mode "auto" is live in a terminal and plain elsewhere; "quiet" shows
    warnings only; "json" leaves standard output alone and writes to standard error.
    """

    def __init__(self, mode: Mode = "auto", stream: TextIO | None = None) -> None:
        self._quiet = mode == "quiet"
        lasting = Lasting(stream or (sys.stderr if mode == "json" else sys.stdout))
        self._rich = Rich(file=cast(TextIO, lasting), highlight=False, soft_wrap=True)
        terminal = self._rich.is_terminal and not self._rich.is_dumb_terminal
        self._live = mode in ("auto", "json") and terminal
        self._board: Board | None = None
        self._block: LiveBlock | None = None

    @contextmanager
    def run(self, total: int, done: int) -> Iterator[None]:
        """While a run of `total` steps goes on from `done`: a live terminal shows the block, and
        everything else scrolls above it.
        """
        if not self._live:
            yield
            return
        utf = self._rich.encoding.lower().startswith("utf")
        self._board = Board(total, done, time.monotonic(), unicode=utf)
        try:
            with LiveBlock(self._board, self._rich) as self._block:
                yield
        finally:
            self._board = self._block = None

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        """Shows that a phase is under way until it ends."""
        if self._board is not None:
            shown = PhaseShown(self._text(name).plain, total, time.monotonic())
            self._board.phase = shown
            yield Phase(shown.advance)
            self._board.phase = None
            return
        if self._live:
            progress = Progress(*_columns(total), console=self._rich, transient=True)
            with _shown_if_it_lasts(progress):
                task = progress.add_task(self._text(name).plain, total=total)
                yield Phase(
                    lambda n: progress.advance(task, n),
                    lambda *counts: progress.update(task, description=_counted(name, *counts)),
                )
            return
        began = spoken = time.monotonic()

        def count(work: str, done: int, total: int | None) -> None:
            nonlocal spoken
            if time.monotonic() - spoken > SLOW_SECONDS:
                spoken = time.monotonic()
                self.note(_counted(name, work, done, total))

        yield Phase(count=count)
        seconds = time.monotonic() - began
        if seconds > SLOW_SECONDS:
            self.note(f"{name}: {seconds:.0f} s")

    def step(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        """One line for a step; in a live terminal as much of it as fits on one."""
        if self._board is not None:
            self._board.stepped(number, metrics)
        metrics = telling(metrics)
        shown = {
            label: (key, form)
            for key, label, form in reversed(SHOWN)  # of two with one label the first is shown
            if math.isfinite(metrics.get(key, math.nan))
        }
        parts = {
            key: f"{label} {fixed(metrics[key], form)}"
            for label, (key, form) in reversed(shown.items())
        }
        width = len(str(total))
        took = f"{step_seconds(metrics):.2f} s"

        def line() -> str:
            return "  ".join((f"step {number:>{width}}/{total}", *parts.values(), took))

        for key in LEAST_FIRST if self._live else ():
            if len(line()) <= self._rich.width:
                break
            parts.pop(key, None)
        if self._block is None:
            self.note(line())
        else:
            self._block.soon(self._text(line()))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of an evaluation after `step` in the block."""
        if self._board is not None:
            self._board.evaluated(step, metrics)

    def spoken(self, name: str, text: str | None) -> None:
        """Shows the message of the sentinel `name` in the block; None removes it."""
        if self._board is not None:
            self._board.spoken(name, text and self._text(text).plain)

    def heading(self, text: str) -> None:
        """Prints the heading of a section."""
        if not self._quiet:
            self._print(self._text(f"\n{text}", "bold"))

    def note(self, text: str) -> None:
        """Prints a line, unless in quiet mode."""
        if not self._quiet:
            self._print(self._text(self._in_lines(text)))

    def warn(self, text: str) -> None:
        """Prints a warning, in quiet mode too."""
        self._print(self._text(self._in_lines(f"warning: {text}"), "yellow"))

    def error(self, text: str) -> None:
        """Prints an error, in quiet mode too."""
        self._print(self._text(self._in_lines(text), "red"))

    @property
    def is_terminal(self) -> bool:
        """Whether it writes to a terminal, where colours and live drawing work."""
        return self._rich.is_terminal

    def spans(self, parts: Sequence[tuple[str, str]]) -> None:
        """Prints the parts, (text, rich style) each, one after the other; texts are never markup.
        On a terminal lines are cut at words.
        """
        if self._quiet:
            return
        text = Text.assemble(*(self._text(*part) for part in parts))
        self._print(_cut(text, self._rich.width) if self._rich.is_terminal else text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Prints a table; texts are never markup. Where it would cut words to fit the width, each
        row is a block of lines in its place, "column  cell", or without names of columns a line.
        """
        if self._quiet:
            return
        table = Table(
            title=self._text(title, "bold"),
            title_justify="left",
            show_header=any(columns),
            box=box.SIMPLE_HEAD if any(columns) else box.SIMPLE,
        )
        cells = [[self._text(cell) for cell in row] for row in (columns, *rows)]
        widths = _widths(cells, self._rich.width)
        self._print()
        if widths is None:
            self._print(self._text(self._in_lines(title), "bold"))
            for row in cells[1:]:
                self._print(Text(self._in_lines("\n" * any(columns) + _block(cells[0], row))))
            return
        for name, width in zip(cells[0], widths, strict=True):
            table.add_column(name, overflow="fold", width=width)
        for row in cells[1:]:
            table.add_row(*row)
        self._print(table)

    def _in_lines(self, text: str) -> str:
        """The text as `in_lines` cuts it, where this is a terminal. Files get long lines as they
        are.
        """
        return in_lines(text, self._rich.width) if self._rich.is_terminal else text

    def _print(self, *renderables: Any) -> None:
        (self._rich if self._block is None else self._block).print(*renderables)

    def _text(self, text: str, style: str = "") -> Text:
        """Text for rich, with controls escaped and markup left as it is."""
        return Text(visible(text, self._rich.encoding), style=style)


def _widths(cells: Sequence[Sequence[Text]], width: int) -> list[int] | None:
    """Widths of a table's columns with which it is at most `width` wide and cuts no word of up to
    CUT characters; None where that is not possible. cells: by row.
    """
    lines = [
        [line for text in column for line in text.split()] for column in zip(*cells, strict=True)
    ]
    words = [(word for line in column for word in line.plain.split()) for column in lines]
    least = [min(CUT, max(map(cell_len, column), default=0)) for column in words]
    room = width - sum(least) - 3 * len(least) - 1  # what box and padding leave
    if room < 0:
        return None
    widths: list[int] = []
    for column, narrow in zip(lines, least, strict=True):
        widths.append(narrow + min(room, max(line.cell_len for line in column) - narrow))
        room -= widths[-1] - narrow
    return widths


def _block(names: Sequence[Text], row: Sequence[Text]) -> str:
    """A row of a table as lines "column  cell", or without names a line; without empty cells."""
    width = max(len(name) for name in names)
    pairs = [(name.plain, cell.plain) for name, cell in zip(names, row, strict=True)]
    parts = [f"{name:<{width}}  {cell}".rstrip() for name, cell in pairs if cell]
    return "\n".join(parts) if width else "".join(parts).lstrip()


def visible(text: str, encoding: str) -> str:
    """Text in which control characters, and those that the encoding lacks, are escaped."""
    escaped = CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)
    return escaped.encode(encoding, "backslashreplace").decode(encoding)


def _cut(text: Text, width: int) -> Text:
    """Styled text with its lines cut as `in_lines` cuts them. Rich would cut long words too."""
    starts: list[int] = []
    place = 0
    for line in in_lines(text.plain, width).split("\n"):
        words = line.lstrip(" ")
        place = text.plain.index(words, place)
        indent = len(line) - len(words)
        indented = text.plain[:place].endswith(" " * indent)  # else it is that of the line before
        starts.append(place - indent if indented else place)
        place += len(words)
    lines = text.divide(starts[1:])
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


def _counted(name: str, work: str, done: int, total: int | None) -> str:
    """ "load: 40,960 of 120,000 rows tokenised, 34%"."""
    things, _, verb = work.partition(" ")
    if total is None:
        return f"{name}: {done:,} {things} {verb}"
    return f"{name}: {done:,} of {total:,} {things} {verb}, {done / max(1, total):.0%}"


def _columns(total: int | None) -> list[ProgressColumn]:
    """Columns of a phase's progress line; one without a total has a spinner and the time only."""
    name, elapsed = (
        [SpinnerColumn(), TextColumn("{task.description}", markup=False)],
        TimeElapsedColumn(),
    )
    if total is None:
        return [*name, elapsed]
    return [*name, BarColumn(bar_width=24), MofNCompleteColumn(), elapsed]
