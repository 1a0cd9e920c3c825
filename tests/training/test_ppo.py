"""PPO in the loop: a critic that starts first, from a policy or a reward model, and resumes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.runs import assert_same_run, lines, tensors, train_until_killed
from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import RunError, UsageError
from postgrad.models.fresh import make_fresh
from postgrad.models.load import load_model
from postgrad.models.score import load_score_model
from postgrad.models.settings import ModelInit
from postgrad.observe.console import Console
from postgrad.tools.export import export
from postgrad.training.rl import RLJob
from postgrad.training.start import resume, train

MODEL: dict[str, Any] = {
    "init": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tokenizer": {
            "kind": "characters",
            "phrases": ["Spell this word backward (example: sun -> nus): "],
        },
    }
}
PPO: dict[str, Any] = {
    "algorithm": {
        "type": "ppo",
        "critic_warmup_steps": 2,
        "reward_scaling": "running",
        "kl_coef": 0.1,
        "kl_target": 0.01,
        "kl_horizon": 16,
    },
    "batch": {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "epochs_per_rollout": 2},
    "critic": {"learner": {"lr": 2e-2}},
}


def of_role(tensors_by_name: dict[str, torch.Tensor], stem: str) -> dict[str, torch.Tensor]:
    return {n.partition("/")[2]: t for n, t in tensors_by_name.items() if n.startswith(f"{stem}/")}


def metrics(recipe: Any) -> list[dict[str, Any]]:
    return lines(Path(recipe.run_dir) / "metrics.jsonl")


@pytest.fixture
def reward_model(make_recipe: Any, console: Console, tmp_path: Path, models: Any) -> str:
    """A small reward model, trained on pairs and exported."""
    recipe = make_recipe("reward", "rm", model={"path": models(0)})
    train(recipe, console)
    return str(export(Path(recipe.run_dir), "latest", tmp_path / "reward-model"))


def test_in_warm_up_steps_the_critic_learns_and_the_policy_keeps_every_bit(
    make_recipe: Any, console: Console, models: Callable[[int], str]
) -> None:
    recipe = make_recipe("rl", **PPO, model={"path": models(0)}, steps=2)
    train(recipe, console)
    saved = tensors(recipe.run_dir, 2)
    start = dict(load_model(models(0), dtype=torch.float32).lm.named_parameters())
    policy = of_role(saved, "policy.weights")
    assert policy.keys() == start.keys()
    assert all(torch.equal(policy[name], start[name]) for name in start)
    assert int(saved["policy.optimizer/updates"]) == 0
    critic = of_role(saved, "critic.weights")
    start_weights = dict(load_score_model(models(0), dtype=torch.float32).lm.named_parameters())
    assert critic.keys() == start_weights.keys()
    assert not any(torch.equal(critic[name], start_weights[name]) for name in start_weights)
    assert int(saved["critic.optimizer/updates"]) == 4
    for line in metrics(recipe):
        assert line["update"] == 0
        assert line["loss"] is None
        assert "policy/loss" not in line
        assert line["critic/loss"] > 0
        # The engine before the publish is as far from the learner as after it: by rounding.
        assert line["sentinel/policy_moved"] == line["sentinel/publish_difference"] < 1e-6
        assert line["kl/coefficient"] == 0.1  # the policy does not move, and is not pushed to


@pytest.mark.slow
def test_the_policy_learns_from_the_step_after_the_warm_up_on(
    trained: MakeRecipe,
) -> None:
    """No sample is hoarded: each step trains on its own."""
    recipe = trained("rl", **PPO, steps=4)
    metric_lines = metrics(recipe)
    assert [line["update"] for line in metric_lines] == [0, 0, 2, 4]
    assert [line["episodes"] for line in metric_lines] == [16, 32, 48, 64]
    assert metric_lines[-1]["policy/grad_norm"] > 0
    updates = tensors(recipe.run_dir, 4)
    assert int(updates["policy.optimizer/updates"]) == 4
    assert int(updates["critic.optimizer/updates"]) == 8


@pytest.mark.slow
def test_a_schedule_would_end_behind_the_run_though_the_policy_starts_late(
    make_recipe: Any, console: Console
) -> None:
    """Linear over the updates of each: four of the policy, eight of the critic."""
    learner = {"lr": 1e-2, "schedule": "linear", "threads": 1}
    recipe = make_recipe("rl", **PPO, learner=learner, steps=4)
    train(recipe, console)
    metric_lines = metrics(recipe)
    assert [line["policy/lr"] for line in metric_lines[2:]] == pytest.approx(
        [1e-2 * 3 / 4, 1e-2 / 4]
    )
    wanted = [2e-2 * left / 8 for left in (7, 5, 3, 1)]  # of the last update in each step
    assert [line["critic/lr"] for line in metric_lines] == pytest.approx(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2, 3], ids=["in warm-up", "at its end", "after it"])
def test_a_killed_run_counts_each_roles_updates_and_ends_with_the_same_bits(
    steps: int,
    make_recipe: Any,
    trained: MakeRecipe,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uninterrupted = trained("rl", **PPO, steps=4)
    killed = make_recipe("rl", "killed", **PPO, steps=4)
    train_until_killed(monkeypatch, RLJob, steps, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, 4)
    used = [line["kl/coefficient"] for line in metrics(uninterrupted)]
    assert len(set(used)) > 1  # adaptive: a run that forgot it would not give the same bits
    assert len({line["reward_scaling/mean"] for line in metrics(uninterrupted)}) > 1


@pytest.mark.slow
def test_a_critic_starts_from_the_reward_model(
    make_recipe: Any, console: Console, models: Any, reward_model: str
) -> None:
    frozen = {"critic": {"learner": {"lr": 1e-12}}}
    rewards = [{"type": "reward_model"}]
    more: dict[str, Any] = {
        "model": {"path": models(0)},
        "rewards": rewards,
        "reward_model": {"model": {"path": reward_model}},
        "eval": {"correct_at": 0.0},
        "steps": 1,
    }
    recipe = make_recipe("rl", **{**PPO, **frozen}, **more)
    train(recipe, console)
    critic_weights = of_role(tensors(recipe.run_dir, 1), "critic.weights")
    reward_weights = dict(load_score_model(reward_model, dtype=torch.float32).lm.named_parameters())
    assert critic_weights.keys() == reward_weights.keys()
    for name, tensor in reward_weights.items():
        torch.testing.assert_close(critic_weights[name], tensor.detach(), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_any_role_is_exported(make_recipe: Any, console: Console, tmp_path: Path) -> None:
    recipe = make_recipe("rl", **PPO)
    train(recipe, console)
    run = Path(recipe.run_dir)
    saved = tensors(recipe.run_dir, 3)
    for role in ("policy", "critic"):
        to = str(export(run, "latest", tmp_path / role, role))
        load = load_model if role == "policy" else load_score_model
        read = dict(load(to, dtype=torch.float32).lm.named_parameters())
        wanted = of_role(saved, f"{role}.weights")
        assert all(torch.equal(read[name], wanted[name]) for name in wanted)
    with pytest.raises(UsageError, match="role 'reward': this run has policy and critic"):
        export(run, "latest", tmp_path / "reward", "reward")


@pytest.fixture
def wider(tmp_path: Path) -> str:
    """A model of another width with the tokenizer of `models`."""
    width = {"hidden_size": 24, "initializer_range": 0.2}
    make_fresh(ModelInit.model_validate({**MODEL["init"], **width}), [], 0, tmp_path / "wider")
    return str(tmp_path / "wider")


def test_a_critic_may_have_another_shape_than_the_policy(
    make_recipe: Any, console: Console, models: Any, wider: str
) -> None:
    critic = {"critic": {"model": {"path": wider}}}
    recipe = make_recipe("rl", **{**PPO, **critic}, model={"path": models(0)}, steps=1)
    train(recipe, console)
    assert tensors(recipe.run_dir, 1)["critic.weights/score.weight"].shape == (1, 24)


def test_a_critic_whose_config_is_not_of_its_weights_is_named(
    make_recipe: Any, console: Console, models: Any, wider: str
) -> None:
    config = json.loads((Path(wider) / "config.json").read_text("utf-8"))
    (Path(wider) / "config.json").write_text(json.dumps(config | {"hidden_size": 16}), "utf-8")
    critic = {"critic": {"model": {"path": wider}}}
    recipe = make_recipe("rl", **{**PPO, **critic}, model={"path": models(0)})
    with pytest.raises(UsageError, match="of another shape") as error:
        train(recipe, console)
    assert wider in str(error.value)


@pytest.mark.slow
def test_a_checkpoint_whose_critic_has_another_shape_is_refused(
    make_recipe: Any, console: Console, models: Any, wider: str
) -> None:
    recipe = make_recipe("rl", **PPO, model={"path": models(0)}, steps=1)
    train(recipe, console)
    critic = {"critic": {"model": {"path": wider}}}
    other = make_recipe("rl", **{**PPO, **critic}, model={"path": models(0)}, steps=2)
    with pytest.raises(
        RunError, match=r"of the checkpoint's .* has shape \(\d+, 16\), the model's"
    ):
        train(other, console, allow_change=["critic"])


@pytest.mark.parametrize("role", ["critic", "reference"])
def test_a_role_that_reads_other_tokens_than_the_policys_is_refused(
    role: str, make_recipe: Any, console: Console, models: Any, tmp_path: Path
) -> None:
    plain = {"kind": "characters", "phrases": []}
    init = ModelInit.model_validate({**MODEL["init"], "tokenizer": plain})
    make_fresh(init, [], 0, tmp_path / "other")
    named = {role: {"model": {"path": str(tmp_path / "other")}}}
    recipe = make_recipe("rl", **{**PPO, **named}, model={"path": models(0)})
    with pytest.raises(UsageError, match=rf"{role}\.model\.path: .*another tokenizer"):
        train(recipe, console)


def test_a_critic_from_a_reward_model_with_other_tokens_is_refused_by_the_key_that_names_it(
    make_recipe: Any, console: Console, models: Any, tmp_path: Path
) -> None:
    plain = {"kind": "characters", "phrases": []}
    init = ModelInit.model_validate({**MODEL["init"], "tokenizer": plain})
    make_fresh(init, [], 0, tmp_path / "other")
    more: dict[str, Any] = {
        "model": {"path": models(0)},
        "rewards": [{"type": "reward_model"}],
        "reward_model": {"model": {"path": str(tmp_path / "other")}},
    }
    why = r"reward_model\.model\.path, from which the critic starts: .*another tokenizer"
    with pytest.raises(UsageError, match=why):
        train(make_recipe("rl", **PPO, **more), console)
