"""Recipes of jobs that compare answers, for tests of what evaluates them."""

from typing import Any

from postgrad.recipe.load import parse_recipe


def recipe_of(path: str, **keys: Any) -> Any:
    """A reward model's recipe with the one evaluation set `path`. keys: of [eval]."""
    return parse_recipe(
        {
            "job": "reward",
            "run_dir": "run",
            "steps": 1,
            "model": {"path": "model"},
            "data": {"path": "train.jsonl"},
            "eval": {"path": path, **keys},
        }
    )
