"""Intervals of rates against published formulas, solved another way, and how often they are right.

Draws come from counters: a coverage that is asserted is the same number on every machine.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.seeds import uniform
from postgrad.ops.intervals import Z, mean_interval, wilson


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
    mirrored = mean_interval([1.0 - one for one in values])
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
    found = np.array([mean_interval(row.tolist()) for row in rates])
    covered = ((found[:, 0] <= true) & (true <= found[:, 1])).mean()
    assert 0.925 <= covered <= 0.985
    if samples == 8:
        naive = np.array([wilson(rate, problems * samples) for rate in rates.mean(axis=1)])
        assert ((naive[:, 0] <= true) & (true <= naive[:, 1])).mean() < 0.8
