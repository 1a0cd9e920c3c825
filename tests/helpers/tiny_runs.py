"""Whole runs that last a second: words of three letters, spelled backward by a tiny model."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.jobs import write_pairs
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.recipe import Recipe
from postgrad.training.start import train

TASK = {"min_word_len": 3, "max_word_len": 4}
MODEL = {
    "init": {
        "type": "qwen3",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tokenizer": {
            "kind": "characters",
            "phrases": ["Spell this word backward (example: sun -> nus): "],
        },
    }
}
COMMON: dict[str, Any] = {
    "model": MODEL,
    "data": {
        "path": "reasoning-gym:spell_backward",
        "size": 40,
        "seed": 1,
        "max_len": 48,
        "task": TASK,
    },
    "eval": {
        "path": "reasoning-gym:spell_backward",
        "size": 8,
        "seed": 2,
        "at_start": True,
        "greedy": True,
        "n_samples": 2,
        "pass_at": [1, 2],
        "max_new_tokens": 6,
    },
    "rewards": [{"type": "tiny_rewards:vowels"}],  # dense: random letters earn something
    "scoring": {"workers": 1},
}
SFT: dict[str, Any] = {
    **COMMON,
    "job": "sft",
    "steps": 3,
    "batch": {"train_batch_size": 8},
    "learner": {"lr": 1e-2, "threads": 1},
}
RL: dict[str, Any] = {
    **COMMON,
    "job": "rl",
    "steps": 3,
    "algorithm": {"type": "grpo"},
    "batch": {"rollout_batch_size": 4, "n_samples_per_prompt": 4},
    "rollout": {"max_new_tokens": 6},
    "learner": {"lr": 1e-2, "threads": 1},
    "checkpoint": {"save_steps": 1, "max_ckpt_num": 2},
}
REWARD: dict[str, Any] = {
    "model": MODEL,
    "job": "reward",
    "steps": 3,
    "batch": {"train_batch_size": 6},
    "data": {"max_len": 64},
    "learner": {"lr": 1e-2, "threads": 1},
    "checkpoint": {"save_steps": 1, "max_ckpt_num": 2},
}
JOBS = {"sft": SFT, "rl": RL, "reward": REWARD, "preference": {**REWARD, "job": "preference"}}


@pytest.fixture(autouse=True)
def reward_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import the reward by its name, as a user's own would be."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


MakeRecipe = Callable[..., Recipe]


def recipe_in(folder: Path, job: str, run_dir: str, changes: dict[str, Any]) -> Recipe:
    raw = copy.deepcopy(JOBS[job])
    if job in ("reward", "preference"):
        raw["data"]["path"] = str(write_pairs(folder / "pairs.jsonl"))
    raw["run_dir"] = str(folder / run_dir)
    for name, value in changes.items():
        raw[name] = {**raw.get(name, {}), **value} if isinstance(value, dict) else value
    return parse_recipe(raw)


@pytest.fixture
def make_recipe(tmp_path: Path) -> MakeRecipe:
    """make_recipe("rl", run_dir="b", **sections): a table is merged into the section's."""

    def make(job: str, run_dir: str = "run", **changes: Any) -> Recipe:
        return recipe_in(tmp_path, job, run_dir, changes)

    return make


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> MakeRecipe:
    """trained("rl", **sections): the recipe of a run that was never disturbed. Tests with the same
    sections share it: change nothing in its folder, and ask for it before you patch anything.
    """
    recipes: dict[str, Recipe] = {}

    def run(job: str, **changes: Any) -> Recipe:
        key = json.dumps([job, changes], sort_keys=True)
        if key not in recipes:
            recipe = recipe_in(tmp_path_factory.mktemp("trained"), job, "run", changes)
            train(recipe, Console("quiet"))
            recipes[key] = recipe
        return recipes[key]

    return run


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """models(seed): the directory of a fresh model with the tokenizer of all of them."""
    paths: dict[int, str] = {}

    def model(seed: int) -> str:
        if seed not in paths:
            path = tmp_path_factory.mktemp("fresh") / f"model-{seed}"
            init = {**MODEL["init"], "initializer_range": 0.2}
            make_fresh(ModelInit.model_validate(init), [], seed, path)
            paths[seed] = str(path)
        return paths[seed]

    return model


@pytest.fixture
def console() -> Console:
    return Console("quiet")
