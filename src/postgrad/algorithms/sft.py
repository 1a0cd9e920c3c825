"""Supervised fine-tuning: the negative log-likelihood of the loss-bearing tokens."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from postgrad.algorithms.base import LossInputs, LossOutput, PolicyAlgorithm
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.ops.losses import entry_weights


class SFT(PolicyAlgorithm):
    """aggregation "token": every loss token of an update counts the same; "sequence": every
    conversation does.
    """

    aggregation: Literal["token", "sequence"] = "token"

    def experience(self, sequences: Sequences) -> Experience:
        """Conversations as they are trained on: no columns, gradient wherever there is loss."""
        return Experience(sequences, {}, sequences.loss_mask.sums() > 0)

    def entry_weights(self, sequences: Sequences, rows: NDArray[np.int64]) -> Ragged:
        return entry_weights(sequences.loss_mask, rows, self.aggregation)

    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        """-sum(weight * logp). Metric "policy/nll": nats per loss token."""
        loss = -(inputs.weight * inputs.logprobs).sum()
        nll = -(inputs.token_weight * inputs.logprobs.detach()).sum()
        return LossOutput(loss, {"policy/nll": nll})
