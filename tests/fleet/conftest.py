"""Whole runs that last a second (helpers.tiny_runs), and engines of several processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_workers import Dies
from helpers.shared_engines import Shared, requests, tokens
from helpers.tiny_runs import console, make_recipe, models, reward_on_path, trained
from postgrad.rollout.engine import generate

__all__ = ["console", "make_recipe", "models", "reward_on_path", "trained"]


@pytest.fixture
def shared(make_recipe: Any, models: Any, tmp_path: Path) -> Any:
    """shared(size, {number: dies}, **how)"""
    started: list[Shared] = []

    def start(size: int, dies: dict[int, Dies] | None = None, **how: Any) -> Shared:
        recipe = make_recipe("rl", model={"dtype": "float32"})
        started.append(Shared(recipe, models(0), tmp_path, size, dies or {}, **how))
        return started[-1]

    yield start
    for each in started:
        each.engine.close()


@pytest.fixture(scope="session")
def sampled() -> dict[int, list[Any]]:
    """What `undisturbed` has sampled so far."""
    return {}


@pytest.fixture
def undisturbed(shared: Any, sampled: dict[int, list[Any]]) -> Callable[..., list[Any]]:
    """undisturbed(max_new_tokens=12): the tokens that `requests` get where nothing happens; an
    engine of one process has sampled them, once for all tests.
    """

    def of(most: int = 12) -> list[Any]:
        if most not in sampled:
            sampled[most] = tokens(generate(shared(1).engine, requests(max_new_tokens=most)))
        return sampled[most]

    return of
