"""What the runs of a sweep reached, in order, and whether the evaluation tells which is best.

Read from files alone, so that a sweep can be looked at while it runs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, cast

from postgrad.observe.follow import is_number, read_object, read_steps, set_of
from postgrad.observe.run_dir import SUMMARY
from postgrad.ops.intervals import Interval
from postgrad.recipe.sweep import Sweep, SweptRun
from postgrad.tools.sweep import seeds

Better = Literal["max", "min"]
RunStatus = Literal["finished", "failed", "running", "stopped", "waiting"]
LAST = 10  # steps at the end of a run over which a metric of training is averaged
# Without checkpoint.best_metric: the first of these that the evaluations have.
USUAL: tuple[tuple[str, Better], ...] = (("accuracy", "max"), ("loss", "min"), ("reward", "max"))
# Without evaluations: the first of these that the steps have.
TRAINED: tuple[tuple[str, Better], ...] = (("reward", "max"), ("loss", "min"))


@dataclass(frozen=True, slots=True)
class Metric:
    """The number that decides which run is best."""

    name: str  # "eval/accuracy", or of training "loss"
    mode: Better
    limits: tuple[float, float] = (-math.inf, math.inf)  # what it can be

    @property
    def evaluated(self) -> bool:
        """Whether evaluations measure it; else it is a mean over the last steps of training."""
        return self.name.startswith("eval/")

    @property
    def highest(self) -> str:
        """The adjective for its best value."""
        return "highest" if self.mode == "max" else "lowest"


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What a run of a sweep reached."""

    trial: SweptRun
    state: RunStatus
    steps: int
    seconds: float | None  # of all of its processes; None where it has not ended
    value: float | None  # of the metric: its last evaluation, or the mean of its last steps
    interval: Interval | None  # 95%, of the value
    curve: Sequence[tuple[int, float]]  # (step, value) of the metric so far
    cause: str = ""  # why it failed

    def to_json(self) -> dict[str, Any]:
        """Its entry in the sweep's summary.json."""
        return {
            "name": self.trial.name,
            "values": dict(self.trial.values),
            "run_dir": str(self.trial.path),
            "state": self.state,
            "steps": self.steps,
            "seconds": self.seconds,
            "value": self.value,
            "low": self.interval and self.interval.low,
            "high": self.interval and self.interval.high,
            **({"cause": self.cause} if self.cause else {}),
        }


