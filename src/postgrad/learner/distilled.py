"""Students that learn from whole distributions of a teacher: one in the same process, or one that
read the rows before.
"""

from abc import abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from postgrad.algorithms.base import LossInputs, LossOutput, PolicyAlgorithm
from postgrad.algorithms.distillation import Distillation
from postgrad.core.process import Handle, done
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.layout import Layout
from postgrad.learner.backbone import Backbone
from postgrad.learner.context import RankRows
from postgrad.learner.learner import UpdateResult
from postgrad.learner.policy import Policy, PolicyLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Entries, FlatColumns, Update
from postgrad.models.attention import to_device
from postgrad.models.config import load_config
from postgrad.models.distilled_head import LiveTeacher, StoredTeacher, Taught, top_logprobs
from postgrad.ops.distillation import TeacherDivergence

STORED = "taught"  # the column of an experience with what a StoredDistillation learns from


def shared_vocabulary(config: Any, path: str) -> int:
    """How many token ids a model of this config and the one at `path` both have: of one tokenizer,
    either may be padded further than the other.
    """
    both = config, load_config(path)
    return min(each.get_text_config().vocab_size for each in both)


class DistilledLearner(PolicyLearner):
    """The policy with its optimizer, and a teacher's distributions at its loss tokens."""

    @abstractmethod
    def trial(self, layout: Layout) -> Tensor:
        """[E] outputs of a layout that take the memory of an update, whatever they say."""

    @abstractmethod
    def divergences(
        self, layout: Layout, divergence: TeacherDivergence, entries: Entries
    ) -> tuple[Tensor, Tensor]:
        """[E] logprobs of a layout's loss entries, and how far the student is from the teacher.
        entries: the columns there.
        """

    def _loss(
        self, layout: Layout, flat: FlatColumns, algorithm: PolicyAlgorithm
    ) -> tuple[LossOutput, Tensor]:
        assert isinstance(algorithm, Distillation)  # of a recipe with a teacher
        entries = flat.at(layout)
        logprobs, apart = self.divergences(layout, algorithm.compared, entries)
        inputs = LossInputs(logprobs, None, **entries)
        inputs = replace(inputs, columns={**inputs.columns, "divergence": apart})
        return algorithm.policy_loss(inputs), logprobs


class LiveDistillation(DistilledLearner):
    """The frozen teacher lies beside the policy: each micro-batch goes through both. On several
    ranks the teacher is divided over them as the policy is.
    """

    def __init__(
        self, backbone: Backbone, settings: LearnerSettings, total_updates: int, teacher: Backbone
    ) -> None:
        super().__init__(backbone, settings, total_updates)
        self.teacher = teacher

    def trial(self, layout: Layout) -> Tensor:
        logprobs, apart = self._compared(layout, TeacherDivergence("jsd"))
        return logprobs + apart

    def divergences(
        self, layout: Layout, divergence: TeacherDivergence, entries: Entries
    ) -> tuple[Tensor, Tensor]:
        return self._compared(layout, divergence)

    def _compared(self, layout: Layout, divergence: TeacherDivergence) -> tuple[Tensor, Tensor]:
        def taught(rank_rows: RankRows | None) -> Taught:
            hidden = self.teacher.hidden(layout, rank_rows)
            return LiveTeacher(self.teacher.lm, hidden, divergence)

        return self.backbone.divergences(layout, taught)

    def _update(self, update: Update, algorithm: PolicyAlgorithm) -> UpdateResult:
        result = super()._update(update, algorithm)
        self.teacher.free_gathered()
        return result

    def _outputs(self, layout: Layout) -> Tensor:
        if not layout.n_sequences and torch.is_grad_enabled():  # others ask the teacher meanwhile
            return self._compared(layout, TeacherDivergence())[0]
        return super()._outputs(layout)


class StoredDistillation(DistilledLearner):
    """The teacher's `top_k` most likely tokens come with the rows, in the column STORED: [N, 2 k +
    1]. vocabulary: the tokens that both have.
    """

    def __init__(
        self,
        backbone: Backbone,
        settings: LearnerSettings,
        total_updates: int,
        top_k: int,
        vocabulary: int,
    ) -> None:
        super().__init__(backbone, settings, total_updates)
        self._top_k, self._vocabulary = top_k, vocabulary

    def trial(self, layout: Layout) -> Tensor:
        stored = _any_row(self._top_k, torch.zeros((), device=self.backbone.device))
        stored = stored.expand(len(layout.target), -1)
        logprobs, apart = self._compared(layout, TeacherDivergence("jsd"), stored)
        return logprobs + apart

    def divergences(
        self, layout: Layout, divergence: TeacherDivergence, entries: Entries
    ) -> tuple[Tensor, Tensor]:
        return self._compared(layout, divergence, entries["columns"][STORED])

    def _compared(
        self, layout: Layout, divergence: TeacherDivergence, stored: Tensor
    ) -> tuple[Tensor, Tensor]:
        def taught(rank_rows: RankRows | None) -> Taught:
            part = stored
            if rank_rows is not None:  # with one entry more, whose gradient is 0
                part = stored.index_select(0, to_device(rank_rows.entries, stored.device))
                part = torch.cat([part, _any_row(self._top_k, part)])
            return StoredTeacher(part, self._vocabulary, divergence)

        return self.backbone.divergences(layout, taught)


def _any_row(top_k: int, like: Tensor) -> Tensor:
    """[1, 2 k + 1] of a teacher to which the first k tokens and all others are as likely."""
    ids = torch.arange(top_k, device=like.device, dtype=like.dtype)
    even = like.new_full((top_k + 1,), -1.0)
    return torch.cat([ids, even.log_softmax(-1)])[None]


class ReadingTeacher(Policy):
    """A teacher that reads rows before the first update. vocabulary: the tokens that it and its
    student have.
    """

    def __init__(self, backbone: Backbone, vocabulary: int) -> None:
        super().__init__(backbone)
        self._vocabulary = vocabulary

    def top_logprobs(self, sequences: Sequences, top_k: int, temperature: float) -> Handle[Ragged]:
        """[N, 2 k + 1] at every loss token, see models.distilled_head; zeros elsewhere."""
        read = partial(
            top_logprobs, top_k=top_k, temperature=temperature, vocabulary=self._vocabulary
        )
        with self.backbone.ranks.doing("top logprobs"):
            column = self.backbone.column(
                sequences, lambda layout: self.backbone.read(layout, read), width=(2 * top_k + 1,)
            )
        return done(column)
