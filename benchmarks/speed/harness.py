"""Sides take turns on the same work; ratios are of medians, and of equal work only.

One process a side, one at work at a time, one round each to warm up, then A B A B: a busy machine
hits all of them. Where every side may choose its precision, each precision is a process of its own
and the faster one counts; one that a trial round shows to be far behind is let go.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks.speed.side import Options

ROOT = Path(__file__).parents[2]
FAR_BEHIND = 1.5  # times the CPU time of the same side at its other precision
LOG_LINES = 20  # of a side that failed


class Refused(Exception):
    """The rounds cannot be compared: a side failed or did other work than another."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One process: a side at one precision. python: the interpreter that has its packages."""

    side: str
    module: str
    python: str
    options: Options

    @property
    def name(self) -> str:
        """What tables and files call it."""
        return f"{self.side}-{self.options.precision}"


@dataclass(frozen=True, slots=True)
class Measured:
    """One round: seconds by the wall clock, CPU seconds of all its processes, work, peak memory."""

    seconds: float
    cpu_seconds: float
    counts: Mapping[str, int]
    peak_bytes: int


@dataclass(slots=True)
class Results:
    """All rounds of one contestant, warm-up and trial left out."""

    contestant: Contestant
    versions: Mapping[str, str]
    rounds: list[Measured] = field(default_factory=list[Measured])

    def median(self, quantity: str) -> float:
        """Of "seconds", "cpu_seconds" or "peak_bytes"."""
        return statistics.median(getattr(measurement, quantity) for measurement in self.rounds)


class Child:
    """A worker process, spoken to in JSON lines."""

    def __init__(self, contestant: Contestant, folder: Path) -> None:
        self.contestant = contestant
        self._log = folder / f"{contestant.name}.log"
        threads = str(contestant.options.threads)
        command = [contestant.python, "-m", "benchmarks.speed.worker", contestant.module]
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [*command, str(folder), contestant.options.to_json()],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ready(self) -> Mapping[str, str]:
        """Wait until it is prepared; its versions."""
        return self._answer()["ready"]

    def round(self, number: int) -> Measured:
        """Let it do one round."""
        assert self._process.stdin is not None
        print(json.dumps({"round": number}), file=self._process.stdin, flush=True)
        return Measured(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = self._log.read_text("utf-8", "replace").splitlines()[-LOG_LINES:]
            raise Refused("\n".join([f"{self.contestant.name} ended before its answer:", *last]))
        return json.loads(line)


def check_equal(measured: Mapping[str, Mapping[str, int]], equal: Sequence[str]) -> None:
    """No ratio is bought by doing less: raises Refused where counts of `equal` differ or lack."""
    for key in equal:
        values = {name: counts.get(key) for name, counts in measured.items()}
        if None in values.values() or len(set(values.values())) > 1:
            raise Refused(f"{key} must be the same on all sides, and is {values}")


def compete(
    contestants: Sequence[Contestant], folder: Path, *, rounds: int, equal: Sequence[str]
) -> list[Results]:
    """All rounds of all contestants, in turns. Raises Refused."""
    children: list[Child] = []
    try:
        results: dict[str, Results] = {}
        for contestant in contestants:  # one after the other: a loading side disturbs nobody
            children.append(Child(contestant, folder))
            results[contestant.name] = Results(contestant, children[-1].ready())
        together(children, 0, equal)
        children = drop_far_behind(children, equal)
        for number in range(1, rounds + 1):
            for name, measured in together(children, number, equal).items():
                results[name].rounds.append(measured)
            print(f"round {number} of {rounds}", file=sys.stderr)
        return [side_result for side_result in results.values() if side_result.rounds]
    finally:
        for child in children:
            child.__exit__()


def together(children: Sequence[Child], number: int, equal: Sequence[str]) -> dict[str, Measured]:
    """One round of everybody, one after the other."""
    measured = {child.contestant.name: child.round(number) for child in children}
    check_equal({name: measurement.counts for name, measurement in measured.items()}, equal)
    return measured


def drop_far_behind(children: list[Child], equal: Sequence[str]) -> list[Child]:
    """Where a side runs at two precisions, a trial round; the much slower one ends here."""
    if len({child.contestant.side for child in children}) == len(children):
        return children
    trial = together(children, 0, equal)
    best: dict[str, float] = {}
    for child in children:
        side, cpu = child.contestant.side, trial[child.contestant.name].cpu_seconds
        best[side] = min(cpu, best.get(side, cpu))
    kept: list[Child] = []
    for child in children:
        own_seconds = trial[child.contestant.name].cpu_seconds
        if own_seconds > FAR_BEHIND * best[child.contestant.side]:
            print(f"{child.contestant.name} is far behind and ends here", file=sys.stderr)
            child.__exit__()
        else:
            kept.append(child)
    return kept


def fastest(results: Sequence[Results], side: str) -> Results:
    """The side at its best precision, by the median of CPU time: the clock is others' too."""
    own_results = [side_result for side_result in results if side_result.contestant.side == side]
    return min(own_results, key=lambda side_result: side_result.median("cpu_seconds"))


def ratio(ours: Results, theirs: Results, quantity: str) -> dict[str, float]:
    """Theirs over ours: of the medians, and the least and the most that one pair of rounds gave."""
    pairs = [
        getattr(b, quantity) / getattr(a, quantity)
        for a, b in zip(ours.rounds, theirs.rounds, strict=True)
    ]
    return {
        "of_medians": theirs.median(quantity) / ours.median(quantity),
        "min": min(pairs),
        "max": max(pairs),
    }
