"""On-policy distillation: the student samples, a teacher grades every token of it (Agarwal et al.
2023, arXiv:2306.13649; as a policy gradient: Lu et al. 2025, "On-Policy Distillation", Thinking
Machines Lab).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from postgrad.algorithms.base import Credit, Grades, Needs, required
from postgrad.algorithms.grpo import GRPO
from postgrad.core.ragged import Ragged
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.ops.losses import Aggregation


class OnPolicyDistillation(GRPO):
    """A token's advantage is how much more likely the teacher finds it than the student did:
    teacher_coef * (log p_teacher - log p_student), each token for itself, not what follows it. Its
    mean over the student's samples is minus the reverse KL to the teacher, KL(student || teacher).
    reward_coef adds GRPO's advantage of the sample, times that.

    graded_by: in place of [teacher] the policy as it is before the step, or the reference, which
    read the row's hint (data.hint): self-distillation (Shenfeld et al. 2026, arXiv:2601.19897).
    """

    min_group_size: ClassVar[int] = 1  # the grades alone need no baseline
    # All of them act before grades are there.
    unread: ClassVar[tuple[str, ...]] = ("covariance", "second_moment", "kl_in", "advantage_clip")

    graded_by: Literal["teacher", "policy", "reference"] = "teacher"
    # Reward from which on a sample is the {group.answer} of data.hint for others of its group.
    correct_at: float = 1.0
    teacher_coef: float = Field(1.0, gt=0.0)
    teacher_clip: float | None = Field(None, gt=0.0)  # bounds a token's difference of the two
    reward_coef: float = Field(0.0, ge=0.0)
    aggregation: Aggregation = "token"

    def needs(self) -> Needs:
        needs, by = super().needs(), self.graded_by
        grader = {"teacher": True} if by == "teacher" else {"self_graded": by}
        old_logprobs = not needs.sampled_is_old
        return replace(needs, old_logprobs=old_logprobs, correct_at=self.correct_at, **grader)

    def advantages(
        self, rewards: NDArray[np.float64], group: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        earned = super().advantages(rewards, group) if self.reward_coef else np.zeros(len(rewards))
        return self.reward_coef * earned

    def credit(
        self,
        batch: RolloutBatch,
        old: Ragged | None,
        ref: Ragged | None,
        values: Ragged | None,
        state: Mapping[str, Any],
        entropy: Ragged | None = None,
        teacher: Grades | None = None,
    ) -> Credit:
        """As PolicyGradient.credit. teacher: what the grader says of the batch's samples."""
        credit = super().credit(batch, old, ref, values, state, entropy)
        sequences, columns = credit.experience.sequences, dict(credit.experience.columns)
        before = required(columns.get("old_logprobs"), "'old' logprobs")
        grades = required(teacher, "'teacher' logprobs").take(credit.rows)
        gap, metrics = grades.above(before, sequences.loss_mask, self.teacher_clip)
        taught = columns["advantages"].values + self.teacher_coef * gap
        columns["advantages"] = columns["advantages"].like(taught.astype(np.float32))
        has_gradient = self._has_gradient(columns, credit.experience.replies)
        experience = replace(credit.experience, columns=columns, has_gradient=has_gradient)
        return replace(credit, experience=experience, metrics={**credit.metrics, **metrics})
