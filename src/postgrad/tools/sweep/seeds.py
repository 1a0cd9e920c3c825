"""What the settings of a sweep reach over their seeds: runs that differ in nothing but a seed are
one setting, which is compared by its mean.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.ops.intervals import Interval, student
from postgrad.recipe.sweep import short_names

# Shares of problems, answers or steps, of all or by the values of a column.
RATE = re.compile(r"(accuracy|\w+_accuracy|(pass|maj)@\d+|\w+_fraction)(/.*)?", re.ASCII)


def limits_of(metric: str) -> tuple[float, float]:
    """The least and the largest value of a metric of evaluations, by its key in eval.jsonl."""
    if RATE.fullmatch(metric):
        return 0.0, 1.0
    return (0.0 if metric in ("loss", "perplexity") else -math.inf), math.inf


def is_seed(key: str) -> bool:
    """Whether a swept key is the seed of a run, or of a pipeline's stage."""
    return key.rpartition(".")[2] == "seed"


@dataclass(frozen=True, slots=True)
class Setting:
    """The finished runs of one setting."""

    name: str  # "lr=1e-4,kl_coef=0.01"; of a sweep over seeds alone "all seeds"
    values: Mapping[str, str]  # by swept key, without the seeds
    numbers: Sequence[float]  # the metric of each run
    limits: tuple[float, float] = (-math.inf, math.inf)  # what the metric can be

    @property
    def mean(self) -> float:
        """Of the metric over the seeds."""
        return statistics.fmean(self.numbers)

    @property
    def deviation(self) -> float | None:
        """The sample's standard deviation; None for one seed."""
        return statistics.stdev(self.numbers) if len(self.numbers) > 1 else None

    @property
    def interval(self) -> Interval | None:
        """The 95% interval of the mean over seeds, by Student's t. None for one seed, and where all
        seeds give the same number: a few of them do not prove that every seed does. Of a metric
        with limits it ends there, as the mean does.
        """
        if not self.deviation:
            return None
        n = len(self.numbers)
        half = student(n - 1) * self.deviation / math.sqrt(n)
        return Interval(self.mean - half, self.mean + half).within(*self.limits)

    def to_json(self) -> dict[str, Any]:
        """Its entry in the sweep's summary.json."""
        return {
            "name": self.name,
            "values": dict(self.values),
            "seeds": len(self.numbers),
            "mean": self.mean,
            "deviation": self.deviation,
            "low": self.interval and self.interval.low,
            "high": self.interval and self.interval.high,
            "least": min(self.numbers),
            "most": max(self.numbers),
        }


def settings_of(
    keys: Sequence[str],
    runs: Sequence[tuple[Mapping[str, str], float]],
    *,
    highest: bool,
    limits: tuple[float, float] = (-math.inf, math.inf),
) -> list[Setting]:
    """The settings of a sweep over `keys`, the best mean first; none where no seed was swept.

    runs: swept values and metric of the finished runs. highest: whether a higher mean is better.
    limits: what the metric can be.
    """
    if not any(map(is_seed, keys)):
        return []
    apart = [key for key in keys if not is_seed(key)]
    numbers: dict[tuple[str, ...], list[float]] = {}
    for values, number in runs:
        numbers.setdefault(tuple(values[key] for key in apart), []).append(number)
    short = short_names(apart)
    settings: list[Setting] = []
    for texts, of_setting in numbers.items():
        values = dict(zip(apart, texts, strict=True))
        name = ",".join(f"{short[key]}={text}" for key, text in values.items())
        settings.append(Setting(name or "all seeds", values, of_setting, limits))
    return sorted(settings, key=lambda setting: setting.mean, reverse=highest)


def verdict(settings: Sequence[Setting], metric: str, adjective: str) -> str:
    """Sentences that say which setting has the best mean, and whether it is known to be the best.

    adjective: "highest" or "lowest", whichever is better.
    """
    best, *others = settings
    count = len(best.numbers)
    of_seeds = f"{count} seed{'s' if count > 1 else ''}"
    mean = f"{best.mean:.4g} over {of_seeds}"
    if best.interval is not None:
        mean += f" (95% interval {best.interval.text()})"
    if not best.values:
        return f"The mean {metric} is {mean}."
    equals = [setting.name for setting in settings if setting.mean == best.mean]
    verb = "has" if len(equals) == 1 else "have"
    text = f"{' and '.join(equals)} {verb} the {adjective} mean {metric}: {mean}."
    if not others:
        return f"{text} No run of another setting has finished."
    unclear = [setting for setting in others if not _known_apart(best, setting)]
    if not unclear:
        return f"{text} It is the best: no other setting's interval overlaps with its own."
    names = ", ".join(setting.name for setting in unclear)
    which = f"whether it is better than {names}" if verb == "has" else "which setting is the best"
    return (
        f"{text} It is not known {which}: the intervals overlap, or one is missing. More seeds "
        "make them narrower."
    )


def _known_apart(best: Setting, other: Setting) -> bool:
    if best.interval is None or other.interval is None:
        return False
    return not best.interval.overlaps(other.interval)


def table(settings: Sequence[Setting], metric: str) -> tuple[list[str], list[list[str]]]:
    """Columns and rows for the console and the page."""
    columns = ["setting", f"mean {metric}", "95% interval", "deviation", "range", "seeds"]
    return columns, [
        [
            setting.name,
            f"{setting.mean:.4g}",
            "" if setting.interval is None else setting.interval.text(),
            "" if setting.deviation is None else f"{setting.deviation:.2g}",
            f"{min(setting.numbers):.4g} to {max(setting.numbers):.4g}",
            str(len(setting.numbers)),
        ]
        for setting in settings
    ]
