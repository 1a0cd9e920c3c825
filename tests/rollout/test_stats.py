"""What engines count: sums by hand, on a clock that the test moves."""

from collections.abc import Callable

import numpy as np
import pytest

from postgrad.core.errors import RunError
from postgrad.rollout import stats
from postgrad.rollout.stats import (
    SUMMED,
    DividedStats,
    EngineStats,
    agreed,
    distance,
    engine_metrics,
    named,
)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """at(seconds) sets the clock."""
    now = [0.0]
    monkeypatch.setattr(stats.time, "perf_counter", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] = seconds

    return move


def test_a_process_is_busy_while_it_has_samples_open(at: Callable[[float], None]) -> None:
    """0 works from 1 to 4 and from 8 to 9, 1 from 2 to 6; the engine from 1 to 6 and 8 to 9."""
    sums = DividedStats(2)
    at(1.0)
    sums.begin(0, samples=2, prompt_tokens=7)
    at(2.0)
    sums.begin(1, samples=1, prompt_tokens=5)
    at(3.0)
    sums.end(0, response_tokens=11)
    at(4.0)
    sums.end(0, response_tokens=2)
    at(6.0)
    sums.cut(1)
    at(8.0)
    sums.begin(0, samples=1, prompt_tokens=1)
    at(9.0)
    sums.end(0, response_tokens=3)
    total, first, second = (named(row) for row in sums.rows())
    assert (total["busy_seconds"], first["busy_seconds"], second["busy_seconds"]) == (6.0, 4.0, 4.0)
    assert (total["requests"], first["requests"], second["requests"]) == (3, 3, 0)
    assert (total["prompt_tokens"], total["response_tokens"]) == (13, 16)
    assert (second["prompt_tokens"], second["response_tokens"]) == (5, 0)


def test_each_process_is_reported_since_the_last_report(at: Callable[[float], None]) -> None:
    sums = DividedStats(2)
    sums.begin(0, 1, 3)
    at(4.0)
    sums.end(0, 8)
    sums.begin(1, 1, 3)
    at(5.0)
    sums.end(1, 2)
    assert sums.by_engine() == {
        "engine/0/requests": 1, "engine/1/requests": 1,
        "engine/0/prompt_tokens": 3, "engine/1/prompt_tokens": 3,
        "engine/0/response_tokens": 8, "engine/1/response_tokens": 2,
        "engine/0/busy_seconds": 4.0, "engine/1/busy_seconds": 1.0,
        "engine/0/busy_time_fraction": 1.0, "engine/1/busy_time_fraction": 0.25,
    }  # fmt: skip
    sums.begin(1, 1, 3)
    at(6.0)
    sums.end(1, 2)
    again = sums.by_engine()
    assert (again["engine/0/requests"], again["engine/1/busy_seconds"]) == (0, 1.0)
    shares = [again[f"engine/{number}/busy_time_fraction"] for number in (0, 1)]
    assert shares == [0.0, 1.0]


def test_the_only_process_of_an_engine_is_not_reported_beside_it() -> None:
    sums = DividedStats(1)
    sums.begin(0, 4, 9)
    assert sums.by_engine() == {}
    assert len(sums.rows()) == len(EngineStats().rows()) == 1


def test_a_row_has_every_sum_in_its_order() -> None:
    row = EngineStats(requests=1, decode_slots=5, busy_seconds=8.5).row
    assert dict(zip(SUMMED, row, strict=True)) == named(row)
    assert (named(row)["decode_slots"], named(row, ("busy_seconds",))) == (5, {"busy_seconds": 8.5})


def test_where_nobody_was_busy_there_is_no_share() -> None:
    assert engine_metrics({"0": {"busy_seconds": 0.0}}) == {"engine/0/busy_seconds": 0.0}
    assert engine_metrics({}) == {}


def logprobs(*rows: list[float]) -> list[np.ndarray]:
    return [np.array(row, np.float32) for row in rows]


def test_the_distance_is_the_mean_over_all_tokens() -> None:
    assert distance(logprobs([-1.0, -2.0], [-3.0]), logprobs([-1.0, -2.5], [-2.0])) == 0.5


def test_what_the_first_said_is_taken_where_all_agree_up_to_rounding() -> None:
    first, near = logprobs([-1.0, -2.0]), logprobs([-1.00005, -2.0])
    assert agreed([first, near], "float32", "engine") is first


@pytest.mark.parametrize("other", [-1.01, float("nan")])
def test_an_engine_that_lies_too_far_off_or_nowhere_is_named(other: float) -> None:
    engine_logprobs = [logprobs([-1.0]), logprobs([-1.0]), logprobs([other])]
    with pytest.raises(RunError, match=r"^engine 2 does not have the weights of engine 0"):
        agreed(engine_logprobs, "float32", "engine")


def test_bfloat16_may_round_by_more() -> None:
    apart = [logprobs([-1.0]), logprobs([-1.004])]
    assert agreed(apart, "bfloat16", "engine") == apart[0]
    with pytest.raises(RunError):
        agreed(apart, "float32", "engine")
