"""What the workers that run verifiers hold, before there are any: for a plan."""

from collections.abc import Sequence

from postgrad.rewards.lanes import Lane, dealt, lane
from postgrad.rewards.learned import RewardModel
from postgrad.rewards.registry import known
from postgrad.rewards.settings import RewardSettings, ScoringSettings

WORKER_BYTES = 33_000_000  # resident, of one that imports nothing but what is ours; measured


def worker_bytes(rewards: Sequence[RewardSettings], scoring: ScoringSettings) -> int:
    """Resident bytes of all of a run's workers. What code of others imports is not known.

    rewards: with what they leave to the rollout's settings filled in (registry.for_rollout).
    """
    every = [(reward, known(reward)) for reward in rewards]
    worked = [one for one in every if not isinstance(one[1], RewardModel)]
    imports = [verifier.imports_bytes for _, verifier in worked]
    lanes: list[Lane] = [lane(reward, verifier) for reward, verifier in worked]
    return sum(
        workers * (WORKER_BYTES + sum(imports[component] for component in components))
        for _, components, workers in dealt(lanes, scoring)
    )
