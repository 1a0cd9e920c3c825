"""The contents of a terminal's live block: a run's progress and health in a few lines.

`lines` renders the block for a width and a time, and reads nothing but the board's fields. It does
not use a table of rich, which costs ten times as much: `LiveBlock` draws it while the run trains.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

from rich.cells import cell_len, set_cell_size
from rich.console import Console as Rich
from rich.console import ConsoleOptions
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from postgrad.core.text import fixed

BARS = "▁▂▃▄▅▆▇█"
KEPT = 240  # values of a curve
BAR = 24  # columns of a progress bar
NARROW = 58  # columns below which a line has one figure, not two
FIGURE = 20  # columns of a figure before its curve: label, value and spaces
MOST_SENTINELS = 4

# Label of at most 9 characters; its metric, the first of these that is there; format.
FIGURES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("reward",), "{:.3f}"),
    ("loss", ("loss",), "{:.4f}"),
    ("accuracy", ("reward_model/accuracy", "policy/accuracy"), "{:.1%}"),
    ("margin", ("reward_model/margin", "policy/reward_margin"), "{:.3f}"),
    ("KL", ("kl/token_mean", "policy/kl"), "{:.4f}"),
    ("entropy", ("policy/entropy", "sampled_entropy"), "{:.3f}"),
    ("clipped", ("policy/clip_fraction",), "{:.1%}"),
    ("length", ("response_length",), "{:.1f}"),
    ("truncated", ("truncated_fraction",), "{:.1%}"),
    ("grad norm", ("policy/grad_norm", "reward_model/grad_norm"), "{:.3g}"),
    ("moved", ("sentinel/policy_moved",), "{:.4f}"),
)
# End of a metric's name -> (label, format) of a held-out result.
HELD_OUT = {
    "/accuracy": ("eval acc", "{:.1%}"),
    "/loss": ("eval loss", "{:.4f}"),
    "/reward": ("eval mean", "{:.3f}"),
}
SPEEDS = (("sampled", "response_tokens_per_second"), ("trained", "train_tokens_per_second"))
# Of a run with samples ahead: the metrics of a text, and the text.
AHEAD: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("staleness/mean", "staleness/max", "staleness/mixed_samples"),
        "staleness {m[staleness/mean]:.2f} (most {m[staleness/max]:.0f}), "
        "mixed {m[staleness/mixed_samples]:.0%}",
    ),
    (
        ("ahead/groups", "ahead/ended_groups", "ahead/open_samples"),
        "under way {m[ahead/groups]:.0f} groups ({m[ahead/ended_groups]:.0f} ended), "
        "{m[ahead/open_samples]:.0f} samples",
    ),
    (("idle/learner_time_fraction",), "learner idle {m[idle/learner_time_fraction]:.0%}"),
    (("idle/engines_time_fraction",), "engines idle {m[idle/engines_time_fraction]:.0%}"),
    (("idle/empty_rows_fraction",), "empty rows {m[idle/empty_rows_fraction]:.0%}"),
    (
        ("publish/send_seconds", "publish/sent_bytes"),
        "weights sent in {m[publish/send_seconds]:.2f} s, {m[publish/sent_bytes]:,.0f} bytes",
    ),
)
MEMORY, STEP = "peak_memory_bytes", "step_seconds"
ESTIMATED = "estimated/"  # prefix of a metric's estimate
# Ends of phases' columns, what they add up to, and how. A GPU's estimate is of reserved bytes.
TOTALS = (("_seconds", STEP, sum), ("_memory_bytes", MEMORY, max), ("_reserved_bytes", MEMORY, max))
Curves = dict[str, deque[float]]  # label -> newest values

PERIOD_SECONDS = 1.0  # between two drawings: the times in the block are whole seconds


@dataclass(slots=True)
class PhaseShown:
    """A phase of a step that is under way."""

    name: str
    total: int | None  # None: it cannot be counted
    began: float  # time.monotonic()
    done: int = 0  # of total

    def advance(self, n: int) -> None:
        """Counts `n` more as done."""
        self.done += n


@dataclass(slots=True)
class Board:
    """The state that the block shows."""

    total: int  # steps of the run
    before: int  # steps that were done when this process began, after a resume
    began: float  # time.monotonic() at that moment
    unicode: bool = True  # False: ASCII only
    step: int = 0  # steps done
    phase: PhaseShown | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # of the last step
    curves: Curves = field(default_factory=Curves)
    held_out: tuple[str, str, int] | None = None  # label, formatted value, step of the evaluation
    sentinels: dict[str, str] = field(default_factory=dict[str, str])  # name -> message

    def __post_init__(self) -> None:
        self.step = self.before

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step that has ended."""
        self.step, self.metrics = step, telling(metrics)
        for label, names, _ in FIGURES:
            value = _first(self.metrics, names)
            if value is not None:
                self._add(label, value)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes an evaluation after `step`: shows its first accuracy, else its loss or reward."""
        for ending, (label, form) in HELD_OUT.items():
            for name, value in metrics.items():
                if name.endswith(ending) and math.isfinite(value):
                    self.held_out = (label, fixed(value, form), step)
                    self._add(label, value)
                    return

    def spoken(self, name: str, text: str | None) -> None:
        """Shows the message of a sentinel; None removes it."""
        if text is None:
            self.sentinels.pop(name, None)
        else:
            self.sentinels[name] = text

    def lines(self, width: int, now: float) -> list[Text]:
        """The block at time `now` (time.monotonic()).

        Each line is narrower than `width`, since the last column makes some terminals wrap.
        """
        width = max(20, width - 1)
        parts = [
            Text(("─" if self.unicode else "-") * width, "dim"),
            self._run(width, now),
            self._phase(width, now),
            *self._figures(width),
            *self._machine(width),
            *self._ahead(width),
            *self._health(),
        ]
        for line in parts:
            line.truncate(width, overflow="ellipsis" if self.unicode else "crop")
        return parts

    def _add(self, label: str, value: float) -> None:
        self.curves.setdefault(label, deque(maxlen=KEPT)).append(value)

    def _run(self, width: int, now: float) -> Text:
        steps_done, elapsed = self.step - self.before, now - self.began
        times = f"{duration(elapsed)} elapsed"
        if steps_done > 0 and self.step < self.total:
            times += f", {duration(elapsed / steps_done * (self.total - self.step))} left"
        share = self.step / max(1, self.total)
        return self._bar("step", share, f"{self.step}/{self.total}  {share:.0%}  {times}", width)

    def _phase(self, width: int, now: float) -> Text:
        phase = self.phase
        if phase is None:
            return Text("")
        seconds = f"{max(0.0, now - phase.began):.0f} s"
        if not phase.total:
            return Text.assemble((f"{phase.name:<9} ", "bold"), seconds)
        share = min(1.0, phase.done / phase.total)
        return self._bar(phase.name, share, f"{phase.done}/{phase.total}  {seconds}", width)

    def _bar(self, label: str, share: float, text: str, width: int) -> Text:
        most = max(0, min(BAR, width - cell_len(label.ljust(9)) - len(text) - 3))
        full = round(share * most)
        done, rest = ("━", "─") if self.unicode else ("=", "-")
        bar = [(done * full, "green"), (rest * (most - full), "dim")] if most >= 6 else []
        return Text.assemble((f"{label:<9} ", "bold"), *bar, f" {text}" if bar else text)

    def _figures(self, width: int) -> list[Text]:
        figures: list[tuple[str, str]] = []
        for label, names, form in FIGURES:
            value = _first(self.metrics, names)
            if value is not None:
                figures.append((label, fixed(value, form)))
        if self.held_out is not None:
            label, shown, _ = self.held_out
            figures.insert(min(1, len(figures)), (label, shown))
        in_line = 2 if width >= NARROW else 1
        cells = [self._figure(label, value, width // in_line) for label, value in figures]
        lines: list[Text] = []
        for start in range(0, len(cells), in_line):
            lines.append(Text().append_text(cells[start]))
            for cell in cells[start + 1 : start + in_line]:
                lines[-1].append_text(cell)
        return lines

    def _figure(self, label: str, value: str, width: int) -> Text:
        """A label, its value and its curve, `width` columns wide."""
        curve, room = "", width - FIGURE - 1
        held_out = self.held_out
        if held_out is not None and label == held_out[0] and len(self.curves[label]) == 1:
            curve = f"at step {held_out[2]}"
        elif self.unicode and room >= 4:
            curve = sparkline(list(self.curves.get(label, ())), room)
        padded = set_cell_size(curve, max(0, width - FIGURE))
        return Text.assemble((f"{label:<9}", "dim"), f" {value:>9} ", (padded, "cyan"))

    def _machine(self, width: int) -> list[Text]:
        metrics = _with_totals(self.metrics)
        texts = [
            f"{label} {metrics[name]:,.0f} tok/s"
            for label, name in SPEEDS
            if math.isfinite(metrics.get(name, math.nan))
        ]
        texts += _against(metrics, MEMORY, "memory", 2**30, "GiB")
        texts += _against(metrics, STEP, "a step", 1, "s")
        return _packed(texts, width)

    def _ahead(self, width: int) -> list[Text]:
        """Of a run with samples ahead: how old they are, what is under way, who waits."""
        if "ahead/groups" not in self.metrics:
            return []
        there = [text for names, text in AHEAD if all(name in self.metrics for name in names)]
        return _packed([text.format(m=self.metrics) for text in there], width)

    def _health(self) -> list[Text]:
        if not self.sentinels and self.step == self.before:
            return [Text("sentinels wait for the first step", "dim")]
        if not self.sentinels:
            return [Text("sentinels silent: nothing looks wrong", "green")]
        mark = "▲" if self.unicode else "!"
        shown = list(self.sentinels.items())[:MOST_SENTINELS]
        lines = [Text(f"{mark} {name}: {text}", "yellow") for name, text in shown]
        if more := len(self.sentinels) - len(shown):
            lines.append(Text(f"{mark} and {more} more", "yellow"))
        return lines


def telling(metrics: Mapping[str, float]) -> Mapping[str, float]:
    """The metrics without those that say nothing. Advantages have a mean near 0, and so has the
    loss of a step of RL however well it learns; samples of the weights of now are never clipped.
    """
    silent = {"loss"} if "reward" in metrics else set[str]()
    if not metrics.get("policy/clip_fraction"):
        silent.add("policy/clip_fraction")
    return {name: value for name, value in metrics.items() if name not in silent}


def _packed(texts: Iterable[str], width: int) -> list[Text]:
    """The texts beside each other, as many in a line as fit."""
    lines: list[str] = []
    for text in texts:
        if lines and len(lines[-1]) + 3 + len(text) <= width:
            lines[-1] += f"   {text}"
        else:
            lines.append(text)
    return [Text(line) for line in lines]


def _with_totals(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics with the seconds and peak memory of the step, and their estimates if any.

    Memory is the maximum over phases only where there is an estimate of phases to compare with.
    """
    extended = dict(metrics)
    for ending, total, combine in TOTALS:
        phases = _phases(metrics, ending)
        estimated = [metrics[ESTIMATED + phase] for phase in phases if ESTIMATED + phase in metrics]
        if phases and (estimated or total == STEP):
            extended[total] = combine(metrics[phase] for phase in phases)
        if estimated:
            extended[ESTIMATED + total] = combine(estimated)
    return extended


