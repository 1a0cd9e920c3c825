"""Supervised fine-tuning: a step is one update on the next conversations."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

import numpy as np
from torch import Tensor

from postgrad.algorithms.sft import SFT
from postgrad.checkpoint.state import RunState
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.data.conversations import Conversation
from postgrad.data.mixture import Draws
from postgrad.jobs.evaluation import Evaluator
from postgrad.jobs.results import Result
from postgrad.jobs.run import Run
from postgrad.learner.role import PolicyLearner
from postgrad.learner.update import Update
from postgrad.rollout.engine import Engine


class SFTJob:
    """One policy, its conversations, and, where it is evaluated, an engine that answers."""

    def __init__(
        self,
        run: Run,
        algorithm: SFT,
        policy: PolicyLearner,
        conversations: Draws[Conversation],
        engine: Engine | None,
        evaluator: Evaluator | None,
    ) -> None:
        self._run = run
        self._algorithm = algorithm
        self._policy = policy
        self._conversations = conversations
        self._engine = engine
        self._evaluator = evaluator

    def step(self, state: RunState) -> tuple[RunState, dict[str, float]]:
        """Job.step: the first open tickets are the update."""
        run = self._run
        tickets = list(islice(state.cursor.open_tickets(), run.geometry.train_batch_size))
        with run.phase("train"):
            drawn = [self._conversations.draw(ticket, run.recipe.seed) for ticket in tickets]
            experience = self._algorithm.experience(sequences_of(drawn))
            update = Update(experience, np.arange(len(drawn)))
            run.stop.hold()  # from here on the weights are no longer those of the last boundary
            result = self._policy.update(update, self._algorithm).result()
        seconds = run.clock.step["train"]
        metrics = {
            "loss": result.metrics["policy/loss"],
            **result.metrics,
            "samples": len(drawn),
            "loss_tokens": update.loss_tokens,
            "train_tokens_per_second": result.metrics["policy/computed_tokens"] / seconds,
        }
        following = replace(
            state,
            step=state.step + 1,
            update=state.update + 1,
            episodes=state.episodes + len(drawn),
            cursor=state.cursor.settle(tickets),
        )
        return following, metrics

    def evaluate(self) -> list[Result]:
        """Job.evaluate: the engine takes over the weights, then answers."""
        assert self._engine is not None
        assert self._evaluator is not None
        with self._run.phase("publish"):
            version = self._policy.optimizer.updates
            self._engine.load_weights(self._policy.weights().items(), version)
        with self._run.phase("evaluate", self._evaluator.total):
            return self._evaluator(self._engine, self._run.advance)

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Job.tensors."""
        return self._policy.tensors()


def sequences_of(conversations: list[Conversation]) -> Sequences:
    """Conversations as a learner trains on them, each a group of its own."""
    return Sequences(
        tokens=Ragged.of([one.token_ids for one in conversations], np.int32),
        loss_mask=Ragged.of([one.loss_mask for one in conversations], np.bool_),
        group=np.arange(len(conversations), dtype=np.int64),
    )
