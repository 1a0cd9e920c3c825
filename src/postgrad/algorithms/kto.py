"""KTO: Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from postgrad.algorithms import preference
from postgrad.algorithms.base import LossInputs, LossLevel, LossOutput, Needs, PreferenceAlgorithm
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.ops.losses import entry_weights
from postgrad.ops.preferences import AnswerSums, kto

if TYPE_CHECKING:
    from torch import Tensor

LABELS = ("desirable", "undesirable")


class KTO(PreferenceAlgorithm):
    """Good or bad answers, without a partner, against a reference point z. z is max(0, mean of
    sum(logp - logp_ref) of prompts with another sample's answer), an estimate of the policy's KL,
    without gradient; with "apo_zero" (APO-zero without pairs, arXiv:2408.06266) it is 0.
    """

    level: ClassVar[LossLevel] = "sequence"
    beta: float = Field(0.1, gt=0.0)
    loss: Literal["kto", "apo_zero"] = "kto"
    desirable_weight: float = Field(1.0, gt=0.0)
    undesirable_weight: float = Field(1.0, gt=0.0)

    def needs(self) -> Needs:
        return Needs(reference=True, mismatched=self.loss == "kto")

    def reward(self, answers: AnswerSums) -> Tensor:
        return self.beta * answers.log_ratio

    def experience(
        self,
        sequences: Sequences,
        preferred: NDArray[np.bool_],
        ref: Ragged | None,
        mismatched: NDArray[np.float64] | None,
    ) -> Experience:
        """Columns: ref_logprobs, z, and for each label 1 / its answers at them, else 0."""
        n, full, spread = len(sequences), sequences.loss_mask.sums() > 0, sequences.tokens.spread
        crossed = np.zeros(n) if self.loss == "apo_zero" else mismatched
        if crossed is None or len(crossed) != n or not np.isfinite(crossed).all():
            raise ValueError("KTO needs a finite sum(logp - logp_ref) of each mismatched pair")
        z = max(0.0, float(crossed.sum()) / max(1, n))
        columns = preference.with_reference(sequences, ref) | {"z": spread(np.full(n, z))}
        for name, labelled in zip(LABELS, (preferred & full, ~preferred & full), strict=True):
            columns[name] = spread(labelled / max(1, labelled.sum()))
        return Experience(sequences, columns, full)

    def entry_weights(self, sequences: Sequences, rows: NDArray[np.int64]) -> Ragged:
        return entry_weights(sequences.loss_mask, rows, "sequence")

    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        """Metrics are means over the answers of a label, "policy/kl" over tokens."""
        sums, weight = preference.answers_of(inputs)
        z, good, bad = (preference.mean_of(inputs, name) for name in ("z", *LABELS))
        reward, costs = self.reward(sums), (self.desirable_weight, self.undesirable_weight)
        loss = kto(reward - self.beta * z, good > 0, costs)
        margin = ((good - bad) * reward.detach()).sum()
        metrics = {"policy/z": (weight * z).sum(), "policy/reward_margin": margin}
        for name, share in zip(LABELS, (good, bad), strict=True):
            metrics[f"policy/{name}"] = (weight * (share > 0)).sum()
            metrics[f"policy/reward_{name}"] = (share * reward.detach()).sum()
            metrics[f"policy/logprob_{name}"] = (share * sums.logprob.detach()).sum()
        return LossOutput((weight * loss).sum(), metrics | preference.distance(inputs))

    def report(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return preference.without_absent(metrics, LABELS)
