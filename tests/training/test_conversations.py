"""Whole runs of episodes with several conversations: what is recorded, learned and resumed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.runs import assert_same_run, lines, train_until_killed
from helpers.tiny_runs import MODEL, MakeRecipe
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit
from postgrad.observe.console import Console
from postgrad.training.rl import RLJob
from postgrad.training.start import resume, train

CHANGES: dict[str, Any] = {
    "model": {"init": {**MODEL["init"], "max_position_embeddings": 512, "initializer_range": 0.3}},
    "environment": {"type": "rooms:Rooms", "max_turns": 5},
    "data": {"max_len": 400},
    "eval": {"max_len": 400, "size": 2},
    "rollout": {"max_new_tokens": 30, "stop": [*"abcdefghijklmno"]},  # ends most turns
    "algorithm": {"type": "grpo", "correction": "tis"},
    "steps": 3,
}


def conversations(line: dict[str, Any]) -> list[list[tuple[list[int], dict[str, Any] | None]]]:
    """Of a sample, the turns of each conversation as (tokens, the policy's turn or None)."""
    read = [[(line["prompt_token_ids"], None)]]
    for number, turn in enumerate(line["turns"]):
        if turn.get("opens"):
            read = [*read, []] if number else [[]]  # where the first turn opens, no prompt is read
        read[-1].append((turn["token_ids"], turn if turn["author"] == "policy" else None))
    return read


@pytest.mark.slow
def test_each_turn_has_the_logprobs_of_what_was_read_before_it(
    make_recipe: MakeRecipe, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "helpers"))
    make_fresh(ModelInit.model_validate(CHANGES["model"]["init"]), [], 3, tmp_path / "model")
    path = {"path": str(tmp_path / "model"), "init": None}
    recipe = make_recipe("rl", "run", **{**CHANGES, "model": path, "steps": 1})
    train(recipe, console)
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    samples = [line for line in lines(Path(recipe.run_dir) / "samples.jsonl") if line["step"] == 1]
    counted = 0
    for line in samples:
        read = conversations(line)
        assert line["counts"]["conversations"] == len(read)
        for parts in read:
            ids = torch.tensor([token for tokens, _ in parts for token in tokens])
            logprobs = torch.log_softmax(lm(ids[None]).logits[0].double(), -1)
            begin = 0
            for tokens, turn in parts:
                end = begin + len(tokens)
                if turn is not None:
                    wanted = logprobs[begin - 1 : end - 1].gather(1, ids[begin:end, None])[:, 0]
                    for name in ("logprobs", "learner_logprobs"):
                        np.testing.assert_allclose(turn[name], wanted.detach(), atol=1e-4)
                    counted += 1
                begin = end
    assert counted > len(samples)
    begun = {line["sample"] for line in samples if line["turns"][0].get("opens")}
    assert begun == {line["sample"] for line in samples if line["sample"] % 3}
    opened = [sum(len(tokens) for tokens, _ in parts) for line in samples for parts in
              conversations(line)[1:]]  # fmt: skip
    assert len(opened) > 10
    metrics = lines(Path(recipe.run_dir) / "metrics.jsonl")[0]
    wanted = np.mean([line["counts"]["conversations"] for line in samples])
    assert metrics["environment/conversations"] == pytest.approx(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Rooms", "Forgetful"])
def test_a_killed_run_with_samples_ahead_has_the_same_bits(
    make_recipe: MakeRecipe,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "helpers"))
    changes = {
        **CHANGES,
        "environment": {"type": f"rooms:{kind}", "max_turns": 5},
        "rollout": {**CHANGES["rollout"], "max_staleness": 1, "slots": 3},
    }
    never, killed = (make_recipe("rl", name, **changes) for name in ("never", "killed"))
    train(never, console)
    train_until_killed(monkeypatch, RLJob, 2, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(never, killed, 3)


@pytest.mark.slow
def test_a_replay_learns_from_recorded_conversations(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "helpers"))
    recorded = make_recipe("rl", "recorded", **CHANGES)
    train(recorded, console)
    replay = {"source": "replay", "replay_path": str(recorded.run_dir), **CHANGES["rollout"]}
    again = make_recipe("rl", "again", **{**CHANGES, "rollout": replay})
    train(again, console)
    losses = [
        [line["policy/loss"] for line in lines(Path(recipe.run_dir) / "metrics.jsonl")]
        for recipe in (recorded, again)
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("max_len", [70, 100])
def test_conversations_of_a_sample_fit_what_the_learner_computes_at_once(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch, max_len: int
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "helpers"))
    changes = {
        **CHANGES,
        "data": {"max_len": max_len},
        "batch": {"rollout_batch_size": 4, "n_samples_per_prompt": 4,
                  "micro_train_tokens": max_len},
        "steps": 2,
    }  # fmt: skip
    recipe = make_recipe("rl", "run", **changes)
    train(recipe, console)
    samples = lines(Path(recipe.run_dir) / "samples.jsonl")
    ends = {line["finish_reason"] for line in samples}
    assert "length" in ends
    assert max(len(conversations(line)) for line in samples) > 1


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_ranks_that_share_sequences_learn_the_same_from_several_conversations(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "helpers"))
    ray = {"type": "ray", "start_seconds": 600.0}
    norms: list[list[float]] = []
    for name, more in (("alone", {}), ("shared", {"ranks": 2, "context_parallel": 2})):
        changes = {
            **CHANGES,
            "algorithm": {"type": "ppo", "kl_coef": 0.05},
            "critic": {"learner": {"lr": 5e-3, "eps": 1e-6}},
            "learner": {"lr": 1e-2, "threads": 1, "eps": 1e-6, **more},
            "eval": {"every": 0},
            **({"cluster": ray} if more else {}),
        }
        recipe = make_recipe("rl", name, **changes)
        train(recipe, console)
        steps = lines(Path(recipe.run_dir) / "metrics.jsonl")
        assert max(line["environment/conversations"] for line in steps) > 1.5
        norms.append([line[f"{role}/grad_norm"] for line in steps for role in ("policy", "critic")])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
