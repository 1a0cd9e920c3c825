"""Reads a run directory into messages for a page: each once, in order.

The report reads them all at once, the watch page polls. A message is a JSON object with a `kind`:
"run" (recipe, versions, summary, plan), "metrics", "evaluations" and "events" (lines), "groups"
(samples), "counts" (how many samples there are and are shown), "trouble" (what could not be read),
"reset" (the directory holds another run, or lines were removed: discard everything).
"""

import base64
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from postgrad.core.media import IMAGES
from postgrad.core.members import SUFFIX, open_lines
from postgrad.core.untrusted import readable
from postgrad.observe.follow import Followed, parse, read_object
from postgrad.observe.report.samples import (
    Pieces,
    body,
    group_row,
    pictures,
    pieces_of,
    vocabulary,
)
from postgrad.observe.report.selection import Cap, Group, SampleSelection, heads
from postgrad.observe.run_dir import PLAN, RECIPE, SUMMARY

PageMessage = dict[str, Any]
SCALE = "scale.svg"  # where `postgrad plan --scale --svg` was told to write it
WHOLE = (RECIPE, SUMMARY, PLAN, SCALE)  # files that are replaced, not appended to
MOST_PICTURE = 2**18  # bytes of a picture
LOGS = {"metrics": "metrics.jsonl", "evaluations": "eval.jsonl", "events": "events.jsonl"}
SAMPLES = "samples.jsonl"
EVAL_SAMPLES = "eval_samples.jsonl"
SHARE = 0.25  # of the cap that is for samples of evaluations
GROUPS_A_MESSAGE = 32
IMAGES_BYTES = 2**24  # of the images on a page
DIGITS = 7  # significant, of metrics: float32 has no more


