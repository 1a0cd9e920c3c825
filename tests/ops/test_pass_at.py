"""pass@k against every choice of k samples, counted one by one."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.ops.intervals import pass_at_k


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
