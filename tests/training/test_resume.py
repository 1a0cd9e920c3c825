"""Resume: the same bits after any number of kills, and what may change on the way."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.runs import assert_same_run, lines, tensors, train_until_killed
from helpers.tiny_runs import TASK, MakeRecipe
from postgrad.api.run import Run
from postgrad.core.errors import RunError, UsageError
from postgrad.observe.console import Console
from postgrad.parallel import device as devices
from postgrad.recipe.load import with_overrides
from postgrad.training.rl import RLJob
from postgrad.training.sft import SFTJob
from postgrad.training.start import resume, train


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "learner", [{"ema_decay": 0.9}, pytest.param({"optimizer": "muon"}, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("job", "kind"), [("sft", SFTJob), ("rl", RLJob)])
def test_a_killed_and_resumed_run_gives_the_same_bits(
    job: str,
    kind: type,
    learner: dict[str, object],
    make_recipe: Any,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {
        "checkpoint": {"save_steps": 1},
        "eval": {"every": 1},
        "learner": learner,
    }
    never = make_recipe(job, "never", **changes)
    killed = make_recipe(job, "killed", **changes)
    train(never, console)
    train_until_killed(monkeypatch, kind, 2, killed, console)
    assert len(lines(Path(killed.run_dir) / "metrics.jsonl")) == 2
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(never, killed, 3)


@pytest.mark.slow
def test_rewards_of_the_run_so_far_survive_a_kill_without_a_critic_too(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = {"type": "rloo", "reward_scaling": "running", "reward_clip": [-2.0, 1.5]}
    never = make_recipe("rl", "never", algorithm=algorithm)
    killed = make_recipe("rl", "killed", algorithm=algorithm)
    train(never, console)
    train_until_killed(monkeypatch, RLJob, 2, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(never, killed, 3)
    means = {line["reward_scaling/mean"] for line in lines(Path(never.run_dir) / "metrics.jsonl")}
    assert len(means) == 3  # state: a run that forgot it would not give the same bits


@pytest.mark.slow
def test_a_longer_run_continues_a_shorter_one(
    make_recipe: Any, trained: MakeRecipe, console: Console
) -> None:
    """A constant rate: the horizon changes nothing that was done before."""
    long, short = trained("rl", steps=4), make_recipe("rl", "short")
    train(short, console)
    resume(Path(short.run_dir), ["--steps", "4"], [], console)
    a, b = tensors(long.run_dir, 4), tensors(short.run_dir, 4)
    assert all(torch.equal(a[name], b[name]) for name in a)
    steps = [line["step"] for line in lines(Path(short.run_dir) / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4]


def test_a_run_that_has_ended_is_not_run_again(make_recipe: Any, console: Console) -> None:
    recipe = make_recipe("rl")
    first = train(recipe, console)
    before = contents(Path(recipe.run_dir))
    again = train(recipe, console)
    assert again == json.loads(json.dumps(first))
    assert contents(Path(recipe.run_dir)) == before


@pytest.mark.slow
def test_a_run_that_has_ended_exports_its_model_again_where_that_is_gone(
    make_recipe: Any, console: Console
) -> None:
    recipe = make_recipe("sft", checkpoint={"save_hf": True})
    model = Path(train(recipe, console)["model"])
    shutil.rmtree(model)
    train(recipe, console)
    assert (model / "config.json").exists()


@pytest.mark.slow
def test_a_change_of_the_recipe_is_an_event_and_the_one_of_before_is_kept(
    make_recipe: Any, console: Console
) -> None:
    recipe = make_recipe("sft")
    run = Path(recipe.run_dir)
    train(recipe, console)
    first = json.loads((run / "recipe.json").read_text("utf-8"))
    resume(run, ["--steps", "4"], [], console)
    resume(run, ["--learner.lr", "0.5", "--steps", "5"], ["learner.lr"], console)
    assert json.loads((run / "recipe-1.json").read_text("utf-8")) == first
    events = [line for line in lines(run / "events.jsonl") if line["event"] == "recipe_changed"]
    assert [event["kept"] for event in events] == ["recipe-1.json", "recipe-2.json"]
    assert events[1]["changes"] == {
        "steps": {"before": 4, "after": 5},
        "learner.lr": {"before": 0.01, "after": 0.5},
    }
    train(recipe, console, overwrite=True)
    assert not (run / "recipe-1.json").exists()


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_passed_over_and_the_bits_stay(
    make_recipe: Any, trained: MakeRecipe, console: Console
) -> None:
    uninterrupted, damaged = trained("rl"), make_recipe("rl", "damaged")
    train(damaged, console)
    newest = Path(damaged.run_dir) / "checkpoints" / "step-000003" / "policy.weights.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    resume(Path(damaged.run_dir), [], [], console)
    assert_same_run(uninterrupted, damaged, 3)
    events = [line["event"] for line in lines(Path(damaged.run_dir) / "events.jsonl")]
    assert "damaged_checkpoint" in events


@pytest.mark.slow
def test_a_changed_frozen_reference_stops_the_resume(make_recipe: Any, console: Console) -> None:
    recipe = make_recipe("rl", algorithm={"type": "grpo", "kl_coef": 0.1})
    train(recipe, console)
    config = Path(recipe.run_dir) / "init" / "config.json"
    config.write_text(config.read_text("utf-8") + "\n", "utf-8")
    with pytest.raises(RunError, match="its files have changed"):
        resume(Path(recipe.run_dir), ["--steps", "4"], [], console)


@pytest.mark.slow
def test_a_changed_recipe_is_another_run(make_recipe: Any, console: Console) -> None:
    recipe = make_recipe("sft")
    train(recipe, console)
    other = with_overrides(recipe, ["--learner.lr", "0.5"])
    with pytest.raises(UsageError) as refused:
        train(other, console)
    assert "learner.lr: 0.01 there, 0.5 here" in str(refused.value)
    assert "--overwrite true" in str(refused.value)
    assert "--allow-change learner.lr" in str(refused.value)
    run = Path(recipe.run_dir)
    with pytest.raises(
        UsageError, match=rf"\nchange a copy that postgrad fork {run} .*, or continue"
    ):
        resume(run, ["--learner.lr", "0.5"], [], console)
    assert train(other, console, allow_change=["learner.lr"])["steps"] == 3
    assert train(other, console, overwrite=True)["steps"] == 3


def test_a_run_does_not_go_back_to_fewer_steps(make_recipe: Any, console: Console) -> None:
    recipe = make_recipe("sft")
    train(recipe, console)
    stored = (Path(recipe.run_dir) / "recipe.json").read_bytes()
    refused = r"steps = 2: .* has done 3, .*; give 3 to end it there, .* postgrad fork .*run --ch"
    with pytest.raises(UsageError, match=refused):
        resume(Path(recipe.run_dir), ["--steps", "2"], [], console)
    with pytest.raises(UsageError, match="no run goes back"):
        train(with_overrides(recipe, ["--steps", "2"]), console)
    assert (Path(recipe.run_dir) / "recipe.json").read_bytes() == stored


@pytest.mark.parametrize("again", ["resume", "train"])
def test_a_run_whose_checkpoints_are_gone_does_not_start_over(
    again: str, make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    """As after a full disk, whose message names checkpoint.ckpt_path."""
    recipe = make_recipe("sft", checkpoint={"save_steps": 1})
    run_dir, other = Path(recipe.run_dir), tmp_path / "other"
    train(recipe, console)
    before = contents(run_dir)
    overrides = ["--steps", "4", "--checkpoint.ckpt_path", str(other)]

    def longer() -> dict[str, Any]:
        if again == "resume":
            return resume(run_dir, overrides, [], console)
        return train(with_overrides(recipe, overrides), console)

    with pytest.raises(UsageError, match=r"the last one of step 3, and .*other has none: put them"):
        longer()
    assert contents(run_dir) == before
    shutil.move(run_dir / "checkpoints", other)
    assert longer()["steps"] == 4
    assert [line["step"] for line in lines(run_dir / "metrics.jsonl")] == [1, 2, 3, 4]


def test_checkpoints_of_another_run_are_never_taken_for_ones_own(
    make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    elsewhere = {"ckpt_path": str(tmp_path / "elsewhere")}
    train(make_recipe("sft", "one", checkpoint=elsewhere), console)
    with pytest.raises(UsageError, match="holds checkpoints of another run"):
        train(make_recipe("sft", "two", checkpoint=elsewhere), console)


@pytest.mark.slow
def test_recorded_choices_are_used_again_unless_they_may_change(
    make_recipe: Any, console: Console
) -> None:
    recipe = make_recipe("rl", learner={"threads": None}, rollout={"slots": 5})
    train(recipe, console)
    run_dir = Path(recipe.run_dir)
    resume(run_dir, ["--steps", "4", "--rollout.slots", "3"], ["rollout.slots"], console)
    resume(run_dir, ["--steps", "5"], ["threads", "micro_train_tokens"], console)
    choices = [
        line for line in lines(run_dir / "events.jsonl") if line["event"] in ("started", "resumed")
    ]
    assert [line["event"] for line in choices] == ["started", "resumed", "resumed"]
    assert [line["slots"] for line in choices] == [5, 3, 3]
    assert choices[0]["threads"] == choices[1]["threads"]  # the third may have chosen another


@pytest.mark.slow
def test_an_adaptive_kl_in_the_reward_survives_a_kill(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coefficient is run state: a run that forgot it would not give the same bits."""
    knobs = {"type": "rloo", "kl_in": "reward", "kl_coef": 0.2, "kl_target": 0.01}
    changes = {"algorithm": {**knobs, "kl_estimator": "k1", "kl_horizon": 16}}
    uninterrupted, killed = (
        make_recipe("rl", "whole", **changes),
        make_recipe("rl", "killed", **changes),
    )
    train(uninterrupted, console)
    train_until_killed(monkeypatch, RLJob, 2, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, 3)
    used = [line["kl/coefficient"] for line in lines(Path(uninterrupted.run_dir) / "metrics.jsonl")]
    assert used[0] == 0.2
    assert used[2] != used[1] != used[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "kind"),
    [
        ("rl", RLJob),
        pytest.param("sft", SFTJob, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_a_resume_after_a_resume_gives_the_same_bits(
    job: str, kind: type, make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"checkpoint": {"save_steps": 1}, "eval": {"every": 1}, "steps": 5}
    never, killed = make_recipe(job, "never", **changes), make_recipe(job, "killed", **changes)
    train(never, console)
    for step in (1, 1, 3):  # twice in the same step too
        train_until_killed(monkeypatch, kind, step, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(never, killed, 5)
    for name in ("metrics.jsonl", "eval.jsonl"):
        steps = [line["step"] for line in lines(Path(killed.run_dir) / name)]
        assert steps == sorted(set(steps))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "key", "value"),
    [("sft", "micro_train_batch_size", "2"), ("rl", "micro_train_tokens", "64")],
)
def test_another_cut_into_micro_batches_goes_on_with_the_same_numbers_to_rounding(
    job: str, key: str, value: str, make_recipe: Any, console: Console
) -> None:
    """The update does not depend on it beyond rounding, so it needs leave but breaks nothing."""
    changes = {"checkpoint": {"save_steps": 1}, "learner": {"eps": 1e-3}}
    uninterrupted = make_recipe(job, "whole", **changes, steps=3)
    train(uninterrupted, console)
    cut = make_recipe(job, "cut", **changes, steps=1)
    train(cut, console)
    words = ["--steps", "3", f"--batch.{key}", value]
    with pytest.raises(UsageError, match=rf"--allow-change batch\.{key}") as refused:
        resume(Path(cut.run_dir), words, [], console)
    assert "--overwrite" not in str(refused.value)  # resume has none
    resume(Path(cut.run_dir), words, ["batch"], console)
    full_tensors, resumed_tensors = tensors(uninterrupted.run_dir, 3), tensors(cut.run_dir, 3)
    assert full_tensors.keys() == resumed_tensors.keys()
    for name, tensor in full_tensors.items():
        torch.testing.assert_close(resumed_tensors[name], tensor, rtol=1e-4, atol=1e-6)
    metrics = [lines(Path(run.run_dir) / "metrics.jsonl") for run in (uninterrupted, cut)]
    losses = [[line["loss"] for line in each] for each in metrics]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("follow", [{"refresh_steps": 2}, {"ema_decay": 0.5}])
def test_filters_curriculum_and_a_reference_that_follows_survive_a_kill(
    follow: dict[str, float], make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {
        "steps": 5,
        "algorithm": {"type": "dapo", "kl_coef": 0.1},
        "reference": follow,
        "rollout": {
            "dynamic_sampling": True,
            "max_rounds": 2,
            "keep_below": 0.9,
            "curriculum": {"retire_at": 0.6},
        },
    }
    uninterrupted, killed = (
        make_recipe("rl", "whole", **changes),
        make_recipe("rl", "killed", **changes),
    )
    train(uninterrupted, console)
    train_until_killed(monkeypatch, RLJob, 3, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, 5)
    assert any(name.startswith("reference.weights/") for name in tensors(uninterrupted.run_dir, 5))
    metrics = lines(Path(uninterrupted.run_dir) / "metrics.jsonl")
    assert sum(line["sampling/filtered_groups"] for line in metrics) > 0
    kls = [line["policy/kl"] for line in metrics]
    assert kls[0] == pytest.approx(0.0, abs=1e-6)
    assert max(kls) > 1e-6
    samples = lines(Path(uninterrupted.run_dir) / "samples.jsonl")
    trained = {line["ticket"] for line in samples if "filtered" not in line}
    filtered = {line["ticket"] for line in samples if "filtered" in line}
    assert filtered
    assert not trained & filtered


@pytest.mark.slow
def test_what_failures_left_of_a_step_is_spread_and_a_kill_changes_nothing_of_it(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {
        "rewards": [{"type": "tiny_rewards:seldom_broken"}],
        "scoring": {"max_failed_fraction": 1.0},
        "batch": {"n_samples_per_prompt": 8, "num_mini_batches": 8},
        "eval": {"at_start": False, "at_end": False},
    }
    uninterrupted, killed = (
        make_recipe("rl", "whole", **changes),
        make_recipe("rl", "killed", **changes),
    )
    train(uninterrupted, console)
    train_until_killed(monkeypatch, RLJob, 2, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, 3)
    folder = Path(uninterrupted.run_dir)
    samples, metrics = lines(folder / "samples.jsonl"), lines(folder / "metrics.jsonl")
    left = [
        sum(sample["step"] == n and "advantages" in sample for sample in samples) for n in (1, 2, 3)
    ]
    assert all(4 < n < 32 for n in left)
    for n, line in zip(left, metrics, strict=True):  # 32 were planned as eight updates of 4
        assert line["updates/made"] == min(8, n // 2)
        assert line["updates/smallest"] == n // line["updates/made"] >= 2
        assert line["updates/largest"] - line["updates/smallest"] <= 1
    spread_events = [
        event for event in lines(folder / "events.jsonl") if event["event"] == "samples_spread"
    ]
    assert [event["step"] for event in spread_events] == [1, 2, 3]
    assert spread_events[0]["message"].startswith(f"{left[0]} of 32 samples are trained on")


@pytest.mark.slow
def test_a_replay_filters_what_the_run_filtered(make_recipe: Any, console: Console) -> None:
    rollout = {"dynamic_sampling": True, "max_rounds": 2}
    live = make_recipe("rl", "live", rollout=rollout)
    train(live, console)
    replay = make_recipe("rl", "replay", rollout={"source": "replay", "replay_path": live.run_dir})
    train(replay, console)
    live_tensors, replay_tensors = tensors(live.run_dir, 3), tensors(replay.run_dir, 3)
    assert all(torch.equal(live_tensors[name], replay_tensors[name]) for name in live_tensors)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        {"type": "online_dpo"},
        {"type": "remax", "entropy_target": 9.0, "entropy_coef_step": 0.002},
    ],
)
def test_pairs_baselines_and_an_adapted_entropy_bonus_survive_a_kill(
    algorithm: dict[str, Any], make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"steps": 4, "algorithm": algorithm}
    changes["batch"] = {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "train_batch_size": 8}
    uninterrupted, killed = (
        make_recipe("rl", "whole", **changes),
        make_recipe("rl", "killed", **changes),
    )
    train(uninterrupted, console)
    train_until_killed(monkeypatch, RLJob, 2, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, 4)
    metrics = lines(Path(uninterrupted.run_dir) / "metrics.jsonl")
    trained = 2 if algorithm["type"] == "online_dpo" else 3
    assert metrics[0]["updates/largest"] == 2 * trained  # of two prompts
    if "entropy_target" in algorithm:
        assert metrics[1]["entropy/coefficient"] == pytest.approx(0.002)


@pytest.mark.slow
def test_sets_with_samples_of_their_own_survive_a_kill_and_measure_what_each_alone_would(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_set = {"path": "reasoning-gym:spell_backward", "size": 4, "task": TASK}
    many = {**of_set, "name": "many", "seed": 2, "n_samples": 4, "temperature": 0.7}
    few = {**of_set, "name": "few", "seed": 3, "max_new_tokens": 3}
    both = {"path": None, "size": None, "seed": None, "n_samples": 1, "greedy": False, "every": 1}
    changes = {"eval": {**both, "sets": [many, few], "pass_at": [1, 4]}}
    uninterrupted, killed = (
        make_recipe("rl", "whole", **changes),
        make_recipe("rl", "killed", **changes),
    )
    train(uninterrupted, console)
    train_until_killed(monkeypatch, RLJob, 2, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, 3)
    samples = lines(Path(uninterrupted.run_dir) / "eval_samples.jsonl")
    counts = {name: sum(sample["set"] == name for sample in samples) for name in ("many", "few")}
    assert counts == {"many": 4 * 4 * 4, "few": 4 * 4}  # rows, samples, evaluations
    longest = {
        name: max(
            len(sample["turns"][0]["token_ids"]) for sample in samples if sample["set"] == name
        )
        for name in counts
    }
    assert longest == {"many": 6, "few": 3}
    rates = {line["set"]: set(line) for line in lines(Path(uninterrupted.run_dir) / "eval.jsonl")}
    assert ("pass@4" in rates["many"], "pass@4" in rates["few"]) == (True, False)
    alone = {**both, "sets": [few], "pass_at": [1]}
    lone = make_recipe("rl", "alone", **{"eval": alone})
    train(lone, console)
    texts = [sample["text"] for sample in samples if sample["set"] == "few"]
    assert [sample["text"] for sample in lines(Path(lone.run_dir) / "eval_samples.jsonl")] == texts


def test_a_new_run_takes_the_choices_of_the_run_that_it_is_compared_with(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_threads = {"learner": {"lr": 1e-2, "threads": None}, "steps": 1}
    monkeypatch.setattr(devices, "useful_threads", lambda most: 1)
    recipe = make_recipe("sft", **open_threads)
    chosen = {"device": "cpu", "threads": 2, "products": {"16x16": "mkl"}}
    train(recipe, console, choices=chosen)
    started = next(e for e in Run(recipe.run_dir).events() if e["event"] == "started")
    assert {name: started[name] for name in chosen} == chosen
