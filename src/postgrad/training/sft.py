"""Supervised fine-tuning: an update on the next conversations."""

from contextlib import ExitStack

from postgrad.algorithms.sft import SFT
from postgrad.checkpoint.store import Checkpoint
from postgrad.core.records import Experience
from postgrad.data.conversations import Conversation
from postgrad.data.draws import Draws
from postgrad.evaluation.answers import Evaluator
from postgrad.evaluation.losses import LossEvaluator, sequences_of, with_losses
from postgrad.evaluation.results import Result
from postgrad.fleet.learned import scorer_of
from postgrad.learner.protocols import PolicyRole
from postgrad.models.load import load_tokenizer
from postgrad.recipe.recipe import SFTRecipe
from postgrad.rollout.engine import Engine
from postgrad.training import memory, rows
from postgrad.training.publish import PROBES, Publisher
from postgrad.training.run import Run
from postgrad.training.saving import foresee_disk
from postgrad.training.supervised import SupervisedJob


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
            updates = self._policy.updates
            self._run.sentinels.at_once(updates, self._publish(updates))
        with self._run.phase("evaluate", self._evaluator.total):
            results = self._evaluator(self._engine, self._run.advance)
        self._engine.rest()
        return results


def assemble(
    run: Run, recipe: SFTRecipe, path: str, stack: ExitStack, checkpoint: Checkpoint | None
) -> SFTJob:
    """The job, from a checkpoint where there is one. See train.prepare.assemble."""
    tokenizer = load_tokenizer(path)
    rows.check_teacher(recipe, tokenizer)
    conversations = rows.conversations(recipe, tokenizer)
    rows.show_rows(run, conversations.accounts)
    evaluator = losses = None
    if recipe.samples_answers:
        scorer = stack.enter_context(scorer_of(recipe))
        evaluator = rows.evaluator(run, recipe, tokenizer, scorer)
    if recipe.measures_loss:
        losses = LossEvaluator(recipe, tokenizer)
        rows.show_rows(run, losses.accounts, "held-out")
    run.count_rows(len(conversations))
    policy = run.fleet.policy(path)
    foresee_disk(run, policy.state_bytes())
    rows.restore(policy, checkpoint)
    engine = publish = None
    if evaluator is not None:
        run.give_back()  # what loading took, before an engine looks how much is free
        engine = memory.engine(
            run, path, stack, sequences=evaluator.sequences, max_len=evaluator.max_len
        )
        publish = Publisher(
            policy, engine, evaluator.probe(PROBES), run.give_back, run.console.warn,
            event=run.logs.event, adapter=recipe.rollout_settings.sends_adapter,
        )  # fmt: skip
        engine.rest()
    memory.try_tokens(run, [policy])
    algorithm = recipe.algorithm
    return SFTJob(run, algorithm, policy, conversations, engine, evaluator, publish, losses)
