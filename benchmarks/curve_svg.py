"""A small picture of how a number went over the steps of a few runs, as SVG text.

Readable in light and in dark mode: colours follow the reader's system. No dependency, no script.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

Curve = Mapping[int, float]  # step -> value

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 44
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #3b4252 }
  .grid { stroke: #d6dae2; stroke-width: 1 }
  .seed { stroke: #7d8bb0; stroke-width: 1.2; fill: none; opacity: 0.8 }
  .mean { stroke: #2f4fd0; stroke-width: 2.6; fill: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #cfd6e6 }
    .grid { stroke: #434b5e }
    .seed { stroke: #8b97bb }
    .mean { stroke: #8fa8ff }
  }
"""


def picture(curves: Mapping[str, Curve], title: str) -> str:
    """SVG: a thin line a run and a thick one for their mean. curves: by seed."""
    steps = sorted({0, *(step for points in curves.values() for step in points)})
    values = [value for points in curves.values() for value in points.values()]
    ticks = ticks_between(min(values), max(values))
    across, up = _scale(steps, LEFT, WIDTH - RIGHT), _scale(ticks, HEIGHT - BOTTOM, TOP)
    lines = [_line(points, across, up, "seed") for points in curves.values()]
    if len(curves) > 1:
        lines.append(_line(mean(curves), across, up, "mean"))
    else:
        lines = [_line(points, across, up, "mean") for points in curves.values()]
    words = f"{title}: {_described(mean(curves))}"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(words)}</title>",
        f"<style>{STYLE}</style>",
        f'<text x="{LEFT}" y="20">{escape(title)}</text>',
        *_grid(steps, ticks, across, up),
        *lines,
        "</svg>\n",
    ])  # fmt: skip


def mean(curves: Mapping[str, Curve]) -> dict[int, float]:
    """Of the steps that all runs have."""
    shared = sorted(set.intersection(*(set(points) for points in curves.values())))
    return {step: sum(points[step] for points in curves.values()) / len(curves) for step in shared}


def ticks_between(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about `count` of them."""
    span = (high - low) or abs(high) or 1.0
    raw = span / (count - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, max(last, first + 1) + 1)]


def _scale(values: Sequence[float], start: float, end: float) -> Mapping[str, float]:
    low, high = min(values), max(values)
    return {"low": low, "start": start, "per": (end - start) / ((high - low) or 1.0)}


def _at(scale: Mapping[str, float], value: float) -> float:
    return round(scale["start"] + (value - scale["low"]) * scale["per"], 1)


def _line(curve: Curve, across: Mapping[str, float], up: Mapping[str, float], kind: str) -> str:
    points = " ".join(f"{_at(across, s)},{_at(up, v)}" for s, v in sorted(curve.items()))
    return f'<polyline class="{kind}" points="{points}"/>'


def _grid(
    steps: Sequence[int],
    ticks: Sequence[float],
    across: Mapping[str, float],
    up: Mapping[str, float],
) -> list[str]:
    elements: list[str] = []
    for tick in ticks:
        y = _at(up, tick)
        elements.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        elements.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    marks = [tick for tick in ticks_between(steps[0], steps[-1], 6) if tick <= steps[-1]]
    for mark in marks:
        x = _at(across, mark)
        elements.append(f'<text x="{x}" y="{HEIGHT - 22}" text-anchor="middle">{mark:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    elements.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">step</text>')
    return elements


def _described(curve: Curve) -> str:
    """The curve for those who do not see it."""
    first, last = min(curve), max(curve)
    return f"{curve[first]:.3g} at step {first}, {curve[last]:.3g} at step {last}"
