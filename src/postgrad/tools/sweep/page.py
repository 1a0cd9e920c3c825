"""The page of a sweep: one HTML file without a program, which loads nothing from a network.

It has what `postgrad report` of a few runs lacks: any number of runs in order, with the intervals
on one scale, the verdict, and the metric over the steps of all runs in one picture. It links to the
reports of single runs where these have been written.
"""

import base64
import hashlib
import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from postgrad.core.files import whole_file
from postgrad.core.text import how_many
from postgrad.tools.pages import REPORT
from postgrad.tools.sweep import seeds
from postgrad.tools.sweep.results import Standing, TrialResult

PAGE = "sweep.html"
WIDTH, HEIGHT, LEFT, BOTTOM = 720, 260, 76, 28  # of the picture of curves
BAR = 220  # width of the column of intervals
MOST_POINTS = 300  # of a curve
MOST_COLOURS = 6  # further runs are grey: more colours cannot be told apart
STYLE = """
:root { color-scheme: light dark; --line: #8886; --quiet: #6a6f76; --best: #0b6e4f;
  --c0: #0b6e4f; --c1: #2f5fd0; --c2: #b3570b; --c3: #8a3ab9; --c4: #b5233b; --c5: #0f7f8c; }
@media (prefers-color-scheme: dark) { :root { --quiet: #9aa1a9; --best: #4cc79b; --c0: #4cc79b;
  --c1: #86a8ff; --c2: #f0a35e; --c3: #cf97ef; --c4: #f48a9c; --c5: #5fcbd8; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.verdict { border-left: 4px solid var(--best); padding: .2rem 0 .2rem .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--line); }
th, td { white-space: nowrap; } td:last-child { white-space: normal; min-width: 12rem; }
th { font-weight: 600; } td.n, th.n { text-align: right; }
.quiet { color: var(--quiet); } .best td:first-child { font-weight: 600; }
svg { display: block; max-width: 100%; height: auto; overflow: visible; }
table svg { max-width: none; }
svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
@media (max-width: 40rem) { svg text { font-size: 18px; }
  .swept { display: none; } }  /* the name of a run says them too */
.axis { stroke: var(--line); } .ends { stroke: currentColor; stroke-width: 2; }
.band { fill: var(--best); opacity: .14; } .dot { fill: currentColor; }
.curve { fill: none; stroke-width: 2; stroke: var(--quiet); opacity: .9; }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .45em;
  background: var(--quiet); }
"""
COLOURS = "".join(
    f".k{n} {{ stroke: var(--c{n}); }} .key.k{n} {{ background: var(--c{n}); }}\n"
    for n in range(MOST_COLOURS)
)


def write_page(result: Standing) -> Path:
    """Writes sweep.html into the directory of the sweep."""
    path = result.sweep.path / PAGE
    with whole_file(path) as written:
        written.write_text("".join(document(result)), "utf-8")
    return path


def document(result: Standing) -> Iterator[str]:
    """The page in pieces."""
    style = STYLE + COLOURS
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    name = html.escape(result.sweep.path.resolve().name)
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'"
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n'
        f"<title>{name} · postgrad</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<h1>Sweep {name}</h1>\n"
    )
    states = [run.state for run in result.results]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    keys = ", ".join(f"<code>{html.escape(key)}</code>" for key in result.sweep.keys)
    yield f'<p class="quiet">{how_many(len(states), "run")} over {keys}: {", ".join(counts)}</p>\n'
    yield f'<p class="verdict">{html.escape(result.verdict())}</p>\n'
    if (result.sweep.path / REPORT).is_file():
        yield f'<p><a href="./{REPORT}">The best runs side by side</a></p>\n'
    yield from _settings(result)
    yield from _table(result)
    yield from _curves(result)
    yield "</body>\n</html>\n"


def _settings(result: Standing) -> Iterator[str]:
    """The table of settings, where seeds were swept."""
    if not result.settings or result.metric is None:
        return
    columns, rows = seeds.table(result.settings, result.metric.name)
    yield '<h2>Over the seeds</h2>\n<div class="scroll"><table>\n'
    yield f"<thead>{_row('th', columns)}</thead>\n<tbody>\n"
    for row in rows:
        yield f"{_row('td', row)}\n"
    yield "</tbody></table></div>\n<h2>Runs</h2>\n"


def _row(tag: str, cells: Sequence[str]) -> str:
    inner = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
    return f"<tr>{inner}</tr>"