@dataclass(frozen=True, slots=True)
class Standing:
    """The runs of a sweep from the best to the worst; runs without a value at the end."""

    sweep: Sweep
    metric: Metric | None  # None where no run has logged anything yet
    results: Sequence[TrialResult]
    seconds: float = field(default=0.0)  # of the command, so far

    @property
    def ranked(self) -> Sequence[TrialResult]:
        """Finished runs with a value, the best first."""
        return [
            result
            for result in self.results
            if result.state == "finished" and result.value is not None
        ]

    @property
    def best(self) -> TrialResult | None:
        """The finished run with the best value."""
        return next(iter(self.ranked), None)

    @property
    def tied(self) -> Sequence[TrialResult]:
        """Other finished runs of which the evaluation cannot say that they are worse: an interval
        is missing, or theirs overlaps with that of the best.
        """
        if self.best is None:
            return []
        return [result for result in self.ranked[1:] if _overlap(self.best, result)]

    @property
    def settings(self) -> Sequence[seeds.Setting]:
        """Where seeds were swept: the settings by their mean over finished runs, the best first."""
        runs = [(run.trial.values, run.value) for run in self.ranked if run.value is not None]
        if self.metric is None:
            return []
        highest, limits = self.metric.mode == "max", self.metric.limits
        return seeds.settings_of(self.sweep.keys, runs, highest=highest, limits=limits)

    def verdict(self) -> str:
        """Sentences that name the best run, or where seeds were swept the best setting, and say
        whether it is known to be the best.
        """
        steps = sorted({result.steps for result in self.ranked})
        uneven = (
            f" The runs trained for different numbers of steps: {', '.join(map(str, steps))}."
            if len(steps) > 1
            else ""
        )
        if self.metric and self.settings:
            text = seeds.verdict(self.settings, self.metric.name, self.metric.highest)
        else:
            text = self._about_best()
        return text + uneven

    def _about_best(self) -> str:
        best, metric = self.best, self.metric
        if best is None or metric is None or best.value is None:
            return "No run has finished with a value to compare."
        equals = [run.trial.name for run in self.ranked if run.value == best.value]
        alone = len(equals) == 1
        subject = f"{' and '.join(equals)} {'has' if alone else 'have'}"
        text = f"{subject} the {metric.highest} {metric.name}: {best.value:.4g}"
        if not metric.evaluated:
            text += f", the mean over its last {LAST} steps"
        if len(self.ranked) == 1:
            return f"{text}. No other run has finished."
        if not metric.evaluated:
            return (
                f"{text}. A metric of training has no interval, so it is not known whether this "
                "run is the best: give the recipe an [eval]."
            )
        if best.interval is None:
            return (
                f"{text}. This metric has no interval, so it is not known whether this run is the "
                "best."
            )
        text += f" (95% interval {best.interval.text()})."
        if not self.tied:
            return f"{text} It is the best: no other interval overlaps with its own."
        worse = [run.trial.name for run in self.tied if run.value != best.value]
        if worse:
            subject = "Its interval overlaps" if alone else "Their intervals overlap"
            which = "that" if len(worse) == 1 else "those"
            text += f" {subject} with {which} of {' and '.join(worse)}, so it"
        else:
            text += " It"
        return (
            f"{text} is not known which of them is the best. More rows in [eval] make the "
            "intervals narrower."
        )

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows for the console."""
        metric = self.metric.name if self.metric else "value"
        columns = ["run", metric, "95% interval", "steps", "time", ""]
        return columns, [
            [
                result.trial.name,
                "" if result.value is None else f"{result.value:.4g}",
                "" if result.interval is None else result.interval.text(),
                str(result.steps),
                "" if result.seconds is None else f"{result.seconds:.0f} s",
                self.remark(result),
            ]
            for result in self.results
        ]

    def remark(self, result: TrialResult) -> str:
        """The last cell of a run's row."""
        if result.state != "finished":
            return result.state
        if self.best is None or self.metric is None:
            return ""
        if result is self.best and not self.tied:
            return "best"
        if result.value == self.best.value:
            return f"{self.metric.highest} value"
        compared = self.best.interval and result.interval
        return "overlaps with the best" if compared and result in self.tied else ""

    def to_json(self) -> dict[str, Any]:
        """The content of the sweep's summary.json."""
        return {
            "sweep": list(self.sweep.keys),
            "run_dir": str(self.sweep.path),
            "metric": self.metric and self.metric.name,
            "mode": self.metric and self.metric.mode,
            "best": self.best and self.best.trial.name,
            "tied": [result.trial.name for result in self.tied],
            "verdict": self.verdict(),
            "seconds": round(self.seconds, 3),
            "runs": [result.to_json() for result in self.results],
            **(
                {"settings": [setting.to_json() for setting in self.settings]}
                if self.settings
                else {}
            ),
        }


def _overlap(best: TrialResult, other: TrialResult) -> bool:
    if best.interval is None or other.interval is None:
        return True
    return best.interval.overlaps(other.interval)


def standing(
    sweep: Sweep, failures: Mapping[str, str], under_way: Sequence[str] = (), seconds: float = 0.0
) -> Standing:
    """What the runs have reached. failures: causes by name of run. under_way: runs that a process
    works on.
    """
    evaluations = {trial.name: _lines(trial, "eval.jsonl") for trial in sweep.trials}
    steps = {trial.name: _lines(trial, "metrics.jsonl") for trial in sweep.trials}
    metric = _metric(sweep.trials[0], evaluations.values(), steps.values())
    if metric is not None and metric.evaluated:
        _, key = _of_set(list(chain.from_iterable(evaluations.values())), metric)
        metric = replace(metric, limits=seeds.limits_of(key))
    results = [
        _result(
            trial, metric, evaluations[trial.name], steps[trial.name], failures.get(trial.name),
            under_way=trial.name in under_way,
        )
        for trial in sweep.trials
    ]  # fmt: skip
    sign = -1.0 if metric is None or metric.mode == "max" else 1.0

    def order(result: TrialResult) -> tuple[bool, float]:
        unknown = result.state != "finished" or result.value is None
        return unknown, 0.0 if unknown else sign * cast(float, result.value)

    return Standing(sweep, metric, sorted(results, key=order), seconds)