class RunReader:
    """Reads a run directory, without writing or locking.

    number: of the run on the page. about: recipe -> further keys of the "run" message.
    expected_steps: of a run that is under way, see `SampleSelection`.

    Samples of evaluations are groups like those of training, with "evaluated"; they have a part of
    the cap for themselves.
    """

    def __init__(
        self,
        path: Path,
        number: int,
        cap: Cap,
        about: Callable[[dict[str, Any]], dict[str, Any]] = lambda recipe: {},
        *,
        expected_steps: int = 0,
    ) -> None:
        self.path = path
        self._number = number
        self._cap = cap
        self._about = about
        self._expected_steps = expected_steps
        self._begin()

    def poll(self) -> list[PageMessage]:
        """The messages since the last call."""
        messages: list[PageMessage] = []
        sampled = (log for log, _ in self._sampled.values())
        if any(log.rewritten() for log in (*self._logs.values(), *sampled)):
            self._begin()
            messages.append({"kind": "reset"})
        messages += self._whole_files()
        for kind, log in self._logs.items():
            messages += self._lines(kind, log)
        for name in self._sampled:
            messages += self._groups(name)
        return [{**message, "run": self._number} for message in messages]

    def bodies(self, numbers: Sequence[int], room: int = IMAGES_BYTES) -> dict[str, Any]:
        """{"vocab": token id -> text, "bodies": number -> body, "images": hash -> image} of samples
        that a page shows. room: bytes of images.

        Samples whose lines cannot be read any more are left out.
        """
        bodies: dict[int, dict[str, Any]] = {}
        for name in self._sampled:
            wanted = [n for n in numbers if 0 <= n < len(self._shown) and self._shown[n][0] == name]
            if not wanted:
                continue
            with open_lines(self.path / name) as file:
                for number in wanted:
                    _, start, length = self._shown[number]
                    file.seek(start)
                    if (line := parse(file.read(length))) is not None:
                        bodies[number] = body(line, self._pieces)
        read = list(bodies.values())
        images = pictures(read, self.path / IMAGES, room)
        return {"vocab": vocabulary(read, self._pieces), "bodies": bodies, "images": images}

    @property
    def samples(self) -> int:
        """How many samples the page shows."""
        return len(self._shown)

    @property
    def unwritten_seconds(self) -> float:
        """Seconds since the run wrote its recipe or a line of a log."""
        names = (RECIPE, *LOGS.values(), *self._sampled)
        files = [self.path / (name + end) for name in names for end in ("", SUFFIX)]
        written = max((path.stat().st_mtime for path in files if readable(path)), default=0.0)
        return max(0.0, time.time() - written)

    def _begin(self) -> None:
        self._logs = {kind: Followed(self.path / name) for kind, name in LOGS.items()}
        held = Cap(self._cap.samples * SHARE, self._cap.bytes * SHARE)
        self._sampled = {
            SAMPLES: (
                Followed(self.path / SAMPLES),
                SampleSelection(self._cap, self._expected_steps),
            ),
            EVAL_SAMPLES: (
                Followed(self.path / EVAL_SAMPLES),
                SampleSelection(held, self._expected_evaluations()),
            ),
        }
        self._shown: list[tuple[str, int, int]] = []  # file, offset and bytes of each sample
        self._signature: tuple[Any, ...] = ()
        self._pieces: Pieces | None = None

    def _whole_files(self) -> Iterator[PageMessage]:
        signature = tuple(_signature(self.path / name) for name in WHOLE)
        if signature == self._signature:
            return
        self._signature = signature
        recipe_file = read_object(self.path / RECIPE) or {}
        recipe = recipe_file.get("recipe")
        recipe = recipe if isinstance(recipe, dict) else {}
        yield {
            "kind": "run",
            "name": self.path.resolve().name,
            "path": str(self.path),
            "recipe": recipe,
            "versions": recipe_file.get("versions"),
            "summary": read_object(self.path / SUMMARY),
            "plan": _newest(read_object(self.path / PLAN)),
            "scale": _picture(self.path / SCALE),
            **self._about(recipe),
        }
        if not recipe_file:
            yield _trouble(RECIPE, "there is none, or it cannot be read", [])

    def _lines(self, kind: str, log: Followed) -> Iterator[PageMessage]:
        unreadable: list[int] = []
        readable: list[dict[str, Any]] = []
        for start, line in log.lines():
            parsed = parse(line)
            if parsed is None:
                unreadable.append(start)
            else:
                readable.append(_rounded(parsed))
        if readable:
            yield {"kind": kind, "lines": readable}
        if unreadable:
            yield _trouble(log.path.name, "lines are no JSON objects", unreadable)

    def _expected_evaluations(self) -> int:
        """How many evaluations a run of `expected_steps` has; 0 where it is not under way."""
        recipe = (read_object(self.path / RECIPE) or {}).get("recipe")
        evaluation = recipe.get("eval") if isinstance(recipe, dict) else None
        every = evaluation.get("every") if isinstance(evaluation, dict) else None
        if not self._expected_steps:
            return 0
        between = self._expected_steps // every if isinstance(every, int) and every > 0 else 0
        return between + 2  # at the start and at the end

    def _groups(self, name: str) -> Iterator[PageMessage]:
        unreadable: list[int] = []
        log, selection = self._sampled[name]
        before = selection.seen
        chosen = selection.take(heads(log.lines(), unreadable))
        if chosen:
            if self._pieces is None:
                recipe_file = read_object(self.path / RECIPE) or {}
                recipe = recipe_file.get("recipe")
                model = recipe.get("model") if isinstance(recipe, dict) else None
                self._pieces = pieces_of(self.path, model)
            with open_lines(self.path / name) as file:
                rows = [self._row(file, name, group, unreadable) for group in chosen]
                rows = [row for row in rows if row["samples"]]
                for row in rows if name == EVAL_SAMPLES else ():
                    row["evaluated"] = True
                yield from _batched(rows)
        if selection.seen != before:
            seen = sum(of_file.seen for _, of_file in self._sampled.values())
            counts = {"samples": seen, "shown": len(self._shown)}
            yield {"kind": "counts", "pieces": self._pieces is not None, **counts}
        if unreadable:
            yield _trouble(name, "lines are no samples", unreadable)

    def _row(self, file: Any, name: str, group: Group, unreadable: list[int]) -> dict[str, Any]:
        lines: list[tuple[int, dict[str, Any]]] = []
        for start, length in group.spans:
            file.seek(start)
            line = parse(file.read(length))
            if line is None:
                unreadable.append(start)
            else:
                lines.append((len(self._shown), line))
                self._shown.append((name, start, length))
        return group_row(lines) if lines else {"samples": []}


def _newest(plan: dict[str, Any] | None) -> Any:
    """The last entry of plan.json: a run that is resumed is planned again."""
    entries = plan.get("plans") if plan else None
    return entries[-1] if isinstance(entries, list) and entries else None


def _picture(path: Path) -> str | None:
    """An SVG as the address of an image, where no script of it runs and nothing is loaded; None
    where there is none, or one of more than MOST_PICTURE bytes.
    """
    try:
        if not path.is_file() or path.stat().st_size > MOST_PICTURE:
            return None
        return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"
    except OSError:
        return None


def _batched(rows: list[dict[str, Any]]) -> Iterator[PageMessage]:
    for start in range(0, len(rows), GROUPS_A_MESSAGE):
        yield {"kind": "groups", "groups": rows[start : start + GROUPS_A_MESSAGE]}


def _trouble(name: str, problem: str, places: list[int]) -> PageMessage:
    at = f": {len(places)}, the first at byte {places[0]}" if places else ""
    return {"kind": "trouble", "message": f"{name}: {problem}{at}"}


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _rounded(line: dict[str, Any]) -> dict[str, Any]:
    return {
        key: float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
        for key, value in line.items()
    }


def expected_steps(recipe: dict[str, Any]) -> int:
    """The `steps` of a recipe; 0 where its length is set in another way."""
    steps = recipe.get("steps")
    return steps if isinstance(steps, int) else 0
