"""Replay: another run's samples, step by step, so that two runs differ in learning only."""

from pathlib import Path
from typing import Any

from postgrad.core.cursor import Cursor
from postgrad.core.errors import RunError, UsageError
from postgrad.core.media import IMAGES, image_store
from postgrad.core.members import SUFFIX, has_lines, open_lines
from postgrad.core.untrusted import parse_json
from postgrad.rollout.pending import PendingArrays
from postgrad.rollout.records_json import group_from_lines
from postgrad.rollout.source import NO_SAMPLES, Paused, Sampled, State

FILE = "samples.jsonl"


class ReplaySource:
    """Reads `path`, a run directory or its samples.jsonl. Only each line's offset is in memory.

    Raises UsageError when there is no such file, or a line is not a sample.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = _samples_of(path)
        if not has_lines(self._path):
            raise UsageError(
                f"rollout.replay_path: no file {self._path}; give a run directory with {FILE}"
            )
        self._offsets = self._index()
        image_store().read_too(images_of(path))

    def _index(self) -> dict[int, list[tuple[int, int]]]:
        """step -> [(byte offset, line number), ...] of its samples, in the order of the file."""
        offsets: dict[int, list[tuple[int, int]]] = {}
        sizes: dict[int, int] = {}  # of thinned steps, as they were sampled
        offset = 0
        with open_lines(self._path) as file:
            for number, raw in enumerate(file, 1):
                line = self._parse(raw, number)
                offsets.setdefault(line["step"], []).append((offset, number))
                if type(line.get("of")) is int:
                    sizes[line["step"]] = line["of"]
                offset += len(raw)
        if not offsets:
            raise UsageError(f"rollout.replay_path: {self._path} holds no samples")
        for step, size in sizes.items():
            if len(offsets[step]) < size:
                raise UsageError(
                    f"rollout.replay_path: {self._path} has {len(offsets[step])} of the {size} "
                    f"samples of step {step}, and a replay needs all: record the run again with "
                    'observe.samples = "all"'
                )
        return offsets

    def _parse(self, raw: bytes, number: int) -> dict[str, Any]:
        try:
            line = parse_json(raw)
        except ValueError as error:
            raise UsageError(f"{self._path}:{number}: not a JSON object: {error}") from error
        for key in ("step", "ticket"):
            if not isinstance(line, dict) or type(line.get(key)) is not int or line[key] < 0:
                raise UsageError(f"{self._path}:{number}: a sample needs a whole number {key!r}")
        return line

    def next(
        self, step: int, cursor: Cursor, state: State, pending: PendingArrays = NO_SAMPLES
    ) -> Sampled:
        """The groups of the recorded step `step`, with the reasons why some were filtered.

        Raises RunError where there is none, UsageError where its lines are no samples.
        """
        if step not in self._offsets:
            last = max(self._offsets)
            raise RunError(
                f"{self._path} has no samples of step {step} (its last is {last}): "
                "replay fewer steps"
            )
        by_ticket: dict[int, list[dict[str, Any]]] = {}
        first_line = self._offsets[step][0][1]
        with open_lines(self._path) as file:
            for offset, number in self._offsets[step]:
                file.seek(offset)
                line = self._parse(file.readline(), number)
                by_ticket.setdefault(line["ticket"], []).append(line)
        try:
            groups = [group_from_lines(by_ticket[ticket]) for ticket in sorted(by_ticket)]
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{self._path}: step {step}, from line {first_line}: not valid samples: {error!r}"
            ) from error
        reasons = {
            ticket: lines[0]["filtered"]
            for ticket, lines in by_ticket.items()
            if "filtered" in lines[0]
        }
        return Sampled(groups, cursor.settle(sorted(by_ticket)), reasons, state)

    def awaited(self) -> str:
        """Source.awaited: nothing is waited for."""
        return ""

    def start_ahead(self) -> bool:
        """Source.start_ahead: nothing is sampled."""
        return False

    def pause(self) -> Paused:
        """Source.pause: nothing is under way."""
        return Paused()


def images_of(path: str | Path) -> Path:
    """Where the images of a replayed run are, whether it has any or not. path: as ReplaySource
    reads it.
    """
    return _samples_of(path).parent / IMAGES


def _samples_of(path: str | Path) -> Path:
    location = Path(path)
    file = location / FILE if location.is_dir() else location
    return file.with_name(file.name.removesuffix(SUFFIX))
