"""What engines count: sums by hand, on a clock that the test moves."""

from collections.abc import Callable

import pytest

from postgrad.rollout import stats
from postgrad.rollout.stats import SUMMED, DividedStats, EngineStats, engine_metrics, named


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
    whole, first, second = (named(row) for row in sums.rows())
    assert (whole["busy_seconds"], first["busy_seconds"], second["busy_seconds"]) == (6.0, 4.0, 4.0)
    assert (whole["requests"], first["requests"], second["requests"]) == (3, 3, 0)
    assert (whole["prompt_tokens"], whole["response_tokens"]) == (13, 16)
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
        "engine/0/busy_per_second": 1.0, "engine/1/busy_per_second": 0.25,
    }  # fmt: skip
    sums.begin(1, 1, 3)
    at(6.0)
    sums.end(1, 2)
    again = sums.by_engine()
    assert (again["engine/0/requests"], again["engine/1/busy_seconds"]) == (0, 1.0)
    assert (again["engine/0/busy_per_second"], again["engine/1/busy_per_second"]) == (0.0, 1.0)


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
