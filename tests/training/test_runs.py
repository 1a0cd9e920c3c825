"""Whole runs: what they leave behind, and the same bits twice."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.runs import assert_same_run, lines, tensors, train_until_killed
from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import UsageError
from postgrad.observe.console import Console
from postgrad.observe.run_dir import claimed
from postgrad.tools.export import export
from postgrad.training.sft import SFTJob
from postgrad.training.start import resume, train


def test_the_moving_average_is_exported_as_a_model_of_its_own(
    make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    recipe = make_recipe("sft", learner={"ema_decay": 0.5})
    train(recipe, console)
    to = export(Path(recipe.run_dir), "latest", tmp_path / "ema", "ema")
    saved, wanted = load_file(to / "model.safetensors"), tensors(recipe.run_dir, 3)
    assert all(torch.equal(saved[name], wanted[f"policy.ema/{name}"]) for name in saved)
    name = "model.norm.weight"
    assert not torch.equal(saved[name], wanted[f"policy.weights/{name}"])


def test_two_runs_of_a_recipe_give_the_same_bits(
    make_recipe: Any, trained: MakeRecipe, console: Console
) -> None:
    first_run, second_run = trained("rl"), make_recipe("rl", "two")
    train(second_run, console)
    assert_same_run(first_run, second_run, 3)


def test_another_seed_gives_other_weights(
    make_recipe: Any, trained: MakeRecipe, console: Console
) -> None:
    first_run, second_run = trained("sft"), make_recipe("sft", "two", seed=1)
    train(second_run, console)
    a, b = tensors(first_run.run_dir, 3), tensors(second_run.run_dir, 3)
    name = "policy.weights/model.embed_tokens.weight"
    assert not torch.equal(a[name], b[name])


def test_every_sample_stands_once_in_samples_jsonl(trained: MakeRecipe) -> None:
    recipe = trained("rl")
    sample_keys = [
        (line["ticket"], line["sample"]) for line in lines(Path(recipe.run_dir) / "samples.jsonl")
    ]
    assert sample_keys == [(ticket, sample) for ticket in range(12) for sample in range(4)]


def test_several_updates_a_step_use_the_logprobs_from_before_the_step(
    make_recipe: Any, console: Console
) -> None:
    recipe = make_recipe("rl", batch={"train_batch_size": 8, "epochs_per_rollout": 2})
    summary = train(recipe, console)
    assert summary["updates"] == 3 * 2 * 2
    last = lines(Path(recipe.run_dir) / "metrics.jsonl")[-1]
    assert last["policy/ratio"] != 1.0


def test_kl_in_the_loss_starts_at_zero_against_the_policys_own_start(trained: MakeRecipe) -> None:
    recipe = trained("rl", algorithm={"type": "grpo", "kl_coef": 0.1})
    kls = [line["policy/kl"] for line in lines(Path(recipe.run_dir) / "metrics.jsonl")]
    assert kls[0] == pytest.approx(0.0, abs=1e-6)
    assert kls[2] > 1e-6


def test_replay_trains_on_another_runs_samples(
    make_recipe: Any, trained: MakeRecipe, console: Console
) -> None:
    live = trained("rl")
    replay = make_recipe("rl", "replay", rollout={"source": "replay", "replay_path": live.run_dir})
    train(replay, console)
    a, b = tensors(live.run_dir, 3), tensors(replay.run_dir, 3)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_that_failed_before_its_first_step_does_not_block_the_mended_recipe(
    make_recipe: Any, console: Console
) -> None:
    wrong = make_recipe("sft", data={"path": "nowhere.jsonl"})
    with pytest.raises(UsageError, match="no such file"):
        train(wrong, console)
    assert train(make_recipe("sft"), console)["steps"] == 3


def test_epochs_and_episodes_say_how_long_a_run_is(make_recipe: Any, console: Console) -> None:
    epochs = make_recipe("sft", "epochs", steps=None, epochs=0.5)
    kept = 40 - 2  # two of the 40 rows are held out
    assert train(epochs, console)["steps"] == -(-kept // 2 // 8)
    episodes = make_recipe("rl", "episodes", steps=None, total_episodes=40)
    assert train(episodes, console)["episodes"] == 32


def test_the_best_checkpoint_is_kept_and_named(make_recipe: Any, console: Console) -> None:
    recipe = make_recipe(
        "rl",
        eval={"every": 1, "at_start": False},
        checkpoint={"save_steps": 0, "max_ckpt_num": 1, "best_metric": "eval/reward"},
        steps=4,
    )
    summary = train(recipe, console)
    rewards = [line["reward"] for line in lines(Path(recipe.run_dir) / "eval.jsonl")]
    best = 1 + rewards.index(max(rewards))
    assert summary["best"] == {
        "metric": "eval/reward",
        "value": max(rewards),
        "step": best,
        "waited": 4 - best,
        "mode": "max",
    }
    folder = Path(recipe.run_dir) / "checkpoints"
    assert (folder / "best").read_text("utf-8").strip() == f"step-{best:06d}"
    assert (folder / "latest").read_text("utf-8").strip() == "step-000004"


@pytest.mark.parametrize("mode", ["max", "min"])
def test_of_equal_evaluations_the_earliest_stays_the_best(
    mode: str, make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NeMo RL#3067. The rate is so small that all are equal; the last two come after a resume."""
    recipe = make_recipe(
        "sft",
        eval={"every": 1, "at_start": False, "greedy": True, "n_samples": 1, "pass_at": [1]},
        checkpoint={"save_steps": 1, "best_metric": "eval/reward", "best_mode": mode},
        learner={"lr": 1e-30},
    )
    train_until_killed(monkeypatch, SFTJob, 1, recipe, console)
    best = resume(Path(recipe.run_dir), [], [], console)["best"]
    values = [line["reward"] for line in lines(Path(recipe.run_dir) / "eval.jsonl")]
    assert values == [best["value"]] * 3
    assert (best["step"], best["waited"]) == (1, 2)
    folder = Path(recipe.run_dir) / "checkpoints"
    assert (folder / "best").read_text("utf-8").strip() == "step-000001"


