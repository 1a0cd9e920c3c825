"""Whole runs: the same bits twice, after a kill, and after a resume with another length."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from postgrad.checkpoint.state import RunState
from postgrad.core.errors import RunError, UsageError
from postgrad.jobs.export import export
from postgrad.jobs.rl import RLJob
from postgrad.jobs.sft import SFTJob
from postgrad.jobs.train import dry_run, resume, train
from postgrad.observe.console import Console
from postgrad.recipe.load import with_overrides
from postgrad.recipe.recipe import Recipe

ENDINGS = ("_seconds", "_bytes", "_per_second")


class Killed(Exception):
    """The process ended here."""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def timeless(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.endswith(ENDINGS)} for line in lines(path)]


def tensors(run_dir: str, step: int) -> dict[str, torch.Tensor]:
    folder = Path(run_dir) / "checkpoints" / f"step-{step:06d}"
    return {
        f"{path.stem}/{name}": tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def assert_same_run(one: Recipe, two: Recipe, step: int) -> None:
    a, b = tensors(one.run_dir, step), tensors(two.run_dir, step)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    for file in ("metrics.jsonl", "eval.jsonl", "samples.jsonl"):
        first, second = Path(one.run_dir) / file, Path(two.run_dir) / file
        assert first.exists() == second.exists()
        if first.exists():
            assert timeless(first) == timeless(second)


def kill_after(monkeypatch: pytest.MonkeyPatch, kind: type, steps: int) -> None:
    """The process dies in the middle of the step after `steps`: its samples are logged, its weights
    have moved, nothing of it is saved.
    """
    whole = kind.step

    def step(self: Any, state: RunState) -> Any:
        result = whole(self, state)
        if state.step == steps:
            raise Killed
        return result

    monkeypatch.setattr(kind, "step", step)


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
@pytest.mark.parametrize(("job", "kind"), [("sft", SFTJob), ("rl", RLJob)])
def test_a_killed_and_resumed_run_gives_the_same_bits(
    job: str,
    kind: type,
    ema_decay: float,
    make_recipe: Any,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {
        "checkpoint": {"save_steps": 1},
        "eval": {"every": 1},
        "learner": {"ema_decay": ema_decay},
    }
    never = make_recipe(job, "never", **changes)
    killed = make_recipe(job, "killed", **changes)
    train(never, console)
    with monkeypatch.context() as patch:
        kill_after(patch, kind, 2)
        with pytest.raises(Killed):
            train(killed, console)
    assert len(lines(Path(killed.run_dir) / "metrics.jsonl")) == 2
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(never, killed, 3)


def test_the_moving_average_is_exported_as_a_model_of_its_own(
    make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    recipe = make_recipe("sft", learner={"ema_decay": 0.5})
    train(recipe, console)
    to = export(Path(recipe.run_dir), "latest", tmp_path / "ema", role="ema")
    saved, wanted = load_file(to / "model.safetensors"), tensors(recipe.run_dir, 3)
    assert all(torch.equal(saved[name], wanted[f"policy.ema/{name}"]) for name in saved)
    name = "model.norm.weight"
    assert not torch.equal(saved[name], wanted[f"policy.weights/{name}"])


def test_two_runs_of_a_recipe_give_the_same_bits(make_recipe: Any, console: Console) -> None:
    one, two = make_recipe("rl", "one"), make_recipe("rl", "two")
    train(one, console)
    train(two, console)
    assert_same_run(one, two, 3)


def test_another_seed_gives_other_weights(make_recipe: Any, console: Console) -> None:
    one, two = make_recipe("sft", "one"), make_recipe("sft", "two", seed=1)
    train(one, console)
    train(two, console)
    a, b = tensors(one.run_dir, 3), tensors(two.run_dir, 3)
    name = "policy.weights/model.embed_tokens.weight"
    assert not torch.equal(a[name], b[name])


def test_a_longer_run_continues_a_shorter_one(make_recipe: Any, console: Console) -> None:
    """A constant rate: the horizon changes nothing that was done before."""
    long, short = make_recipe("rl", "long", steps=4), make_recipe("rl", "short")
    train(long, console)
    train(short, console)
    resume(Path(short.run_dir), ["--steps", "4"], [], console)
    a, b = tensors(long.run_dir, 4), tensors(short.run_dir, 4)
    assert all(torch.equal(a[name], b[name]) for name in a)
    steps = [line["step"] for line in lines(Path(short.run_dir) / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4]


def test_a_run_that_has_ended_is_not_run_again(make_recipe: Any, console: Console) -> None:
    recipe = make_recipe("rl")
    first = train(recipe, console)
    metrics = (Path(recipe.run_dir) / "metrics.jsonl").read_bytes()
    again = train(recipe, console)
    assert again["steps"] == first["steps"] == 3
    assert (Path(recipe.run_dir) / "metrics.jsonl").read_bytes() == metrics


def test_a_damaged_newest_checkpoint_is_passed_over_and_the_bits_stay(
    make_recipe: Any, console: Console
) -> None:
    whole, damaged = make_recipe("rl", "whole"), make_recipe("rl", "damaged")
    train(whole, console)
    train(damaged, console)
    newest = Path(damaged.run_dir) / "checkpoints" / "step-000003" / "policy.weights.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    resume(Path(damaged.run_dir), [], [], console)
    assert_same_run(whole, damaged, 3)
    events = [line["event"] for line in lines(Path(damaged.run_dir) / "events.jsonl")]
    assert "damaged_checkpoint" in events


def test_every_sample_stands_once_in_samples_jsonl(make_recipe: Any, console: Console) -> None:
    recipe = make_recipe("rl")
    train(recipe, console)
    found = [
        (line["ticket"], line["sample"]) for line in lines(Path(recipe.run_dir) / "samples.jsonl")
    ]
    assert found == [(ticket, sample) for ticket in range(12) for sample in range(4)]


def test_several_updates_a_step_use_the_logprobs_from_before_the_step(
    make_recipe: Any, console: Console
) -> None:
    recipe = make_recipe("rl", batch={"train_batch_size": 8, "epochs_per_rollout": 2})
    summary = train(recipe, console)
    assert summary["updates"] == 3 * 2 * 2
    last = lines(Path(recipe.run_dir) / "metrics.jsonl")[-1]
    assert last["policy/ratio"] != 1.0


def test_kl_in_the_loss_starts_at_zero_against_the_policys_own_start(
    make_recipe: Any, console: Console
) -> None:
    recipe = make_recipe("rl", algorithm={"type": "grpo", "kl_coef": 0.1})
    train(recipe, console)
    kls = [line["policy/kl"] for line in lines(Path(recipe.run_dir) / "metrics.jsonl")]
    assert kls[0] == pytest.approx(0.0, abs=1e-6)
    assert kls[2] > 1e-6


def test_a_changed_frozen_reference_stops_the_resume(make_recipe: Any, console: Console) -> None:
    recipe = make_recipe("rl", algorithm={"type": "grpo", "kl_coef": 0.1})
    train(recipe, console)
    config = Path(recipe.run_dir) / "init" / "config.json"
    config.write_text(config.read_text("utf-8") + "\n", "utf-8")
    with pytest.raises(RunError, match="its files have changed"):
        resume(Path(recipe.run_dir), ["--steps", "4"], [], console)


def test_replay_trains_on_another_runs_samples(make_recipe: Any, console: Console) -> None:
    live = make_recipe("rl", "live")
    train(live, console)
    replay = make_recipe("rl", "replay", rollout={"source": "replay", "replay_path": live.run_dir})
    train(replay, console)
    a, b = tensors(live.run_dir, 3), tensors(replay.run_dir, 3)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_changed_recipe_is_another_run(make_recipe: Any, console: Console) -> None:
    recipe = make_recipe("sft")
    train(recipe, console)
    other = with_overrides(recipe, ["--learner.lr", "0.5"])
    with pytest.raises(UsageError) as refused:
        train(other, console)
    assert "learner.lr: 0.01 there, 0.5 here" in str(refused.value)
    assert "--overwrite true" in str(refused.value)
    assert "--allow-change learner.lr" in str(refused.value)
    assert train(other, console, allow_change=["learner.lr"])["steps"] == 3
    assert train(other, console, overwrite=True)["steps"] == 3


def test_a_run_that_failed_before_its_first_step_does_not_block_the_mended_recipe(
    make_recipe: Any, console: Console
) -> None:
    wrong = make_recipe("sft", data={"path": "nowhere.jsonl"})
    with pytest.raises(UsageError, match="no such file"):
        train(wrong, console)
    assert train(make_recipe("sft"), console)["steps"] == 3


def test_checkpoints_of_another_run_are_never_taken_for_ones_own(
    make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    elsewhere = {"ckpt_path": str(tmp_path / "elsewhere")}
    train(make_recipe("sft", "one", checkpoint=elsewhere), console)
    with pytest.raises(UsageError, match="holds checkpoints of another run"):
        train(make_recipe("sft", "two", checkpoint=elsewhere), console)


def test_recorded_choices_are_used_again_unless_they_may_change(
    make_recipe: Any, console: Console
) -> None:
    recipe = make_recipe("rl", learner={"threads": None}, rollout={"slots": 5})
    train(recipe, console)
    found = Path(recipe.run_dir)
    resume(found, ["--steps", "4", "--rollout.slots", "3"], ["rollout.slots"], console)
    resume(found, ["--steps", "5"], ["threads", "micro_train_tokens"], console)
    choices = [line for line in lines(found / "events.jsonl") if line["event"] != "data"]
    assert [line["event"] for line in choices] == ["started", "resumed", "resumed"]
    assert [line["slots"] for line in choices] == [5, 3, 3]
    assert len({line["threads"] for line in choices}) == 1


def test_an_adaptive_kl_in_the_reward_survives_a_kill(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coefficient is run state: a run that forgot it would not give the same bits."""
    knobs = {"type": "rloo", "kl_in": "reward", "kl_coef": 0.2, "kl_target": 0.01}
    changes = {"algorithm": {**knobs, "kl_estimator": "k1", "kl_horizon": 16}}
    whole, killed = make_recipe("rl", "whole", **changes), make_recipe("rl", "killed", **changes)
    train(whole, console)
    with monkeypatch.context() as patch:
        kill_after(patch, RLJob, 2)
        with pytest.raises(Killed):
            train(killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(whole, killed, 3)
    used = [line["kl/coefficient"] for line in lines(Path(whole.run_dir) / "metrics.jsonl")]
    assert used[0] == 0.2
    assert used[2] != used[1] != used[0]


def test_epochs_and_episodes_say_how_long_a_run_is(make_recipe: Any, console: Console) -> None:
    epochs = make_recipe("sft", "epochs", steps=None, epochs=0.5)
    kept = 40 - 2  # two of the 40 rows are held out
    assert train(epochs, console)["steps"] == -(-kept // 2 // 8)
    episodes = make_recipe("rl", "episodes", steps=None, total_episodes=40)
    assert train(episodes, console)["episodes"] == 32


def test_a_dry_run_leaves_nothing_behind(make_recipe: Any, console: Console) -> None:
    recipe = make_recipe("rl")
    report = dry_run(recipe, console)
    assert report["batch"]["samples_per_step"] == 16
    assert not Path(recipe.run_dir).exists()


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
    }
    folder = Path(recipe.run_dir) / "checkpoints"
    assert (folder / "best").read_text("utf-8").strip() == f"step-{best:06d}"
    assert (folder / "latest").read_text("utf-8").strip() == "step-000004"


def test_bfloat16_trains_over_float32_masters(make_recipe: Any, console: Console) -> None:
    recipe = make_recipe("sft", model={"dtype": "bfloat16"})
    train(recipe, console)
    found = tensors(recipe.run_dir, 3)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}


def test_gradient_checkpointing_changes_no_bit_of_the_loss(
    make_recipe: Any, console: Console
) -> None:
    plain = make_recipe("sft", "plain")
    saving = make_recipe("sft", "saving", model={"gradient_checkpointing": True})
    train(plain, console)
    train(saving, console)
    losses = [
        [line["loss"] for line in lines(Path(one.run_dir) / "metrics.jsonl")]
        for one in (plain, saving)
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
