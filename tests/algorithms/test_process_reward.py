"""The loss of process reward models against a loop, and against that of TRL's trainer."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.layouts import slope, split, total, undivided
from postgrad.algorithms.process_reward import ProcessReward
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences

MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=2, max_size=5).filter(
    lambda rows: any(map(any, rows))
)


def of_masks(masks: list[list[bool]], labels: np.ndarray, **knobs: float) -> Experience:
    mask = Ragged.of(masks, np.bool_)
    tokens = mask.like(np.arange(len(mask.values), dtype=np.int32))
    sequences = Sequences(tokens, mask, np.arange(len(masks)))
    return ProcessReward(**knobs).experience(sequences, labels)


@settings(max_examples=25, deadline=None)
@given(masks=MASKS, seed=st.integers(0, 10**6), scale=st.sampled_from([0.1, 1.0, 30.0]))
def test_loss_and_gradient_are_the_cross_entropy_over_steps_however_the_update_is_split(
    masks: list[list[bool]], seed: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    flat = np.concatenate(masks)
    labels = np.where(rng.random(len(flat)) < 0.5, rng.random(len(flat)), rng.integers(0, 2))
    experience = of_masks(masks, labels)
    kept = experience.columns["labels"].values.astype(np.float64)
    scores = rng.normal(0, scale, len(flat))
    steps = np.flatnonzero(flat)

    def wanted(at: np.ndarray) -> float:
        return math.fsum(
            max(at[i], 0) + math.log1p(math.exp(-abs(at[i]))) - kept[i] * at[i] for i in steps
        ) / len(steps)

    algorithm = ProcessReward()
    loss, gradient, metrics = total(algorithm, experience, undivided(experience), scores, "score")
    assert loss == pytest.approx(wanted(scores), rel=1e-6, abs=1e-9)
    np.testing.assert_allclose(gradient, slope(wanted, scores, 1e-5), rtol=1e-4, atol=1e-7)
    parts = split(experience, seed, of=1)
    again, same_gradient, same_metrics = total(algorithm, experience, parts, scores, "score")
    assert again == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(same_gradient, gradient, rtol=1e-12)
    assert same_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)


def test_a_hand_worked_update_divides_by_the_steps_of_all_its_answers() -> None:
    """Steps 1, 0.25 | 0 with scores 0, log 3, -log 3: p = 1/2, 3/4, 1/4."""
    labels = np.array([9.0, 1.0, 0.25, 9.0, 0.0])
    experience = of_masks([[False, True, True], [False, True]], labels)
    scores = np.array([5.0, 0.0, math.log(3), 5.0, -math.log(3)])
    algorithm = ProcessReward()
    loss, gradient, metrics = total(algorithm, experience, undivided(experience), scores, "score")
    soft = -0.25 * math.log(0.75) - 0.75 * math.log(0.25)
    assert loss == pytest.approx((math.log(2) + soft - math.log(0.75)) / 3, rel=1e-6)
    assert gradient.tolist() == pytest.approx([0, -0.5 / 3, 0.5 / 3, 0, 0.25 / 3], abs=1e-7)
    assert algorithm.report(metrics) == pytest.approx(
        {
            "reward_model/accuracy": 2 / 3,
            "reward_model/right_steps": 1 / 3,
            "reward_model/probability_right": 0.5,
            "reward_model/probability_wrong": 0.5,
        }
    )


def test_hard_labels_are_1_from_their_bound_on() -> None:
    experience = of_masks([[True] * 4], np.array([0.0, 0.125, 0.5, 1.0]), hard_at=0.125)
    assert experience.columns["labels"].values.tolist() == [0.0, 1.0, 1.0, 1.0]


def test_a_sequence_without_a_labelled_step_has_no_gradient() -> None:
    experience = of_masks([[True], [False]], np.array([1.0, 0.0]))
    assert experience.has_gradient.tolist() == [True, False]


@pytest.mark.parametrize("label", [-0.1, 1.1, math.nan])
def test_a_label_outside_0_to_1_is_refused(label: float) -> None:
    with pytest.raises(ValueError, match="a label from 0 to 1"):
        of_masks([[True]], np.array([label]))


@pytest.mark.parametrize(("label", "absent"), [(1.0, "wrong"), (0.0, "right")])
def test_metrics_of_labels_that_no_step_has_are_left_out(label: float, absent: str) -> None:
    """Whether or not so many weights add up to 1 in float32."""
    algorithm = ProcessReward()
    for steps in (2, 25, 43, 59):
        experience = of_masks([[True] * steps], np.full(steps, label))
        *_, metrics = total(algorithm, experience, undivided(experience), np.zeros(steps), "score")
        report = algorithm.report(metrics)
        assert f"reward_model/probability_{absent}" not in report
        assert "reward_model/wrong_steps" not in report
        kept = "right" if absent == "wrong" else "wrong"
        assert report[f"reward_model/probability_{kept}"] == pytest.approx(0.5, rel=1e-6)


def test_the_loss_is_that_of_two_labels_for_tokens() -> None:
    """What TRL's PRMTrainer trains with: transformers' loss of token classification, the mean of
    the cross entropy over tokens whose label is not -100.
    """
    rng = np.random.default_rng(0)
    mask = rng.random(40) < 0.3
    labels, scores = rng.integers(0, 2, 40), rng.normal(0, 2, 40)
    experience = of_masks([mask[:25].tolist(), mask[25:].tolist()], labels.astype(np.float64))
    loss, *_ = total(ProcessReward(), experience, undivided(experience), scores, "score")
    # the difference of two logits is the score
    other = rng.normal(0, 1, 40)
    logits = torch.tensor(np.stack([other, other + scores], 1))
    ignored = torch.tensor(np.where(mask, labels, -100))
    assert loss == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits, ignored)), rel=1e-5
    )
