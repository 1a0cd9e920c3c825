"""Supervised fine-tuning: an update on the next conversations."""

import numpy as np

from postgrad.algorithms.sft import SFT
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.data.conversations import Conversation
from postgrad.data.draws import Draws
from postgrad.jobs.evaluation import Evaluator
from postgrad.jobs.publish import Publisher
from postgrad.jobs.results import Result
from postgrad.jobs.run import Run
from postgrad.jobs.supervised import SupervisedJob
from postgrad.learner.protocols import PolicyRole
from postgrad.rollout.engine import Engine


class SFTJob(SupervisedJob[Conversation]):
    """One policy, its conversations, and, where it is evaluated, an engine that answers."""

    def __init__(
        self,
        run: Run,
        algorithm: SFT,
        policy: PolicyRole,
        conversations: Draws[Conversation],
        engine: Engine | None,
        evaluator: Evaluator | None,
        publish: Publisher | None,
    ) -> None:
        super().__init__(run, policy, algorithm, conversations)
        self._sft = algorithm
        self._policy = policy
        self._engine = engine
        self._evaluator = evaluator
        self._publish = publish

    def experience(self, drawn: list[Conversation]) -> Experience:
        return self._sft.experience(sequences_of(drawn))

    def evaluate(self) -> list[Result]:
        """Job.evaluate: the engine takes over the weights, then answers."""
        assert self._engine is not None
        assert self._evaluator is not None
        assert self._publish is not None
        with self._run.phase("publish"):
            self._run.sentinels.at_once(self._policy.updates, self._publish())
        with self._run.phase("evaluate", self._evaluator.total):
            found = self._evaluator(self._engine, self._run.advance)
        self._engine.rest()
        return found


def sequences_of(conversations: list[Conversation]) -> Sequences:
    """Conversations as a learner trains on them, each a group of its own."""
    return Sequences(
        tokens=Ragged.of([one.token_ids for one in conversations], np.int32),
        loss_mask=Ragged.of([one.loss_mask for one in conversations], np.bool_),
        group=np.arange(len(conversations), dtype=np.int64),
    )