def test_bfloat16_trains_over_float32_masters(make_recipe: Any, console: Console) -> None:
    recipe = make_recipe("sft", model={"dtype": "bfloat16"})
    train(recipe, console)
    saved = tensors(recipe.run_dir, 3)
    counts = [name for name in saved if name.endswith("/updates")]
    assert [int(saved.pop(name)) for name in counts] == [3]
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def test_gradient_checkpointing_changes_no_bit_of_the_loss(
    make_recipe: Any, trained: MakeRecipe, console: Console
) -> None:
    plain = trained("sft")
    saving = make_recipe("sft", "saving", model={"gradient_checkpointing": True})
    train(saving, console)
    losses = [
        [line["loss"] for line in lines(Path(recipe.run_dir) / "metrics.jsonl")]
        for recipe in (plain, saving)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_run_whose_verifiers_all_failed_in_evaluation_still_ends_with_a_summary(
    make_recipe: Any, console: Console
) -> None:
    """The recipe allows it; there is then no accuracy, and no zero in its place."""
    recipe = make_recipe(
        "sft",
        rewards=[{"type": "tiny_rewards:broken"}],
        scoring={"workers": 1, "max_failed_fraction": 1.0},
    )
    train(recipe, console)
    written = json.loads((Path(recipe.run_dir) / "summary.json").read_text("utf-8"))
    assert written["accuracy_after"] is None
    last = lines(Path(recipe.run_dir) / "eval.jsonl")[-1]
    assert last["accuracy"] is None
    assert last["failed"] == 8 * 2 + 8


def test_routed_rewards_and_failures_stand_apart_in_metrics_and_samples(
    make_recipe: Any, console: Console
) -> None:
    """What does not apply is absent, what failed is null, and a replay reads both alike."""
    rewards = [
        {"type": "tiny_rewards:vowels"},
        {"type": "tiny_rewards:broken", "on_failure": "score", "failure_score": 0.25},
        {"type": "f1", "when": {"index": list(range(20))}},
        {"type": "regex", "pattern": "x", "when": {"index": -1}},
        {"type": "overlong", "buffer": 2, "weight": 0.5},
        {"type": "stop_properly", "weight": 0.0},
    ]
    scoring = {"max_failed_fraction": 1.0}
    recipe = make_recipe("rl", rewards=rewards, scoring=scoring)
    train(recipe, console)
    samples = lines(Path(recipe.run_dir) / "samples.jsonl")
    routed = {"vowels", "broken", "overlong", "stop_properly"}
    for line in samples:
        first = line["metadata"]["index"] < 20
        assert set(line["rewards"]) == routed | ({"f1"} if first else set())
        assert line["rewards"]["broken"] is None
        assert [failure["component"] for failure in line["failures"]] == ["broken"]
        tokens = sum(len(turn["token_ids"]) for turn in line["turns"])
        assert line["rewards"]["overlong"] == -max(tokens - 4, 0) / 2  # of 6 new tokens
        assert line["details"]["stop_properly"] == {"finish_reason": line["finish_reason"]}
    metrics = lines(Path(recipe.run_dir) / "metrics.jsonl")
    assert all(line["reward/broken"] is None for line in metrics)
    assert all("reward/regex" not in line for line in metrics)
    assert 0 < sum("f1" in line["rewards"] for line in samples) < len(samples)

    replayed = make_recipe(
        "rl", "again", rewards=rewards, scoring=scoring,
        rollout={"source": "replay", "replay_path": recipe.run_dir},
    )  # fmt: skip
    train(replayed, console)
    again = lines(Path(replayed.run_dir) / "samples.jsonl")
    keys = ("rewards", "total", "details", "failures", "kept")
    assert [[a[key] for key in keys] for a in again] == [[s[key] for key in keys] for s in samples]


def test_a_run_of_another_process_is_neither_continued_nor_replaced(
    make_recipe: Any, console: Console
) -> None:
    recipe = make_recipe("sft", steps=1)
    train(recipe, console)
    run = Path(recipe.run_dir)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with claimed(run):
        for start in (
            lambda: train(recipe, console),
            lambda: train(recipe, console, overwrite=True),
            lambda: resume(run, ["--steps", "2"], [], console),
        ):
            with pytest.raises(UsageError, match="another process is running"):
                start()
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_truncated_samples_are_scored_and_written_but_not_trained_on(
    make_recipe: Any, console: Console
) -> None:
    """Nine answers of ten are cut off here; a step of which all are makes no update."""
    off = {"at_start": False, "at_end": False}
    recipe = make_recipe(
        "rl", eval=off, algorithm={"type": "grpo", "mask_truncated_completions": True}
    )
    train(recipe, console)
    samples = lines(Path(recipe.run_dir) / "samples.jsonl")
    metrics = lines(Path(recipe.run_dir) / "metrics.jsonl")
    finished = [sample["finish_reason"] == "stop" for sample in samples]
    assert 0 < sum(finished) < len(samples)
    assert ["advantages" in sample for sample in samples] == finished
    assert all(sample["total"] is not None for sample in samples)
    for line in metrics:
        step_samples = [sample for sample in samples if sample["step"] == line["step"]]
        cut = sum(sample["finish_reason"] == "length" for sample in step_samples)
        assert line["masked_samples"] == cut
        assert line["updates/largest"] == len(step_samples) - cut
        assert line["truncated_fraction"] == cut / len(step_samples)
