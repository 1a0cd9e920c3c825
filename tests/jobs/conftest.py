"""Whole runs that last a second: words of three letters, spelled backward by a tiny model."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.recipe import Recipe

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


@pytest.fixture(autouse=True)
def _reward_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import the reward by its name, as a user's own would be."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def make_recipe(tmp_path: Path) -> MakeRecipe:
    """make_recipe("rl", run_dir="b", **sections): a table is merged into the section's."""

    def make(job: str, run_dir: str = "run", **changes: Any) -> Recipe:
        raw = copy.deepcopy({"sft": SFT, "rl": RL}[job])
        raw["run_dir"] = str(tmp_path / run_dir)
        for name, value in changes.items():
            raw[name] = {**raw.get(name, {}), **value} if isinstance(value, dict) else value
        return parse_recipe(raw)

    return make


@pytest.fixture
def console() -> Console:
    return Console("quiet")
