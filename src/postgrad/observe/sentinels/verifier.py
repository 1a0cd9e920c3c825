"""Verifier failures: samples that got no score."""

from collections.abc import Sequence

from pydantic import Field

from postgrad.core.records import ScoredGroup
from postgrad.observe.sentinels.base import Level, Seen

KEY = "failed_fraction"


class VerifierFailures(Level):
    """Speaks while verifiers fail on more than `limit` of a step's samples. Independent of it, a
    run stops at scoring.max_failed_fraction.
    """

    limit: float = Field(default=0.02, ge=0.0, lt=1.0)
    steps: int = Field(default=1, ge=1)

    def value(self, seen: Seen) -> float | None:
        return seen.get(KEY)

    def tell(self, value: float, seen: Seen) -> str:
        return (
            f"{value:.1%} of the samples have no score, since a verifier or the environment failed "
            f"on them (limit {self.limit:.1%}): events.jsonl has each cause (verifier_failed, "
            "environment_failed); fix what failed, or where it was too slow raise its limit "
            "(wall_seconds, cpu_seconds, environment.step_seconds)"
        )


def failed(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """The share of samples on which at least one component failed."""
    samples = sum(len(group.rollouts) for group in groups)
    failures = sum(len({failure.sample for failure in group.failures}) for group in groups)
    return {KEY: failures / max(1, samples)}
