"""Memory of the workers that run verifiers, estimated for a plan before they are started."""

from collections.abc import Sequence

from postgrad.rewards.lanes import Lane, lane, workers_by_lane
from postgrad.rewards.learned import RewardModel
from postgrad.rewards.registry import controller_verifier
from postgrad.rewards.settings import RewardSettings, ScoringSettings

WORKER_BYTES = 33_000_000  # resident, of a worker with postgrad's own imports; measured


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
