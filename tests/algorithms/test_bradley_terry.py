"""The reward model's loss against a loop, and what an experience of pairs looks like."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.layouts import slope, split, total, undivided
from postgrad.algorithms.bradley_terry import BradleyTerry
from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences

LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=5)
KNOBS: list[dict[str, Any]] = [
    {},
    {"loss": "log_exp"},
    {"margin": True},
    {"margin": True, "centre_coef": 0.1},
    {"loss": "log_exp", "centre_coef": 0.1},
]


def pairs_of(lengths: list[tuple[int, int]]) -> Sequences:
    tokens = Ragged.of([np.arange(n) for pair in lengths for n in pair], np.int32)
    mask = tokens.like(np.zeros(len(tokens.values), np.bool_))
    return Sequences(tokens, mask, np.repeat(np.arange(len(lengths)), 2))


def test_the_score_is_read_at_the_last_token_of_each_sequence() -> None:
    experience = BradleyTerry().experience(pairs_of([(3, 1), (2, 4)]), np.array([0.5, 2.0]))
    assert [row.astype(int).tolist() for row in experience.sequences.loss_mask] == [
        [0, 0, 1], [1], [0, 1], [0, 0, 0, 1],
    ]  # fmt: skip
    assert [row[-1] for row in experience.columns["margins"]] == [0.5, 0.5, 2.0, 2.0]
    assert experience.has_gradient.all()


@pytest.mark.parametrize("knobs", KNOBS)
@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 10**6), scale=st.sampled_from([0.1, 1.0, 30.0]))
def test_loss_and_gradient_are_the_paper_s_however_the_update_is_split(
    knobs: dict[str, Any], lengths: list[tuple[int, int]], seed: int, scale: float
) -> None:
    algorithm = BradleyTerry(**knobs)
    rng = np.random.default_rng(seed)
    margins = rng.exponential(1.0, len(lengths))
    experience = algorithm.experience(pairs_of(lengths), margins)
    scores = rng.normal(0, scale, len(experience.sequences.tokens.values))
    last = experience.sequences.tokens.offsets[1:] - 1

    def wanted(at: np.ndarray) -> float:
        losses = []
        for k, margin in enumerate(margins):
            good, bad = float(at[last[2 * k]]), float(at[last[2 * k + 1]])
            x = good - bad - (margin if algorithm.margin else 0.0)
            loss = math.log1p(math.exp(-x)) if x > 0 else -x + math.log1p(math.exp(x))
            losses.append(loss + algorithm.centre_coef * (good + bad) ** 2)
        return math.fsum(losses) / len(losses)

    loss, gradient, metrics = total(algorithm, experience, undivided(experience), scores, "score")
    assert loss == pytest.approx(wanted(scores), rel=1e-6, abs=1e-9)
    np.testing.assert_allclose(gradient, slope(wanted, scores, 1e-5), rtol=1e-5, atol=1e-7)
    parts = split(experience, seed, of=2)
    again, same_gradient, same_metrics = total(algorithm, experience, parts, scores, "score")
    assert again == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(same_gradient, gradient, rtol=1e-12)
    assert same_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    good, bad = scores[last[0::2]], scores[last[1::2]]
    report = algorithm.report(metrics)
    assert report == pytest.approx(
        {
            "reward_model/accuracy": float((good > bad).mean()),
            "reward_model/margin": float((good - bad).mean()),
            "reward_model/reward_chosen": float(good.mean()),
            "reward_model/reward_rejected": float(bad.mean()),
            "reward_model/reward_mean": float(scores[last].mean()),
            "reward_model/reward_std": float(scores[last].std()),
        },
        rel=1e-5, abs=1e-5 * scale,
    )  # fmt: skip


def test_scores_far_apart_leave_loss_and_gradient_finite() -> None:
    for knobs in KNOBS:
        algorithm = BradleyTerry(**knobs)
        experience = algorithm.experience(pairs_of([(1, 1), (1, 1)]), np.zeros(2))
        scores = np.array([1e4, -1e4, -1e4, 1e4])
        loss, gradient, _ = total(algorithm, experience, undivided(experience), scores, "score")
        assert loss == pytest.approx(1e4, rel=1e-6)  # half the pairs are right, half cost 2e4
        assert gradient.tolist() == pytest.approx([0, 0, -0.5, 0.5])


def test_what_cannot_be_learned_from_is_refused() -> None:
    with pytest.raises(UsageError, match="log_exp loss has no margin"):
        BradleyTerry(loss="log_exp", margin=True)
    with pytest.raises(ValueError, match="one margin, a finite number"):
        BradleyTerry().experience(pairs_of([(1, 1)]), np.zeros(2))
    with pytest.raises(ValueError, match="one margin, a finite number"):
        BradleyTerry().experience(pairs_of([(1, 1)]), np.array([np.nan]))
    with pytest.raises(ValueError, match="without tokens"):
        BradleyTerry().experience(pairs_of([(1, 0)]), np.zeros(1))
