"""A change of a recipe, as flags, and its effect: that of a plan with the changed recipe."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.plan.plan import Facts, RunPlan
from postgrad.plan.splits import Overrides, planned

Change = tuple[Overrides, str]  # flags of the command line, and what they do


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of a recipe and its effect."""

    overrides: Overrides  # flags of the command line: ("--model.gradient_checkpointing", "true")
    reason: str  # what the flags do
    before: RunPlan  # with all advice before this one
    after: RunPlan  # with this one too; it may be on more devices than there are

    @property
    def change(self) -> str:
        """The flags as they are typed in a shell."""
        had, has = self.before.hardware, self.after.hardware
        more = () if had == has else ("--hardware", str(has))
        return shlex.join((*more, *self.overrides))

    @property
    def effect(self) -> str:
        """The reason, and peak memory, time of a step and of the run before and after."""
        was, now = self.before, self.after
        parts = [
            f"{gigabytes(was.memory.peak_bytes)} -> {gigabytes(now.memory.peak_bytes)} at the peak",
            f"a step {digits(was.timing.step_seconds)} -> {digits(now.timing.step_seconds)} s",
        ]
        if was.timing.hours is not None and now.timing.hours is not None:
            hours = was.timing.hours, now.timing.hours
            parts.append(f"the run {digits(hours[0])} -> {digits(hours[1])} h")
            if was.timing.devices != now.timing.devices:
                spent = hours[0] * was.timing.devices, hours[1] * now.timing.devices
                parts.append(f"{digits(spent[0])} -> {digits(spent[1])} device-hours")
        return f"{self.reason}: {', '.join(parts)}"

    def to_json(self) -> dict[str, Any]:
        """Its entry in the output of --json."""
        return {"change": self.change, "effect": self.effect}


def advised(start: RunPlan, steps: Sequence[Change], facts: Facts) -> Iterator[Advice]:
    """The steps as advice, each on top of those before it. Of several steps of one key the last
    counts.
    """
    last = {overrides[0]: place for place, (overrides, _) in enumerate(steps)}
    now = start
    for place, (overrides, reason) in enumerate(steps):
        if last[overrides[0]] != place:
            continue
        after = planned(now.recipe, overrides, facts)
        if after is None:  # the step was possible only with another one, which was left out
            continue
        yield Advice(overrides, reason, now, after)
        now = after


def digits(value: float) -> str:
    """The number with three digits and without an exponent: 0.0123, 4.56, 17,900."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def gigabytes(count: float) -> str:
    """The bytes as text in units of 10^9: "13.4 GB"."""
    return f"{count / 1e9:.1f} GB"


def long_as(hours: float) -> str:
    """ "3.40 h"; "12 min" and "45 s" of less than an hour and than two minutes."""
    seconds = 3600 * hours
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{hours:.2f} h" if hours >= 1 else f"{seconds / 60:.0f} min"
