"""A plan as tables for people and as JSON for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.plan import engines
from postgrad.plan.advice import Advice, gigabytes
from postgrad.plan.batches import batch_json, batch_rows
from postgrad.plan.phases import PHASES
from postgrad.plan.plan import Outlook, full_logits_bytes

Rows = list[list[str]]
LARGE = 4e9  # logits that are worth a line though nobody makes them


@dataclass(frozen=True, slots=True)
class Page:
    """What `postgrad plan` says of a recipe."""

    outlook: Outlook
    advice: tuple[Advice, ...]

    def verdict(self) -> str:
        """Whether it fits, and by how much, in a line or two."""
        of = self.outlook
        where = f"{of.hardware.count} x {of.hardware.device.name}"
        if of.missing_devices:
            ranks = of.recipe.learner.ranks
            return f"does not fit: {ranks} ranks need a device each, there are {where}"
        peak = f"{gigabytes(of.memory.peak_bytes)} of {gigabytes(of.memory.capacity)}"
        word = "fits" if of.fits else "does not fit"
        hours = of.timing.hours
        long = (
            "; hours unknown"
            if hours is None
            else f"; {hours:.2f} h, {hours * of.timing.devices:.2f} device-hours"
        )
        return f"{word}: {peak} at the peak ({of.memory.peak}) on {where}{long}"

    def batch_rows(self) -> Rows:
        """Name, number, unit and formula."""
        return batch_rows(self.outlook)

    def memory_rows(self) -> Rows:
        """A line for each thing that a role holds, a column for each phase, and the sums."""
        memory = self.outlook.memory
        rows = [
            [line.role, line.what, *(_bytes(line.bytes.get(phase, 0)) for phase in PHASES)]
            for line in memory.lines
        ]
        return [*rows, ["sum", "", *(_bytes(memory.at(phase)) for phase in PHASES)]]

    def time_rows(self) -> Rows:
        """Seconds of a step by phase, with their share."""
        timing = self.outlook.timing
        whole = timing.step_seconds or 1.0
        rows = [
            [f"{name}, each step", f"{seconds:.3g}", f"{seconds / whole:.0%}"]
            for name, seconds in timing.step.items()
            if seconds
        ]
        rows += [[f"{name}, once", f"{seconds:.3g}", ""] for name, seconds in timing.once.items()]
        return rows

    def hours_problem(self) -> str | None:
        """Why there are no hours, and what to do; None where there are."""
        of = self.outlook
        if of.timing.hours is not None:
            return None
        paths = ", ".join(dict.fromkeys(one.path for one in of.recipe.data.sources))
        return (
            f"no hours: how many steps epochs = {of.recipe.epochs:g} are, the rows of {paths} say. "
            "They were not counted: they are not on this machine, or too many to read for a plan. "
            "State steps, or the rows of an epoch with --rows N"
        )

    def notes(self) -> Iterator[str]:
        """What else a person should know."""
        of = self.outlook
        if problem := self.hours_problem():
            yield problem
        yield f"lengths: {of.lengths.source}"
        if of.calibrated is not None:
            yield f"times: {of.calibrated}"
        if of.auto:
            told = ", ".join(f"{key} = {size}" for key, size in of.auto.items())
            yield f'"auto" chooses {told} here; a run tries them before its first step'
        if idle := of.hardware.count - of.recipe.learner.ranks if of.fits else 0:
            yield f"{idle} of {of.hardware.count} devices train nothing (learner.ranks)"
        if self.advice and not self.advice[-1].after.fits:
            after = self.advice[-1].after.memory
            peak, room = gigabytes(after.peak_bytes), gigabytes(after.capacity)
            yield f"with all of the advice it still does not fit: {peak} of {room}"
        yield from engines.notes(of.recipe, of.hardware.device)
        logits = full_logits_bytes(of)
        if logits > LARGE:
            yield (
                f"all logits of {of.sizes.micro_tokens} tokens over a vocabulary of "
                f"{of.roles[0].shape.vocab_size} would take {gigabytes(logits)} with their "
                "gradient; they are made a chunk at a time and never kept"
            )

    def to_json(self) -> dict[str, Any]:
        """fits, hours, devices, memory, batch, advice, and what they were made from."""
        of = self.outlook
        return {
            "fits": of.fits,
            "hours": of.timing.hours,
            "hours_problem": self.hours_problem(),
            "devices": of.recipe.learner.ranks,
            "hardware": {"device": of.hardware.device.name, "count": of.hardware.count},
            "memory": of.memory.to_json(),
            "time": of.timing.to_json(),
            "batch": batch_json(of),
            "sizes": _sizes(of),
            "auto": dict(of.auto),
            "calibrated": of.calibrated,
            "advice": [one.to_json() for one in self.advice],
            "notes": list(self.notes()),
        }


def advice_rows(advice: Sequence[Advice]) -> Rows:
    """Number, change and effect."""
    return [[str(n), one.change, one.effect] for n, one in enumerate(advice, 1)]


def _sizes(of: Outlook) -> dict[str, Any]:
    engine = of.sizes.engine
    return {
        "micro_tokens": of.sizes.micro_tokens,
        **({} if engine is None else engine.to_json()),
    }


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f}" if count else ""
