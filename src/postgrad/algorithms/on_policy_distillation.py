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

from postgrad.algorithms.base import Credit, Needs, required
from postgrad.algorithms.grpo import GRPO
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, RolloutBatch
from postgrad.ops.losses import Aggregation


class OnPolicyDistillation(GRPO):
    """A token's advantage is how much more likely the teacher finds it than the student did:
    teacher_coef * (log p_teacher - log p_student), each token for itself, not what follows it. Its
    mean over the student's samples is minus the reverse KL to the teacher, KL(student || teacher).

    reward_coef adds GRPO's advantage of the sample, times that: 0 leaves rewards to the metrics.
    With the teacher alone one sample a prompt is enough.

    graded_by: "policy" is self-distillation: the policy as it is before the step, which reads the
    row's hint (data.hint) behind the prompt, grades what it wrote without it (Shenfeld et al. 2026,
    arXiv:2601.19897). "reference" is its start, or an average of it where [reference] moves.
    """

    min_group_size: ClassVar[int] = 1
    # Both act on advantages before the teacher's part is there.
    unread: ClassVar[tuple[str, ...]] = ("covariance", "kl_in")

    graded_by: Literal["teacher", "policy", "reference"] = "teacher"
    teacher_coef: float = Field(1.0, gt=0.0)
    teacher_clip: float | None = Field(None, gt=0.0)  # bounds a token's difference of the two
    reward_coef: float = Field(0.0, ge=0.0)
    aggregation: Aggregation = "token"

    def needs(self) -> Needs:
        needs = super().needs()
        by, asks_old = self.graded_by, not needs.sampled_is_old
        of_teacher = {"teacher": True} if by == "teacher" else {"self_graded": by}
        return replace(needs, old_logprobs=asks_old, **of_teacher)

    def advantages(
        self, rewards: NDArray[np.float64], group: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        if not self.reward_coef:
            return np.zeros(len(rewards))
        return self.reward_coef * super().advantages(rewards, group)

    def credit(
        self,
        batch: RolloutBatch,
        old: Ragged | None,
        ref: Ragged | None,
        values: Ragged | None,
        state: Mapping[str, Any],
        entropy: Ragged | None = None,
        teacher: Ragged | None = None,
    ) -> Credit:
        """As PolicyGradient.credit. teacher: the grader's logprobs, float32 over the
        batch's tokens.
        """
        credit = super().credit(batch, old, ref, values, state, entropy)
        sequences, columns = credit.experience.sequences, dict(credit.experience.columns)
        before = required(columns.get("old_logprobs"), "'old' logprobs").values
        grades = required(teacher, "'teacher' logprobs").take(credit.rows).values
        mask = sequences.loss_mask.values
        gap = (grades.astype(np.float64) - before) * mask
        advantages, metrics = columns["advantages"], dict(credit.metrics)
        tokens, total = max(1, int(mask.sum())), (grades * mask).sum(dtype=np.float64)
        means = {"teacher/reverse_kl": -float(gap.sum()), "teacher/logprob": float(total)}
        metrics |= {name: value / tokens for name, value in means.items()}
        if self.teacher_clip is not None:
            free, gap = gap, gap.clip(-self.teacher_clip, self.teacher_clip)
            metrics["teacher/clipped_fraction"] = float((free != gap).sum()) / tokens
        taught = advantages.values + self.teacher_coef * gap
        columns["advantages"] = advantages.like(taught.astype(np.float32))
        experience = Experience(sequences, columns, self._moves(columns))
        return replace(credit, experience=experience, metrics=metrics)
