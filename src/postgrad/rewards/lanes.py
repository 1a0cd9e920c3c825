"""Pools of workers: verifiers which wait for a server hold up none that compute, and those of
others that may run a sample's text are shut in.
"""

import selectors
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, get_args

from postgrad.rewards.pool import Pool
from postgrad.rewards.protocol import Job, Outcome
from postgrad.rewards.settings import RewardSettings, ScoringSettings
from postgrad.rewards.verifier import Verifier

Lane = Literal["computing", "waiting", "sandboxed"]
_TICK = 0.05


def lane(reward: RewardSettings, verifier: Verifier) -> Lane:
    """Which workers run it. A recipe's `sandbox` and `waits` go before the verifier's own."""
    if verifier.sandboxed if reward.sandbox is None else reward.sandbox:
        return "sandboxed"
    return "waiting" if (verifier.waits if reward.waits is None else reward.waits) else "computing"


def dealt(lanes: Sequence[Lane], scoring: ScoringSettings) -> Iterator[tuple[Lane, list[int], int]]:
    """Each lane that is needed: its name, its components, and the number of its workers."""
    for name in get_args(Lane):
        components = [component for component, place in enumerate(lanes) if place == name]
        if components:
            workers = scoring.waiting_workers if name == "waiting" else scoring.workers
            yield name, components, workers


class Lanes:
    """A Pool for each lane that is needed, with the calls of one; see there.

    lanes: for each of `rewards`, which lane it is in. Close it, or use `with`.
    """

    def __init__(
        self, rewards: Sequence[RewardSettings], lanes: Sequence[Lane], scoring: ScoringSettings
    ) -> None:
        self._components = len(rewards)
        self._pools: list[Pool] = []
        self._selector = selectors.DefaultSelector()
        self._way: dict[int, tuple[Pool, int]] = {}  # component -> its pool, its number there
        for name, components, workers in dealt(lanes, scoring):
            pool = Pool([rewards[c] for c in components], workers, sandboxed=name == "sandboxed")
            self._pools.append(pool)
            self._selector.register(pool, selectors.EVENT_READ)
            self._way |= {component: (pool, place) for place, component in enumerate(components)}

    def __enter__(self) -> "Lanes":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Pool.submit, each job to the pool of its component."""
        for pool in self._pools:
            ways = [(job, self._way[job.component]) for job in jobs]
            pool.submit(replace(job, component=place) for job, (own, place) in ways if own is pool)

    def checks(self) -> list[bool]:
        """Pool.checks."""
        found = {id(pool): pool.checks() for pool in self._pools}
        ways = [self._way[component] for component in range(self._components)]
        return [found[id(pool)][place] for pool, place in ways]

    def poll(self, wait: bool) -> list[Outcome]:
        """Pool.poll."""
        ended = [outcome for pool in self._pools for outcome in pool.poll(wait=False)]
        while wait and not ended and any(pool.is_busy() for pool in self._pools):
            self._selector.select(_TICK)
            ended = [outcome for pool in self._pools for outcome in pool.poll(wait=False)]
        return ended

    def close(self) -> None:
        """Pool.close."""
        self._selector.close()
        for pool in self._pools:
            pool.close()
