"""Supervised fine-tuning: the negative log-likelihood of the loss-bearing tokens."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from postgrad.algorithms.base import LossInputs, LossOutput, Needs, PolicyAlgorithm
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.ops.losses import entry_weights


class SFT(PolicyAlgorithm):
    """aggregation "token": every loss token of an update counts the same, or as the weight of its
    message says; "sequence": every conversation counts the same. The loss "dft" multiplies that of
    each token by its probability, through which no gradient goes: rare tokens pull less (Wu et al.
    2025, arXiv:2508.05629).

    neftune_noise_alpha: in updates each embedding gets noise, uniform within +-alpha / sqrt(tokens
    of its conversation * width) (Jain et al. 2023, arXiv:2310.05914).
    """

    loss: Literal["nll", "dft"] = "nll"
    aggregation: Literal["token", "sequence"] = "token"
    neftune_noise_alpha: float = Field(default=0.0, ge=0.0)  # 0: no noise

    def needs(self) -> Needs:
        return Needs(embedding_noise=self.neftune_noise_alpha)

    def experience(self, sequences: Sequences) -> Experience:
        """Conversations as they are trained on: no columns, gradient wherever there is loss."""
        return Experience(sequences, {}, sequences.loss_mask.sums() > 0)

    def entry_weights(self, sequences: Sequences, rows: NDArray[np.int64]) -> Ragged:
        return entry_weights(
            sequences.loss_mask, rows, self.aggregation, token_weights=sequences.loss_weights
        )

    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        """-sum(weight * logp), with "dft" -sum(weight * p * logp). Metric "policy/nll": nats per
        loss token, with either loss and whatever tokens weigh.
        """
        logprobs = inputs.logprobs.detach()
        weight = inputs.weight if self.loss == "nll" else inputs.weight * logprobs.exp()
        nll = -(inputs.token_weight * logprobs).sum()
        return LossOutput(-(weight * inputs.logprobs).sum(), {"policy/nll": nll})
