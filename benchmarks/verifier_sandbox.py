"""What the walls around verifiers of others cost per score, beside the same verifier without them.

    python -m benchmarks.verifier_sandbox --samples 512 --rounds 5 --to verifier_sandbox.json

Each verifier scores the same samples in one worker: shut in (`sandbox = true`) and as you
(`sandbox = false`), one after the other in every round. The JSON has the command, the layer, and
for each the median milliseconds of CPU time per score (controller, worker and its children
together), every round's figure, and the ratio of the medians.
"""

import argparse
import json
import platform
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from postgrad.core.records import Prompt, Rollout, Turn
from postgrad.data.gym import read_gym
from postgrad.rewards.descendants import cpu_of_this_process
from postgrad.rewards.sandbox.enclosure import describe
from postgrad.rewards.scorer import Scorer
from postgrad.rewards.settings import RewardSettings, ScoringSettings


def exact(prompt: Any, rollout: Any) -> float:
    """A user's function that does next to nothing."""
    return float(rollout.text == prompt.answer)


CASES: dict[str, tuple[str, str | None, str]] = {  # type, task of reasoning-gym, text of a sample
    "reasoning_gym: spell_backward": ("reasoning_gym", "spell_backward", "sample {}"),
    "reasoning_gym: countdown, which evaluates": ("reasoning_gym", "countdown", "{} + 1"),
    "math: boxed": ("math", None, r"so it is \boxed{{\frac{{{}}}{{2}}}}"),
    "math: plain, which evaluates": ("math", None, "so it is {}/4+1"),
    "a function of yours": ("benchmarks.verifier_sandbox:exact", None, "sample {}"),
}


def group(case: str, samples: int, first: int) -> tuple[Prompt, list[Rollout]]:
    """One prompt with as many different samples."""
    _, task, text = CASES[case]
    ids = np.zeros(1, np.int32)
    row = dict(next(iter(read_gym(task, {}, 1, 0)))[1]) if task else {"answer": "1/2"}
    turn = Turn("policy", ids, np.zeros(1, np.float32))
    rollouts = [
        Rollout(first, n, (turn,), "stop", ((0, 1),), text.format(first + n))
        for n in range(samples)
    ]
    return Prompt(first, ids, "?", row["answer"], "benchmark", first, row), rollouts


def milliseconds(scorer: Scorer, case: str, samples: int, first: int) -> float:
    """CPU time of one score."""
    batch, before = group(case, samples, first), cpu_of_this_process()
    scored = scorer.score([batch])[0]
    assert not scored.failures
    return 1e3 * (cpu_of_this_process() - before) / samples


def measure(case: str, samples: int, rounds: int) -> dict[str, Any]:
    """Both ways in turns, after a warm-up of each."""
    scoring = ScoringSettings(workers=1)
    kind = CASES[case][0]
    with (
        Scorer([RewardSettings(type=kind, name="v", sandbox=True)], scoring) as shut,
        Scorer([RewardSettings(type=kind, name="v", sandbox=False)], scoring) as bare,
    ):
        figures: dict[str, list[float]] = {"shut in": [], "as you": []}
        for number in range(rounds + 1):
            for name, scorer in (("shut in", shut), ("as you", bare)):
                figures[name].append(milliseconds(scorer, case, samples, number * samples))
    measured = {name: values[1:] for name, values in figures.items()}
    medians = {name: statistics.median(values) for name, values in measured.items()}
    return {
        "cpu_ms_per_score": medians,
        "ratio": medians["shut in"] / medians["as you"],
        "rounds": measured,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    result = {
        "command": shlex.join(["python", "-m", "benchmarks.verifier_sandbox", *sys.argv[1:]]),
        "machine": platform.platform(),
        "layer": describe(),
        "cases": {case: measure(case, options.samples, options.rounds) for case in CASES},
    }
    for case, figures in result["cases"].items():
        medians = figures["cpu_ms_per_score"]
        print(f"{case}: {medians['shut in']:.3f} ms shut in, {medians['as you']:.3f} as you")
    if options.to:
        options.to.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
