"""Process reward models: answers with labelled steps as learners read them, and the evaluation of
steps and of the first wrong step of an answer.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.algorithms.process_reward import RIGHT
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences, column_of
from postgrad.data.account import RowAccount
from postgrad.data.overlap import Selection
from postgrad.data.step_tokens import Stepwise, StepwiseSet, load_steps
from postgrad.evaluation.keys import counted_under, keys_of
from postgrad.evaluation.results import EvaluatedProblem, Result, by_dataset, rates
from postgrad.models.image_reader import ImageReader
from postgrad.ops.advantages import Floats
from postgrad.ops.intervals import Interval, harmonic_interval, mean_interval, ratio_interval
from postgrad.recipe.recipe import Comparing

# the scores of each sequence at its loss tokens, [steps]
ScoreSteps = Callable[[Sequences], list[Floats]]


def sequences_of(answers: Sequence[Stepwise]) -> Sequences:
    """Answers of one row are a group, so that what they begin with alike is computed once."""
    starts = [place for place, answer in enumerate(answers) if _begins(answers, place, answer)]
    sizes = np.diff([*starts, len(answers)])
    return Sequences(
        tokens=Ragged.of([answer.token_ids for answer in answers], np.int32),
        loss_mask=Ragged.of([answer.loss_mask for answer in answers], np.bool_),
        group=np.repeat(np.arange(len(starts)), sizes),
        images=column_of(answer.images for answer in answers),
    )


def _begins(answers: Sequence[Stepwise], place: int, answer: Stepwise) -> bool:
    return place == 0 or answers[place - 1].row != answer.row


def first_wrong(right: NDArray[np.bool_]) -> int:
    """The index of the first step that is not right; -1 where all are."""
    wrong = np.flatnonzero(~right)
    return int(wrong[0]) if len(wrong) else -1


def read_set(
    recipe: Comparing, place: int, tokenizer: Any, reader: ImageReader | None = None
) -> StepwiseSet:
    """Evaluation set `place`. reader: of a model that reads images. Raises UsageError for data
    that cannot be read, and for a row without the column that `by` names.
    """
    eval_set, selection = recipe.eval.sets[place], Selection(part="evaluation")
    with keys_of(recipe.eval, place, recipe.data):
        answers = load_steps(eval_set.data, tokenizer, selection=selection, reader=reader)
    for answer in answers.all():
        counted_under(eval_set.by, answer.metadata, answer.row, answers.account.name)
    return answers


class StepEvaluator:
    """The evaluation sets of a recipe, read once. A step is judged right where its probability is
    at least 0.5.
    """

    def __init__(
        self, recipe: Comparing, tokenizer: Any, reader: ImageReader | None = None
    ) -> None:
        """Raises UsageError as read_set does."""
        self._settings = recipe.eval
        self._tokenizer = tokenizer
        self._sets = [
            read_set(recipe, place, tokenizer, reader) for place in range(len(recipe.eval.sets))
        ]

    @property
    def accounts(self) -> list[RowAccount]:
        """Where the rows of every set went."""
        return [answers.account for answers in self._sets]

    def __call__(self, score: ScoreSteps) -> list[Result]:
        """The results of every set, in the recipe's order."""
        return [
            self._evaluate_set(eval_set.name, eval_set.by, answers, score)
            for eval_set, answers in zip(self._settings.sets, self._sets, strict=True)
        ]

    def _evaluate_set(
        self, name: str | None, by: str | None, answers: StepwiseSet, score: ScoreSteps
    ) -> Result:
        began = time.perf_counter()
        rows = answers.all()[:]  # made once
        scores = score(sequences_of(rows))
        # an answer without a score has failed: it is in no mean
        scored = [(a, s) for a, s in zip(rows, scores, strict=True) if np.isfinite(s).all()]
        problems = [
            self._problem(
                answer,
                values,
                counted_under(by, answer.metadata, answer.row, answers.account.name),
            )
            for answer, values in zip(rows, scores, strict=True)
            if not answer.gaps  # its first wrong step is not known
        ]
        overall, parts = rates(problems, (1,)), by_dataset(problems, (1,))
        of_steps = step_rates(scored)
        measured = {**of_steps, "accuracy": overall["accuracy"], **parts}
        return Result(
            name=name,
            rows=len(rows),
            failed=len(rows) - len(scored),
            metrics={metric: rate for metric, (rate, _) in measured.items()},
            seconds=time.perf_counter() - began,
            intervals={metric: ends for metric, (_, ends) in measured.items() if ends},
            problems=problems,
        )

    def _problem(self, answer: Stepwise, scores: Floats, dataset: str) -> EvaluatedProblem:
        wanted, judged = first_wrong(_labels(answer) >= RIGHT), first_wrong(scores >= 0)
        scored = bool(np.isfinite(scores).all())
        return EvaluatedProblem(
            dataset=dataset,
            row=answer.row,
            question=self._tokenizer.decode(answer.token_ids[: answer.prompt_tokens]),
            samples=(int(scored), int(scored and wanted == judged)),
            greedy=None,
            text=f"first wrong step {judged}, by the labels {wanted} (-1: none)",
            answer=answer.path,
        )


def step_rates(
    scored: Sequence[tuple[Stepwise, Floats]],
) -> dict[str, tuple[float, Interval | None]]:
    """Rates over steps, and ProcessBench's over answers (Zheng et al. 2024, arXiv:2412.06559), each
    with its 95% interval: `erroneous` is the share of answers with a wrong step whose first one was
    named, `correct` that of answers without one in which none was, f1 their harmonic mean.
    """
    labels, scores = [_labels(answer) for answer, _ in scored], [s for _, s in scored]
    steps = np.array([len(each) for each in labels], np.float64)
    losses = [np.logaddexp(0.0, s) - y * s for y, s in zip(labels, scores, strict=True)]
    agreed = [(y >= RIGHT) == (s >= 0) for y, s in zip(labels, scores, strict=True)]
    sums = {
        "loss": np.array([each.sum() for each in losses], np.float64),
        "step_accuracy": np.array([each.sum() for each in agreed], np.float64),
    }
    metrics: dict[str, tuple[float, Interval | None]] = {
        name: (float(of_rows.sum()) / steps.sum() if len(steps) else math.nan,
               ratio_interval(of_rows, steps).within(0.0, math.inf if name == "loss" else 1.0))
        for name, of_rows in sums.items()
    }  # fmt: skip
    named: dict[bool, list[float]] = {True: [], False: []}
    for (answer, _), y, s in zip(scored, labels, scores, strict=True):
        if not answer.gaps:
            wanted = first_wrong(y >= RIGHT)
            named[wanted >= 0].append(float(wanted == first_wrong(s >= 0)))
    for name, values in {"erroneous": named[True], "correct": named[False]}.items():
        mean = sum(values) / len(values) if values else math.nan
        metrics[name] = mean, mean_interval(values)
    metrics["f1"] = harmonic_interval(named[True], named[False])
    return metrics


def _labels(answer: Stepwise) -> Floats:
    return answer.labels[answer.loss_mask].astype(np.float64)
