"""Short programs a second in the sandbox, as a run has them: through reward workers.

    python benchmarks/sandbox.py --programs 400 --workers 2 --rounds 3 --to sandbox.json

Every sample is another program that reads a line and prints one, with one test; half of them are
right. The JSON has the command, the layer, every round's seconds, and programs a second: the median
on the clock, and what the processors would give if nobody else used them (CPU seconds of workers,
sandbox and programs together).
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from postgrad.core.records import Prompt, Rollout, Turn
from postgrad.rewards.descendants import cpu_of_this_process
from postgrad.rewards.sandbox.choice import describe
from postgrad.rewards.scorer import Scorer
from postgrad.rewards.settings import RewardSettings, ScoringSettings

PROGRAM = "```python\nn = int(input())\nprint(n * n + {place} * ({place} % 2))\n```"


def group(programs: int, first: int) -> tuple[Prompt, list[Rollout]]:
    """One prompt with as many samples as there are programs."""
    ids = np.zeros(1, np.int32)
    tests = json.dumps({"inputs": ["12\n"], "outputs": ["144\n"]})
    turn = Turn("policy", ids, np.zeros(1, np.float32))
    texts = [PROGRAM.format(place=first + place) for place in range(programs)]
    rollouts = [Rollout(first, n, (turn,), "stop", ((0, 1),), text) for n, text in enumerate(texts)]
    return Prompt(first, ids, "Square it.", tests, "benchmark", first, {}), rollouts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    seconds: list[float] = []
    used: list[float] = []
    with Scorer([RewardSettings(type="code")], ScoringSettings(workers=options.workers)) as scorer:
        scorer.score([group(8 * options.workers, 0)])  # until every worker is ready
        for number in range(options.rounds):
            pair = group(options.programs, (number + 1) * options.programs)
            started, before = time.perf_counter(), cpu_of_this_process()
            scored = scorer.score([pair])[0]
            seconds.append(time.perf_counter() - started)
            used.append(cpu_of_this_process() - before)
            assert not scored.failures
            assert float(scored.total.sum()) == options.programs / 2
    result = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "layer": describe(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "programs": options.programs,
        "workers": options.workers,
        "seconds": seconds,
        "cpu_seconds": used,
        "programs_per_second": options.programs / statistics.median(seconds),
        "programs_per_cpu_second": options.programs / statistics.median(used),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.to:
        options.to.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
