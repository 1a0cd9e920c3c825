"""A student that learns from whole distributions of a teacher in the same process."""

from dataclasses import replace

import torch
from torch import Tensor

from postgrad.algorithms.base import LossInputs, LossOutput, PolicyAlgorithm
from postgrad.algorithms.distillation import Distillation
from postgrad.layout.layout import Layout
from postgrad.learner.backbone import Backbone
from postgrad.learner.role import PolicyLearner, UpdateResult
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import FlatColumns, Update
from postgrad.ops.distillation import TeacherDivergence


class DistilledLearner(PolicyLearner):
    """The policy with its optimizer, and the frozen teacher beside it: each micro-batch goes
    through both. On several ranks the teacher is divided over them as the policy is.
    """

    def __init__(
        self, backbone: Backbone, settings: LearnerSettings, total_updates: int, teacher: Backbone
    ) -> None:
        super().__init__(backbone, settings, total_updates)
        self.teacher = teacher

    def divergences(self, layout: Layout, divergence: TeacherDivergence) -> tuple[Tensor, Tensor]:
        """[E] logprobs of a layout's loss entries, and how far the student is from the teacher."""
        return self.backbone.divergences(layout, self.teacher, divergence)

    def _update(self, update: Update, algorithm: PolicyAlgorithm) -> UpdateResult:
        result = super()._update(update, algorithm)
        self.teacher.free_gathered()
        return result

    def _outputs(self, layout: Layout) -> Tensor:
        if not layout.n_sequences and torch.is_grad_enabled():  # others ask the teacher meanwhile
            return self.divergences(layout, TeacherDivergence())[0]
        return super()._outputs(layout)

    def _loss(
        self, layout: Layout, flat: FlatColumns, algorithm: PolicyAlgorithm
    ) -> tuple[LossOutput, Tensor]:
        assert isinstance(algorithm, Distillation)  # of a recipe with a teacher
        logprobs, apart = self.divergences(layout, algorithm.compared)
        inputs = LossInputs(logprobs, None, **flat.at(layout))
        inputs = replace(inputs, columns={**inputs.columns, "divergence": apart})
        return algorithm.policy_loss(inputs), logprobs
