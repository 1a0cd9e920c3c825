"""Online DPO: who is chosen, what a tie costs, and the loss in numbers worked out by hand."""

import math
from collections import defaultdict
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from helpers.layouts import split, total, undivided
from postgrad.algorithms import online_dpo
from postgrad.core.errors import UsageError
from postgrad.ops.advantages import best_and_worst
from postgrad.recipe.recipe import PreferenceRecipe, RLRecipe

OnlineDPO: Any = online_dpo.OnlineDPO
COMPARING = ("run_dir", "steps", "model", "data", "algorithm")
GROUP = [0, 0, 0, 1, 1, 2, 2, 3]
REWARDS = [0.5, 2.0, 0.0, 1.0, 1.0, 0.2, 0.6, 9.0]  # group 1 is a tie, group 3 has one sample
REF = [[-1.0] * 3, [-1.0] * 2, [-2.0], [-1.0], [-1.0], [-1.0] * 2, [-1.0], [-1.0]]
LOGP = [[-9.0] * 3, [-0.5] * 2, [-3.0], [-1.0], [-1.0], [-0.5] * 2, [-3.0], [-1.0]]
LENGTHS = [len(row) for row in REF]
SECTIONS: dict[str, Any] = {
    "run_dir": "run",
    "steps": 1,
    "model": {"path": "some/model"},
    "rewards": [{"type": "gsm8k"}],
    "algorithm": {"type": "online_dpo"},
    "data": {"path": "rows.jsonl", "max_len": 1024},
    "rollout": {"max_new_tokens": 512},
}


@pytest.fixture
def prepare(make_batch: Any, over_responses: Any) -> Any:
    def make(**settings: Any) -> Any:
        batch = make_batch(GROUP, REWARDS, LENGTHS)
        algorithm = OnlineDPO(**settings)
        return algorithm, algorithm.credit(batch, None, over_responses(REF), None, {})

    return make


def wide(rows: Any, of: Any) -> np.ndarray:
    return np.concatenate([[0.0, 0.0, *of[row]] for row in rows])


def test_the_best_sample_is_chosen_over_the_worst_and_lonely_samples_are_dropped(prepare: Any):
    algorithm, credit = prepare()
    assert credit.rows.tolist() == [1, 2, 3, 4, 6, 5]
    assert credit.experience.has_gradient.tolist() == [True, True, False, False, True, True]
    assert credit.metrics["groups/dropped"] == 1.0
    assert credit.metrics["pairs/tied_fraction"] == pytest.approx(1 / 3)
    assert credit.metrics["pairs/reward_difference"] == pytest.approx((2.0 + 0.0 + 0.4) / 3)
    assert algorithm.trained_samples(64, 8) == 16


def test_a_tie_has_no_gradient_and_is_counted_in_the_mean(prepare: Any):
    # x of group 0: 0.5 * ((2 * 0.5) - (-1)) = 1; of group 2: 0.5 * ((-2) - (2 * 0.5)) = -1.5
    algorithm, credit = prepare(beta=0.5)
    logprobs = wide(credit.rows, LOGP)
    loss, gradient, _ = total(algorithm, credit.experience, undivided(credit.experience), logprobs)
    assert loss == pytest.approx((math.log1p(math.exp(-1.0)) + math.log1p(math.exp(1.5))) / 3)
    slope = 0.5 / (1 + math.exp(1.0)) / 3
    np.testing.assert_allclose(gradient[2:4], [-slope, -slope], rtol=1e-6)


def test_metrics_are_means_over_the_pairs_that_are_no_ties(prepare: Any):
    """The more ties, the likelier chosen answers would seem to be, if ties counted as 0."""
    algorithm, credit = prepare(beta=0.5)
    logprobs = wide(credit.rows, LOGP)
    *_, metrics = total(algorithm, credit.experience, undivided(credit.experience), logprobs)
    report = algorithm.report(metrics)
    assert report["policy/accuracy"] == pytest.approx(1 / 2)
    assert report["policy/reward_margin"] == pytest.approx((1.0 - 1.5) / 2)
    chosen, rejected = credit.rows[[0, 4]], credit.rows[[1, 5]]
    for name, rows in {"chosen": chosen, "rejected": rejected}.items():
        sums = [math.fsum(LOGP[row]) for row in rows]
        assert report[f"policy/logprob_{name}"] == pytest.approx(math.fsum(sums) / 2)
    assert "policy/computed_pairs" not in report


def test_a_margin_takes_the_gradient_of_pairs_that_differ_by_no_more(prepare: Any):
    _, credit = prepare(margin=0.4)
    assert credit.experience.has_gradient.tolist() == [True, True, False, False, False, False]
    assert credit.metrics["pairs/tied_fraction"] == pytest.approx(2 / 3)
    assert credit.metrics["groups/equal_fraction"] == pytest.approx(1 / 3)


def test_the_loss_does_not_depend_on_how_pairs_are_cut_into_layouts(prepare: Any):
    algorithm, credit = prepare(loss="hinge")
    logprobs = wide(credit.rows, LOGP)
    once = total(algorithm, credit.experience, undivided(credit.experience), logprobs)
    parts = total(algorithm, credit.experience, split(credit.experience, 1, of=2), logprobs)
    assert parts[0] == pytest.approx(once[0], rel=1e-12)
    np.testing.assert_allclose(parts[1], once[1], rtol=1e-12)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2)), min_size=1, max_size=12))
