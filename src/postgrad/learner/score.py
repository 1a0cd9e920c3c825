"""Roles with a scalar head: a critic, which gives the value of the state before each token, and a
reward model, which gives the score of a whole sequence.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from postgrad.algorithms.base import LossOutput, ScoreAlgorithm, ScoreInputs
from postgrad.core.process import Handle, done
from postgrad.core.ragged import Ragged
from postgrad.core.records import PlacedImage, Sequences, column_of
from postgrad.layout.layout import Layout, ReadPosition
from postgrad.learner.backbone import Backbone
from postgrad.learner.learner import Learner
from postgrad.learner.protocols import ScalarRole
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import FlatColumns, Update


class ScoreRole:
    """Computes scores at loss tokens. reads: the hidden state that the head takes, "before" the
    token for a critic, "at" it (a sequence's last one) for a reward model. base: with the frozen
    weights and head under the backbone's adapter.
    """

    def __init__(self, backbone: Backbone, reads: ReadPosition, *, base: bool = False) -> None:
        self.backbone = backbone
        self.reads: ReadPosition = reads
        self._base = base

    def scores(self, sequences: Sequences) -> Handle[Ragged]:
        """The score at every loss token, float32; zeros elsewhere."""
        with (
            self.backbone.ranks.doing("scores"),
            self.backbone.as_base() if self._base else nullcontext(),
        ):
            return done(self.backbone.column(sequences, self.backbone.scores, self.reads))


class ScoreLearner(ScoreRole, Learner[ScoreAlgorithm]):
    """A critic or reward model with its optimizer, called `name` in metrics and checkpoints."""

    def __init__(
        self,
        name: str,
        backbone: Backbone,
        reads: ReadPosition,
        settings: LearnerSettings,
        total_updates: int,
    ) -> None:
        ScoreRole.__init__(self, backbone, reads)
        Learner.__init__(self, name, backbone, settings, total_updates)

    def under_adapter(self) -> ScoreRole | None:
        """The frozen weights and head under its adapter, as a reward model; None without an adapter
        and with a head that was drawn, which rewards nothing.
        """
        backbone = self.backbone
        if backbone.adapter is None or backbone.drawn_head:
            return None
        return ScoreRole(backbone, "at", base=True)

    def _weights(self, update: Update, algorithm: ScoreAlgorithm) -> Ragged:
        return algorithm.score_weights(update.experience.sequences, update.rows)

    def _outputs(self, layout: Layout) -> Tensor:
        return self.backbone.scores(layout)

    def _loss(
        self, layout: Layout, flat: FlatColumns, algorithm: ScoreAlgorithm
    ) -> tuple[LossOutput, Tensor]:
        scores = self.backbone.scores(layout)
        return algorithm.score_loss(ScoreInputs(scores, **flat.at(layout))), scores


def score_sequences(
    model: ScalarRole,
    sequences: Sequence[NDArray[np.int32]],
    images: Sequence[tuple[PlacedImage, ...]] = (),
) -> NDArray[np.float64]:
    """[S] the score of each sequence of token ids ([tokens], at least one), read at its last token.
    An opening that several share is computed once. images: of each sequence; (): none has any.
    """
    tokens = Ragged.of(sequences, np.int32)
    no_loss = tokens.like(np.zeros(len(tokens.values), np.bool_))
    one_group = np.zeros(len(tokens), np.int64)  # a layout shares openings within a group
    shown = column_of(images)
    return last_scores(model, Sequences(tokens, no_loss, one_group, images=shown))


def step_scores(model: ScalarRole, sequences: Sequences) -> list[NDArray[np.float64]]:
    """The scores of each sequence at its loss tokens: [steps] of a process reward model."""
    scores = model.scores(sequences).result()
    rows = zip(scores, sequences.loss_mask, strict=True)
    return [values[mask].astype(np.float64) for values, mask in rows]


def probabilities(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """That a step is right, by its score: the logistic function, also of scores far from 0."""
    return np.exp(-np.logaddexp(0.0, -scores))


def last_scores(model: ScalarRole, sequences: Sequences) -> NDArray[np.float64]:
    """[S] the score of each whole sequence: that of its last token."""
    marked = sequences.at_last()
    return model.scores(marked).result().values[marked.loss_mask.values].astype(np.float64)
