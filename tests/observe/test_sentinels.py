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


def test_rounding_alone_is_no_reason_to_stop(tmp_path: Path) -> None:
    sentinels, _ = watch(tmp_path)
    sentinels.published(before=ONE, engine=ONE, learner=moved(0.0005))
    sentinels.published(before=ONE, engine=moved(0.49), learner=moved(0.5))
    assert events(tmp_path) == []


def test_an_engine_whose_logprobs_are_no_numbers_does_not_agree(tmp_path: Path) -> None:
    sentinels, _ = watch(tmp_path)
    with pytest.raises(RunError, match="does not have the policy's weights"):
        sentinels.published(before=ONE, engine=moved(math.nan), learner=ONE)
