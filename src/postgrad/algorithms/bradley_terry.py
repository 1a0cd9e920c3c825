"""Bradley-Terry reward model: which of two answers a person prefers (Ouyang et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from postgrad.algorithms.base import LossLevel, LossOutput, RewardAlgorithm, ScoreInputs
from postgrad.algorithms.preference import check_pairs
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.ops.losses import entry_weights, sequence_sums
from postgrad.ops.preferences import log_exp, logistic


class BradleyTerry(RewardAlgorithm):
    """P(chosen is better) = sigmoid(r_chosen - r_rejected), with the score at the last token.

    That loss depends on differences only; `centre_coef` adds centre_coef * (r_chosen +
    r_rejected)^2, which keeps scores around 0 (Eisenstein et al. 2023, arXiv:2312.09244). `margin`
    subtracts the data's margin from the difference (Llama 2, arXiv:2307.09288).
    """

    level: ClassVar[LossLevel] = "pair"

    loss: Literal["log_sigmoid", "log_exp"] = "log_sigmoid"
    margin: bool = False
    centre_coef: float = Field(0.0, ge=0.0)

    @model_validator(mode="after")
    def _margin_needs_log_sigmoid(self) -> Self:
        if self.margin and self.loss == "log_exp":
            raise ValueError(
                "the log_exp loss has no margin: set loss = 'log_sigmoid', or leave margin out"
            )
        return self

    def experience(self, sequences: Sequences, targets: NDArray[np.float64]) -> Experience:
        check_pairs(sequences)
        if 2 * len(targets) != len(sequences) or not np.isfinite(targets).all():
            raise ValueError("each pair has one margin, a finite number")
        columns = {"margins": sequences.tokens.spread(np.repeat(targets, 2))}
        return Experience(sequences.at_last(), columns, np.ones(len(sequences), np.bool_))

    def entry_weights(self, sequences: Sequences, rows: NDArray[np.int64]) -> Ragged:
        return entry_weights(sequences.loss_mask, rows, "pair")

    def score_loss(self, inputs: ScoreInputs) -> LossOutput:
        """Metrics are means over pairs. From the means of rewards and of their squares `report`
        computes the deviation of all rewards.
        """
        scores, margins, weight = (
            sequence_sums(each, inputs.sequence, inputs.n_sequences)
            for each in (inputs.scores, inputs.columns["margins"], inputs.weight)
        )
        good, bad, weight = scores[0::2], scores[1::2], weight[0::2]
        ahead = good - bad - margins[0::2] if self.margin else good - bad
        loss = logistic(ahead) if self.loss == "log_sigmoid" else log_exp(good, bad)
        if self.centre_coef > 0:
            loss = loss + self.centre_coef * (good + bad).square()
        c, r = good.detach().double(), bad.detach().double()
        means = {
            "accuracy": c > r, "margin": c - r, "reward_chosen": c, "reward_rejected": r,
            "reward_mean": (c + r) / 2, "reward_square": (c.square() + r.square()) / 2,
        }  # fmt: skip
        metrics = {f"reward_model/{name}": (weight * x).sum() for name, x in means.items()}
        return LossOutput((weight * loss).sum(), metrics)

    def report(self, metrics: Mapping[str, float]) -> dict[str, float]:
        reported = dict(metrics)
        if (square := reported.pop("reward_model/reward_square", None)) is not None:
            variance = square - reported["reward_model/reward_mean"] ** 2
            reported["reward_model/reward_std"] = math.sqrt(max(0.0, variance))
        return reported
