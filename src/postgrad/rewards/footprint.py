"""What the workers that run verifiers hold, before there are any: for a plan."""

from collections.abc import Sequence

from postgrad.rewards.lanes import dealt
from postgrad.rewards.learned import RewardModel
from postgrad.rewards.registry import VERIFIERS, build
from postgrad.rewards.settings import RewardSettings, ScoringSettings
from postgrad.rewards.verifier import Verifier

WORKER_BYTES = 33_000_000  # resident, of one that imports nothing but what is ours; measured


def worker_bytes(rewards: Sequence[RewardSettings], scoring: ScoringSettings) -> int:
    """Resident bytes of all of a run's workers. What code of others imports is not known.

    rewards: with what they leave to the rollout's settings filled in (registry.for_rollout).
    """
    every = [(one, build(one) if one.type in VERIFIERS else Verifier()) for one in rewards]
    worked = [(one, verifier) for one, verifier in every if not isinstance(verifier, RewardModel)]
    waits = [verifier.waits if one.waits is None else one.waits for one, verifier in worked]
    return sum(
        workers * (WORKER_BYTES + sum(worked[component][1].imports_bytes for component in own))
        for own, workers in dealt(waits, scoring)
    )
