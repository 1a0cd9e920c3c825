"""Whole runs with agents, which begin with messages of their own."""

from pathlib import Path
from typing import Any

import pytest

from helpers.runs import lines, train_until_killed
from helpers.tiny_runs import MODEL, MakeRecipe
from postgrad.observe.console import Console
from postgrad.training.rl import RLJob
from postgrad.training.start import resume

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
CHANGES: dict[str, Any] = {
    "model": {"init": {**MODEL["init"], "max_position_embeddings": 512}},
    "environment": {"type": "agent", "agent": "helpers.agents:instructs", "max_turns": 3},
    "data": {"max_len": 400},
    "eval": {"max_len": 400, "size": 2},
    "rollout": {"max_new_tokens": 12, "stop": [*"abcdefghijklmno"], "max_staleness": 1},
    "algorithm": {"type": "grpo", "correction": "tis"},
    "steps": 3,
}


@pytest.mark.slow
def test_a_killed_run_goes_on_and_learns_from_what_the_agents_policy_read(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("rl", "run", **CHANGES)
    train_until_killed(monkeypatch, RLJob, 2, recipe, console)
    resume(Path(recipe.run_dir), [], [], console)
    folder = Path(recipe.run_dir)
    samples = lines(folder / "samples.jsonl")
    assert {line["step"] for line in samples} == {1, 2, 3}
    stopped_samples = [line for line in samples if line["finish_reason"] == "stop"]
    assert stopped_samples
    for line in stopped_samples:
        first, *later = line["turns"]
        assert first["opens"]
        assert "system\nBe brief." in first["text"]
        assert f"user\nTask: {line['question']}" in first["text"]
        assert not any(turn.get("opens") for turn in later)
        for turn in later if line["step"] == 1 else ():  # later ones are of older weights too
            assert turn["logprobs"] == pytest.approx(turn["learner_logprobs"], abs=1e-4)
    steps = lines(folder / "metrics.jsonl")
    lengths = [
        sum(len(turn["token_ids"]) for turn in line["turns"][1:])  # behind what stands for a prompt
        for line in samples if line["step"] == 1
    ]  # fmt: skip
    assert steps[0]["response_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert [line["environment/conversations"] for line in steps] == [1.0] * 3
    assert all(line["logprobs/kl"] < 1e-6 for line in steps if "logprobs/kl" in line)
