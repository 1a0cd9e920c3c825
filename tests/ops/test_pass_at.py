"""pass@k and maj@k against every choice of k samples, counted one by one."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.ops.intervals import majority_at_k, pass_at_k


@given(st.integers(1, 8), st.data())
def test_it_is_the_share_of_choices_with_a_right_sample(n: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    samples = [True] * correct + [False] * (n - correct)
    choices = list(itertools.combinations(samples, k))
    share = sum(any(choice) for choice in choices) / len(choices)
    assert pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-12)


def test_two_of_four_right_give_five_sixths_at_two() -> None:
    assert pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)


def test_more_samples_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@5 needs at least 5 samples, there are 4"):
        pass_at_k(4, 2, 5)


@given(st.lists(st.sampled_from(["right", "a", "b", "c", None]), min_size=1, max_size=9), st.data())
def test_a_majority_is_that_of_the_choices_with_ties_divided(
    answers: list[str | None], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(answers)))
    share = 0.0
    for choice in itertools.combinations(answers, k):
        votes = Counter(answer for answer in choice if answer is not None)
        first = [answer for answer, count in votes.items() if count == max(votes.values())]
        share += ("right" in first) / max(1, len(first))
    counts = Counter(answer for answer in answers if answer is not None)
    right = counts.pop("right", 0)
    chance = majority_at_k(right, tuple(counts.values()), answers.count(None), k)
    choices = len(list(itertools.combinations(answers, k)))
    assert chance == pytest.approx(share / choices, abs=1e-12)


def test_two_of_five_right_against_three_different_answers_win_at_five() -> None:
    assert majority_at_k(2, (1, 1, 1), 0, 5) == 1.0
    assert majority_at_k(2, (2, 1), 0, 5) == 0.5  # a tie
    assert majority_at_k(2, (3,), 0, 5) == 0.0
    assert majority_at_k(1, (1,), 2, 2) == pytest.approx((1 * 0.5 + 2) / 6)  # by hand


def test_a_majority_of_many_samples_is_exact() -> None:
    """Against one wrong answer in 32 of 64 samples the chance is a half, for every k."""
    assert [majority_at_k(32, (32,), 0, k) for k in (1, 2, 31, 32, 64)] == [0.5] * 5
    with pytest.raises(ValueError, match="maj@5 needs at least 5 samples, there are 4"):
        majority_at_k(1, (1,), 2, 5)
