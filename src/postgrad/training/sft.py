"""Supervised fine-tuning: an update on the next conversations."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from postgrad.algorithms.distillation import Distillation
from postgrad.algorithms.sft import SFT
from postgrad.checkpoint.store import Checkpoint
from postgrad.core.errors import UsageError
from postgrad.core.records import Experience, PlacedImage
from postgrad.core.seeds import integer, uniform
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
from postgrad.models.config import load_config
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.sentinels.publish import MOVED
from postgrad.recipe.recipe import SFTRecipe
from postgrad.rollout.engine import Completion, Engine, Request
from postgrad.rollout.settings import SamplingSettings
from postgrad.training import auto_sizes, rows
from postgrad.training.publish import PROBES, Publisher
from postgrad.training.run import Run
from postgrad.training.saving import estimate_disk
from postgrad.training.stored import cached_columns, in_parts
from postgrad.training.supervised import SupervisedJob


@dataclass(frozen=True, slots=True)
class OwnAnswers:
    """Which rows the student answers itself, and what it is asked: the same for a ticket in every
    run of a seed.
    """

    share: float  # of the rows
    sampling: SamplingSettings
    max_len: int  # tokens of a row, its own answer included
    seed: int  # of the run

    def requests(self, drawn: Sequence[Conversation]) -> list[Request]:
        """A request for each row that the student answers, up to its last answer."""
        chosen = uniform(self.seed, "on_policy", [row.ticket for row in drawn]) < self.share
        return [self._request(row) for row, yes in zip(drawn, chosen, strict=True) if yes]

    def _request(self, row: Conversation) -> Request:
        asked = row.token_ids[: last_answer(row.loss_mask)]
        if not len(asked):
            raise UsageError(
                f"row {row.row}: nothing precedes its answer, so there is nothing to answer with "
                "algorithm.on_policy: give the row a question, or leave it out"
            )
        room = min(self.sampling.max_new_tokens, self.max_len - len(asked))
        sampling = self.sampling.model_copy(update={"max_new_tokens": room})
        seed = integer(self.seed, "on_policy")
        return Request(
            row.ticket, (0,), asked, sampling, seed=seed, images=shown_before(row, len(asked))
        )


def last_answer(loss_mask: NDArray[np.bool_]) -> int:
    """The place of the first token of a conversation's last answer. loss_mask: [T]."""
    last = int(np.flatnonzero(loss_mask)[-1])
    before = np.flatnonzero(~loss_mask[:last])
    return int(before[-1]) + 1 if len(before) else 0


def shown_before(row: Conversation, place: int) -> tuple[PlacedImage, ...]:
    """The images of a row's first `place` tokens; none is cut, as answers have no images."""
    return tuple(image for image in row.images if image.at[0] < place)


def with_answer(row: Conversation, asked: NDArray[np.int32], answer: Completion) -> Conversation:
    """The row with this answer in place of its last one, whose weight it takes over, and loss on it
    alone.
    """
    tokens = np.concatenate([asked, answer.token_ids])
    mask = np.arange(len(tokens)) >= len(asked)
    weights = row.loss_weights
    if weights is not None:
        weights = mask * weights[len(asked)]
    return replace(
        row,
        token_ids=tokens,
        loss_mask=mask,
        images=shown_before(row, len(asked)),
        loss_weights=weights,
    )


