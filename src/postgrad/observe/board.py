"""The live block of a terminal: where a run stands and whether it is healthy, in a few lines.

Pure but for what it is told: `lines` makes the block for a width and a time. Put together by hand,
since it is drawn twice a second beside training and a table of rich costs ten times as much.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from rich.cells import cell_len, set_cell_size
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
KEPT = 240  # values of a curve
BAR = 24  # columns
NARROW = 58  # columns below which figures stand one in a line
FIGURE = 20  # columns of a figure before its curve
MOST_SENTINELS = 4

# Label; the metrics that it may be, the first that is there; format.
FIGURES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("reward",), "{:.3f}"),
    ("loss", ("loss",), "{:.4f}"),
    ("right", ("reward_model/accuracy", "policy/accuracy"), "{:.1%}"),
    ("margin", ("reward_model/margin", "policy/reward_margin"), "{:.3f}"),
    ("KL", ("kl/token_mean", "policy/kl"), "{:.4f}"),
    ("entropy", ("policy/entropy", "sampled_entropy"), "{:.3f}"),
    ("length", ("response_length",), "{:.1f}"),
    ("cut", ("truncated_fraction",), "{:.1%}"),
    ("gradient", ("policy/grad_norm", "reward_model/grad_norm"), "{:.3g}"),
    ("moved", ("sentinel/policy_moved",), "{:.4f}"),
)
HELD_OUT = {"/accuracy": "accuracy", "/loss": "eval loss"}  # what a metric ends with -> its label
SPEEDS = (("sampled", "response_tokens_per_second"), ("trained", "train_tokens_per_second"))
MEMORY, STEP = "peak_memory_bytes", "step_seconds"
FORESEEN = "foreseen/"  # of the metric whose name follows
Curves = dict[str, deque[float]]


@dataclass(slots=True)
class PhaseShown:
    """A phase under way: since when, and what is done of it."""

    name: str
    total: int | None
    began: float
    done: int = 0

    def advance(self, n: int) -> None:
        """So much more is done."""
        self.done += n


@dataclass(slots=True)
class Board:
    """What the block knows. total: steps of the run; step: those done, of which `before` were done
    when it began.
    """

    total: int
    before: int
    began: float
    unicode: bool = True
    step: int = 0
    phase: PhaseShown | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    curves: Curves = field(default_factory=Curves)
    held_out: tuple[str, float, int] | None = None  # label, value, step of the evaluation
    sentinels: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        self.step = self.before

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step has ended."""
        self.step, self.metrics = step, metrics
        for label, names, _ in FIGURES:
            value = _first(metrics, names)
            if value is not None:
                self._add(label, value)

    def evaluated(self, step: int, found: Mapping[str, float]) -> None:
        """An evaluation has ended: the first accuracy of it is shown, else the first loss."""
        for ending, label in HELD_OUT.items():
            for name, value in found.items():
                if name.endswith(ending) and math.isfinite(value):
                    self.held_out = (label, value, step)
                    self._add(label, value)
                    return

    def spoken(self, name: str, text: str | None) -> None:
        """What a sentinel says now; None: nothing any more."""
        if text is None:
            self.sentinels.pop(name, None)
        else:
            self.sentinels[name] = text

    def lines(self, width: int, now: float) -> list[Text]:
        """The block, each line narrower than `width`: the last column makes some terminals wrap."""
        width = max(20, width - 1)
        parts = [
            Text(("─" if self.unicode else "-") * width, "dim"),
            self._run(width, now),
            self._phase(width, now),
            *self._figures(width),
            *self._machine(width),
            *self._health(),
        ]
        for line in parts:
            line.truncate(width, overflow="ellipsis" if self.unicode else "crop")
        return parts

    def _add(self, label: str, value: float) -> None:
        self.curves.setdefault(label, deque(maxlen=KEPT)).append(value)

    def _run(self, width: int, now: float) -> Text:
        made, gone = self.step - self.before, now - self.began
        times = f"{duration(gone)} gone"
        if made > 0 and self.step < self.total:
            times += f", {duration(gone / made * (self.total - self.step))} left"
        share = self.step / max(1, self.total)
        return self._bar("step", share, f"{self.step}/{self.total}  {share:.0%}  {times}", width)

    def _phase(self, width: int, now: float) -> Text:
        one = self.phase
        if one is None:
            return Text("")
        seconds = f"{max(0.0, now - one.began):.0f} s"
        if not one.total:
            return Text.assemble((f"{one.name:<9} ", "bold"), seconds)
        share = min(1.0, one.done / one.total)
        return self._bar(one.name, share, f"{one.done}/{one.total}  {seconds}", width)

    def _bar(self, label: str, share: float, what: str, width: int) -> Text:
        most = max(0, min(BAR, width - cell_len(label.ljust(9)) - len(what) - 3))
        full = round(share * most)
        done, rest = ("━", "─") if self.unicode else ("=", "-")
        bar = [(done * full, "green"), (rest * (most - full), "dim")] if most >= 6 else []
        return Text.assemble((f"{label:<9} ", "bold"), *bar, f" {what}" if bar else what)

    def _figures(self, width: int) -> list[Text]:
        figures: list[tuple[str, str]] = []
        for label, names, form in FIGURES:
            value = _first(self.metrics, names)
            if value is not None:
                figures.append((label, _plain_zero(form.format(value))))
        if self.held_out is not None:
            label, value, _ = self.held_out
            shown = f"{value:.1%}" if label == "accuracy" else f"{value:.4f}"
            figures.insert(min(1, len(figures)), (label, shown))
        in_line = 2 if width >= NARROW else 1
        cells = [self._figure(label, value, width // in_line) for label, value in figures]
        found: list[Text] = []
        for at in range(0, len(cells), in_line):
            found.append(Text().append_text(cells[at]))
            for cell in cells[at + 1 : at + in_line]:
                found[-1].append_text(cell)
        return found

    def _figure(self, label: str, value: str, width: int) -> Text:
        """One label, value and curve, `width` columns wide."""
        curve, room = "", width - FIGURE - 1
        held_out = self.held_out
        if held_out is not None and label == held_out[0] and len(self.curves[label]) == 1:
            curve = f"at step {held_out[2]}"
        elif self.unicode and room >= 4:
            curve = sparkline(list(self.curves.get(label, ())), room)
        padded = set_cell_size(curve, max(0, width - FIGURE))
        return Text.assemble((f"{label:<9}", "dim"), f" {value:>9} ", (padded, "cyan"))

    def _machine(self, width: int) -> list[Text]:
        known = _with_totals(self.metrics)
        parts = [
            f"{label} {known[name]:,.0f} tok/s"
            for label, name in SPEEDS
            if math.isfinite(known.get(name, math.nan))
        ]
        parts += _against(known, MEMORY, "memory", 2**30, "GiB")
        parts += _against(known, STEP, "a step", 1, "s")
        found: list[str] = []
        for part in parts:
            if found and len(found[-1]) + 3 + len(part) <= width:
                found[-1] += f"   {part}"
            else:
                found.append(part)
        return [Text(line) for line in found]

    def _health(self) -> list[Text]:
        if not self.sentinels and self.step == self.before:
            return [Text("sentinels wait for the first step", "dim")]
        if not self.sentinels:
            return [Text("sentinels silent: nothing looks wrong", "green")]
        mark = "▲" if self.unicode else "!"
        shown = list(self.sentinels.items())[:MOST_SENTINELS]
        found = [Text(f"{mark} {name}: {text}", "yellow") for name, text in shown]
        if more := len(self.sentinels) - len(shown):
            found.append(Text(f"{mark} and {more} more", "yellow"))
        return found


def _with_totals(metrics: Mapping[str, float]) -> dict[str, float]:
    """With the whole step's seconds and most memory, beside what was foreseen of its phases."""
    known = dict(metrics)
    for ending, total, of in (("_seconds", STEP, sum), ("_memory_bytes", MEMORY, max)):
        phases = [k for k in metrics if k.endswith(ending) and "/" not in k and k != MEMORY]
        foreseen = [metrics[FORESEEN + k] for k in phases if FORESEEN + k in metrics]
        if phases and (foreseen or total == STEP):
            known[total] = of(metrics[k] for k in phases)
        if foreseen:
            known[FORESEEN + total] = of(foreseen)
    return known


def _first(metrics: Mapping[str, float], names: tuple[str, ...]) -> float | None:
    """The first of the metrics that is there, and a number."""
    return next((metrics[n] for n in names if math.isfinite(metrics.get(n, math.nan))), None)


def _against(
    known: Mapping[str, float], name: str, label: str, unit: float, what: str
) -> list[str]:
    """ "memory 3.20 GiB of 4.00 foreseen"; nothing where it was not measured."""
    value, foreseen = _first(known, (name,)), _first(known, (FORESEEN + name,))
    if value is None:
        return []
    beside = "" if foreseen is None else f" of {foreseen / unit:.2f} foreseen"
    return [f"{label} {value / unit:.2f} {what}{beside}"]


def sparkline(values: list[float], most: int) -> str:
    """At most so many characters, each the mean of equally many values (one more or less), from the
    lowest mean to the highest; "" for fewer than two values.
    """
    if len(values) < 2:
        return ""
    n = min(most, len(values))
    cuts = [len(values) * place // n for place in range(n + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[int((value - low) * scale + 0.5)] for value in means)


def _plain_zero(text: str) -> str:
    """Never -0.000."""
    return text if any(digit in text for digit in "123456789") else text.lstrip("-")


def duration(seconds: float) -> str:
    """ "45 s", "3:07", "2:03:45"."""
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
