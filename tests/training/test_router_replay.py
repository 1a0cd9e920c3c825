"""Runs of a mixture of experts that learn with the experts that the sampler chose."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.model_types import make_model
from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import UsageError
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.recipe.recipe import Recipe
from postgrad.rollout.records_json import group_from_lines
from postgrad.tools.verify_resume import fingerprint
from postgrad.training.start import train

Models = Callable[[int], str]
ROLLOUT = {"max_new_tokens": 6, "router_replay": "sampled"}
STALE = {**ROLLOUT, "max_staleness": 1, "slots": 5}


@pytest.fixture
def run(make_recipe: MakeRecipe, models: Models, tmp_path: Path) -> Callable[..., Recipe]:
    """run(name, **sections): trains a small Qwen3-MoE."""
    vocabulary = len(load_tokenizer(models(0)))
    mixture = make_model("qwen3_moe", Path(models(0)), vocabulary, tmp_path / "mixture")

    def trained(name: str, **changes: Any) -> Recipe:
        model = {"path": str(mixture), "init": None}
        recipe = make_recipe("rl", name, model=model, **changes)
        train(recipe, Console("quiet"))
        return recipe

    return trained


def weights(recipe: Recipe) -> str:
    return fingerprint(Path(recipe.run_dir))["policy.weights.safetensors"]


@pytest.mark.slow
def test_a_run_records_its_experts_and_its_samples_replayed_make_the_same_weights(
    run: Callable[..., Recipe],
) -> None:
    changes: dict[str, Any] = {"steps": 2, "rollout": ROLLOUT, "eval": {"every": 0}}
    first = run("first", **changes)
    lines = [json.loads(line) for line in (Path(first.run_dir) / "samples.jsonl").open()]
    for ticket in {line["ticket"] for line in lines}:
        group = group_from_lines([line for line in lines if line["ticket"] == ticket])
        for rollout in group.rollouts:
            experts = rollout.experts
            assert experts is not None
            assert len(experts) == len(group.prompt.token_ids) + len(rollout.token_ids)
            assert (np.unique(experts[:-1]) >= 0).all()
            assert (experts[-1] == -1).all()
    replay = {**ROLLOUT, "source": "replay", "replay_path": first.run_dir}
    assert weights(run("again", **{**changes, "rollout": replay})) == weights(first)


@pytest.mark.slow
@pytest.mark.parametrize("most", [400, 110])  # tokens of a sample, and of a micro-batch
def test_every_token_of_several_conversations_has_its_experts(
    most: int, run: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "helpers"))
    stops = {"stop": [*"abcdefghijklmno"], "max_new_tokens": 30, "router_replay": "sampled"}
    changes: dict[str, Any] = {
        "batch": {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "micro_train_tokens": most},
        "environment": {"type": "rooms:Rooms", "max_turns": 5}, "data": {"max_len": most},
        "eval": {"every": 0}, "steps": 2, "rollout": stops,
    }  # fmt: skip
    first = run("first", **changes)
    lines = [json.loads(line) for line in (Path(first.run_dir) / "samples.jsonl").open()]
    openings = 0
    for line in lines:
        group = group_from_lines([line])
        (rollout,) = group.rollouts
        experts, prompt = rollout.experts, len(rollout.read_prompt(group.prompt))
        assert experts is not None
        assert len(experts) == prompt + len(rollout.token_ids)
        ends = [prompt + at for at in (*rollout.openings, len(rollout.token_ids))]
        openings += len(rollout.openings)
        last = [end - 1 for end in ends]  # of each conversation: read by no later token
        assert (experts[last] == -1).all()
        assert (np.delete(experts, last, axis=0) >= 0).all()
    assert openings > 10
    replay = {**stops, "source": "replay", "replay_path": first.run_dir}
    assert weights(run("again", **{**changes, "rollout": replay})) == weights(first)


@pytest.mark.slow
def test_kills_and_resumes_keep_the_experts_of_samples_under_way(
    run: Callable[..., Recipe],
) -> None:
    changes: dict[str, Any] = {"algorithm": {"correction": "tis"}, "rollout": STALE}
    uninterrupted = run("whole", steps=4, **changes)
    for steps in range(1, 5):
        pieces = run("pieces", steps=steps, **changes)
    first, second = (fingerprint(Path(recipe.run_dir)) for recipe in (uninterrupted, pieces))
    for name in ("policy.weights.safetensors", "pending.safetensors", "samples.jsonl"):
        assert first[name] == second[name]


@pytest.mark.slow
def test_several_updates_use_the_experts_from_before_the_step(run: Callable[..., Recipe]) -> None:
    batch = {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "train_batch_size": 4}
    digests = {
        replay: weights(
            run(
                replay,
                steps=1,
                batch=batch,
                rollout={"max_new_tokens": 6, "router_replay": replay},
                learner={"lr": 0.05, "threads": 1},
            )
        )
        for replay in ("off", "old")
    }
    assert digests["off"] != digests["old"]


def test_other_engines_and_dense_models_are_refused_by_name(make_recipe: MakeRecipe) -> None:
    with pytest.raises(UsageError, match=r"router_replay.*\n?.*\"openai\", whose samples come"):
        make_recipe(
            "rl",
            rollout={
                **ROLLOUT,
                "type": "openai",
                "openai": {"base_url": "http://127.0.0.1:9/v1", "model": "m"},
            },
        )
    recipe = make_recipe("rl", rollout=ROLLOUT)
    with pytest.raises(UsageError, match="a qwen3 model is no mixture of experts"):
        train(recipe, Console("quiet"))
