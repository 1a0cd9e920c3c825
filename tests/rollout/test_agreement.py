"""Engines with the same weights say the same."""

import numpy as np
import pytest

from postgrad.core.errors import RunError
from postgrad.rollout.agreement import agreed, distance


def logprobs(*rows: list[float]) -> list[np.ndarray]:
    return [np.array(row, np.float32) for row in rows]


def test_the_distance_is_the_mean_over_all_tokens() -> None:
    assert distance(logprobs([-1.0, -2.0], [-3.0]), logprobs([-1.0, -2.5], [-2.0])) == 0.5


def test_what_the_first_said_is_taken_where_all_agree_up_to_rounding() -> None:
    first, near = logprobs([-1.0, -2.0]), logprobs([-1.00005, -2.0])
    assert agreed([first, near], "float32", "engine") is first


@pytest.mark.parametrize("other", [-1.01, float("nan")])
def test_an_engine_that_lies_too_far_off_or_nowhere_is_named(other: float) -> None:
    found = [logprobs([-1.0]), logprobs([-1.0]), logprobs([other])]
    with pytest.raises(RunError, match=r"^engine 2 does not have the weights of engine 0"):
        agreed(found, "float32", "engine")


def test_bfloat16_may_round_by_more() -> None:
    apart = [logprobs([-1.0]), logprobs([-1.004])]
    assert agreed(apart, "bfloat16", "engine") == apart[0]
    with pytest.raises(RunError):
        agreed(apart, "float32", "engine")
