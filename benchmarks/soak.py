"""Runs with samples ahead that are killed at random for hours: nothing is lost, memory is flat.

    PYTHONPATH=tests:. python benchmarks/soak.py --hours 2 --to benchmarks/results/soak.json

For each max_staleness of 1, 2 and 4 a run of --steps steps is trained once undisturbed. Then runs
of the same recipes begin in turn, each killed again and again after a random time of at most
--life seconds, and resumed, until it ends. Each must have every sample of every ticket once, and
the weights, optimizer, state and logs of the undisturbed run to the bit; the first that has not
ends the soak with exit code 1. Memory is that of the training process, looked at every second:
the median of each tenth of the time. Needs Linux and a C compiler, as the fault tests do.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil

from benchmarks.speed.report import machine
from helpers.faults import Fault, Machine
from helpers.jobs import write_recipe
from postgrad.core.seeds import uniform
from postgrad.observe.follow import read_lines
from postgrad.tools.verify_resume import fingerprint

JOB = "grpo of stale samples"
TENTHS = 10


@dataclass
class Memory:
    """Resident bytes of the processes that train, over time, while it is open."""

    looks: list[tuple[float, int]] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Looks once a second. The first child is the machine's server, which trains in forks."""
        began = time.monotonic()
        while not self._ended.wait(1.0):
            server = psutil.Process().children()[0]
            for trainer in server.children():
                try:
                    self.looks.append((time.monotonic() - began, trainer.memory_info().rss))
                except psutil.NoSuchProcess:
                    continue

    def end(self) -> None:
        """Stops looking."""
        self._ended.set()

    def medians(self) -> list[int]:
        """Bytes in each tenth of the time in which anything was seen."""
        last = self.looks[-1][0] + 1e-9
        tenths: list[list[int]] = [[] for _ in range(TENTHS)]
        for at, size in self.looks:
            tenths[int(TENTHS * at / last)].append(size)
        return [round(statistics.median(sizes)) for sizes in tenths if sizes]


def train(disk: Machine, recipe: Path, run: Path, fault: Fault) -> int:
    """The exit code, or minus the signal that ended it."""
    words = ["train", str(recipe), "--run_dir", str(run), "--quiet"]
    ended = disk.call("postgrad.cli.main:main", [words], run, fault)
    if ended.status not in (0, -9):
        sys.exit(f"the run ended with {ended.status}: {ended.told}")
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


def soak(options: argparse.Namespace, folder: Path, disk: Machine) -> dict[str, Any]:
    """Kills until the time is over and the run under way has ended."""
    recipes = {s: write(folder / str(s), s, options) for s in (1, 2, 4)}
    wanted: dict[int, dict[str, str]] = {}
    for staleness, recipe in recipes.items():
        run = folder / f"undisturbed {staleness}"
        train(disk, recipe, run, Fault())
        check(run, {}, options.steps)
        wanted[staleness] = fingerprint(run)
    memory = Memory()
    threading.Thread(target=memory.watch, daemon=True).start()
    kills, runs, run = dict.fromkeys(recipes, 0), dict.fromkeys(recipes, 0), folder / "run"
    began, end = time.monotonic(), time.monotonic() + 3600 * options.hours
    for staleness in cycle(recipes):
        while time.monotonic() < end or run.exists():
            lives = sum(kills.values()) + sum(runs.values())
            life = options.life * float(uniform(options.seed, "soak", lives))
            if train(disk, recipes[staleness], run, Fault(seconds=life)) == 0:
                check(run, wanted[staleness], options.steps)
                shutil.rmtree(run)
                runs[staleness] += 1
                break
            kills[staleness] += 1
        if time.monotonic() >= end:
            break
    memory.end()
    return {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "hours": round((time.monotonic() - began) / 3600, 3),
        "steps_of_a_run": options.steps,
        "kills_by_max_staleness": kills,
        "ended_runs_by_max_staleness": runs,
        "lost_or_double_samples": 0,  # the first would have ended the soak
        "resident_bytes_by_tenth": memory.medians(),
    }


def main() -> None:
    """Soaks, prints, and writes what was counted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=200, help="of a run")
    parser.add_argument("--save-steps", type=int, default=2, help="steps between checkpoints")
    parser.add_argument("--life", type=float, default=10.0, help="seconds of the longest life")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        disk = Machine(Path(name))
        result = soak(options, Path(name), disk)
        disk.close()
    text = json.dumps(result, indent=1)
    print(text)
    if options.to:
        options.to.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
