"""A picture of `plan --scale`: seconds of a step over the number of devices, a line a staleness.

Both axes are logarithmic: a line that falls divides a step over the devices that are added, one
that lies flat has reached its longest answer. SVG without scripts; its colours follow the reader's
system.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from postgrad.core.errors import UsageError
from postgrad.core.files import write_text

ScaleCurves = Mapping[int, Mapping[int, float]]  # staleness -> devices -> seconds of a step

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 110, 40, 48
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #3b4252 }
  .grid { stroke: #d6dae2; stroke-width: 1 }
  .line { stroke-width: 2.2; fill: none }
  .s0 { stroke: #5b6275; fill: #5b6275 } .s1 { stroke: #2f4fd0; fill: #2f4fd0 }
  .s2 { stroke: #0b7a75; fill: #0b7a75 } .s3 { stroke: #a8590a; fill: #a8590a }
  .s4 { stroke: #a02c6d; fill: #a02c6d }
  .line { fill: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #cfd6e6 } .grid { stroke: #434b5e }
    .s0 { stroke: #a9b0c2; fill: #a9b0c2 } .s1 { stroke: #8fa8ff; fill: #8fa8ff }
    .s2 { stroke: #58c9c2; fill: #58c9c2 } .s3 { stroke: #f0a860; fill: #f0a860 }
    .s4 { stroke: #f08cc0; fill: #f08cc0 }
    .line { fill: none }
  }
"""


def write_picture(path: Path, title: str, curves: ScaleCurves) -> None:
    """Writes the picture. Raises UsageError where the file cannot be written."""
    try:
        write_text(path, picture(title, curves))
    except OSError as error:
        raise UsageError(f"--svg {path} cannot be written: {error}; name another file") from error


def picture(title: str, curves: ScaleCurves) -> str:
    """The SVG. Every staleness has seconds for the same numbers of devices."""
    devices = sorted({count for line in curves.values() for count in line})
    values = [seconds for line in curves.values() for seconds in line.values()]
    marks = _marks(min(values), max(values))
    across = _Axis(devices[0], devices[-1], LEFT, WIDTH - RIGHT)
    up = _Axis(marks[0], marks[-1], HEIGHT - BOTTOM, TOP)
    words = "; ".join(
        f"max_staleness {staleness}: {line[devices[0]]:.3g} s with {devices[0]}, "
        f"{line[devices[-1]]:.3g} s with {devices[-1]}"
        for staleness, line in curves.items()
    )
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}: seconds of a step by devices. {escape(words)}</title>",
        f"<style>{STYLE}</style>",
        f'<text x="{LEFT}" y="22">{escape(title)}: seconds of a step</text>',
        *_grid(devices, marks, across, up),
        *_lines(curves, across, up),
        "</svg>\n",
    ])  # fmt: skip


class _Axis:
    """A logarithmic axis from `low` to `high`, between two places on the picture."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._start = math.log(low), start
        self._per = (end - start) / ((math.log(high) - self._low) or 1.0)

    def at(self, value: float) -> float:
        return round(self._start + (math.log(value) - self._low) * self._per, 1)


def _marks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from at most `low` to at least `high`."""
    first = math.floor(math.log10(low))
    steps = [factor * 10.0**power for power in range(first, first + 12) for factor in (1, 2, 5)]
    begin = max(n for n, step in enumerate(steps) if step <= low * (1 + 1e-9))
    end = min(n for n, step in enumerate(steps) if step >= high * (1 - 1e-9))
    return steps[begin : max(end, begin + 1) + 1]


def _grid(
    devices: Sequence[int], marks: Sequence[float], across: _Axis, up: _Axis
) -> Iterator[str]:
    for mark in marks:
        y = up.at(mark)
        yield f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{mark:g}</text>'
    for count in devices:
        x = across.at(count)
        yield f'<text x="{x}" y="{HEIGHT - 26}" text-anchor="middle">{count}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">devices</text>'


def _lines(curves: ScaleCurves, across: _Axis, up: _Axis) -> Iterator[str]:
    """A line for each staleness, with its name at its end; names keep a line's height apart."""
    below = -math.inf
    ends = sorted(curves, key=lambda staleness: -curves[staleness][max(curves[staleness])])
    for staleness in ends:
        kind, line = list(curves).index(staleness) % 5, curves[staleness]
        points = " ".join(f"{across.at(n)},{up.at(line[n])}" for n in sorted(line))
        yield f'<polyline class="line s{kind}" points="{points}"/>'
        for n in line:
            yield f'<circle class="s{kind}" cx="{across.at(n)}" cy="{up.at(line[n])}" r="3"/>'
        below = max(up.at(line[max(line)]) + 4, below + 16)
        yield f'<text x="{WIDTH - RIGHT + 8}" y="{below}">staleness {staleness}</text>'