def step_seconds(metrics: Mapping[str, float]) -> float:
    """Wall-clock seconds of a step: the sum over its phases."""
    return sum(metrics[phase] for phase in _phases(metrics, "_seconds"))


def _phases(metrics: Mapping[str, float], ending: str) -> list[str]:
    """The metrics of phases with this ending; a "/" marks parts of a phase, which are in it."""
    return [
        name for name in metrics if name.endswith(ending) and "/" not in name and name != MEMORY
    ]


def _first(metrics: Mapping[str, float], names: tuple[str, ...]) -> float | None:
    """The first of the metrics `names` that is there and finite."""
    return next((metrics[n] for n in names if math.isfinite(metrics.get(n, math.nan))), None)


def _against(
    metrics: Mapping[str, float], name: str, label: str, unit: float, unit_name: str
) -> list[str]:
    """ "memory 3.20 GiB of 4.00 estimated"; nothing where it was not measured."""
    value, estimated = _first(metrics, (name,)), _first(metrics, (ESTIMATED + name,))
    if value is None:
        return []
    beside = "" if estimated is None else f" of {estimated / unit:.2f} estimated"
    return [f"{label} {value / unit:.2f} {unit_name}{beside}"]


def sparkline(values: list[float], most: int) -> str:
    """A curve of at most `most` characters, scaled from its lowest to its highest.

    Each character is the mean of equally many values (one more or less). "" for fewer than two
    values.
    """
    if len(values) < 2:
        return ""
    n = min(most, len(values))
    cuts = [len(values) * place // n for place in range(n + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[int((value - low) * scale + 0.5)] for value in means)


def duration(seconds: float) -> str:
    """ "45 s", "3:07", "2:03:45"."""
    total = round(max(0.0, seconds))
    if total < 60:
        return f"{total} s"
    minutes, rest = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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