def answer_metrics(answers: Sequence[Completion]) -> dict[str, float]:
    """What is logged of the rows that the policy answered itself."""
    return {
        "on_policy/samples": float(len(answers)),
        "on_policy/mean_tokens": float(np.mean([len(answer.token_ids) for answer in answers])),
        "on_policy/truncated": float(np.mean([a.finish_reason != "stop" for a in answers])),
    }


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
        own_answers: OwnAnswers | None = None,
    ) -> None:
        """taught: what a teacher said of the rows, where it read them before. own_answers: the
        rows that the policy answers itself.
        """
        super().__init__(run, policy, algorithm, conversations)
        self._sft = algorithm
        self._policy = policy
        self._engine = engine
        self._evaluator = evaluator
        self._publish = publish
        self._losses = losses
        self._taught = taught
        self._own_answers = own_answers

    def experience(self, drawn: list[Conversation]) -> Experience:
        experience = self._sft.experience(sequences_of(drawn))
        if self._taught is None:
            return experience
        stored = self._taught.of(experience.sequences)
        return replace(experience, columns={**experience.columns, STORED: stored})

    def with_own_answers(
        self, drawn: list[Conversation]
    ) -> tuple[list[Conversation], Mapping[str, float]]:
        requests = [] if self._own_answers is None else self._own_answers.requests(drawn)
        if not requests:
            return drawn, {}
        assert self._engine is not None
        assert self._publish is not None
        with self._run.phase("publish"):
            updates = self._policy.updates
            published = self._publish(updates)
            self._run.sentinels.at_once(updates, published)
        with self._run.phase("sample", len(requests)):
            done: list[Completion] = []
            for request in requests:
                self._engine.submit(request)
            while ended := self._engine.completed():
                done += ended
                self._run.advance(len(ended))
            self._engine.sleep()
        asked = {request.ticket: request.token_ids for request in requests}
        answers = {answer.ticket: answer for answer in done}
        rows = [
            with_answer(row, asked[row.ticket], answers[row.ticket]) if row.ticket in asked else row
            for row in drawn
        ]
        # How far the policy moved since the engine's last weights is known to the process that had
        # them alone: after a resume the number would be another one.
        lasting = {name: value for name, value in published.items() if name != MOVED}
        return rows, {**answer_metrics(done), **lasting}

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
        self._engine.sleep()
        return results


def assemble_sft(
    run: Run, recipe: SFTRecipe, path: str, stack: ExitStack, checkpoint: Checkpoint | None
) -> SFTJob:
    """The job, from a checkpoint where there is one. See prepare.assemble."""
    tokenizer = load_tokenizer(path)
    check_teachers(recipe, tokenizer)
    reader = rows.image_reader(path, tokenizer)
    conversations = rows.conversations(recipe, tokenizer, reader)
    rows.show_training(run, recipe, conversations, reader)
    evaluator = losses = None
    if recipe.evaluates_answers:
        scorer = stack.enter_context(scorer_of(recipe, tokenizer))
        evaluator = rows.evaluator(run, recipe, tokenizer, scorer, reader)
    if recipe.measures_loss:
        losses = LossEvaluator(recipe, tokenizer, reader)
        rows.show_rows(run, losses.accounts, "held-out")
    run.count_rows(len(conversations))
    own_answers = _own_answers(recipe)
    policy = run.fleet.policy(path)
    estimate_disk(run, policy.state_bytes())
    if checkpoint is not None:
        policy.load(checkpoint.tensors)
    engine = publish = None
    if evaluator is not None or own_answers is not None:
        run.free_memory("nothing")  # what loading took, before an engine looks how much is free
        engine = auto_sizes.engine(run, path, stack, **_engine_needs(run, evaluator, own_answers))
        probe = (
            evaluator.probe(PROBES)
            if evaluator is not None
            else [conversations.draw(n, recipe.seed) for n in range(PROBES)]
        )
        publish = Publisher(
            policy, engine, probe, run.free_memory, run.console.warn,
            event=run.logs.event, adapter=recipe.rollout.sends_adapter,
        )  # fmt: skip
        engine.sleep()
    auto_sizes.try_tokens(run, [policy])
    taught = _taught(run, recipe, path, conversations)
    return SFTJob(
        run, recipe.algorithm, policy, conversations, engine, evaluator, publish, losses, taught,
        own_answers,
    )  # fmt: skip


def _engine_needs(
    run: Run, evaluator: Evaluator | None, own_answers: OwnAnswers | None
) -> dict[str, int]:
    """Sequences at once, and tokens of the longest, of whatever is sampled."""
    sequences, max_len = [0], [0]
    if evaluator is not None:
        sequences.append(evaluator.sequences)
        max_len.append(evaluator.max_len)
    if own_answers is not None:
        sequences.append(run.geometry.train_batch_size)
        max_len.append(own_answers.max_len)
    return {"sequences": max(sequences), "max_len": max(max_len)}


def _own_answers(recipe: SFTRecipe) -> OwnAnswers | None:
    """None where the rows hold all answers."""
    if not recipe.own_answers:
        return None
    return OwnAnswers(recipe.own_answers, recipe.rollout, recipe.data.max_len, recipe.seed)


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
    stored = cached_columns(
        run, "teacher", map(sequences_of, in_parts(rows_of_run.all(), 1)),
        lambda part: teacher.top_logprobs(part, top_k, temperature).result(),
        source=source, model=recipe.teacher.model,
        label=f"the teacher's {top_k} most likely tokens",
        top_k=top_k, temperature=temperature, vocabulary=vocabulary,
    )  # fmt: skip
    run.fleet.release("reading_teacher")
    return stored
