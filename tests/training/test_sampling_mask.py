"""Whole runs that sample with filters and learn over what these left (rollout.keep_sampling_mask)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.runs import assert_same_run, lines, train_until_killed
from helpers.tiny_runs import MakeRecipe
from postgrad.observe.console import Console
from postgrad.training.rl import RLJob
from postgrad.training.start import resume, train

NUCLEUS = {"top_p": 0.8}
# Ratios to the sampler itself: of the first step they are 1, if both mean one distribution.
TO_SAMPLER = {"type": "grpo", "correction": "metrics", "kl_coef": 0.01}


def steps_of(recipe: Any) -> list[dict[str, float]]:
    return lines(Path(recipe.run_dir) / "metrics.jsonl")


@pytest.mark.slow
def test_with_the_mask_importance_ratios_of_the_first_step_are_one_and_without_it_they_are_not(
    make_recipe: MakeRecipe, console: Console
) -> None:
    kept = make_recipe("rl", "kept", rollout={**NUCLEUS, "keep_sampling_mask": True},
                       algorithm=TO_SAMPLER)  # fmt: skip
    biased = make_recipe("rl", "biased", rollout=NUCLEUS, algorithm=TO_SAMPLER)
    for recipe in (kept, biased):
        train(recipe, console)
    first, other = steps_of(kept)[0], steps_of(biased)[0]
    print(first, other)
