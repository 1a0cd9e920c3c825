"""What SFT, reward models and preferences share: a step is one update on the next tickets."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Generic

import numpy as np
from torch import Tensor

from postgrad.algorithms.base import Algorithm
from postgrad.checkpoint.state import RunState
from postgrad.core.records import Experience
from postgrad.data.draws import Drawn, Draws
from postgrad.evaluation.results import Result
from postgrad.learner.learner import UpdateResult
from postgrad.learner.protocols import TrainedRole
from postgrad.learner.update import Update
from postgrad.training.run import Run


class SupervisedJob(ABC, Generic[Drawn]):
    """A job that trains one learner on drawn samples; each step is one update."""

    def __init__(
        self, run: Run, learner: TrainedRole, algorithm: Algorithm, draws: Draws[Drawn]
    ) -> None:
        self._run = run
        self._learner = learner
        self._algorithm = algorithm
        self._draws = draws

    @abstractmethod
    def experience(self, drawn: list[Drawn]) -> Experience:
        """The algorithm's experience of the samples of one update."""

    def with_own_answers(self, drawn: list[Drawn]) -> tuple[list[Drawn], Mapping[str, float]]:
        """Called before an update: its samples, some with an answer that the policy has just
        written, and metrics to log. By default the samples as they are.
        """
        return drawn, {}

    @abstractmethod
    def evaluate(self) -> list[Result]:
        """The results of every evaluation set with the weights of now."""

    def after_update(
        self, state: Mapping[str, Any], experience: Experience, result: UpdateResult
    ) -> tuple[Mapping[str, Any], Mapping[str, float]]:
        """The algorithm's state after an update, and further metrics to log."""
        return state, {}

    def step(self, state: RunState) -> tuple[RunState, dict[str, float]]:
        """One update on the samples of the first open tickets."""
        run, name = self._run, self._learner.name
        tickets = list(islice(state.cursor.open_tickets(), run.geometry.train_batch_size))
        drawn = [self._draws.draw(ticket, run.recipe.seed) for ticket in tickets]
        drawn, sampled = self.with_own_answers(drawn)
        with run.phase("train"):
            experience = self.experience(drawn)
            update = Update(experience, np.arange(len(experience)))
            run.stop.hold()  # from here on the weights are no longer those of the last boundary
            result = self._learner.update(update, self._algorithm).result()
        run.tell_skipped([result.metrics], state.step + 1)
        following, more = self.after_update(state.algorithm, experience, result)
        seconds = run.clock.step["train"]
        metrics = {
            "loss": result.metrics[f"{name}/loss"],
            **result.metrics,
            **more,
            **sampled,
            "samples": len(drawn),
            "loss_tokens": update.loss_tokens,
            "train_tokens_per_second": result.metrics[f"{name}/computed_tokens"] / seconds,
        }
        state = replace(
            state,
            step=state.step + 1,
            update=state.update + (not result.skipped),
            episodes=state.episodes + len(drawn),
            cursor=state.cursor.settle(tickets),
            algorithm=following,
        )
        return state, metrics

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        return self._learner.tensors()
