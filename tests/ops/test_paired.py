"""Paired tests against enumeration, hand-worked numbers, and how often they are right."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.seeds import uniform
from postgrad.ops import intervals
from postgrad.ops.intervals import difference_interval, mcnemar, sign_flip


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [  # the middle two: SciPy 1.17, binomtest(first, first + second).pvalue
        (1, 9, 22 / 1024),  # 2 (1 + 10) / 2^10
        (10, 3, 0.09228515625),
        (40, 61, 0.046044066929342785),
        (0, 0, 1.0),
        (4, 4, 1.0),
    ],
)
def test_mcnemars_test_is_the_binomial_of_the_discordant_problems(
    first: int, second: int, p: float
) -> None:
    assert mcnemar(first, second) == pytest.approx(p, abs=1e-12)
    assert mcnemar(second, first) == mcnemar(first, second)


@given(st.lists(st.sampled_from([-1.0, -0.5, -0.25, 0.0, 0.25, 0.75]), max_size=9))
def test_signs_are_flipped_in_every_way(differences: list[float]) -> None:
    ways = list(itertools.product((-1, 1), repeat=len(differences)))
    sums = [abs(sum(s * d for s, d in zip(way, differences, strict=True))) for way in ways]
    share = sum(flipped_sum >= abs(sum(differences)) - 1e-9 for flipped_sum in sums) / len(ways)
    assert sign_flip(differences, 0) == pytest.approx(share, abs=1e-12)


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 5))
def test_of_single_answers_it_is_mcnemars_test(first: int, second: int, same: int) -> None:
    differences = [1.0] * first + [-1.0] * second + [0.0] * same
    assert sign_flip(differences, 0) == pytest.approx(mcnemar(first, second), abs=1e-12)


def test_drawn_signs_come_close_to_all_signs() -> None:
    """45 against 65 of 110: more words of random bits than one, and more chunks than one."""
    differences = [1.0] * 45 + [-1.0] * 65
    drawn = sign_flip(differences, 7)
    spread = math.sqrt(0.07 * 0.93 / intervals.FLIPS)
    assert drawn == pytest.approx(mcnemar(45, 65), abs=4 * spread)
    assert drawn == sign_flip(differences, 7)
    assert drawn != sign_flip(differences, 8)


def test_the_smallest_p_is_that_of_the_observed_signs_alone() -> None:
    assert sign_flip([1.0] * 80, 0) == 1 / (intervals.FLIPS + 1)
    assert sign_flip([0.5] * 4, 0) == 2 / 16


def test_the_interval_of_single_answers_is_bonett_and_prices() -> None:
    """Their formula with 10 and 3 discordant of 100: p = 11/102 and 4/102."""
    p, q = 11 / 102, 4 / 102
    half = 1.959963984540054 * math.sqrt((p + q - (p - q) ** 2) / 102)
    interval = difference_interval([1.0] * 10 + [-1.0] * 3 + [0.0] * 87)
    assert interval == pytest.approx((p - q - half, p - q + half), abs=1e-12)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40))
def test_an_interval_holds_the_mean_and_mirrors(differences: list[float]) -> None:
    low, high = difference_interval(differences)
    mean = math.fsum(differences) / len(differences)
    assert -1.0 <= low <= mean + 1e-12
    assert mean - 1e-12 <= high <= 1.0
    mirrored = difference_interval([-difference for difference in differences])
    assert mirrored == pytest.approx((-high, -low), abs=1e-12)


def test_without_a_problem_nothing_is_claimed() -> None:
    assert sign_flip([], 0) == 1.0
    assert all(map(math.isnan, difference_interval([])))


@pytest.mark.parametrize("problems", [12, 60])
@pytest.mark.parametrize("gain", [0.0, 0.15])
def test_both_are_right_as_often_as_they_say(problems: int, gain: float) -> None:
    """Four answers each to problems of every difficulty, of which the first model has `gain` more:
    the interval holds the gain; the test finds a difference where there is none at most 5% of the
    time, and the real one more often.
    """
    trials = 400
    of = (np.arange(trials)[:, None, None], np.arange(problems)[:, None])
    chance = uniform(0, f"pairs {problems}", *of) * (1 - gain)
    first = uniform(0, f"first {problems}", *of, np.arange(4)) < chance + gain
    second = uniform(0, f"second {problems}", *of, np.arange(4)) < chance
    differences = [row.tolist() for row in first.mean(axis=2) - second.mean(axis=2)]
    all_intervals = np.array([difference_interval(row) for row in differences])
    assert ((all_intervals[:, 0] <= gain) & (gain <= all_intervals[:, 1])).mean() >= 0.93
    rejected = np.mean([sign_flip(row, i) <= 0.05 for i, row in enumerate(differences[:150])])
    if gain == 0.0:
        assert rejected <= 0.08  # 0.05 and two standard errors of 150 trials
    else:
        assert rejected >= (0.2 if problems == 12 else 0.8)
