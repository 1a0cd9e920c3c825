"""Two models on the same problems: paired differences, and the rows where they differ."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from postgrad.jobs.results import EvaluatedProblem, Result
from postgrad.ops.intervals import Interval
from postgrad.ops.paired import difference_interval, mcnemar, sign_flip

Test = Literal["mcnemar", "sign_flip"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of a rate between two models, over the problems that both answered."""

    rows: int  # problems that have the rate by both models
    value: float  # mean rate of the model less that of the other
    interval: Interval  # 95%, of the value
    p_value: float  # two-sided: the chance of a difference as large between equal models
    test: Test

    def to_json(self) -> dict[str, Any]:
        """Its part of the output of `postgrad eval --json`."""
        return {
            "rows": self.rows,
            "difference": self.value,
            "low": self.interval.low,
            "high": self.interval.high,
            "p_value": self.p_value,
            "test": self.test,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models on one evaluation set."""

    name: str | None  # of the set
    pairs: Sequence[tuple[EvaluatedProblem, EvaluatedProblem]]  # the same row by both models
    # rows that only one model was asked: their prompts are too long for the other's tokenizer
    unpaired: int
    differences: Mapping[str, Difference]  # by rate: "accuracy", "pass@4"

    @property
    def judged_by(self) -> str:
        """The rate by which rows differ: of the greedy answers where there are any."""
        return "greedy_accuracy" if "greedy_accuracy" in self.differences else "accuracy"

    def differing(self) -> list[tuple[EvaluatedProblem, EvaluatedProblem]]:
        """The pairs that were not answered equally well, the furthest apart first."""
        gaps = [_gap(pair, self.judged_by) for pair in self.pairs]
        order = sorted(range(len(gaps)), key=lambda place: -abs(gaps[place]))
        return [self.pairs[place] for place in order if gaps[place]]

    def to_json(self) -> dict[str, Any]:
        """Its part of the output of `postgrad eval --json`."""
        metric = self.judged_by
        return {
            "set": self.name,
            "rows": len(self.pairs),
            "unpaired": self.unpaired,
            "metrics": {
                rate: difference.to_json() for rate, difference in self.differences.items()
            },
            "differing": [
                {
                    "dataset": ours.dataset,
                    "row": ours.row,
                    "metric": metric,
                    "model": ours.value(metric),
                    "against": theirs.value(metric),
                }
                for ours, theirs in self.differing()
            ],
        }


def compare(model: Result, against: Result, seed: int) -> Comparison:
    """Compares the results of two models on a set, row by row.

    seed: of the random signs of permutation tests.
    """
    others = {(problem.dataset, problem.row): problem for problem in against.problems}
    pairs = [
        (problem, others[problem.dataset, problem.row])
        for problem in model.problems
        if (problem.dataset, problem.row) in others
    ]
    unpaired = len(model.problems) + len(others) - 2 * len(pairs)
    names = [rate for rate in model.intervals if "/" not in rate]
    differences = {rate: _difference(pairs, rate, seed) for rate in names}
    return Comparison(model.name, pairs, unpaired, differences)


def _difference(
    pairs: Sequence[tuple[EvaluatedProblem, EvaluatedProblem]], metric: str, seed: int
) -> Difference:
    """The difference of one rate with its test.

    McNemar's exact test where every problem is either right or wrong, as greedy answers are. Else a
    permutation test: between equal models both signs of each problem's difference are as likely.
    """
    both = [(ours.value(metric), theirs.value(metric)) for ours, theirs in pairs]
    values = [(a, b) for a, b in both if a is not None and b is not None]
    gaps = [a - b for a, b in values]
    test: Test = "sign_flip"
    if all(gap in (-1.0, 0.0, 1.0) for gap in gaps):
        test = "mcnemar"
        p_value = mcnemar(gaps.count(1.0), gaps.count(-1.0))
    else:
        p_value = sign_flip(gaps, seed)
    mean = math.fsum(gaps) / len(gaps) if gaps else math.nan
    return Difference(len(gaps), mean, difference_interval(gaps), p_value, test)


def _gap(pair: tuple[EvaluatedProblem, EvaluatedProblem], metric: str) -> float:
    ours, theirs = pair[0].value(metric), pair[1].value(metric)
    return ours - theirs if ours is not None and theirs is not None else 0.0
