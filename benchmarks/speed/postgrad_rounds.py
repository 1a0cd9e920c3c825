"""postgrad's jobs round by round: `postgrad train` itself, which waits after the line of a step."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.speed.rounds import Counts, Ended, Rounds
from benchmarks.speed.side import Options, Round
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.training.start import train

Count = Callable[[int, Mapping[str, float]], Counts]


class Waiting(Console):
    """Says nothing; where the loop would show a step, the round has ended."""

    def __init__(self, ended: Ended, count: Count) -> None:
        super().__init__("quiet")
        self._ended = ended
        self._count = count

    def step(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        self._ended(self._count(number, metrics))


def rounds(folder: Path, options: Options, recipe: Mapping[str, Any], count: Count) -> Round:
    """One step of `recipe` a round. count: from a step's number and metrics to what was done."""
    named = {
        "run_dir": tempfile.mkdtemp(prefix="run-", dir=folder),
        "steps": 1_000_000,
        "learner": {"threads": options.threads, **recipe.get("learner", {})},
        "model": {"dtype": options.precision, "compile": "auto", **recipe.get("model", {})},
    }

    def loop(ended: Ended) -> None:
        train(parse_recipe({**recipe, **named}), Waiting(ended, count), overwrite=True)

    return Rounds(loop)
