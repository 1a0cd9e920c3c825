"""Sentinels against hand-worked numbers, and each of their actions."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postgrad.core.errors import RunError
from postgrad.observe.sentinels import Sentinels, differences
from postgrad.observe.settings import SentinelSettings
from postgrad.observe.sinks import Logs


class Listener:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def watch(folder: Path, **settings: Any) -> tuple[Sentinels, Listener]:
    listener = Listener()
    return Sentinels(SentinelSettings(**settings), Logs(folder), listener), listener


def events(folder: Path) -> list[str]:
    path = folder / "events.jsonl"
    if not path.exists():
        return []
    return [json.loads(line)["sentinel"] for line in path.read_text("utf-8").splitlines()]


def logs_of(*probabilities: float) -> Any:
    return np.log(np.array(probabilities, np.float64)).astype(np.float32)


def test_differences_are_means_over_tokens() -> None:
    found = differences(logs_of(0.5, 0.2), logs_of(0.4, 0.3))
    assert found["sentinel/prob_difference"] == pytest.approx(0.1, rel=1e-6)
    assert found["sentinel/ratio_excess"] == pytest.approx((0.5 / 0.4 + 0.3 / 0.2) / 2, rel=1e-6)
    assert differences(logs_of(), logs_of()) == {}


def test_agreement_is_recorded_and_nothing_else(tmp_path: Path) -> None:
    sentinels, listener = watch(tmp_path)
    mask = np.array([True, True, False])
    found = sentinels.mismatch(logs_of(0.5, 0.2, 0.1), logs_of(0.5, 0.2, 0.9), mask)
    assert found == {"sentinel/prob_difference": 0.0, "sentinel/ratio_excess": 1.0}
    assert listener.warnings == events(tmp_path) == []


@pytest.mark.parametrize(("learner", "sampled"), [(0.5, 0.515), (0.001, 0.0012)])
def test_either_limit_is_enough_to_warn(learner: float, sampled: float, tmp_path: Path) -> None:
    """0.5 against 0.515: |p - p'| = 0.015 > 0.01; 0.001 against 0.0012: ratio 1.2 > 1.05."""
    sentinels, listener = watch(tmp_path)
    sentinels.mismatch(logs_of(learner), logs_of(sampled), np.array([True]))
    assert events(tmp_path) == ["mismatch"]
    assert len(listener.warnings) == 1
    assert "learner and sampler disagree" in listener.warnings[0]


@pytest.mark.parametrize(("learner", "sampled"), [(math.nan, -1.0), (-1.0, math.nan)])
def test_a_logprob_that_is_no_number_does_not_agree(
    learner: float, sampled: float, tmp_path: Path
) -> None:
    sentinels, _ = watch(tmp_path)
    one, two = np.array([learner], np.float32), np.array([sampled], np.float32)
    assert math.isnan(sentinels.mismatch(one, two, np.array([True]))["sentinel/ratio_excess"])
    assert events(tmp_path) == ["mismatch"]


def test_a_token_that_one_side_holds_impossible_counts_without_overflow(tmp_path: Path) -> None:
    sentinels, _ = watch(tmp_path)
    found = sentinels.mismatch(logs_of(0.5), np.array([-np.inf], np.float32), np.array([True]))
    assert found["sentinel/prob_difference"] == pytest.approx(0.5)
    assert found["sentinel/ratio_excess"] == pytest.approx(math.exp(20.0))
    assert events(tmp_path) == ["mismatch"]


def test_at_the_limits_nothing_is_said(tmp_path: Path) -> None:
    found = differences(logs_of(0.5), logs_of(0.25))
    sentinels, listener = watch(
        tmp_path,
        prob_difference=found["sentinel/prob_difference"],
        ratio_excess=found["sentinel/ratio_excess"],
    )
    sentinels.mismatch(logs_of(0.5), logs_of(0.25), np.array([True]))
    assert events(tmp_path) == []
    assert found["sentinel/prob_difference"] == pytest.approx(0.25, rel=1e-6)
    assert found["sentinel/ratio_excess"] == pytest.approx(2.0, rel=1e-6)
    assert listener.warnings == []


