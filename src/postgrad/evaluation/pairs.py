"""Preference pairs as learners read them, and their evaluation by any model that scores them."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences, column_of
from postgrad.data.account import RowAccount
from postgrad.data.overlap import Selection
from postgrad.data.pairs import Pair, PairSet, load_pairs
from postgrad.evaluation.keys import counted_under, keys_of
from postgrad.evaluation.results import EvaluatedProblem, Result, by_dataset, rates
from postgrad.fleet.loading import least_shared
from postgrad.models.image_reader import ImageReader
from postgrad.ops.intervals import calibration_error, margin_histogram
from postgrad.recipe.recipe import Comparing

ScoreSequences = Callable[
    [Sequences], NDArray[np.float64]
]  # [S] the model's score of each sequence


def sequences_of(pairs: Sequence[Pair]) -> Sequences:
    """Two sequences for each pair, the chosen one first. They are one group, so that their common
    prompt is computed once.
    """
    both = [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]
    masks = [mask for pair in pairs for mask in (pair.chosen_mask, pair.rejected_mask)]
    return Sequences(
        tokens=Ragged.of(both, np.int32),
        loss_mask=Ragged.of(masks, np.bool_),
        group=np.repeat(np.arange(len(pairs)), 2),
        images=column_of(
            images for pair in pairs for images in (pair.chosen_images, pair.rejected_images)
        ),
        openings=column_of(
            places for pair in pairs for places in (pair.chosen_openings, pair.rejected_openings)
        ),
    )


def read_set(
    recipe: Comparing, place: int, tokenizer: Any, reader: ImageReader | None = None
) -> PairSet:
    """Evaluation set `place`. reader: of a model that reads images. Raises UsageError for data
    that cannot be read, and for a row without the column that `by` names.
    """
    eval_set, selection = recipe.eval.sets[place], Selection(part="evaluation")
    with keys_of(recipe.eval, place, recipe.data):
        pairs = load_pairs(
            eval_set.data,
            tokenizer,
            selection=selection,
            reader=reader,
            scored=recipe.job == "reward",
            shared=partial(least_shared, recipe, recipe.model.source),
        )
    for pair in pairs.all():
        counted_under(eval_set.by, pair.metadata, pair.row, pairs.account.name)
    return pairs


class PairEvaluator:
    """The evaluation sets of a recipe, read once; a pair is right where its chosen answer scores
    higher than its rejected one.
    """

    def __init__(
        self, recipe: Comparing, tokenizer: Any, reader: ImageReader | None = None
    ) -> None:
        """Raises UsageError as read_set does."""
        self._settings = recipe.eval
        self._tokenizer = tokenizer
        self._sets: list[PairSet] = [
            read_set(recipe, place, tokenizer, reader) for place in range(len(recipe.eval.sets))
        ]

    @property
    def accounts(self) -> list[RowAccount]:
        """Where the rows of every set went."""
        return [pairs.account for pairs in self._sets]

    def sequences(self) -> list[Sequences]:
        """The pairs of every set as sequences."""
        return [sequences_of(pairs.all()) for pairs in self._sets]

    def __call__(self, score: ScoreSequences) -> list[Result]:
        """The results of every set, in the recipe's order."""
        return [
            self._evaluate_set(eval_set.name, eval_set.by, pairs, score)
            for eval_set, pairs in zip(self._settings.sets, self._sets, strict=True)
        ]

    def _evaluate_set(
        self, name: str | None, by: str | None, pairs: PairSet, score: ScoreSequences
    ) -> Result:
        began = time.perf_counter()
        rows = pairs.all()[:]  # made once
        scores = score(sequences_of(rows))
        is_scored: NDArray[np.bool_] = np.isfinite(scores[0::2]) & np.isfinite(scores[1::2])
        # a pair without a score has failed: it is in no mean
        scored = scores.reshape(-1, 2)[is_scored]
        margins = scored[:, 0] - scored[:, 1]
        problems = [
            EvaluatedProblem(
                dataset=counted_under(by, pair.metadata, pair.row, pairs.account.name),
                row=pair.row,
                question=self._tokenizer.decode(pair.chosen[: int(np.argmax(pair.chosen_mask))]),
                samples=(int(both_scored), int(both_scored and pair_scores[0] > pair_scores[1])),
                greedy=None,
                text=f"chosen {pair_scores[0]:.3f}, rejected {pair_scores[1]:.3f}",
            )
            for pair, pair_scores, both_scored in zip(
                rows, scores.reshape(-1, 2), is_scored, strict=True
            )
        ]
        overall, parts = rates(problems, (1,)), by_dataset(problems, (1,))
        with_datasets = overall | parts
        edges, counts = margin_histogram(margins) if len(margins) else ([], [])
        return Result(
            name=name,
            rows=len(rows),
            failed=int((~is_scored).sum()),
            metrics={
                "accuracy": overall["accuracy"][0],
                **_of_scores(scored),
                **{metric: rate for metric, (rate, _) in parts.items()},
            },
            seconds=time.perf_counter() - began,
            intervals={metric: ends for metric, (_, ends) in with_datasets.items() if ends},
            problems=problems,
            more={
                "margin_histogram": {"edges": edges, "counts": counts},
                "ties": int((margins == 0).sum()),
            },
        )


def _of_scores(scores: NDArray[np.float64]) -> dict[str, float]:
    """Metrics of scores [pairs, 2], chosen and rejected; all NaN where there is no pair."""
    names = ("mean", "std", "chosen", "rejected")
    if not len(scores):
        return {f"reward_{n}": math.nan for n in names} | {
            "margin": math.nan,
            "calibration_error": math.nan,
        }
    chosen, rejected = scores.T
    means = scores.mean(), scores.std(), chosen.mean(), rejected.mean()
    return {f"reward_{n}": float(mean) for n, mean in zip(names, means, strict=True)} | {
        "margin": float((chosen - rejected).mean()),
        "calibration_error": calibration_error(chosen - rejected),
    }