def _table(result: Standing) -> Iterator[str]:
    metric = html.escape(result.metric.name if result.metric else "value")
    keys = "".join(f'<th class="swept">{html.escape(key)}</th>' for key in result.sweep.keys)
    yield (
        '<div class="scroll"><table>\n<thead><tr><th>run</th>'
        f'{keys}<th class="n">{metric}</th><th>95% interval</th>'
        '<th class="n">steps</th><th class="n">time</th><th></th></tr></thead>\n<tbody>\n'
    )
    scale = _Scale.of_runs(result.results)
    for place, run in enumerate(result.results):
        best = ' class="best"' if run is result.best else ""
        swept = "".join(
            f'<td class="swept">{html.escape(run.trial.values.get(key, ""))}</td>'
            for key in result.sweep.keys
        )
        value = "" if run.value is None else f"{run.value:.4g}"
        seconds = "" if run.seconds is None else f"{run.seconds:.0f} s"
        yield (
            f"<tr{best}><td>{_key(place, run)}{_link(result.sweep.path, run)}</td>{swept}"
            f'<td class="n">{value}</td><td>{_bar(run, result.best, scale)}</td>'
            f'<td class="n">{run.steps}</td><td class="n">{seconds}</td>'
            f"<td>{html.escape(_remark(result, run))}</td></tr>\n"
        )
    yield "</tbody></table></div>\n"


def _remark(result: Standing, run: TrialResult) -> str:
    """What the last cell of a run's row says; why it failed, where it did."""
    return f"{result.remark(run)}: {run.cause}" if run.cause else result.remark(run)


def _key(place: int, run: TrialResult) -> str:
    colour = f" k{place}" if place < MOST_COLOURS else ""
    return f'<span class="key{colour}"></span>' if run.curve else ""


def _link(folder: Path, run: TrialResult) -> str:
    """The name of a run, which leads to its report where there is one."""
    name = html.escape(run.trial.name)
    report = run.trial.judged / REPORT
    if not report.is_file():
        return name
    target = quote(str(report.relative_to(folder)))
    return f'<a href="./{html.escape(target)}">{name}</a>'


class _Scale:
    """Values on a line of `width` pixels that begins at `start`."""

    def __init__(self, values: Sequence[float], start: float, width: float) -> None:
        self.low, self.high = min(values, default=0.0), max(values, default=1.0)
        self._start, self._width = start, width

    @classmethod
    def of_runs(cls, runs: Sequence[TrialResult]) -> "_Scale":
        """The scale of all intervals."""
        values = [run.value for run in runs if run.value is not None]
        values += [end for run in runs if run.interval for end in run.interval]
        return cls(values, 4, BAR - 8)

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(self._start + self._width * share, 1)


def _bar(run: TrialResult, best: TrialResult | None, scale: _Scale) -> str:
    """The interval as a line, over a band that is that of the best run."""
    if run.value is None:
        return ""
    parts = [f'<svg width="{BAR}" height="18" viewBox="0 0 {BAR} 18" role="img">']
    text = "no interval" if run.interval is None else run.interval.text()
    parts.append(f"<title>{text}</title>")
    if best is not None and best.interval is not None:
        low, high = map(scale, best.interval)
        parts.append(f'<rect class="band" x="{low}" y="0" width="{high - low:.1f}" height="18"/>')
    if run.interval is not None:
        low, high = map(scale, run.interval)
        parts.append(f'<line class="ends" x1="{low}" x2="{high}" y1="9" y2="9"/>')
    parts.append(f'<circle class="dot" cx="{scale(run.value)}" cy="9" r="4"/></svg>')
    return "".join(parts) + f'<span class="quiet">{text}</span>'


def _curves(result: Standing) -> Iterator[str]:
    """The metric over the steps of all runs, the best drawn last."""
    curves = [(place, run.curve) for place, run in enumerate(result.results) if run.curve]
    if result.metric is None or not any(len(curve) > 1 for _, curve in curves):
        return
    steps = [step for _, curve in curves for step, _ in curve]
    values = [value for _, curve in curves for _, value in curve]
    x = _Scale(steps, LEFT, WIDTH - LEFT - 8)
    y = _Scale(values, HEIGHT - BOTTOM, BOTTOM + 8 - HEIGHT)
    yield f"<h2>{html.escape(result.metric.name)} over the steps</h2>\n"
    yield (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">'
        f"<title>{html.escape(result.metric.name)} of every run</title>"
    )
    for value in (y.low, (y.low + y.high) / 2, y.high):
        yield (
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH - 8}" y1="{y(value)}" y2="{y(value)}"/>'
            f'<text x="{LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{value:.3g}</text>'
        )
    for step in dict.fromkeys((x.low, x.high)):
        anchor = "start" if step == x.low else "end"
        yield f'<text x="{x(step)}" y="{HEIGHT - 6}" text-anchor="{anchor}">step {step}</text>'
    for place, curve in reversed(curves):
        colour = f" k{place}" if place < MOST_COLOURS else ""
        yield f'<path class="curve{colour}" d="{_path(curve, x, y)}"/>'
    yield "</svg>\n"


def _path(curve: Sequence[tuple[int, float]], x: _Scale, y: _Scale) -> str:
    """At most MOST_POINTS points of the curve, the last one among them."""
    stride = -(-len(curve) // MOST_POINTS)
    points = [*curve[:-1:stride], curve[-1]]
    return "M" + " L".join(f"{x(step)} {y(value)}" for step, value in points)