def test_no_sample_of_a_group_is_better_than_the_chosen_or_worse_than_the_rejected(
    samples: list[tuple[int, int]],
) -> None:
    samples.sort(key=lambda sample: sample[0])
    group = np.array([g for g, _ in samples])
    rewards = np.array([r for _, r in samples], np.float64)
    rows = best_and_worst(rewards, group)
    assert len(set(rows.tolist())) == len(rows)
    for chosen, rejected in zip(rows[0::2], rows[1::2], strict=True):
        assert group[chosen] == group[rejected]
        same = rewards[group == group[chosen]]
        assert (rewards[chosen], rewards[rejected]) == (same.max(), same.min())
    assert len(rows) == 2 * sum((group == g).sum() > 1 for g in np.unique(group))


def test_rewards_that_are_not_finite_and_a_missing_reference_are_refused(make_batch: Any):
    with pytest.raises(ValueError, match="not finite"):
        OnlineDPO().credit(make_batch([0, 0], [1.0, math.inf]), None, None, None, {})
    with pytest.raises(ValueError, match="reference's logprobs"):
        OnlineDPO().credit(make_batch([0, 0], [1.0, 0.0]), None, None, None, {})


def test_it_is_for_rl_alone_and_a_micro_batch_holds_a_pair() -> None:
    recipe = RLRecipe(**SECTIONS, batch={"rollout_batch_size": 8, "n_samples_per_prompt": 4})
    assert recipe.min_micro_tokens == 2048
    with pytest.raises(UsageError, match="both samples of a pair"):
        RLRecipe(**SECTIONS, batch={"micro_train_batch_size": 1})
    with pytest.raises(UsageError, match="'online_dpo' is not for this job; known: dpo"):
        PreferenceRecipe(**{key: SECTIONS[key] for key in COMPARING})


@pytest.mark.slow
@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.3, 0.9], [0.0, 2.0, 0.5, -1.0]])
def test_trls_online_dpo_has_the_same_loss_and_gradient(
    make_batch: Any, over_responses: Any, rewards: list[float]
) -> None:
    trl = pytest.importorskip("trl.experimental.online_dpo", reason="TRL is a peer")
    rng = np.random.default_rng(0)
    logprobs, ref = (-rng.exponential(1.0, (4, 3)).astype(np.float32) for _ in range(2))
    batch = make_batch([0, 0, 1, 1], rewards)
    algorithm = OnlineDPO(beta=0.3)
    credit = algorithm.credit(batch, None, over_responses(ref), None, {})
    pair_logprobs = logprobs[credit.rows]
    ours = total(
        algorithm, credit.experience, undivided(credit.experience), wide(range(4), pair_logprobs)
    )

    order = [0, 2, 1, 3]  # TRL: the first samples of all prompts, then the second ones
    leaf = torch.tensor(logprobs[order], dtype=torch.float64, requires_grad=True)
    trainer = trl.OnlineDPOTrainer.__new__(trl.OnlineDPOTrainer)
    model = SimpleNamespace(train=lambda: None)
    ids, attention_mask = torch.ones(4, 3, dtype=torch.int64), torch.ones(4, 3, dtype=torch.int64)
    generated = (
        ids,
        attention_mask,
        ids,
        attention_mask,
        None,
    )  # before 1.16 without the last, inputs of images
    outputs = generated if Version(version("trl")) >= Version("1.16") else generated[:4]
    results = {"model": leaf, "ref": torch.tensor(ref[order], dtype=torch.float64)}
    attributes = {
        "args": SimpleNamespace(
            use_vllm=False, missing_eos_penalty=None, loss_type="sigmoid", n_gpu=1, optim="",
            torch_empty_cache_steps=None, gradient_accumulation_steps=1,
        ),
        "eos_token_ids": [1], "ref_model": "ref", "reward_funcs": None, "_beta": 0.3,
        "state": SimpleNamespace(global_step=0, epoch=0.0),
        "processing_class": SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
        "accelerator": SimpleNamespace(
            gather_for_metrics=lambda x: x, backward=lambda loss, **_: loss.backward()
        ),
        "_generate": lambda *_: outputs,
        "_forward": lambda model, *_: results["ref" if model == "ref" else "model"],
        "_calculate_rewards_from_functions": lambda **_: torch.tensor(rewards)[order],
        "stats": defaultdict(list),
    }  # fmt: skip
    for name, value in attributes.items():
        object.__setattr__(trainer, name, value)
    loss = trainer.training_step(model, {"prompt": ["a", "b"]})
    assert leaf.grad is not None
    gradient = np.empty((4, 3))
    gradient[order] = leaf.grad.numpy()
    assert ours[0] == pytest.approx(float(loss), rel=1e-6)
    response_gradient = ours[1].reshape(4, 5)[:, 2:]
    np.testing.assert_allclose(response_gradient, gradient[credit.rows], rtol=1e-5, atol=1e-9)
