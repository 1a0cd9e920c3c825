"""Mean and deviation of what comes in batches."""

import json
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.algorithms.reward_scaling import Moments, moments

VALUES = st.lists(st.floats(-1e3, 1e3), max_size=20)


@given(batches=st.lists(VALUES, max_size=5), shift=st.sampled_from([0.0, 1e6]))
def test_any_split_into_batches_gives_the_moments_of_all_numbers(batches, shift):
    seen = Moments()
    for batch in batches:
        seen = seen.merged(moments(np.array(batch, np.float64) + shift))
    every = [value + shift for batch in batches for value in batch]
    assert seen.n == len(every)
    if every:
        assert seen.mean == pytest.approx(statistics.fmean(every), rel=1e-12, abs=1e-9)
    wanted = statistics.stdev(every) if len(every) > 1 else 0.0
    assert seen.std == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_equal_numbers_have_no_deviation_and_are_divided_by_one():
    seen = moments(np.full(3, 0.1)).merged(moments(np.full(7, 0.1)))
    assert seen == Moments(10, 0.1, 0.0)
    assert (seen.std, seen.unit) == (0.0, 1.0)
    assert Moments(2, 0.3, 1e-34).unit == 1.0  # 0.1 + 0.2 beside 0.3
    assert moments(np.array([0.0, 2.0])).unit == pytest.approx(2**0.5)


def test_moments_survive_a_checkpoint():
    seen = moments(np.array([0.1, 0.7, -3.0]))
    assert Moments(*json.loads(json.dumps(list(seen)))) == seen
