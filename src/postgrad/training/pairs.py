"""The jobs on preferences, from their assembly to their steps: `RewardJob` trains a reward model,
`StepRewardJob` one that judges steps, `PreferenceJob` a policy without one. They read pairs, or
answers with labels one at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Generic

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from postgrad.algorithms.base import PreferenceAlgorithm, RewardAlgorithm
from postgrad.checkpoint.state import RunState
from postgrad.checkpoint.store import Checkpoint
from postgrad.core.batch import BatchGeometry
from postgrad.core.cursor import Cursor
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, PlacedImage, Sequences, column_of
from postgrad.data.draws import Drawn, Draws
from postgrad.data.pairs import Labelled, Pair
from postgrad.data.step_tokens import Stepwise
from postgrad.evaluation.pairs import PairEvaluator, sequences_of
from postgrad.evaluation.results import Result
from postgrad.evaluation.steps import StepEvaluator
from postgrad.evaluation.steps import sequences_of as steps_as_sequences
from postgrad.fleet.loading import require_same_frozen_weights
from postgrad.learner.learner import UpdateResult
from postgrad.learner.protocols import MovingReferenceRole, PolicyRole, ScoringRole
from postgrad.learner.reference import ReferenceLogprobs
from postgrad.learner.score import last_scores, step_scores
from postgrad.models.image_reader import ImageReader
from postgrad.models.score import require_padding, require_step_labels, scale_of_state
from postgrad.models.tokenizer import load_tokenizer, require_same_tokens
from postgrad.ops.preferences import AnswerSums
from postgrad.recipe.recipe import Comparing, PreferenceRecipe, RewardRecipe
from postgrad.training import auto_sizes, rows
from postgrad.training.run import Run
from postgrad.training.saving import estimate_disk
from postgrad.training.stored import cached_columns, in_parts
from postgrad.training.supervised import SupervisedJob

KEPT = 0.9  # of the running mean and mean square, at each step


class PreferenceJob(SupervisedJob[Drawn], Generic[Drawn]):
    """Trains a policy on preferences. reference: None where the loss needs none."""

    def __init__(
        self,
        run: Run,
        algorithm: PreferenceAlgorithm,
        policy: PolicyRole,
        draws: Draws[Drawn],
        read: Callable[[Sequence[Drawn]], tuple[Sequences, NDArray[np.bool_]]],
        reference: ReferenceLogprobs | None,
        evaluator: PairEvaluator | None,
        moving_reference: MovingReferenceRole | None = None,
    ) -> None:
        """read: turns drawn samples into sequences and a mask [S] of the preferred ones.
        moving_reference: one that follows the policy, in place of `reference`.
        """
        super().__init__(run, policy, algorithm, draws)
        self._preference = algorithm
        self._policy = policy
        self._read = read
        self._reference = reference
        self._evaluator = evaluator
        self._moving_reference = moving_reference

    def step(self, state: RunState) -> tuple[RunState, dict[str, float]]:
        """One update, after which the reference follows, where it does."""
        state, metrics = super().step(state)
        if self._moving_reference is not None:
            self._moving_reference.after_step(state.step, self._policy)
        return state, metrics

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        changing = {} if self._moving_reference is None else self._moving_reference.tensors()
        return {**super().tensors(), **changing}

    def experience(self, drawn: list[Drawn]) -> Experience:
        sequences, preferred = self._read(drawn)
        experience = self._preference.experience(
            sequences, preferred, self._of_reference(sequences), self._mismatched(sequences)
        )
        temperatures = self._preference.needs().own_temperatures
        before = [self._policy.logprobs(sequences, temperature) for temperature in temperatures]
        return self._preference.with_own(experience, [asked.result() for asked in before])

    def evaluate(self) -> list[Result]:
        """Evaluates pairs: the score of a sequence is its implicit reward."""
        assert self._evaluator is not None
        with self._run.phase("evaluate"):
            return self._evaluator(self._score)

    def _score(self, sequences: Sequences) -> NDArray[np.float64]:
        logprobs = self._policy.logprobs(sequences).result()
        return implicit_rewards(
            self._preference, sequences, logprobs, self._of_reference(sequences)
        )

    def _of_reference(self, sequences: Sequences) -> Ragged | None:
        if self._moving_reference is not None:
            return self._moving_reference.logprobs(sequences).result()
        return None if self._reference is None else self._reference.of(sequences)

    def _mismatched(self, sequences: Sequences) -> NDArray[np.float64] | None:
        if not self._preference.needs().mismatched:
            return None
        crossed = mismatched(sequences)
        ref = self._of_reference(crossed)
        assert ref is not None  # what needs a reference point needs a reference
        return self._policy.logprobs(crossed).result().sums() - ref.sums()


def implicit_rewards(
    algorithm: PreferenceAlgorithm, sequences: Sequences, logprobs: Ragged, ref: Ragged | None
) -> NDArray[np.float64]:
    """[S] the implicit reward of each answer, as the loss defines it.

    logprobs, ref: of each token, by policy and reference; ref: None where the loss needs none.
    """
    ratio = logprobs.like(logprobs.values - (logprobs if ref is None else ref).values)
    tokens = np.maximum(sequences.loss_mask.sums(), 1)
    sums = [torch.as_tensor(column) for column in (logprobs.sums(), ratio.sums(), tokens)]
    return algorithm.reward(AnswerSums(*sums)).numpy()


def of_pairs(pairs: Sequence[Pair]) -> tuple[Sequences, NDArray[np.bool_]]:
    """The sequences of pairs, chosen and rejected in turn, and the mask of the chosen ones."""
    return sequences_of(pairs), np.tile([True, False], len(pairs))


def of_labelled(samples: Sequence[Labelled]) -> tuple[Sequences, NDArray[np.bool_]]:
    """Sequences of labelled answers, each a group of its own, and the mask of desirable ones."""
    sequences = Sequences(
        tokens=Ragged.of([sample.token_ids for sample in samples], np.int32),
        loss_mask=Ragged.of([sample.loss_mask for sample in samples], np.bool_),
        group=np.arange(len(samples), dtype=np.int64),
        images=column_of(sample.images for sample in samples),
    )
    return sequences, np.array([sample.desirable for sample in samples], np.bool_)


def mismatched(sequences: Sequences) -> Sequences:
    """Each prompt with the answer of the next sample, the last with the first's (KTO,
    arXiv:2402.01306). An answer begins at its first loss token. What is over the token limit in
    its new place is no longer than the longest prompt and answer together.
    """
    tokens = list(sequences.tokens)
    masks = list(sequences.loss_mask)
    starts = [int(np.argmax(mask)) for mask in masks]
    following = np.roll(np.arange(len(tokens)), -1).tolist()
    crossed = [
        (
            np.concatenate([tokens[i][: starts[i]], tokens[j][starts[j] :]]),
            np.concatenate([masks[i][: starts[i]], masks[j][starts[j] :]]),
            _crossed_images(sequences, (i, starts[i]), (j, starts[j])),
        )
        for i, j in enumerate(following)
    ]
    return Sequences(
        tokens=Ragged.of([ids for ids, _, _ in crossed], np.int32),
        loss_mask=Ragged.of([mask for _, mask, _ in crossed], np.bool_),
        group=np.arange(len(tokens), dtype=np.int64),
        images=column_of(images for _, _, images in crossed),
    )


def _crossed_images(
    sequences: Sequences, prompt: tuple[int, int], answer: tuple[int, int]
) -> tuple[PlacedImage, ...]:
    """The images of one sequence's prompt and of another's answer behind it. prompt, answer: the
    number of each sequence, and where its answer begins.
    """
    (asked, before), (answered, start) = prompt, answer
    moved = (
        image.moved(before - start)
        for image in sequences.images_of(answered)
        if image.at[0] >= start
    )
    return (*(i for i in sequences.images_of(asked) if i.at[0] < before), *moved)


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

    def after_update(
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


class StepRewardJob(SupervisedJob[Stepwise]):
    """Trains a process reward model on answers whose steps have labels; evaluates it on held-out
    ones.
    """

    def __init__(
        self,
        run: Run,
        algorithm: RewardAlgorithm,
        model: ScoringRole,
        answers: Draws[Stepwise],
        evaluator: StepEvaluator | None,
    ) -> None:
        super().__init__(run, model, algorithm, answers)
        self._reward = algorithm
        self._model = model
        self._evaluator = evaluator

    def experience(self, drawn: list[Stepwise]) -> Experience:
        labels = np.concatenate([answer.labels for answer in drawn]).astype(np.float64)
        return self._reward.experience(steps_as_sequences(drawn), labels)

    def evaluate(self) -> list[Result]:
        assert self._evaluator is not None
        with self._run.phase("evaluate"):
            return self._evaluator(lambda sequences: step_scores(self._model, sequences))


def assemble_reward(
    run: Run, recipe: RewardRecipe, path: str, checkpoint: Checkpoint | None
) -> RewardJob | StepRewardJob:
    """The job, from a checkpoint where there is one. See prepare.assemble."""
    tokenizer, by_step = load_tokenizer(path), recipe.row_kind == "steps"
    if by_step:
        require_step_labels(path)
    else:
        require_padding(tokenizer, path)
    reader = rows.image_reader(path, tokenizer)
    read = rows.steps if by_step else rows.pairs
    draws: Any = read(recipe, tokenizer, reader)
    rows.show_training(run, recipe, draws, reader)
    evaluator: Any = None
    if by_step and recipe.eval.sets:
        evaluator = StepEvaluator(recipe, tokenizer, reader)
        rows.show_rows(run, evaluator.accounts, "evaluation")
    elif not by_step:
        evaluator = _evaluator(run, recipe, tokenizer, reader)
    run.count_rows(len(draws))
    model = run.fleet.reward_model(path)
    estimate_disk(run, model.state_bytes())
    auto_sizes.try_tokens(run, [model])
    if checkpoint is not None:
        model.load(checkpoint.tensors)
    kind = StepRewardJob if by_step else RewardJob
    return kind(run, recipe.algorithm, model, draws, evaluator)


def assemble_preference(
    run: Run, recipe: PreferenceRecipe, path: str, checkpoint: Checkpoint | None
) -> PreferenceJob[Pair] | PreferenceJob[Labelled]:
    """The job, from a checkpoint where there is one. See prepare.assemble."""
    tokenizer, algorithm = load_tokenizer(path), recipe.algorithm
    reader = rows.image_reader(path, tokenizer)
    one_by_one = algorithm.level != "pair"
    if one_by_one:
        draws: Any = rows.labelled(recipe, tokenizer, reader)
        read: Any = of_labelled
    else:
        draws = rows.pairs(recipe, tokenizer, reader)
        read = of_pairs
    rows.show_training(run, recipe, draws, reader)
    evaluator = _evaluator(run, recipe, tokenizer, reader)
    other = recipe.reference.model.source
    if algorithm.needs().reference and other is not None and other != path:
        require_same_tokens(other, "reference.model.path", tokenizer)
    run.count_rows(len(draws))
    policy = run.fleet.policy(path)
    moving = run.fleet.moving_reference(path) if recipe.reference.moves else None
    saved = [policy] if moving is None else [policy, moving]
    estimate_disk(run, sum(role.state_bytes() for role in saved))
    auto_sizes.try_tokens(run, [policy], [moving])
    reference = None
    if moving is None and algorithm.needs().reference:
        wanted = _read_by_reference(recipe, draws, read, run.geometry, evaluator)
        reference = _reference(run, recipe, path, policy, wanted)
    if checkpoint is not None:
        for role in saved:
            role.load(checkpoint.tensors)
    return PreferenceJob(run, algorithm, policy, draws, read, reference, evaluator, moving)


def _evaluator(
    run: Run, recipe: Comparing, tokenizer: object, reader: ImageReader | None
) -> PairEvaluator | None:
    if not recipe.eval.sets:
        return None
    evaluator = PairEvaluator(recipe, tokenizer, reader)
    rows.show_rows(run, evaluator.accounts, "evaluation")
    return evaluator


def _read_by_reference(
    recipe: PreferenceRecipe,
    draws: Any,
    read: Any,
    geometry: BatchGeometry,
    evaluator: PairEvaluator | None,
) -> Iterator[Sequences]:
    """Everything that the reference is asked for in the whole run."""
    for some in in_parts(draws.all(), 1 if recipe.algorithm.level != "pair" else 2):
        yield read(some)[0]
    yield from evaluator.sequences() if evaluator else ()
    if not recipe.algorithm.needs().mismatched:
        return
    cursor = Cursor()
    for _ in range(geometry.steps or 0):
        tickets = list(islice(cursor.open_tickets(), geometry.train_batch_size))
        cursor = cursor.settle(tickets)
        drawn = [draws.draw(ticket, recipe.seed) for ticket in tickets]
        yield mismatched(read(drawn)[0])


def _reference(
    run: Run, recipe: PreferenceRecipe, path: str, policy: PolicyRole, wanted: Iterator[Sequences]
) -> ReferenceLogprobs:
    """The reference's logprobs. Where it is the policy's own start, the policy computes them before
    it is restored: there never is a second model.
    """
    start = recipe.reference.model.source or path
    if start == path:
        require_same_frozen_weights(run, "reference", start)
        reference, model = policy.start(), recipe.model
    else:
        reference, model = run.fleet.frozen_policy(start), recipe.reference.model
    logprobs = cached_columns(
        run, "reference", wanted, lambda part: reference.logprobs(part).result(),
        source=start, model=model, label="reference logprobs",
    )  # fmt: skip
    if start != path:
        run.fleet.release("frozen_policy")  # its logprobs are all that is needed
    return logprobs
