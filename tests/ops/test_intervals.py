"""Intervals of rates against published formulas, solved another way, and how often they are right.

Draws come from counters: a coverage that is asserted is the same number on every machine.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.seeds import uniform
from postgrad.ops.intervals import (
    NO_INTERVAL,
    Interval,
    Z,
    mean_interval,
    ratio_interval,
    student,
    wilson,
)


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [  # SciPy 1.17, binomtest(right, n).proportion_ci(method="wilson")
        (0, 10, 0.0, 0.27753279986288926),
        (7, 20, 0.1811918241010821, 0.5671457233147637),
        (263, 500, 0.4822016483694956, 0.5694018859265038),
        (10, 10, 0.7224672001371109, 1.0),
    ],
)
def test_wilsons_interval_is_that_of_others(right: int, n: int, low: float, high: float) -> None:
    assert wilson(right / n, n) == pytest.approx((low, high), abs=1e-12)


def test_the_ends_are_the_rates_that_lie_196_standard_errors_away() -> None:
    """Wilson's definition: |observed - p| = Z sqrt(p (1 - p) / n), found here by bisection."""

    def end(p: float, other: float) -> float:
        for _ in range(60):
            middle = (p + other) / 2
            near = abs(0.3 - middle) <= Z * math.sqrt(middle * (1 - middle) / 40)
            p, other = (middle, other) if near else (p, middle)
        return p

    assert wilson(0.3, 40) == pytest.approx((end(0.3, 0.0), end(0.3, 1.0)), abs=1e-12)


def test_one_answer_to_each_problem_gives_wilsons_interval() -> None:
    assert mean_interval([1.0] * 7 + [0.0] * 13) == pytest.approx(wilson(0.35, 20), abs=1e-12)
    assert mean_interval([1.0] * 10) == wilson(1.0, 10)


def test_samples_of_a_problem_count_by_how_much_they_agree() -> None:
    """Worked by hand: 8 problems of 1/4 and 8 of 3/4: variance 1/16 against 1/4, so a quarter of
    single answers'; (16 / 4 + 2) / 18 = 1/3 of it after smoothing: as 48 independent answers.
    """
    assert mean_interval([0.25] * 8 + [0.75] * 8) == pytest.approx(wilson(0.5, 48), abs=1e-12)
    agreeing = mean_interval([0.0] * 8 + [1.0] * 8)
    assert agreeing == pytest.approx(wilson(0.5, 16), abs=1e-12)


def test_without_a_problem_there_is_no_interval() -> None:
    assert all(map(math.isnan, mean_interval([])))


@given(st.lists(st.integers(0, 8).map(lambda right: right / 8), min_size=1, max_size=30))
def test_an_interval_lies_around_the_mean_and_mirrors(values: list[float]) -> None:
    low, high = mean_interval(values)
    mean = math.fsum(values) / len(values)
    assert 0.0 <= low <= mean + 1e-12
    assert mean - 1e-12 <= high <= 1.0
    assert high - low > 1e-3
    mirrored = mean_interval([1.0 - score for score in values])
    assert mirrored == pytest.approx((1.0 - high, 1.0 - low), abs=1e-9)


@pytest.mark.parametrize("problems", [12, 40, 200])
@pytest.mark.parametrize("samples", [1, 8])
@pytest.mark.parametrize("hard", [0.5, 0.9])
def test_it_holds_the_true_rate_as_often_as_it_says(
    problems: int, samples: int, hard: float
) -> None:
    """A share `hard` of all problems is solved with chance 0.1, the others with 0.9: samples of a
    problem agree more than chance. Intervals that take them for independent are right less than
    80% of the time at 8 samples.
    """
    trials = 1500
    of = (np.arange(trials)[:, None, None], np.arange(problems)[:, None])
    chance = np.where(uniform(0, f"problem {problems}", *of) < hard, 0.1, 0.9)
    right = uniform(0, f"answer {problems}", *of, np.arange(samples)) < chance
    rates = right.mean(axis=2)
    true = 0.1 * hard + 0.9 * (1 - hard)
    intervals = np.array([mean_interval(row.tolist()) for row in rates])
    covered = ((intervals[:, 0] <= true) & (true <= intervals[:, 1])).mean()
    assert 0.925 <= covered <= 0.985
    if samples == 8:
        naive = np.array([wilson(rate, problems * samples) for rate in rates.mean(axis=1)])
        assert ((naive[:, 0] <= true) & (true <= naive[:, 1])).mean() < 0.8


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [
        (1, 12.706205),
        (2, 4.302653),
        (3, 3.182446),
        (4, 2.776445),
        (5, 2.570582),
        (7, 2.364624),
        (12, 2.178813),
        (29, 2.045230),
        (200, 1.971896),
    ],  # SciPy 1.17
)
def test_students_quantile_is_that_of_tables(degrees: int, quantile: float) -> None:
    assert student(degrees) == pytest.approx(quantile, rel=1e-3)


def test_a_ratio_over_rows_is_worked_by_hand() -> None:
    """Losses 1 and 3 over 1 and 3 tokens: the ratio is (1 * 1 + 3 * 3) / 4 = 2.5."""
    sums, counts = np.array([1.0, 9.0]), np.array([1.0, 3.0])
    residuals = 1.0 - 2.5, 9.0 - 7.5
    half = student(1) * math.sqrt(2 * (residuals[0] ** 2 + residuals[1] ** 2)) / 4
    assert ratio_interval(sums, counts) == pytest.approx((2.5 - half, 2.5 + half), abs=1e-12)


def test_a_ratio_of_equal_counts_is_a_mean_with_students_interval() -> None:
    values = 3 + uniform(0, "a ratio", range(12))
    low, high = ratio_interval(7 * values, np.full(12, 7.0))
    half = student(11) * float(values.std(ddof=1)) / math.sqrt(12)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=1e-12)


def test_an_interval_ends_where_its_number_cannot_be() -> None:
    assert Interval(-0.2, 1.3).within(0.0, 1.0) == (0.0, 1.0)
    assert Interval(0.2, 0.3).within(0.0, math.inf) == (0.2, 0.3)
    assert all(math.isnan(end) for end in NO_INTERVAL.within(0.0, 1.0))


def test_a_ratio_without_rows_or_tokens_has_no_interval() -> None:
    for sums, counts in (([], []), ([1.0], [2.0]), ([0.0, 0.0], [0.0, 0.0])):
        ends = ratio_interval(np.array(sums), np.array(counts))
        assert all(math.isnan(end) for end in ends)


def test_the_interval_of_a_ratio_holds_the_truth_nineteen_times_in_twenty() -> None:
    """Rows of 1 to 50 tokens; the longer ones have a lower loss, as real ones do."""
    rows, trials = 40, 2000
    lengths = 1 + np.floor(50 * uniform(1, "lengths", range(rows * trials))).reshape(trials, rows)
    noise = uniform(2, "noise", range(rows * trials)).reshape(trials, rows) - 0.5
    losses = 2.0 - 0.01 * lengths + noise
    every = np.arange(1, 51)
    truth = float((every * (2.0 - 0.01 * every)).sum() / every.sum())
    held = [
        low <= truth <= high
        for low, high in (
            ratio_interval(loss * length, length)
            for loss, length in zip(losses, lengths, strict=True)
        )
    ]
    assert np.mean(held) == pytest.approx(0.95, abs=0.015)
