"""What a small RL run walks through: the files of one step, and the rooms that see the recipe.

    PYTHONPATH=src:tests python tests/helpers/house.py

It trains the job "grpo with kl" of helpers.jobs under `sys.setprofile`, which sees the main thread
of the process, and prints one line of JSON.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import postgrad
from helpers.jobs import write_recipe
from postgrad import train
from postgrad.recipe.load import load_recipe

SOURCE = Path(postgrad.__file__).parent
WARM = 2  # the first step that is measured: the one before fills caches


@dataclass
class Walk:
    """Watches a run as its profile function."""

    recipe: type[Any]
    steps: int = 0  # that have begun
    entered: dict[int, set[str]] = field(default_factory=dict[int, set[str]])  # files by step
    stays: list[str] = field(default_factory=list[str])  # rooms, until the first step begins
    _step: FrameType | None = None  # the call of the job's step that is not over

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(str(SOURCE)):
            return
        if event == "return" and frame is self._step:
            self._step = None
        if event != "call":
            return
        path = Path(code.co_filename).relative_to(SOURCE)
        if path.name == "rl.py" and code.co_name == "step":
            self.steps, self._step = self.steps + 1, frame
        if self.steps >= WARM and self._step is not None:
            self.entered.setdefault(self.steps, set()).add(str(path))
        if self.steps == 0 and self._sees_recipe(frame) and self.stays[-1:] != [path.parts[0]]:
            self.stays.append(path.parts[0])

    @property
    def files(self) -> set[str]:
        """Of which a function ran in every warm step; code for slow verifiers runs only in some."""
        return set.intersection(*self.entered.values())

    def _sees_recipe(self, frame: FrameType) -> bool:
        """Whether a recipe is among the arguments. Methods of the recipe itself do not count."""
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = (frame.f_locals.get(name) for name in names if name != "self")
        return any(isinstance(value, self.recipe) for value in values)


def climbs(stays: Sequence[str], rooms: Sequence[str]) -> int:
    """How often a stay is in a higher room than the stay before. rooms: the highest first."""
    return sum(rooms.index(room) < rooms.index(before) for before, room in pairwise(stays))


def walk_through(folder: Path) -> Walk:
    """Trains the recipe in `folder`."""
    recipe = load_recipe(write_recipe("grpo with kl", folder), ["--run_dir", str(folder / "run")])
    walk = Walk(type(recipe))
    before = sys.getprofile()
    sys.setprofile(walk)
    try:
        train(recipe, quiet=True)
    finally:
        sys.setprofile(before)
    return walk


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        walk = walk_through(Path(folder))
    print(json.dumps({"files": len(walk.files), "stays": len(walk.stays), "rooms": walk.stays}))


if __name__ == "__main__":
    main()
