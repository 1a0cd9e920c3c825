"""Reward models: an update on the next pairs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.algorithms.base import RewardAlgorithm
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.data.draws import Draws
from postgrad.data.pairs import Pair
from postgrad.jobs.pairs import PairEvaluator, sequences_of
from postgrad.jobs.results import Result
from postgrad.jobs.run import Run
from postgrad.jobs.supervised import SupervisedJob
from postgrad.learner.protocols import Scores, ScoringRole
from postgrad.learner.role import UpdateResult
from postgrad.models.score import RewardScale

KEPT = 0.9  # of the running mean and mean square, at each step


class RewardJob(SupervisedJob[Pair]):
    """Trains a reward model on pairs; evaluates it on held-out ones.

    The algorithm state in checkpoints is the scale of the scores: running means over the last
    steps, so that any checkpoint can be exported with it.
    """

    def __init__(
        self,
        run: Run,
        algorithm: RewardAlgorithm,
        model: ScoringRole,
        pairs: Draws[Pair],
        evaluator: PairEvaluator | None,
    ) -> None:
        super().__init__(run, model, algorithm, pairs)
        self._reward = algorithm
        self._model = model
        self._evaluator = evaluator

    def experience(self, drawn: list[Pair]) -> Experience:
        margins = np.array([pair.margin for pair in drawn], np.float64)
        return self._reward.experience(sequences_of(drawn), margins)

    def learned(
        self, state: Mapping[str, Any], experience: Experience, result: UpdateResult
    ) -> tuple[Mapping[str, Any], Mapping[str, float]]:
        scores = result.outputs[experience.sequences.loss_mask.values].astype(np.float64)
        following = {
            "weight": KEPT * state.get("weight", 0.0) + 1.0,
            "sum": KEPT * state.get("sum", 0.0) + float(scores.mean()),
            "squares": KEPT * state.get("squares", 0.0) + float(np.square(scores).mean()),
        }
        scale = scale_of_state(following)
        metrics = {"reward_model/scale_mean": scale.mean, "reward_model/scale_std": scale.std}
        return following, metrics

    def evaluate(self) -> list[Result]:
        assert self._evaluator is not None
        with self._run.phase("evaluate"):
            return self._evaluator(lambda sequences: last_scores(self._model, sequences))


def scale_of_state(state: Mapping[str, Any]) -> RewardScale:
    """The scale of a reward model's scores, from a checkpoint's algorithm state."""
    if not state:
        return RewardScale()
    mean, square = state["sum"] / state["weight"], state["squares"] / state["weight"]
    return RewardScale(mean, float(np.sqrt(max(0.0, square - mean * mean))) or 1.0)


def score_sequences(model: Scores, sequences: Sequence[NDArray[np.int32]]) -> NDArray[np.float64]:
    """[S] the score of each sequence of token ids ([tokens], at least one), read at its last token.
    An opening that several share is computed once.
    """
    tokens = Ragged.of(sequences, np.int32)
    no_loss = tokens.like(np.zeros(len(tokens.values), np.bool_))
    one_group = np.zeros(len(tokens), np.int64)  # a layout shares openings within a group
    return last_scores(model, Sequences(tokens, no_loss, one_group))


def last_scores(model: Scores, sequences: Sequences) -> NDArray[np.float64]:
    """[S] the score of each whole sequence: that of its last token."""
    marked = sequences.at_last()
    return model.scores(marked).result().values[marked.loss_mask.values].astype(np.float64)
