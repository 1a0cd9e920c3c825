"""A run on images on two ranks behind Ray: the weights of one process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from helpers.image_directories import models, row, vision_pair
from helpers.rank_cases import distance
from postgrad.core.errors import UsageError
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.training.start import train

pytest.importorskip("ray")
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
__all__ = ["models"]

CLUSTER = {"type": "ray", "start_seconds": 600.0}


def test_two_ranks_have_the_weights_of_one_process(
    tmp_path: Path, models: Callable[[str], str]
) -> None:
    """Preferences with a reference; of the rows two have no image."""
    text = {"prompt": "Ready?", "chosen": "yes", "rejected": "no"}
    rows = [*map(vision_pair, (1, 2)), text, {**text, "prompt": "Once more?"}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))

    def exported(name: str, **learner: Any) -> dict[str, Any]:
        raw = {
            "job": "preference",
            "run_dir": str(tmp_path / name),
            "steps": 3,
            "model": {"path": models("qwen2_5_vl"), "dtype": "float32"},
            "data": {"path": str(tmp_path / "rows.jsonl"), "max_len": 200, "cache": False},
            "batch": {"train_batch_size": len(rows)},
            "learner": {"lr": 1e-2, "eps": 1e-6, "threads": 1, **learner},
            "checkpoint": {"save_steps": 0, "save_hf": True},
            "cluster": CLUSTER if learner else {},
        }
        train(parse_recipe(raw), Console())
        return load_file(tmp_path / name / "model" / "model.safetensors")

    alone, ranked = exported("alone"), exported("ranked", ranks=2, sharding="zero2")
    assert distance("", ranked, alone) < 1e-4
    start = load_file(Path(models("qwen2_5_vl")) / "model.safetensors")
    assert distance("visual", ranked, start) > 1e-2  # the tower has learned


def test_sampling_on_ranks_is_refused(tmp_path: Path, models: Callable[[str], str]) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({**row(1, 'yes'), 'answer': 'yes'})}\n")
    raw: dict[str, Any] = {
        "job": "rl",
        "run_dir": str(tmp_path / "run"),
        "steps": 1,
        "model": {"path": models("qwen2_5_vl"), "dtype": "float32"},
        "data": {"path": str(tmp_path / "rows.jsonl"), "messages": "messages", "max_len": 200},
        "algorithm": {"type": "grpo"},
        "rewards": [{"type": "exact_match"}],
        "batch": {"rollout_batch_size": 1, "n_samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 4},
        "learner": {"lr": 1e-2},
        "cluster": CLUSTER,
    }
    with pytest.raises(UsageError, match=r'sampling with cluster\.type = "ray" does not support'):
        train(parse_recipe(raw), Console())