def _lines(trial: SweptRun, name: str) -> list[dict[str, Any]]:
    return list(read_steps(trial.judged / name))


def _metric(
    trial: SweptRun,
    evaluations: Any,
    steps: Any,
) -> Metric | None:
    """That of `checkpoint.best_metric`, else the first usual one that the logs have."""
    settings = trial.recipes[-1].checkpoint
    if settings.best_metric is not None:
        return Metric(settings.best_metric, settings.best_mode)
    for logs, usual, prefix in ((evaluations, USUAL, "eval/"), (steps, TRAINED, "")):
        lines = [line for of_run in logs for line in of_run]
        for name, mode in usual:
            of_metric = [line for line in lines if is_number(line.get(name))]
            if of_metric:
                first = set_of(of_metric[0]) if prefix else None
                return Metric(f"{prefix}{first}/{name}" if first else f"{prefix}{name}", mode)
    return None


def _result(
    trial: SweptRun,
    metric: Metric | None,
    evaluations: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    failure: str | None,
    *,
    under_way: bool,
) -> TrialResult:
    summary = read_object(trial.path / SUMMARY)
    reached = int(steps[-1]["step"]) if steps else 0
    state: RunStatus = "stopped" if reached else "waiting"
    if failure is not None:
        state = "failed"
    elif under_way:
        state = "running"
    elif summary and _steps_of(summary) == reached:
        state = "finished"
    seconds = _seconds(summary) if state == "finished" and summary else None
    curve, interval = _measured(metric, evaluations, steps) if metric else ([], None)
    last = [value for _, value in curve[-1 if metric and metric.evaluated else -LAST :]]
    mean = math.fsum(last) / len(last) if last else None
    return TrialResult(trial, state, reached, seconds, mean, interval, curve, failure or "")


def _measured(
    metric: Metric, evaluations: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> tuple[list[tuple[int, float]], Interval | None]:
    """(step, value) of the metric in a run's logs, and the interval of the last value."""
    lines, key = _of_set(evaluations, metric) if metric.evaluated else (steps, metric.name)
    numbers = [line for line in lines if is_number(line.get(key))]
    curve = [(int(line["step"]), float(line[key])) for line in numbers]
    return curve, _interval(numbers[-1], key) if numbers and metric.evaluated else None


def _steps_of(summary: Mapping[str, Any]) -> Any:
    """The steps that a summary counts, of a pipeline those of its last stage."""
    stages = summary.get("stages")
    if isinstance(stages, dict) and stages:
        return list(cast(dict[str, Any], stages).values())[-1].get("steps")
    return summary.get("steps")


def _seconds(summary: Mapping[str, Any]) -> float | None:
    """Seconds of all processes of a run, as far as its summary counts them."""
    seconds = summary.get("seconds")
    if not is_number(seconds):
        return None
    phases = summary.get("phase_seconds")
    by_phase = cast(dict[str, Any], phases).values() if isinstance(phases, dict) else ()
    return max(float(cast(float, seconds)), sum(t for t in by_phase if is_number(t)))


def _of_set(
    evaluations: Sequence[Mapping[str, Any]], metric: Metric
) -> tuple[Sequence[Mapping[str, Any]], str]:
    """The lines of the evaluation set that the metric names, and the metric's key in them."""
    name = metric.name.removeprefix("eval/")
    head, _, rest = name.partition("/")
    if rest and any(set_of(line) == head for line in evaluations):
        return [line for line in evaluations if set_of(line) == head], rest
    return [line for line in evaluations if set_of(line) is None], name


def _interval(line: Mapping[str, Any], metric: str) -> Interval | None:
    head, slash, rest = metric.partition("/")
    low, high = (line.get(f"{head}_{end}{slash}{rest}") for end in ("low", "high"))
    if not is_number(low) or not is_number(high):
        return None
    return Interval(float(cast(float, low)), float(cast(float, high)))
