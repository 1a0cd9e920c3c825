"""benchmarks/random_recipes.py: recipes of all jobs, and what it says of one that fails."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks import random_recipes
from benchmarks.drawn_recipes import World, draw
from benchmarks.random_recipes import Failed, check
from postgrad.core.errors import RunError


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("random") / "world")


def test_a_seed_alone_decides_a_recipe(world: World) -> None:
    assert draw(4, world, "run") == draw(4, world, "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(n, marks=pytest.mark.long) for n in range(6, 12))]
)
def test_whatever_a_recipe_says_together_is_trained_and_resumed_or_refused(
    seed: int, world: World, tmp_path: Path
) -> None:
    check(draw(seed, world, str(tmp_path / "whole")), tmp_path)


def failing(error: Exception) -> Any:
    def train(*_: Any) -> None:
        raise error

    return train


def test_an_error_of_ours_refuses_a_recipe_and_any_other_is_a_failure(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = draw(4, world, str(tmp_path / "whole"))
    monkeypatch.setattr(random_recipes, "train", failing(RunError("no memory")))
    assert check(raw, tmp_path) == "RunError: no memory"
    monkeypatch.setattr(random_recipes, "train", failing(KeyError("advantages")))
    with pytest.raises(Failed, match="train: KeyError: 'advantages'"):
        check(raw, tmp_path)


def test_a_run_that_makes_other_numbers_than_its_plan_counted_is_a_failure(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counts(*_: Any) -> dict[str, tuple[int, int]]:
        return {"rows": (9, 9), "steps": (3, 2)}

    monkeypatch.setattr(random_recipes, "train", lambda *_: {"steps": 2})
    monkeypatch.setattr(random_recipes, "rows_of_runs", lambda rows: nullcontext(rows.append(9)))
    monkeypatch.setattr(random_recipes, "counts", counts)
    with pytest.raises(Failed, match="steps: the plan counted 3, the run 2"):
        check(draw(4, world, str(tmp_path / "whole")), tmp_path)
