"""What to change where a run does not fit or wastes: the cheapest first, each with its effect.

Every advice is a recipe that was planned: what is said to fit fits by the planner's own word.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.plan.changes import ALL, Change, Overrides, faster, fewer_devices, ranked, smaller
from postgrad.plan.hardware import Hardware
from postgrad.plan.plan import Facts, Outlook, outlook
from postgrad.recipe.load import with_overrides
from postgrad.recipe.recipe import Recipe

COUNTS = (2, 4, 8, 16, 32, 64)  # of devices, where those that are there do not do
WORTH = 0.95  # a change that only saves time has to save a twentieth
WASTED = 2 / 3  # half of the devices that do the run for less than this of the device-hours
CHANGES_LEARNING = ("--model.lora", "--data.max_len")


@dataclass(frozen=True, slots=True)
class Advice:
    """overrides: flags of the command line; after: the outlook with it and all advice before, on
    more devices than there are where that is the advice.
    """

    overrides: Overrides
    reason: str
    before: Outlook
    after: Outlook

    @property
    def change(self) -> str:
        """As it is typed."""
        had, has = self.before.hardware, self.after.hardware
        more = () if had == has else ("--hardware", str(has))
        return shlex.join((*more, *self.overrides))

    @property
    def effect(self) -> str:
        """Peak memory, and time of a step and of the run, before and after."""
        was, now = self.before, self.after
        parts = [
            f"{gigabytes(was.memory.peak_bytes)} -> {gigabytes(now.memory.peak_bytes)} at the peak",
            f"a step {_digits(was.timing.step_seconds)} -> {_digits(now.timing.step_seconds)} s",
        ]
        if was.timing.hours is not None and now.timing.hours is not None:
            hours = was.timing.hours, now.timing.hours
            parts.append(f"the run {_digits(hours[0])} -> {_digits(hours[1])} h")
            if was.timing.devices != now.timing.devices:
                spent = hours[0] * was.timing.devices, hours[1] * now.timing.devices
                parts.append(f"{_digits(spent[0])} -> {_digits(spent[1])} device-hours")
        return f"{self.reason}: {', '.join(parts)}"

    def to_json(self) -> dict[str, Any]:
        """{change, effect}."""
        return {"change": self.change, "effect": self.effect}


def _digits(value: float) -> str:
    """Three digits, and never a power of ten: 0.0123, 4.56, 17,900."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def advise(start: Outlook, facts: Facts) -> tuple[Advice, ...]:
    """Changes in order, each on top of those before it; none where all is well. Where nothing
    helps the last outlook does not fit either.
    """
    if start.fits:
        return tuple(_without_waste(start, facts))
    steps: list[Change] = []
    now = start
    while not now.fits:
        for change in smaller(now):
            tried = _planned(now.recipe, change[0], facts)
            if tried is not None and _better(tried, now):
                steps.append(change)
                now = tried
                break
        else:
            break
    if now.fits:
        return tuple(_told(start, _needed(start, steps, facts), facts))
    return tuple(_on_more_devices(start, steps, facts))


def _better(tried: Outlook, now: Outlook) -> bool:
    """Needs fewer missing devices, or less memory on a device."""
    before = now.missing_devices, now.memory.peak_bytes
    return (tried.missing_devices, tried.memory.peak_bytes) < before


def _without_waste(start: Outlook, facts: Facts) -> Iterator[Advice]:
    """Where there is room: what costs time or devices and is not needed."""
    now, spread = start, False
    for overrides, reason in faster(start):
        tried = _planned(now.recipe, overrides, facts)
        if tried is None or not tried.fits:
            continue
        more = tried.timing.devices > now.timing.devices
        if more and _device_seconds(tried) * WASTED > _device_seconds(now):
            continue
        if tried.timing.step_seconds < WORTH * now.timing.step_seconds:
            yield Advice(overrides, reason, now, tried)
            now, spread = tried, spread or reason == ALL
    if not spread and (half := _halved(now, facts)) is not None:
        yield half


def _halved(now: Outlook, facts: Facts) -> Advice | None:
    """The fewest devices, each time half of them, that do the run for much fewer device-hours."""
    found: Advice | None = None
    last = now
    while True:
        for overrides, reason in fewer_devices(last):
            tried = _planned(last.recipe, overrides, facts)
            if tried is not None and tried.fits and _cheaper(tried, last):
                found, last = Advice(overrides, reason, now, tried), tried
                break
        else:
            return found


def _cheaper(tried: Outlook, now: Outlook) -> bool:
    return _device_seconds(tried) < WASTED * _device_seconds(now)


def _device_seconds(of: Outlook) -> float:
    """That a step takes of all devices together."""
    return of.timing.step_seconds * of.timing.devices


def _on_more_devices(start: Outlook, steps: Sequence[Change], facts: Facts) -> Iterator[Advice]:
    """The fewest devices of this kind that do: with what changes nothing that is learned, else with
    all of the steps. Where none do, the steps as they are.
    """
    lossless = [one for one in steps if not one[0][0].startswith((*CHANGES_LEARNING, "--learner"))]
    for chosen in (lossless, [one for one in steps if not one[0][0].startswith("--learner")]):
        told = list(_told(start, chosen, facts))
        now = told[-1].after if told else start
        for count in COUNTS:
            for stage in ("zero2", "zero3"):
                if count <= start.hardware.count:
                    continue
                there = replace(facts, hardware=_more(start.hardware, count))
                overrides = ranked(count, stage)
                tried = _planned(now.recipe, overrides, there)
                if tried is not None and tried.fits:
                    yield from told
                    yield Advice(overrides, "more devices", now, tried)
                    return
    yield from _told(start, steps, facts)


def _more(hardware: Hardware, count: int) -> Hardware:
    return hardware.model_copy(update={"count": count})


def _needed(start: Outlook, steps: list[Change], facts: Facts) -> list[Change]:
    """Without those that a later one made superfluous, the dearest being left out first."""
    for step in reversed(steps[:-1]):
        rest = [other for other in steps if other is not step]
        tried = _planned(start.recipe, tuple(flag for flags, _ in rest for flag in flags), facts)
        if tried is not None and tried.fits:
            steps = rest
    return steps


def _told(start: Outlook, steps: Sequence[Change], facts: Facts) -> Iterator[Advice]:
    """The steps with what each does on top of those before it; several of one key are one."""
    last = {overrides[0]: place for place, (overrides, _) in enumerate(steps)}
    now = start
    for place, (overrides, reason) in enumerate(steps):
        if last[overrides[0]] != place:
            continue
        after = _planned(now.recipe, overrides, facts)
        if after is None:  # a step that only held on top of one that was left out
            continue
        yield Advice(overrides, reason, now, after)
        now = after


def _planned(recipe: Recipe, overrides: Overrides, facts: Facts) -> Outlook | None:
    """None for a change that is no recipe, such as a budget that a row does not fit."""
    try:
        return outlook(with_overrides(recipe, overrides), facts)
    except UsageError:
        return None


def gigabytes(count: float) -> str:
    """In units of 10^9 bytes."""
    return f"{count / 1e9:.1f} GB"
