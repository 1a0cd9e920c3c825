"""A run with samples ahead, killed at any message of its schedule, ends with the same bits."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.messages import MESSAGES, Disks
from helpers.runs import lines
from helpers.tiny_runs import MakeRecipe, console, make_recipe, reward_on_path
from postgrad.observe.console import Console
from postgrad.tools.verify_resume import fingerprint
from postgrad.training.start import train

__all__ = ["console", "make_recipe", "reward_on_path"]

SPREAD = 6
SMALL: dict[str, Any] = {
    "steps": 3,
    "batch": {"rollout_batch_size": 2, "n_samples_per_prompt": 3},
    "algorithm": {"correction": "tis"},
    "eval": {"at_start": False, "size": 2, "n_samples": 1, "pass_at": [1]},
    "sentinels": {"truncation": "off"},
}


def spread(copies: list[Path], most: int | None) -> list[Path]:
    """`most` of them, evenly; None: all."""
    if most is None:
        return copies
    return [copies[i * (len(copies) - 1) // (most - 1)] for i in range(most)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("staleness", "late", "most"),
    [
        (2, True, SPREAD),
        (1, False, None),
        (4, True, None),
        pytest.param(2, False, None, marks=pytest.mark.long),
        pytest.param(4, False, None, marks=pytest.mark.long),
    ],
)
def test_a_run_killed_at_a_message_of_its_schedule_ends_with_the_same_bits(
    staleness: int,
    late: bool,
    most: int | None,
    make_recipe: MakeRecipe,
    console: Console,
    tmp_path: Path,
) -> None:
    rollout = {"max_staleness": staleness, "schedule": "fixed", "slots": 4, "max_new_tokens": 6}
    recipe = make_recipe("rl", **SMALL, rollout=rollout)
    run = Path(recipe.run_dir)
    with pytest.MonkeyPatch.context() as patch:
        disks = Disks(run, tmp_path / "kept", patch, late=late)
        train(recipe, console)
    wanted = fingerprint(run)
    assert {"pending.safetensors", "policy.weights.safetensors", "samples.jsonl"} <= set(wanted)
    drawn = [(line["ticket"], line["sample"]) for line in lines(run / "samples.jsonl")]
    assert drawn == [(ticket, sample) for ticket in range(6) for sample in range(3)]
    assert set(disks.names) == set(MESSAGES)
    assert len(disks.copies) >= 4 * SMALL["steps"]
    for copy in spread(list(disks.copies.values()), most):
        shutil.rmtree(run)
        shutil.move(copy, run)
        train(recipe, console)
        assert fingerprint(run) == wanted, copy.name
