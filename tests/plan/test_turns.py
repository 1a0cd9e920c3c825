"""Samples with an environment: several turns, and replies between them."""

from typing import Any

import pytest

from postgrad.models.known_shapes import shape_of_model
from postgrad.plan.hardware import parse_hardware
from postgrad.plan.page import Page
from postgrad.plan.plan import Facts, RunPlan, make_plan
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.recipe import Recipe


def with_turns(turns: int, **more: Any) -> Recipe:
    played = {"type": "tools", "tools": ["calculator"], "max_turns": turns}
    return parse_recipe(
        {
            "job": "rl",
            "run_dir": "run",
            "steps": 100,
            "model": {"path": "Qwen/Qwen3-0.6B"},
            "data": {"path": "rows.jsonl", "max_len": 2048},
            "environment": played,
            "rewards": [{"type": "gsm8k"}],
            "algorithm": {"type": "grpo", "correction": "tis", **more},
            "batch": {"rollout_batch_size": 64, "n_samples_per_prompt": 8},
            "rollout": {"max_new_tokens": 256, "max_staleness": 1},
        }
    )


def planned(recipe: Recipe) -> RunPlan:
    return make_plan(recipe, Facts(shape_of_model, parse_hardware("cpu")))


def test_a_plan_says_which_turns_of_an_environment_its_times_leave_out() -> None:
    single, several = (planned(with_turns(turns)) for turns in (1, 8))
    answer = several.recipe.sampled_tokens
    assert answer is not None
    assert not any(note.startswith("turns: ") for note in Page(single, ()).notes())
    (note,) = [note for note in Page(several, ()).notes() if note.startswith("turns: ")]
    assert f"times count one of {answer} tokens for each sample. It may have 8, with" in note
    assert "up to data.max_len = 2048 tokens in all" in note
    learned = planned(with_turns(8, observation_coef=0.1))
    (note,) = [note for note in Page(learned, ()).notes() if note.startswith("turns: ")]
    assert "with replies between them that are learned too, up to" in note
    # their logits are among those of a micro-batch, which is full of loss tokens already
    assert learned.memory == several.memory


def test_a_plan_has_room_for_all_turns_of_an_environment() -> None:
    """A CPU takes memory for the pages of the cache that are written."""
    single, several = (planned(with_turns(turns)) for turns in (1, 8))
    (alone, together) = (
        next(line.bytes["rollout"] for line in plan.memory.lines if "cache" in line.purpose)
        for plan in (single, several)
    )
    assert together > 1.5 * alone
    (few,), (many,) = (
        [note for note in Page(plan, ()).notes() if "samples ahead take" in note]
        for plan in (single, several)
    )
    tokens = (single.recipe.sampled_tokens, 2047)
    megabytes = [float(note.split("up to ")[1].split()[0]) for note in (few, many)]
    assert megabytes[1] / megabytes[0] == pytest.approx(tokens[1] / tokens[0], rel=0.01)
