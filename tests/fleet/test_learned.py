"""A reward model as a component of a run's rewards."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from helpers.runs import assert_same_run, lines, train_until_killed
from postgrad.core.errors import RunError, UsageError
from postgrad.data.mixture import training_prompts
from postgrad.data.overlap import held_out
from postgrad.fleet.learned import LearnedReward, scorer_of
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.tools.export import export
from postgrad.training.rl import RLJob
from postgrad.training.start import resume, train

LETTERS = {"type": "tiny_rewards:vowels"}


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reward-models")


@pytest.fixture
def reward_model(make_recipe: Any, console: Console, kept: Path, models: Any) -> str:
    """Trained on pairs from the model that the policies start from; one for all tests."""
    to = kept / "good"
    if not to.exists():
        recipe = make_recipe("reward", "rm", model={"path": models(0), "init": None})
        train(recipe, console)
        export(Path(recipe.run_dir), "latest", to)
    return str(to)


def with_reward_model(make_recipe: Any, models: Any, path: str, *rewards: Any, **more: Any) -> Any:
    """An RL recipe whose policy starts from the reward model's base."""
    run_dir = more.pop("run_dir", "run")
    return make_recipe(
        "rl",
        run_dir,
        **{
            "model": {"path": models(0), "init": None},
            "reward_model": {"model": {"path": path}},
            "rewards": [{"type": "reward_model"}, *rewards],
            "eval": {"correct_at": 0.0, "greedy": False, "every": 1},
            **more,
        },
    )


def samples(recipe: Any) -> list[dict[str, Any]]:
    return lines(Path(recipe.run_dir) / "samples.jsonl")


def plain_scores(path: str, rows: list[list[int]]) -> np.ndarray:
    """At the last token, also where an untrained policy wrote the padding token there, which the
    model's own pooling would pass over.
    """
    lm: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        states = [lm.model(torch.tensor([row])).last_hidden_state[0, -1] for row in rows]
        for row, state in zip(rows, states, strict=True):
            pooled = lm(torch.tensor([row])).logits.item()
            same = pooled == pytest.approx(lm.score(state).item(), abs=1e-5)
            assert same or row[-1] == lm.config.pad_token_id
        return np.array([lm.score(state).item() for state in states])


def whole_tokens(recipe: Any, models: Any) -> list[list[int]]:
    """Prompt and response of every sample of the run, from its own record."""
    prompts = training_prompts(
        recipe.data,
        load_tokenizer(models(0)),
        max_new_tokens=recipe.rollout.max_new_tokens,
        exclude=held_out([eval_set.data for eval_set in recipe.eval.sets]),
    )
    return [
        [
            *prompts.draw(sample["ticket"], recipe.seed).token_ids.tolist(),
            *(token for turn in sample["turns"] for token in turn["token_ids"]),
        ]
        for sample in samples(recipe)
    ]


@pytest.mark.slow
def test_a_sample_has_the_score_that_plain_transformers_gives_it(
    make_recipe: Any, console: Console, models: Any, reward_model: str
) -> None:
    recipe = with_reward_model(make_recipe, models, reward_model, steps=1)
    train(recipe, console)
    got = [sample["rewards"]["reward_model"] for sample in samples(recipe)]
    wanted = plain_scores(reward_model, whole_tokens(recipe, models))
    np.testing.assert_allclose(got, wanted, atol=2e-5)
    assert np.ptp(wanted) > 1e-3


def test_a_normalised_score_is_less_the_mean_and_over_the_deviation(
    make_recipe: Any, console: Console, models: Any, reward_model: str
) -> None:
    rewards = [{"type": "reward_model", "normalise": True}]
    recipe = with_reward_model(make_recipe, models, reward_model, rewards=rewards, steps=1)
    train(recipe, console)
    config = json.loads((Path(reward_model) / "config.json").read_text("utf-8"))
    raw = plain_scores(reward_model, whole_tokens(recipe, models))
    wanted = (raw - config["reward_mean"]) / config["reward_std"]
    got = [sample["rewards"]["reward_model"] for sample in samples(recipe)]
    np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_model_and_verifier_are_mixed_by_weight(
    make_recipe: Any, console: Console, models: Any, reward_model: str
) -> None:
    rewards = [{"type": "reward_model", "weight": 0.5}, {**LETTERS, "weight": 2.0}]
    recipe = with_reward_model(make_recipe, models, reward_model, rewards=rewards, steps=1)
    train(recipe, console)
    each = [sample["rewards"] for sample in samples(recipe)]
    parts = [set(components) for components in each]
    assert all({"reward_model"} < part for part in parts)
    (other,) = parts[0] - {"reward_model"}
    total = [0.5 * components["reward_model"] + 2.0 * components[other] for components in each]
    (line,) = lines(Path(recipe.run_dir) / "metrics.jsonl")
    assert line["reward"] == pytest.approx(np.mean(total), rel=1e-6)
    assert line["reward/reward_model"] == pytest.approx(
        np.mean([components["reward_model"] for components in each]), rel=1e-6
    )


