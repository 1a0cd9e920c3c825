"""Distillation: the divergence from a teacher's distribution at every loss token (knowledge
distillation, Hinton et al. 2015; GKD, Agarwal et al. 2024, arXiv:2306.13649).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from pydantic import Field, model_validator

from postgrad.algorithms.base import LossInputs, LossOutput, Needs
from postgrad.algorithms.sft import SFT
from postgrad.ops.distillation import DivergenceKind, TeacherDivergence


class Distillation(SFT):
    """teacher_coef * D + nll_coef * the loss of SFT, on the rows' answers and, for a share
    `on_policy` of the rows (GKD's lambda), on answers that the student samples in their place.

    D is the divergence of all tokens' probabilities, not only of the row's next token: see
    ops/distillation.py for `divergence`, `beta` and `temperature`. Both terms have the same weights
    and denominator.
    """

    divergence: DivergenceKind = "forward_kl"
    beta: float = Field(0.5, gt=0.0, lt=1.0)  # of "jsd": near 0 as forward_kl, near 1 as reverse_kl
    temperature: float = Field(1.0, gt=0.0)  # of both distributions in the divergence
    teacher_coef: float = Field(1.0, gt=0.0)
    nll_coef: float = Field(0.0, ge=0.0)  # 0: rows say where to look, the teacher what to say
    on_policy: float = Field(0.0, ge=0.0, le=1.0)  # lambda: rows that the student answers itself

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.on_policy and self.nll_coef:
            raise ValueError(
                f"nll_coef = {self.nll_coef:g} with on_policy = {self.on_policy:g} would raise the "
                "probability of whatever the student samples: leave one of them out"
            )
        return self

    @property
    def compared(self) -> TeacherDivergence:
        """How the two distributions are compared."""
        return TeacherDivergence(self.divergence, self.beta, self.temperature)

    def needs(self) -> Needs:
        return replace(super().needs(), teacher=True, own_answers=self.on_policy)

    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        """inputs.columns["divergence"]: [E] with gradient. Metric "policy/divergence": nats per
        loss token.
        """
        nll = super().policy_loss(inputs)
        apart = inputs.columns["divergence"]
        loss = self.teacher_coef * (inputs.weight * apart).sum()
        if self.nll_coef:
            loss = loss + self.nll_coef * nll.loss
        mean = (inputs.token_weight * apart.detach()).sum()
        return LossOutput(loss, {**nll.metrics, "policy/divergence": mean})
