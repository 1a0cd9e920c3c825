"""Adapter dropout in RL: it is the learner's, and no distance between learner and sampler."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.runs import lines
from helpers.tiny_runs import MakeRecipe
from postgrad.core.records import Experience, Sequences
from postgrad.learner.policy import PolicyLearner
from postgrad.observe.console import Console
from postgrad.training.start import train

LEARNING: dict[str, Any] = {"steps": 4, "learner": {"lr": 3e-2}}
NOTHING_LIKE_IT = 1e-4  # a bound that the noise of dropout is far over


def dropping(models: Any, dropout: float = 0.5) -> dict[str, Any]:
    lora = {"rank": 4, "alpha": 8, "dropout": dropout}
    return {"path": models(0), "init": None, "lora": lora}


def steps_of(recipe: Any) -> list[dict[str, float]]:
    train(recipe, Console("quiet"))
    return lines(Path(recipe.run_dir) / "metrics.jsonl")


def plain_logprobs(policy: PolicyLearner, path: str, sequences: Sequences) -> torch.Tensor:
    """float64 [N] by transformers, with the merged weights; zeros where there is no loss."""
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    merged = {name: weight.double() for name, weight in policy.hub_weights()}
    assert not lm.load_state_dict(merged, strict=False).unexpected_keys
    rows: list[torch.Tensor] = []
    for tokens, mask in zip(sequences.tokens, sequences.loss_mask, strict=True):
        row = torch.as_tensor(tokens).long()
        with torch.no_grad():
            logprobs = lm(row[None]).logits[0, :-1].log_softmax(-1)
        next_tokens = logprobs.gather(1, row[1:, None])[:, 0]
        rows.append(torch.cat([torch.zeros(1), next_tokens]) * torch.as_tensor(mask))
    return torch.cat(rows)


@pytest.fixture
def trained_on(monkeypatch: pytest.MonkeyPatch, models: Any) -> list[tuple[Experience, Any]]:
    """The experience of every update, and plain logprobs of its sequences before it."""
    seen: list[tuple[Experience, Any]] = []
    original_update = PolicyLearner.update

    def update(self: PolicyLearner, update: Any, algorithm: Any) -> Any:
        experience = update.experience
        seen.append((experience, plain_logprobs(self, models(0), experience.sequences).numpy()))
        return original_update(self, update, algorithm)

    monkeypatch.setattr(PolicyLearner, "update", update)
    return seen


def test_learner_and_sampler_agree_in_a_step_of_one_update_with_dropout(
    make_recipe: MakeRecipe, models: Any
) -> None:
    steps = steps_of(make_recipe("rl", model=dropping(models), **LEARNING))
    assert len(steps) == 4
    for line in steps:
        assert line["sentinel/ratio_excess"] == pytest.approx(1.0, abs=1e-4)
        assert line["sentinel/prob_difference"] < 1e-5
        assert line["policy/ratio"] == 1.0  # the loss has the update's own logprobs, noise and all
        assert line["policy/kl_old"] == line["policy/clip_fraction"] == 0.0
    sampled = [line["sampled_entropy"] + line["policy/logprob"] for line in steps]
    assert max(map(abs, sampled[1:])) > 1e-2  # the update itself does drop


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        {"correction": "tis"},
        {"rejection": {"mean_k3": NOTHING_LIKE_IT, "any_token": [0.999, 1.001]}},
        {"off_policy_threshold": NOTHING_LIKE_IT},
        {"old_logprobs": "sampled", "rejection": {"mean_k3": NOTHING_LIKE_IT}},
        {"kl_coef": 0.01, "kl_in": "reward", "off_policy_threshold": NOTHING_LIKE_IT},
    ],
    ids=["tis", "rejection", "off-policy mask", "sampled", "KL in the reward"],
)
def test_what_dropout_drops_neither_weighs_nor_rejects_samples_of_the_policy_itself(
    algorithm: dict[str, Any], make_recipe: MakeRecipe, models: Any
) -> None:
    recipe = make_recipe("rl", model=dropping(models), algorithm=algorithm, **LEARNING)
    for line in steps_of(recipe):
        assert line["correction/factor"] == pytest.approx(1.0, abs=1e-4)
        assert line["correction/ratio"] == pytest.approx(1.0, abs=1e-4)
        assert line["correction/kl"] < 1e-7
        assert line["correction/zeroed_fraction"] == 0.0
        assert line.get("correction/rejected_fraction", 0.0) == 0.0


def test_the_weights_of_a_correction_are_those_of_the_model_without_dropout(
    make_recipe: MakeRecipe, models: Any, trained_on: list[tuple[Experience, Any]]
) -> None:
    """Samples of older weights, so that weights are not 1, against transformers in float64."""
    rollout = {"max_staleness": 1, "slots": 5, "max_new_tokens": 6}
    recipe = make_recipe(
        "rl", model=dropping(models), algorithm={"correction": "tis"}, rollout=rollout, **LEARNING
    )
    steps, far = steps_of(recipe), 0.0
    assert len(steps) == len(trained_on) == 4
    for line, (experience, plain) in zip(steps, trained_on, strict=True):
        mask = experience.sequences.loss_mask
        computed = mask.values & mask.spread(experience.has_gradient).values
        log_w = (plain - experience.columns["sampled_logprobs"].values)[computed]
        w = np.exp(log_w)
        assert line["correction/ratio"] == pytest.approx(w.mean(), rel=1e-5)
        assert line["correction/factor"] == pytest.approx(np.minimum(w, 2.0).mean(), rel=1e-5)
        assert line["correction/kl"] == pytest.approx((w - 1 - log_w).mean(), rel=1e-3, abs=1e-8)
        far = max(far, np.abs(log_w).max())
    assert far > 0.1


def test_in_a_step_of_several_updates_the_loss_has_the_columns_that_it_has_without_dropout(
    make_recipe: MakeRecipe, models: Any, trained_on: list[tuple[Experience, Any]]
) -> None:
    """Old logprobs are of a pass without dropout anyway."""
    changes = {"algorithm": {"correction": "tis"}, "batch": {"train_batch_size": 8}}
    steps = steps_of(make_recipe("rl", model=dropping(models), **changes, **LEARNING))
    columns = {name for experience, _ in trained_on for name in experience.columns}
    assert columns == {"advantages", "old_logprobs", "sampled_logprobs"}
    assert len(trained_on) == 2 * len(steps)
    assert all(abs(line["correction/ratio"] - 1.0) < 1e-4 for line in steps)
