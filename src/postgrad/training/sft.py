"""Supervised fine-tuning: an update on the next conversations."""

from contextlib import ExitStack
from dataclasses import replace

from postgrad.algorithms.distillation import Distillation
from postgrad.algorithms.sft import SFT
from postgrad.checkpoint.store import Checkpoint
from postgrad.core.errors import UsageError
from postgrad.core.records import Experience
from postgrad.data.conversations import Conversation
from postgrad.data.draws import Draws
from postgrad.evaluation.answers import Evaluator
from postgrad.evaluation.losses import LossEvaluator, sequences_of, with_losses
from postgrad.evaluation.results import Result
from postgrad.fleet.learned import scorer_of
from postgrad.fleet.teachers import check_teachers
from postgrad.learner.distilled import STORED, shared_vocabulary
from postgrad.learner.protocols import PolicyRole
from postgrad.learner.reference import ReferenceLogprobs
from postgrad.models.load import load_config, load_tokenizer
from postgrad.recipe.recipe import SFTRecipe
from postgrad.rollout.engine import Engine
from postgrad.training import memory, rows
from postgrad.training.publish import PROBES, Publisher
from postgrad.training.run import Run
from postgrad.training.saving import foresee_disk
from postgrad.training.stored import prepared
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
        taught: ReferenceLogprobs | None = None,
    ) -> None:
        """taught: what a teacher said of the rows, where it read them before."""
        super().__init__(run, policy, algorithm, conversations)
        self._sft = algorithm
        self._policy = policy
        self._engine = engine
        self._evaluator = evaluator
        self._publish = publish
        self._losses = losses
        self._taught = taught

    def experience(self, drawn: list[Conversation]) -> Experience:
        experience = self._sft.experience(sequences_of(drawn))
        if self._taught is None:
            return experience
        stored = self._taught.of(experience.sequences)
        return replace(experience, columns={**experience.columns, STORED: stored})

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
    check_teachers(recipe, tokenizer)
    reader = rows.image_reader(recipe, path, tokenizer)
    conversations = rows.conversations(recipe, tokenizer, reader)
    rows.show_rows(run, conversations.accounts)
    evaluator = losses = None
    if recipe.samples_answers:
        scorer = stack.enter_context(scorer_of(recipe))
        evaluator = rows.evaluator(run, recipe, tokenizer, scorer, reader)
    if recipe.measures_loss:
        losses = LossEvaluator(recipe, tokenizer, reader)
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
    taught = _taught(run, recipe, path, conversations)
    return SFTJob(
        run, recipe.algorithm, policy, conversations, engine, evaluator, publish, losses, taught
    )


def _taught(
    run: Run, recipe: SFTRecipe, path: str, rows_of_run: Draws[Conversation]
) -> ReferenceLogprobs | None:
    """What the teacher of teacher.top_k says of all rows, after which it is released."""
    top_k, source = recipe.teacher.top_k, recipe.teacher.model.source
    if top_k is None:
        return None
    assert source is not None  # a recipe without it is refused
    assert isinstance(recipe.algorithm, Distillation)
    vocabulary = shared_vocabulary(load_config(path), source)
    if top_k >= vocabulary:
        raise UsageError(
            f"teacher.top_k = {top_k}: both models have {vocabulary} tokens; take fewer, or leave "
            "it out, and the teacher computes beside its student"
        )
    temperature = recipe.algorithm.temperature
    teacher = run.fleet.reading_teacher(source, vocabulary)
    stored = prepared(
        run, "teacher", [sequences_of(rows_of_run.all())],
        lambda part: teacher.top_logprobs(part, top_k, temperature).result(),
        source=source, quantize=recipe.teacher.model.quantize,
        label=f"the teacher's {top_k} most likely tokens",
        top_k=top_k, temperature=temperature, vocabulary=vocabulary,
    )  # fmt: skip
    run.fleet.release("reading_teacher")
    return stored
