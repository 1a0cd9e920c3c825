"""What workers hold is estimated from what their verifiers import, and from how many there are."""

from typing import Any

import psutil
import pytest

from postgrad.rewards.math import Math
from postgrad.rewards.pool import WORKER_BYTES, worker_bytes
from postgrad.rewards.scorer import Scorer
from postgrad.rewards.settings import RewardSettings, ScoringSettings


def rewards(*every: dict[str, Any]) -> list[RewardSettings]:
    return [RewardSettings(**reward) for reward in every]


def test_each_worker_imports_what_the_verifiers_of_its_lane_do() -> None:
    computing, waiting = {"type": "gsm8k"}, {"type": "package.module:asks", "waits": True}
    scoring = ScoringSettings(workers=3, waiting_workers=5)
    alone = 3 * WORKER_BYTES
    assert worker_bytes(rewards(computing), scoring) == alone
    assert worker_bytes(rewards(waiting), scoring) == 5 * WORKER_BYTES
    assert worker_bytes(rewards(computing, waiting), scoring) == 8 * WORKER_BYTES
    sums = {"type": "math"}
    shut_in = 3 * (WORKER_BYTES + Math.imports_bytes)  # workers of their own
    assert worker_bytes(rewards(sums), scoring) == shut_in
    assert worker_bytes(rewards(sums, computing), scoring) == alone + shut_in
    every = rewards(sums, waiting)
    assert worker_bytes(every, scoring) == 5 * WORKER_BYTES + shut_in


def test_a_reward_model_of_the_run_is_in_no_worker() -> None:
    assert worker_bytes(rewards({"type": "reward_model"}), ScoringSettings()) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gsm8k", "math", "reasoning_gym"])
def test_what_is_estimated_of_a_worker_is_what_it_holds(own_workers: None, kind: str) -> None:
    """Once it is ready: scoring adds some, which is among what was measured."""
    every, scoring = rewards({"type": kind}), ScoringSettings(workers=1)
    before = set(psutil.Process().children())
    with Scorer(every, scoring) as scorer:
        assert scorer.check([]) == []  # it has answered: it is prepared
        (worker,) = set(psutil.Process().children()) - before
        held = worker.memory_info().rss
    assert 0.6 * worker_bytes(every, scoring) < held < 1.2 * worker_bytes(every, scoring)
