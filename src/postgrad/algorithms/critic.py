"""What algorithms with a critic share: its loss, and how much of the returns it explains."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from postgrad.algorithms.base import LossOutput, ScoreAlgorithm, ScoreInputs
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.ops.losses import entry_weights, explained_variance, value_clipped, value_loss


class Critic(ScoreAlgorithm):
    """The mean squared error to the returns over all loss tokens of the update, with values clipped
    around those before the step. Columns: "values" (before the step) and "returns".
    """

    value_clip: float | None = Field(0.2, gt=0.0)  # None: off
    critic_warmup_steps: int = Field(0, ge=0)  # steps in which the critic alone learns

    def score_weights(self, sequences: Sequences, rows: NDArray[np.int64]) -> Ragged:
        return entry_weights(sequences.loss_mask, rows, "token")

    def score_loss(self, inputs: ScoreInputs) -> LossOutput:
        """Metrics are means per token. From the means of error, return and their squares `report`
        computes the explained variance. It divides these by "critic/weight", the sum of the tokens'
        weights: rounded to float32 they do not add up to 1, and what is missing of the square of
        the mean return would be taken for a variance.
        """
        old, returns, clip = inputs.columns["values"], inputs.columns["returns"], self.value_clip
        loss = value_loss(inputs.scores, old, returns, clip)
        predicted = inputs.scores.detach()
        error, target = (returns - predicted).double(), returns.double()
        token_metrics = {
            "value": predicted,
            "clip_fraction": value_clipped(predicted, old, returns, clip),
            "error": error,
            "error_square": error.square(),
            "return": target,
            "return_square": target.square(),
        }
        weight = inputs.token_weight.double()
        means = {f"critic/{name}": (weight * value).sum() for name, value in token_metrics.items()}
        means["critic/weight"] = weight.sum()
        return LossOutput((inputs.weight * loss).sum(), means)

    def report(self, metrics: Mapping[str, float]) -> dict[str, float]:
        reported = dict(metrics)
        weight = reported.pop("critic/weight", None)
        if weight is not None:
            names = ("error", "error_square", "return", "return_square")
            means = [reported[f"critic/{name}"] / (weight or 1.0) for name in names]
            reported["critic/explained_variance"] = explained_variance(*means)
            del reported["critic/error_square"], reported["critic/return_square"]
        return reported
