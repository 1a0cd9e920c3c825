"""Runs with samples ahead that are killed at random for hours: nothing is lost, memory is flat.

    PYTHONPATH=tests:. python benchmarks/soak.py --hours 2 --to benchmarks/results/soak.json

For each max_staleness of 1, 2 and 4 a run of --steps steps is trained once undisturbed. Then runs
of the same recipes begin in turn, each killed again and again with SIGKILL, and resumed, until it
ends. A life is a random time of at most --life seconds, every tenth of at most --long-life. Each
run must have every sample of every ticket once, and the weights, optimizer, state and logs of the
undisturbed run to the bit; the first that has not ends the soak with exit code 1.

Memory is what a run's process, its verifier workers and its renderer hold for themselves (without
the pages that a fork shares with its parent), looked at every --look seconds from --settled seconds
after a life began: medians over the time of the soak, and over the age of a life. It is flat where
neither grows to --flat times its beginning; exit code 1 otherwise, and where no life was old enough
for a look. The result is written anew after every life, so a
soak that was cut says how far it came. Needs Linux and a C compiler, as the fault tests do.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil

from benchmarks.speed.report import machine
from helpers.faults import Fault, Machine
from helpers.jobs import write_recipe
from postgrad.core.files import write_json
from postgrad.core.seeds import uniform
from postgrad.observe.follow import read_lines
from postgrad.tools.verify_resume import fingerprint

JOB = "grpo of stale samples"
TENTHS = 10


@dataclass(frozen=True)
class Look:
    """Private bytes of all processes of a run."""

    at: float  # seconds of the soak
    age: float  # seconds of this life
    size: int


@dataclass
class Memory:
    """What the processes of runs hold, over time, until it is ended."""

    settled: float  # a younger life is not looked at: it is still importing
    every: float  # seconds between two looks
    looks: list[Look] = field(default_factory=list[Look])
    server: list[int] = field(default_factory=list[int])  # resident bytes of the runs' parent
    _ended: threading.Event = field(default_factory=threading.Event)

    def watch(self, server: int) -> None:
        """Looks again and again at the children of the process `server`: each is a run, and has
        its verifier workers and its renderer below it.
        """
        began = time.monotonic()
        while not self._ended.wait(self.every):
            parent = psutil.Process(server)
            runs = parent.children()
            if runs:  # before, the parent itself is still importing
                self.server.append(parent.memory_info().rss)
            for run in runs:
                try:
                    age = time.time() - run.create_time()
                    if age >= self.settled:
                        tree = [run, *run.children(recursive=True)]
                        size = sum(process.memory_full_info().uss for process in tree)
                        self.looks.append(Look(time.monotonic() - began, age, size))
                except psutil.NoSuchProcess:  # killed meanwhile
                    continue

    def end(self) -> None:
        """Stops looking."""
        self._ended.set()

    def figures(self) -> dict[str, Any]:
        """Median bytes in tenths of the soak, by the age of a life, and of the runs' parent."""
        looks = list(self.looks)  # the thread goes on
        if not looks:
            return {}
        length = looks[-1].at + 1e-9
        by_tenth = medians((int(TENTHS * look.at / length), look.size) for look in looks)
        ages = (2 ** (int(look.age / self.settled).bit_length() - 1) for look in looks)
        by_age = medians(zip(ages, (look.size for look in looks), strict=True))
        return {
            "looks": len(looks),
            "median_bytes_by_tenth": list(by_tenth.values()),
            "median_bytes_by_age": {
                f"{times * self.settled:g} s": n for times, n in by_age.items()
            },
            "parent_bytes_first_and_last": [self.server[0], self.server[-1]],
        }


