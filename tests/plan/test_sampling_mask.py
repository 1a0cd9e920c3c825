"""What kept sampling masks take: as much as top_k bounds, else for each token that is left."""

from typing import Any

import pytest

from postgrad.models.known_shapes import shape_of_model
from postgrad.plan.hardware import parse_hardware
from postgrad.plan.page import Page
from postgrad.plan.plan import Facts, make_plan
from postgrad.recipe.load import parse_recipe


def note_of(start: str, **rollout: Any) -> str:
    recipe = parse_recipe(
        {
            "job": "rl",
            "run_dir": "run",
            "steps": 100,
            "model": {"path": "Qwen/Qwen3-0.6B"},
            "data": {"path": "rows.jsonl", "max_len": 2048},
            "rewards": [{"type": "gsm8k"}],
            "algorithm": {"type": "grpo", "correction": "tis"},
            "batch": {"rollout_batch_size": 64, "n_samples_per_prompt": 8},
            "rollout": {"max_new_tokens": 250, **rollout},
        }
    )
    notes = Page(make_plan(recipe, Facts(shape_of_model, parse_hardware("cpu"))), ()).notes()
    return next((note for note in notes if note.startswith(start)), "")


def test_a_plan_says_what_sampling_masks_take() -> None:
    kept = {"keep_sampling_mask": True}
    assert note_of("sampling masks") == ""
    # 64 x 8 samples of 250 tokens: 128 000 tokens, each with 4 bytes and 4 for each of 20 ids
    assert "take up to 10.8 MB," in note_of("sampling masks", top_k=20, **kept)
    unbounded = note_of("sampling masks", top_p=0.95, **kept)
    assert "take 0.512 MB for each token that filters leave" in unbounded
    assert "73.9 GB of an even distribution: rollout.top_k would bound them" in unbounded


def test_samples_ahead_have_their_masks_too() -> None:
    sizes = [
        float(note_of("samples ahead take", max_staleness=1, **kept).split()[5])
        for kept in ({}, {"top_k": 20, "keep_sampling_mask": True})
    ]
    assert sizes[1] / sizes[0] == pytest.approx((8 + 84) / 8, rel=0.01)