@pytest.mark.slow
def test_a_killed_run_with_a_reward_model_and_a_critic_ends_with_the_same_bits(
    make_recipe: Any,
    console: Console,
    models: Any,
    reward_model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {"algorithm": {"type": "ppo", "kl_coef": 0.1}, "steps": 4}
    recipes = [
        with_reward_model(make_recipe, models, reward_model, LETTERS, **changes, run_dir=name)
        for name in ("whole", "killed")
    ]
    train(recipes[0], console)
    train_until_killed(monkeypatch, RLJob, 2, recipes[1], console)
    resume(Path(recipes[1].run_dir), [], [], console)
    assert_same_run(*recipes, 4)


def test_a_reward_model_that_changed_on_the_way_stops_the_resume(
    make_recipe: Any, console: Console, models: Any, reward_model: str, tmp_path: Path
) -> None:
    changed_model = shutil.copytree(reward_model, tmp_path / "own")
    recipe = with_reward_model(make_recipe, models, str(changed_model), steps=1)
    train(recipe, console)
    weights = load_file(changed_model / "model.safetensors")
    save_file(
        {n: w * 1.5 for n, w in weights.items()},
        changed_model / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(RunError, match=r"\(reward_model\) is not the one"):
        resume(Path(recipe.run_dir), ["--steps", "2"], [], console)


def test_scores_that_are_no_numbers_are_recorded_failures_not_zeros(
    make_recipe: Any, console: Console, models: Any, reward_model: str, tmp_path: Path
) -> None:
    """All samples fail, which is more than a run may lose: it stops and says why."""
    broken = shutil.copytree(reward_model, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["score.weight"][:] = float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    recipe = with_reward_model(make_recipe, models, str(broken), steps=1)
    with pytest.raises(RunError, match="reward_model") as error:
        train(recipe, console)
    assert "max_failed_fraction" in str(error.value)
    assert "nan" in str(error.value)


def test_failures_within_the_fraction_drop_their_samples_and_are_events(
    make_recipe: Any,
    console: Console,
    models: Any,
    reward_model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original_score = LearnedReward.score
    asked: list[int] = []

    def sometimes(self: LearnedReward, sequences: Any, images: Any) -> Any:
        scores = original_score(self, sequences, images)
        asked.append(len(scores))
        if len(asked) == 1:
            scores[0] = np.nan
        return scores

    monkeypatch.setattr(LearnedReward, "score", sometimes)
    quiet = {"eval": {"at_end": False, "at_start": False}}
    recipe = with_reward_model(make_recipe, models, reward_model, steps=1, **quiet)
    train(recipe, console)
    (line,) = lines(Path(recipe.run_dir) / "metrics.jsonl")
    assert (line["failures"], line["dropped_samples"]) == (1, 1)
    events = lines(Path(recipe.run_dir) / "events.jsonl")
    (failed,) = [event for event in events if event["event"] == "verifier_failed"]
    assert (failed["component"], failed["cause"]) == ("reward_model", "error")


def test_a_reward_model_with_another_tokenizer_is_refused_before_its_weights_are_read(
    make_recipe: Any, console: Console, models: Any, reward_model: str, tmp_path: Path
) -> None:
    other = shutil.copytree(reward_model, tmp_path / "other")
    (other / "model.safetensors").unlink()
    tokenizer = load_tokenizer(str(other))
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(other)
    recipe = with_reward_model(make_recipe, models, str(other))
    with pytest.raises(UsageError, match="another tokenizer than the policy") as error:
        train(recipe, console)
    assert f"postgrad serve-reward {other}" in str(error.value)


def test_a_policy_is_no_reward_model(make_recipe: Any, console: Console, models: Any) -> None:
    recipe = with_reward_model(make_recipe, models, models(0))
    with pytest.raises(UsageError, match=r'no reward model; train one with job = "reward"'):
        train(recipe, console)


def test_normalising_by_what_a_model_does_not_say_is_refused(
    make_recipe: Any, console: Console, models: Any, reward_model: str, tmp_path: Path
) -> None:
    changed_model = shutil.copytree(reward_model, tmp_path / "own")
    config = json.loads((changed_model / "config.json").read_text("utf-8"))
    del config["reward_mean"]
    (changed_model / "config.json").write_text(json.dumps(config), "utf-8")
    rewards = [{"type": "reward_model", "normalise": True}]
    recipe = with_reward_model(make_recipe, models, str(changed_model), rewards=rewards)
    with pytest.raises(UsageError, match="normalise = true, and its model says mean None"):
        train(recipe, console)


def test_a_verifier_that_would_look_for_a_special_token_in_plain_text_is_refused(
    make_recipe: Any, models: Any
) -> None:
    behind = {"type": "gsm8k", "after": "<|im_end|>\n"}
    tokenizer = load_tokenizer(models(0))
    with pytest.raises(UsageError) as refused:
        scorer_of(make_recipe("rl", rewards=[behind]), tokenizer)
    assert str(refused.value) == (
        r"rewards.after = '<|im_end|>\n' of 'gsm8k': '<|im_end|>' is a special token of this "
        "model's tokenizer, which the text of a sample leaves out: say special_tokens = true"
    )
    rewards = [behind | {"special_tokens": True}, {"type": "gsm8k", "name": "b", "after": "im_end"}]
    scorer_of(make_recipe("rl", rewards=rewards), tokenizer).close()