def test_observe_is_silent_and_stop_ends_the_run(tmp_path: Path) -> None:
    quiet, listener = watch(tmp_path, mismatch="observe")
    quiet.mismatch(logs_of(0.5), logs_of(0.9), np.array([True]))
    assert (events(tmp_path), listener.warnings) == (["mismatch"], [])
    strict, _ = watch(tmp_path, mismatch="stop")
    with pytest.raises(RunError, match="sentinel mismatch: learner and sampler disagree"):
        strict.mismatch(logs_of(0.5), logs_of(0.9), np.array([True]))


def test_a_step_without_computed_tokens_has_nothing_to_compare(tmp_path: Path) -> None:
    sentinels, _ = watch(tmp_path)
    assert sentinels.mismatch(logs_of(0.5), logs_of(0.9), np.array([False])) == {}


ONE = [np.array([-1.0, -2.0], np.float32)]


def moved(by: float) -> list[Any]:
    return [ONE[0] + np.float32(by)]


def test_weights_that_arrived_are_recorded_with_how_far_they_moved(tmp_path: Path) -> None:
    sentinels, _ = watch(tmp_path)
    found = sentinels.published(before=ONE, engine=moved(0.25), learner=moved(0.25))
    assert found == {"sentinel/publish_difference": 0.0, "sentinel/policy_moved": 0.25}
    assert events(tmp_path) == []


@pytest.mark.parametrize("by", [0.002, 0.02, 3.0])
def test_a_stale_engine_stops_the_run_however_little_the_policy_moved(
    by: float, tmp_path: Path
) -> None:
    sentinels, _ = watch(tmp_path)
    with pytest.raises(RunError, match="does not have the policy's weights"):
        sentinels.published(before=ONE, engine=ONE, learner=moved(by))
    assert events(tmp_path) == ["publish"]


@pytest.mark.parametrize("action", ["observe", "warn"])
def test_a_stale_engine_may_only_be_recorded_or_told(action: str, tmp_path: Path) -> None:
    sentinels, listener = watch(tmp_path, publish=action)
    found = sentinels.published(before=ONE, engine=ONE, learner=moved(0.5))
    assert found == {"sentinel/publish_difference": 0.5, "sentinel/policy_moved": 0.5}
    assert events(tmp_path) == ["publish"]
    assert len(listener.warnings) == (action == "warn")


def test_distances_are_means_over_all_tokens_of_the_probe(tmp_path: Path) -> None:
    """Sequences of one and three tokens: (0.25 + 3 * 0) / 4, no mean of means."""
    sentinels, _ = watch(tmp_path, publish="observe")
    one, three = np.zeros(1, np.float32), np.zeros(3, np.float32)
    found = sentinels.published([one, three], [one, three], [one + np.float32(0.25), three])
    assert found == {"sentinel/publish_difference": 0.0625, "sentinel/policy_moved": 0.0625}


def test_an_engine_off_by_more_than_the_limit_stops_though_it_moved_along(tmp_path: Path) -> None:
    """0.0625 from the learner after a move of 1: most of the way, and over the limit of 0.05."""
    sentinels, _ = watch(tmp_path)
    with pytest.raises(RunError, match=r"difference 0\.0625 on the same tokens \(limit 0\.05\)"):
        sentinels.published(before=ONE, engine=moved(0.9375), learner=moved(1.0))


def test_rounding_alone_is_no_reason_to_stop(tmp_path: Path) -> None:
    sentinels, _ = watch(tmp_path)
    sentinels.published(before=ONE, engine=ONE, learner=moved(0.0005))
    sentinels.published(before=ONE, engine=moved(0.49), learner=moved(0.5))
    assert events(tmp_path) == []


def test_an_engine_whose_logprobs_are_no_numbers_does_not_agree(tmp_path: Path) -> None:
    sentinels, _ = watch(tmp_path)
    with pytest.raises(RunError, match="does not have the policy's weights"):
        sentinels.published(before=ONE, engine=moved(math.nan), learner=ONE)
