"""Metrics of a step's samples that only sentinels need; no forward pass is made for them."""

from collections.abc import Sequence

from postgrad.core.records import RolloutBatch, ScoredGroup
from postgrad.observe.sentinels.entropy import sampled_entropy
from postgrad.observe.sentinels.no_gradient import stuck
from postgrad.observe.sentinels.repetition import repeated
from postgrad.observe.sentinels.verifier import failed


def of_samples(groups: Sequence[ScoredGroup], batch: RolloutBatch) -> dict[str, float]:
    """Metrics of all the samples of a step; batch: those that are trained on."""
    return {**sampled_entropy(batch), **stuck(groups), **repeated(groups), **failed(groups)}
