"""Two thousand random kills of runs with samples ahead: each ticket once, the same bits.

    PYTHONPATH=tests:. python benchmarks/random_kills.py --to benchmarks/results/random_kills.json

For each max_staleness of 1, 2 and 4 a run of --steps steps is trained undisturbed. Then runs of the
same recipes begin, each ended with SIGKILL after random times, and resumed, until it ends by
itself. A process is a fork of one that has imported everything, so that a life costs half a second
of CPU time. Each run must have the tickets 0 to n-1 once each, as trained, filtered or failed, with
all their samples, and the bits of the undisturbed run: weights, optimizer, pending samples, state,
logs. The first that has not ends all with an error. The result is written anew every few kills.
`make test-faults` does the same as a test. Needs Linux and a C compiler.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.speed.report import machine
from helpers.faults import Fault, Machine
from helpers.random_kills import STEPS, Kills, kill_runs, train, write
from postgrad.core.files import write_json
from postgrad.tools.verify_resume import fingerprint

STALENESS = (1, 2, 4)
AT_ONCE = 20  # kills of a recipe before the next one has its turn


def result(counted: dict[int, Kills], seconds: float, fault_free: float) -> dict[str, Any]:
    """What was counted so far."""
    tickets: Counter[str] = Counter()
    for kills in counted.values():
        tickets += kills.tickets
    return {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "seconds": round(seconds),
        "seconds_of_an_undisturbed_run": round(fault_free, 2),
        "kills": sum(kills.kills for kills in counted.values()),
        "kills_by_max_staleness": {s: kills.kills for s, kills in counted.items()},
        "kills_by_newest_checkpoint": {
            s: dict(sorted(kills.steps.items())) for s, kills in counted.items()
        },
        "runs_compared_by_max_staleness": {s: kills.runs for s, kills in counted.items()},
        "tickets": dict(tickets),
        "lost_or_double_tickets": 0,  # the first would have been an error
        "runs_with_other_bits": 0,  # as above
    }


def main() -> None:
    """Kills, prints, and writes what was counted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run")
    parser.add_argument("--life", type=float, default=1.0, help="of the longest, in whole runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, help="JSON file for the result, renewed as it grows")
    options = parser.parse_args()
    began = time.monotonic()
    counted = {staleness: Kills() for staleness in STALENESS}
    with tempfile.TemporaryDirectory() as name:
        folder, disk = Path(name), Machine(Path(name))
        recipes = {s: write(folder / str(s), s, options.steps) for s in STALENESS}
        wanted: dict[int, dict[str, str]] = {}
        seconds = 0.0
        for staleness, recipe in recipes.items():
            run, start = folder / f"undisturbed {staleness}", time.monotonic()
            assert train(disk, recipe, run, Fault())
            seconds = time.monotonic() - start  # the last has no import to do
            wanted[staleness] = fingerprint(run)
        turn = 0
        while (left := options.kills - sum(kills.kills for kills in counted.values())) > 0:
            staleness = STALENESS[turn % len(STALENESS)]
            counted[staleness] += kill_runs(
                disk, recipes[staleness], min(AT_ONCE, left),
                life=options.life * seconds, seed=options.seed + turn, wanted=wanted[staleness],
            )  # fmt: skip
            turn += 1
            record = result(counted, time.monotonic() - began, seconds)
            if options.to:
                write_json(options.to, record)
        disk.close()
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
