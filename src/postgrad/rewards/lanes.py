"""A pool of workers for each kind of verifier.

Verifiers that wait for a server do not hold up those that compute. Third-party ones that may run a
sample's text as code have sandboxed workers.
"""

import selectors
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, get_args

from postgrad.rewards.learned import RewardModel
from postgrad.rewards.pool import Pool
from postgrad.rewards.protocol import Outcome, ScoreJob
from postgrad.rewards.registry import controller_verifier
from postgrad.rewards.settings import RewardSettings, ScoringSettings
from postgrad.rewards.verifier import Verifier

Lane = Literal["computing", "waiting", "sandboxed"]
_TICK = 0.05

WORKER_BYTES = 33_000_000  # resident, of a worker with postgrad's own imports; measured


def lane(reward: RewardSettings, verifier: Verifier) -> Lane:
    """Which workers run a verifier: the recipe's `sandbox` and `waits` override its own."""
    if verifier.sandboxed if reward.sandbox is None else reward.sandbox:
        return "sandboxed"
    return "waiting" if (verifier.waits if reward.waits is None else reward.waits) else "computing"


def workers_by_lane(
    lanes: Sequence[Lane], scoring: ScoringSettings
) -> Iterator[tuple[Lane, list[int], int]]:
    """(name, components, number of workers) of each lane that has components.

    lanes: the lane of each component, by its index.
    """
    for name in get_args(Lane):
        components = [component for component, place in enumerate(lanes) if place == name]
        if components:
            workers = scoring.waiting_workers if name == "waiting" else scoring.workers
            yield name, components, workers


class Lanes:
    """A Pool for each lane that has components, with the methods of one pool.

    lanes: the lane of each of `rewards`. Close it, or use `with`.
    """

    def __init__(
        self, rewards: Sequence[RewardSettings], lanes: Sequence[Lane], scoring: ScoringSettings
    ) -> None:
        self._components = len(rewards)
        self._pools: list[Pool] = []
        self._selector = selectors.DefaultSelector()
        self._way: dict[int, tuple[Pool, int]] = {}  # component -> its pool, its number there
        for name, components, workers in workers_by_lane(lanes, scoring):
            pool = Pool([rewards[c] for c in components], workers, sandboxed=name == "sandboxed")
            self._pools.append(pool)
            self._selector.register(pool, selectors.EVENT_READ)
            self._way |= {component: (pool, place) for place, component in enumerate(components)}

    def __enter__(self) -> "Lanes":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, jobs: Sequence[ScoreJob]) -> None:
        """Queue each job at the pool of its component; keys must differ."""
        for pool in self._pools:
            routes = [(job, self._way[job.component]) for job in jobs]
            pool.submit(
                replace(job, component=place) for job, (owner, place) in routes if owner is pool
            )

    def checks(self) -> list[bool]:
        """For each component, whether its verifier checks reference answers; waits for workers."""
        by_pool = {id(pool): pool.checks() for pool in self._pools}
        routes = [self._way[component] for component in range(self._components)]
        return [by_pool[id(pool)][place] for pool, place in routes]

    def poll(self, wait: bool) -> list[Outcome]:
        """The jobs that ended since the last call; with `wait`, at least one if any is open."""
        ended = [outcome for pool in self._pools for outcome in pool.poll(wait=False)]
        while wait and not ended and any(pool.is_busy() for pool in self._pools):
            self._selector.select(_TICK)
            ended = [outcome for pool in self._pools for outcome in pool.poll(wait=False)]
        return ended

    def close(self) -> None:
        """Kill and reap every worker; open jobs are forgotten."""
        self._selector.close()
        for pool in self._pools:
            pool.close()


def worker_bytes(rewards: Sequence[RewardSettings], scoring: ScoringSettings) -> int:
    """Resident bytes of all of a run's workers, without what third-party verifiers import.

    rewards: with the rollout's settings filled in (registry.for_rollout).
    """
    every = [(reward, controller_verifier(reward)) for reward in rewards]
    worked = [
        (reward, verifier) for reward, verifier in every if not isinstance(verifier, RewardModel)
    ]
    imports = [verifier.imports_bytes for _, verifier in worked]
    lanes: list[Lane] = [lane(reward, verifier) for reward, verifier in worked]
    return sum(
        workers * (WORKER_BYTES + sum(imports[component] for component in components))
        for _, components, workers in workers_by_lane(lanes, scoring)
    )