def medians(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """The median of each key's values, by key."""
    values: dict[int, list[int]] = defaultdict(list)
    for key, value in pairs:
        values[key].append(value)
    return {key: round(statistics.median(sizes)) for key, sizes in sorted(values.items())}


def grown(figures: dict[str, Any], flat: float) -> list[str]:
    """Which memory grew to more than `flat` times its beginning."""
    series = {
        "over the soak": figures["median_bytes_by_tenth"],
        "with the age of a run": list(figures["median_bytes_by_age"].values()),
        "of the runs' parent": figures["parent_bytes_first_and_last"],
    }
    return [name for name, sizes in series.items() if sizes[-1] > flat * sizes[0]]


def train(disk: Machine, recipe: Path, run: Path, fault: Fault) -> int:
    """The exit code, or minus the signal that ended it."""
    words = ["train", str(recipe), "--run_dir", str(run), "--quiet"]
    ended = disk.call("postgrad.cli.main:main", [words], run, fault)
    if ended.status not in (0, -9):
        sys.exit(f"the run ended with {ended.status}: {ended.message}")
    return ended.status


def check(run: Path, wanted: dict[str, str], steps: int) -> None:
    """Every sample is there once, and the bits are those of the undisturbed run."""
    drawn = sorted((line["ticket"], line["sample"]) for line in read_lines(run / "samples.jsonl"))
    if drawn != [(ticket, sample) for ticket in range(4 * steps) for sample in range(4)]:
        sys.exit(f"samples are missing or double: {len(drawn)} of {16 * steps} in {run}")
    differ = {name for name, value in wanted.items() if fingerprint(run).get(name) != value}
    if differ:
        sys.exit(f"not the bits of the undisturbed run: {', '.join(sorted(differ))} in {run}")


def write(folder: Path, staleness: int, options: argparse.Namespace) -> Path:
    """The recipe of the fault tests with so many steps."""
    folder.mkdir()
    path = write_recipe(JOB, folder)
    text = path.read_text("utf-8").replace("max_staleness = 2", f"max_staleness = {staleness}")
    text = text.replace("\nsteps = 4\n", f"\nsteps = {options.steps}\n")
    text = text.replace("save_steps = 1\n", f"save_steps = {options.save_steps}\n")
    path.write_text(text.replace("every = 2\n", f"every = {options.save_steps * 5}\n"), "utf-8")
    return path


class Soak:
    """Trains and kills, and keeps count."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._disk = Machine(folder)
        self._memory = Memory(options.settled, options.look)
        self._recipes = {s: write(folder / str(s), s, options) for s in (1, 2, 4)}
        self._began = time.monotonic()
        self._kills = dict.fromkeys(self._recipes, 0)
        self._ended = dict.fromkeys(self._recipes, 0)

    def run(self) -> dict[str, Any]:
        """Kills until the time is over, and lets the run under way end. Returns the result."""
        server = (self._disk.process,)
        threading.Thread(target=self._memory.watch, args=server, daemon=True).start()
        wanted: dict[int, dict[str, str]] = {}
        for staleness, recipe in self._recipes.items():
            run = self._folder / f"undisturbed {staleness}"
            train(self._disk, recipe, run, Fault())
            check(run, {}, self._options.steps)
            wanted[staleness] = fingerprint(run)
        for staleness in cycle(self._recipes):
            self._until_it_ends(staleness, wanted[staleness])
            if self._over:
                break
        self._memory.end()
        self._disk.close()
        return self._result(completed=True)

    @property
    def _over(self) -> bool:
        enough = sum(self._kills.values()) >= self._options.kills
        return enough and time.monotonic() - self._began >= 3600 * self._options.hours

    def _until_it_ends(self, staleness: int, wanted: dict[str, str]) -> None:
        """One run with all its kills."""
        run, recipe = self._folder / "run", self._recipes[staleness]
        while train(self._disk, recipe, run, Fault(seconds=self._life())) != 0:
            self._kills[staleness] += 1
            self._result(completed=False)
        check(run, wanted, self._options.steps)
        shutil.rmtree(run)
        self._ended[staleness] += 1
        self._result(completed=False)

    def _life(self) -> float | None:
        """Seconds of the next life; None once the time is over."""
        if self._over:
            return None
        lives = sum(self._kills.values()) + sum(self._ended.values())
        most = self._options.life if lives % 10 != 9 else self._options.long_life
        return most * float(uniform(self._options.seed, "soak", lives))

    def _result(self, *, completed: bool) -> dict[str, Any]:
        """What was counted so far, also as a file."""
        options = self._options
        result = {
            "command": " ".join(["python", *sys.argv]),
            "machine": machine(),
            "hours": round((time.monotonic() - self._began) / 3600, 3),
            "whole": completed,  # false: it was cut, and the run under way was not compared
            "steps_of_a_run": options.steps,
            "kills_by_max_staleness": self._kills,
            "ended_runs_by_max_staleness": self._ended,
            "runs_with_lost_or_double_samples_or_other_bits": 0,  # the first ends the soak
            "memory": self._memory.figures(),
        }
        if options.to:
            write_json(options.to, result)
        return result


def main() -> None:
    """Soaks, prints, and writes what was counted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--kills", type=int, default=0, help="no end before so many")
    parser.add_argument("--steps", type=int, default=1000, help="of a run")
    parser.add_argument("--save-steps", type=int, default=2, help="steps between checkpoints")
    parser.add_argument("--life", type=float, default=20.0, help="seconds, at most")
    parser.add_argument("--long-life", type=float, default=300.0, help="of every tenth life")
    parser.add_argument("--settled", type=float, default=10.0, help="seconds without a look")
    parser.add_argument("--look", type=float, default=2.0, help="seconds between two looks")
    parser.add_argument("--flat", type=float, default=1.1, help="most growth of memory, as a ratio")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, help="JSON file for the result, renewed at every kill")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = Soak(options, Path(name)).run()
    print(json.dumps(result, indent=1))
    if not result["memory"]:
        sys.exit(
            f"no life was older than {options.settled:g} s, so nobody looked at memory: "
            "take longer lives (--life) or a shorter --settled"
        )
    if growing := grown(result["memory"], options.flat):
        sys.exit(f"memory grows {', '.join(growing)}")


if __name__ == "__main__":
    main()
