"""How far a reward model's confidence can be trusted: by hand, and by a slower definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.ops.intervals import calibration_error, margin_histogram


def test_four_pairs_by_hand() -> None:
    """Confidences sigmoid(2) = 0.8808 (twice, one right), sigmoid(0.1) = 0.5250 (right, wrong):
    |1/2 - 0.8808| * 2/4 + |1/2 - 0.5250| * 2/4.
    """
    margins = np.array([2.0, -2.0, 0.1, -0.1])
    assert calibration_error(margins) == pytest.approx((0.380797 + 0.024979) / 2, abs=1e-6)


def test_a_certain_model_that_is_right_has_no_error_and_one_that_is_wrong_all_of_it() -> None:
    assert calibration_error(np.full(5, 40.0)) == pytest.approx(0.0, abs=1e-12)
    assert calibration_error(np.full(5, -40.0)) == pytest.approx(1.0)


def test_a_model_that_knows_nothing_is_calibrated() -> None:
    assert calibration_error(np.zeros(7)) == 0.0


def test_huge_margins_do_not_overflow() -> None:
    with np.errstate(all="raise", under="ignore"):
        assert calibration_error(np.array([1e300, -1e300])) == pytest.approx(0.5)


def test_a_sigmoid_of_the_margin_is_calibrated_where_outcomes_follow_it() -> None:
    rng = np.random.default_rng(0)
    size = rng.exponential(1.5, 40_000)
    right = rng.uniform(size=len(size)) < 1 / (1 + np.exp(-size))
    margins = np.where(right, size, -size)
    assert calibration_error(margins) < 0.01
    assert calibration_error(3 * margins) > 0.1  # the same order, too sure of it


finite = st.floats(-20, 20, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 1e-9)


@given(st.lists(finite, min_size=1, max_size=60))
def test_it_is_the_weighted_mean_over_ten_bins_of_confidence(margins: list[float]) -> None:
    bins: dict[int, list[tuple[float, float]]] = {}
    for margin in margins:
        confidence = 1 / (1 + np.exp(-abs(margin)))
        place = min(9, int((confidence - 0.5) / 0.05 + 1e-12))
        exact = (confidence - 0.5) / 0.05
        if abs(exact - round(exact)) < 1e-9 and 0 < round(exact) < 10:
            return  # on an edge either bin will do
        right = 0.5 if margin == 0 else float(margin > 0)
        bins.setdefault(place, []).append((confidence, right))
    expected = sum(
        len(each)
        / len(margins)
        * abs(np.mean([r for _, r in each]) - np.mean([c for c, _ in each]))
        for each in bins.values()
    )
    assert calibration_error(np.array(margins)) == pytest.approx(expected, abs=1e-9)


@given(st.lists(finite, min_size=1, max_size=60))
def test_a_histogram_counts_every_margin_once(margins: list[float]) -> None:
    edges, counts = margin_histogram(np.array(margins))
    assert sum(counts) == len(margins)
    assert len(edges) == len(counts) + 1 == 21
    assert edges[0] <= min(margins)
    assert max(margins) <= edges[-1]
    assert edges == sorted(edges)
