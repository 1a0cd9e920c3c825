"""Process reward model: whether each step of an answer is right (Lightman et al. 2023,
arXiv:2305.20050).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from postgrad.algorithms.base import LossLevel, LossOutput, RewardAlgorithm, ScoreInputs
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.ops.losses import entry_weights

RIGHT = 0.5  # a label or a probability from here on means a right step


class ProcessReward(RewardAlgorithm):
    """P(step is right) = sigmoid(s), s the score at the last token of the step. The loss is the
    cross entropy -y log P - (1 - y) log(1 - P) of the label y, averaged over the labelled steps of
    the update.

    A label in [0, 1] is learned as it is (the soft estimate of Math-Shepherd, arXiv:2312.08935).
    `hard_at` makes it 1 where it reaches that number, else 0: just above 0 is Math-Shepherd's hard
    estimate.
    """

    level: ClassVar[LossLevel] = "step"

    hard_at: float | None = Field(None, gt=0.0, le=1.0)  # None: labels stay as they are

    def experience(self, sequences: Sequences, targets: NDArray[np.float64]) -> Experience:
        """Column: labels. Sequences without a labelled step have no gradient."""
        mask = sequences.loss_mask.values
        if targets.shape != mask.shape or not ((targets[mask] >= 0) & (targets[mask] <= 1)).all():
            raise ValueError("each labelled step has a label from 0 to 1")
        labels = np.where(mask, targets, 0.0)
        if self.hard_at is not None:
            labels = (labels >= self.hard_at) & mask
        column = sequences.tokens.like(labels.astype(np.float32))
        return Experience(sequences, {"labels": column}, sequences.loss_mask.sums() > 0)

    def entry_weights(self, sequences: Sequences, rows: NDArray[np.int64]) -> Ragged:
        return entry_weights(sequences.loss_mask, rows, "token")

    def score_loss(self, inputs: ScoreInputs) -> LossOutput:
        """Metrics are means over steps; `report` divides those of right and of wrong steps by the
        share of such steps.
        """
        from torch.nn.functional import softplus

        scores, label, weight = inputs.scores, inputs.columns["labels"], inputs.weight
        loss = softplus(scores) - label * scores
        p, right = scores.detach().double().sigmoid(), label >= RIGHT
        means = {
            "accuracy": (p >= RIGHT) == right,
            "right_steps": right,
            "wrong_steps": ~right,  # not 1 less the others: weights are rounded
            "probability_right": p * right,
            "probability_wrong": p * ~right,
        }
        metrics = {f"reward_model/{name}": (weight * x).sum() for name, x in means.items()}
        return LossOutput((weight * loss).sum(), metrics)

    def report(self, metrics: Mapping[str, float]) -> dict[str, float]:
        reported = dict(metrics)
        wrong = reported.pop("reward_model/wrong_steps", 0.0)
        shares = {"right": reported.get("reward_model/right_steps", 0.0), "wrong": wrong}
        for label, share in shares.items():
            name = f"reward_model/probability_{label}"
            if name in reported and share == 0.0:  # exactly, where there are none
                del reported[name]
            elif name in reported:
                reported[name] /= share
        return reported
