"""Two pools of workers, so that verifiers which wait for a server hold up none that compute."""

import selectors
from collections.abc import Iterator, Sequence
from dataclasses import replace

from postgrad.rewards.pool import Pool
from postgrad.rewards.protocol import Job, Outcome
from postgrad.rewards.settings import RewardSettings, ScoringSettings
from postgrad.rewards.verifier import Verifier

_TICK = 0.05


def waits(reward: RewardSettings, verifier: Verifier) -> bool:
    """Whether it is in the lane of those that wait for a server."""
    return verifier.waits if reward.waits is None else reward.waits


def dealt(waits: Sequence[bool], scoring: ScoringSettings) -> Iterator[tuple[list[int], int]]:
    """The components of each lane that is needed, and the number of its workers."""
    for lane, workers in ((False, scoring.workers), (True, scoring.waiting_workers)):
        own = [component for component, waiting in enumerate(waits) if waiting is lane]
        if own:
            yield own, workers


class Lanes:
    """A Pool for each lane that is needed, with the calls of one; see there.

    waits: for each of `rewards`, which lane it is in. Close it, or use `with`.
    """

    def __init__(
        self, rewards: Sequence[RewardSettings], waits: Sequence[bool], scoring: ScoringSettings
    ) -> None:
        self._components = len(rewards)
        self._pools: list[Pool] = []
        self._selector = selectors.DefaultSelector()
        self._way: dict[int, tuple[Pool, int]] = {}  # component -> its pool, its number there
        for own, workers in dealt(waits, scoring):
            pool = Pool([rewards[c] for c in own], workers)
            self._pools.append(pool)
            self._selector.register(pool, selectors.EVENT_READ)
            self._way |= {component: (pool, place) for place, component in enumerate(own)}

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
