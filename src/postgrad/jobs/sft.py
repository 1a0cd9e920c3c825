"""Supervised fine-tuning: an update on the next conversations."""

from postgrad.algorithms.sft import SFT
from postgrad.core.records import Experience
from postgrad.data.conversations import Conversation
from postgrad.data.draws import Draws
from postgrad.jobs.evaluation import Evaluator
from postgrad.jobs.held_out_loss import LossEvaluator, sequences_of, with_losses
from postgrad.jobs.publish import Publisher
from postgrad.jobs.results import Result
from postgrad.jobs.run import Run
from postgrad.jobs.supervised import SupervisedJob
from postgrad.learner.protocols import PolicyRole
from postgrad.rollout.engine import Engine


class SFTJob(SupervisedJob[Conversation]):
    """Trains a policy on conversations; evaluates it by sampled answers, by the loss of held-out
    conversations, or by both.
    """

    def __init__(
        self,
        run: Run,
        algorithm: SFT,
        policy: PolicyRole,
        conversations: Draws[Conversation],
        engine: Engine | None,
        evaluator: Evaluator | None,
        publish: Publisher | None,
        losses: LossEvaluator | None,
    ) -> None:
        super().__init__(run, policy, algorithm, conversations)
        self._sft = algorithm
        self._policy = policy
        self._engine = engine
        self._evaluator = evaluator
        self._publish = publish
        self._losses = losses

    def experience(self, drawn: list[Conversation]) -> Experience:
        return self._sft.experience(sequences_of(drawn))

    def evaluate(self) -> list[Result]:
        answered = [] if self._evaluator is None else self._answers()
        if self._losses is None:
            return answered
        with self._run.phase("evaluate"):
            losses = self._losses(lambda sequences: self._policy.logprobs(sequences).result())
        return with_losses(answered, losses) if answered else losses

    def _answers(self) -> list[Result]:
        """Publishes the weights to the engine and evaluates its answers."""
        assert self._engine is not None
        assert self._evaluator is not None
        assert self._publish is not None
        with self._run.phase("publish"):
            self._run.sentinels.at_once(self._policy.updates, self._publish())
        with self._run.phase("evaluate", self._evaluator.total):
            results = self._evaluator(self._engine, self._run.advance)
        self._engine.rest()
        return results
