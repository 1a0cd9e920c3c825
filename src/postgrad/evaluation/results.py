"""Results of evaluations: correct answers of each problem, rates with intervals over them, and the
paired comparison of two models.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, cast

from postgrad.core.text import fixed
from postgrad.ops.intervals import (
    Interval,
    difference_interval,
    majority_at_k,
    mcnemar,
    mean_interval,
    pass_at_k,
    sign_flip,
)

LOSSES = ("loss", "perplexity")  # of held-out conversations, which are no rates
LOPSIDED = 2.0  # an interval with one end over so many times as far from the value as the other
LEFT_OUT = "left_out@"  # before the k of pass@k and maj@k
CorrectCount = tuple[int, int]  # samples that were scored, samples that are right

_LATEX_QUOTIENT = re.compile(r"^([+-]?)\\[dt]?frac\{(\d+)\}\{(\d+)\}$")
# What Fraction reads, and in no time: without exponents, and no quotient by zero.
_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d{1,50})(\.\d{0,50}|/0{0,9}[1-9]\d{0,40})?")

# Rates that each problem has a value of: those of steps and held-out losses are of other things.
_OF_PROBLEMS = re.compile(r"(greedy_)?accuracy|(pass|maj)@\d+")

PairedTest = Literal["mcnemar", "sign_flip"]


@dataclass(frozen=True, slots=True)
class EvaluatedProblem:
    """One prompt or pair of an evaluation set, with how often it was answered correctly."""

    dataset: str  # name that it is counted under in results by dataset
    row: int  # of its dataset
    question: str
    samples: CorrectCount  # (5, 3): three of five scored samples are correct
    greedy: CorrectCount | None  # the same of the greedy answer; None where none was sampled
    text: str  # the greedy answer, else the first sample
    # for maj@k: how many scored samples gave each different wrong answer; None: it was not asked
    wrong: tuple[int, ...] | None = None
    answer: int = 0  # which of its row's answers, where steps are judged: a row may have several

    @property
    def key(self) -> tuple[str, int, int]:
        """What tells it from others of its set, whichever model is asked."""
        return self.dataset, self.row, self.answer

    def value(self, metric: str) -> float | None:
        """Accuracy, pass@K, maj@K or greedy_accuracy of this problem, in [0, 1]; None where too few
        of its samples were scored.
        """
        n, right = self.samples if metric != "greedy_accuracy" else self.greedy or (0, 0)
        if metric.startswith("maj@") and self.wrong is not None:
            k, silent = int(metric.removeprefix("maj@")), n - right - sum(self.wrong)
            return majority_at_k(right, self.wrong, silent, k) if n >= k else None
        k = int(metric.removeprefix("pass@")) if metric.startswith("pass@") else 1
        return pass_at_k(n, right, k) if n >= k else None


@dataclass(frozen=True, slots=True)
class Result:
    """The results of one evaluation set.

    Names of metrics: accuracy (pass@1 at the evaluation's temperature), pass@k, maj@k and
    greedy_accuracy where they were asked for, left_out@k, reward, response_length in tokens,
    truncated_fraction; reward/NAME, the mean score of each component; RATE/DATASET and rows/DATASET
    where the set has several datasets. A held-out loss has loss and perplexity.
    """

    name: str | None  # of the set; None where the recipe names none
    rows: int
    failed: int  # samples that a verifier failed on; they are in no mean of its scores
    metrics: Mapping[str, float]
    seconds: float  # that the evaluation took
    # of the rates, and of a held-out loss
    intervals: Mapping[str, Interval] = field(default_factory=dict[str, Interval])
    problems: Sequence[EvaluatedProblem] = ()
    # lines of eval_samples.jsonl, whose step is not filled in yet
    samples: Sequence[Mapping[str, Any]] = ()
    # further JSON values for eval.jsonl, such as the histogram of margins
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rated: bool = True  # False: nobody says which answers are right, and rates are not shown
    judge: str | None = None  # the component that the recipe lets decide: its mean is shown too

    def to_json(self) -> dict[str, Any]:
        """A line of eval.jsonl, without its step."""
        line: dict[str, Any] = {"set": self.name, "rows": self.rows, "failed": self.failed}
        for metric, value in self.metrics.items():
            line[metric] = value
            if metric in self.intervals:
                line |= ends(metric, self.intervals[metric])
        return {**line, **self.more, "evaluate_seconds": self.seconds}

    def by_metric(self, *, shown: bool = False) -> dict[str, float]:
        """eval/NAME/METRIC -> value; eval/METRIC for a set without a name. shown: those alone."""
        prefix = "eval/" if self.name is None else f"eval/{self.name}/"
        metrics = self.shown() if shown else self.metrics
        return {prefix + metric: value for metric, value in metrics.items()}

    def shown(self) -> dict[str, float]:
        """The metrics that tell people something; in files are all of them."""
        rates = () if self.rated else set(self.intervals) - set(LOSSES)
        return {name: value for name, value in self.metrics.items() if name not in rates}

    def texts(self) -> list[str]:
        """Metrics of the whole set for the console: "accuracy 0.512 ± 0.031 (2 of 100 problems left
        out)".
        """
        prefix = "" if self.name is None else f"{self.name}/"
        several = sum(metric.startswith("reward/") for metric in self.metrics) > 1
        judge = f"reward/{self.judge}" if several else None
        return [
            f"{prefix}{metric} {fixed(value, '{:.3f}')}"
            f"{plus_minus(value, self.intervals.get(metric))}{self._left_out(metric)}"
            for metric, value in self.shown().items()
            if metric == judge or ("/" not in metric and not metric.startswith(LEFT_OUT))
        ]

    def _left_out(self, metric: str) -> str:
        k = "1" if metric == "accuracy" else metric.partition("@")[2]
        count = self.metrics.get(f"{LEFT_OUT}{k}", 0)
        return f" ({count:.0f} of {self.rows} problems left out)" if count else ""


def rates(
    problems: Sequence[EvaluatedProblem], pass_at: Sequence[int], maj_at: Sequence[int] = ()
) -> dict[str, tuple[float, Interval]]:
    """The mean over problems of accuracy, pass@k, maj@k and, where it was asked, greedy_accuracy,
    each with its 95% interval.
    """
    metrics = ["accuracy", *(f"pass@{k}" for k in pass_at if k > 1)]
    metrics += [f"maj@{k}" for k in maj_at]
    if any(problem.greedy is not None for problem in problems):
        metrics.append("greedy_accuracy")
    by_metric: dict[str, tuple[float, Interval]] = {}
    for metric in metrics:
        values = [v for problem in problems if (v := problem.value(metric)) is not None]
        mean = sum(values) / len(values) if values else math.nan
        by_metric[metric] = mean, mean_interval(values)
    return by_metric


def wrong_answers(
    scores: Sequence[float], details: Sequence[Any], correct_at: float
) -> tuple[int, ...]:
    """How many samples gave each different wrong answer, as a verifier read it, most first. scores:
    [samples], NaN where it failed; details: of its scores, "votes_as" in them is the same for
    spellings of one answer. Samples without an answer are in none.
    """
    counts: Counter[str] = Counter()
    for score, detail in zip(scores, details, strict=True):
        note = note_of_answer(detail) or {}
        answer = note.get("answer")
        if answer is not None and score < correct_at:  # NaN is not
            counts[_ballot(str(answer), str(note.get("votes_as", answer)))] += 1
    return tuple(sorted(counts.values(), reverse=True))


def note_of_answer(detail: Any) -> Mapping[str, Any] | None:
    """The part of a score's detail that says which answer a verifier read; None where none does.
    What guards formulas (rewards/call.py) puts a detail into one of its own.
    """
    if not isinstance(detail, Mapping):
        return None
    note = cast(Mapping[str, Any], detail)
    if set(note) == {"score", "refused"}:
        return note_of_answer(note["score"])
    return note if "answer" in note else None


def _ballot(answer: str, formula: str) -> str:
    """A wrong answer as it votes: a number or a quotient of two by its value, all else by its
    `formula`, without white space, dollars and a full stop at the end.
    """
    plain = _LATEX_QUOTIENT.sub(r"\1\2/\3", _bare(answer))
    return str(Fraction(plain.replace(",", ""))) if _NUMBER.fullmatch(plain) else _bare(formula)


def _bare(text: str) -> str:
    return "".join(text.split()).strip("$").rstrip(".")


def left_out(problems: Sequence[EvaluatedProblem], at: Sequence[int]) -> dict[str, float]:
    """left_out@k by k: how many problems are not in the means of pass@k and maj@k, because fewer
    than k of their samples were scored: a verifier failed, or the component does not apply to them.
    """
    return {
        f"{LEFT_OUT}{k}": float(sum(problem.samples[0] < k for problem in problems))
        for k in dict.fromkeys((1, *at))
    }


def by_dataset(
    problems: Sequence[EvaluatedProblem], pass_at: Sequence[int], maj_at: Sequence[int] = ()
) -> dict[str, tuple[float, Interval | None]]:
    """RATE/DATASET with its interval, and rows/DATASET without; {} for a single dataset."""
    names = sorted({problem.dataset for problem in problems})
    by_metric: dict[str, tuple[float, Interval | None]] = {}
    for name in names if len(names) > 1 else ():
        of_dataset = [problem for problem in problems if problem.dataset == name]
        by_metric[f"rows/{name}"] = len(of_dataset), None
        by_metric |= {
            f"{metric}/{name}": rate for metric, rate in rates(of_dataset, pass_at, maj_at).items()
        }
    return by_metric


def ends(metric: str, interval: Interval) -> dict[str, float]:
    """accuracy_low and accuracy_high of accuracy; accuracy_low/DATASET of accuracy/DATASET."""
    head, slash, name = metric.partition("/")
    return {
        f"{head}_low{slash}{name}": interval.low,
        f"{head}_high{slash}{name}": interval.high,
    }


def plus_minus(value: float, interval: Interval | None) -> str:
    """ " ± 0.031": the distance to the farther end of the interval; " (0.000 to 0.793)", its ends,
    where one is over LOPSIDED times as far as the other: a rate of 0 is nothing to subtract from.
    "" without an interval.
    """
    if interval is None or math.isnan(interval.low):
        return ""
    near, far = sorted((interval.high - value, value - interval.low))
    if far > LOPSIDED * near:
        return f" ({interval.low:.3f} to {interval.high:.3f})"
    return f" ± {far:.3f}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of a rate between two models, over the problems that both answered."""

    rows: int  # problems that have the rate by both models
    value: float  # mean rate of the model less that of the other
    interval: Interval  # 95%, of the value
    p_value: float  # two-sided: the chance of a difference as large between equal models
    test: PairedTest

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
    others = {problem.key: problem for problem in against.problems}
    pairs = [(problem, others[problem.key]) for problem in model.problems if problem.key in others]
    unpaired = len(model.problems) + len(others) - 2 * len(pairs)
    names = [rate for rate in model.intervals if _OF_PROBLEMS.fullmatch(rate)]
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
    test: PairedTest = "sign_flip"
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
