"""A plan as tables for people and as JSON for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.plan.advice import Advice, gigabytes
from postgrad.plan.batches import batch_json, batch_rows
from postgrad.plan.hardware import Device
from postgrad.plan.held import PHASES
from postgrad.plan.plan import Outlook, full_logits_bytes
from postgrad.recipe.recipe import Recipe

TableRows = list[list[str]]
LARGE = 4e9  # bytes of logits that are worth a note, though the run never holds them


@dataclass(frozen=True, slots=True)
class Page:
    """The output of `postgrad plan` for a recipe."""

    outlook: Outlook
    advice: tuple[Advice, ...]

    def verdict(self) -> str:
        """In a line or two: whether the run fits, by how much, and how long it takes."""
        outlook = self.outlook
        where = f"{outlook.hardware.count} x {outlook.hardware.device.name}"
        if outlook.missing_devices:
            ranks = outlook.recipe.learner.ranks
            return f"does not fit: {ranks} ranks need a device each, there are {where}"
        peak = f"{gigabytes(outlook.memory.peak_bytes)} of {gigabytes(outlook.memory.capacity)}"
        word = "fits" if outlook.fits else "does not fit"
        hours = outlook.timing.hours
        long = (
            "; hours unknown"
            if hours is None
            else f"; {hours:.2f} h, {hours * outlook.timing.devices:.2f} device-hours"
        )
        return f"{word}: {peak} at the peak ({outlook.memory.peak}) on {where}{long}"

    def batch_rows(self) -> TableRows:
        """A row for each batch number: its name, the number, its unit and formula."""
        return batch_rows(self.outlook)

    def memory_rows(self) -> TableRows:
        """A row for each line of memory, with gigabytes by phase, and a last row with the sums."""
        memory = self.outlook.memory
        rows = [
            [line.role, line.purpose, *(_bytes(line.bytes.get(phase, 0)) for phase in PHASES)]
            for line in memory.lines
        ]
        return [*rows, ["sum", "", *(_bytes(memory.at(phase)) for phase in PHASES)]]

    def time_rows(self) -> TableRows:
        """Seconds of a step by phase, with their share."""
        timing = self.outlook.timing
        step_seconds = timing.step_seconds or 1.0
        rows = [
            [f"{name}, each step", f"{seconds:.3g}", f"{seconds / step_seconds:.0%}"]
            for name, seconds in timing.step.items()
            if seconds
        ]
        rows += [[f"{name}, once", f"{seconds:.3g}", ""] for name, seconds in timing.once.items()]
        return rows

    def hours_problem(self) -> str | None:
        """Why there are no hours, and what to do; None where there are."""
        outlook = self.outlook
        if outlook.timing.hours is not None:
            return None
        paths = ", ".join(dict.fromkeys(settings.path for settings in outlook.recipe.data.sources))
        return (
            f"no hours: the steps of epochs = {outlook.recipe.epochs:g} depend on the rows of "
            f"{paths}. "
            "They were not counted: they are not on this machine, or too many to read for a plan. "
            "State steps, or the rows of an epoch with --rows N"
        )

    def notes(self) -> Iterator[str]:
        """Sentences below the tables: what the plan assumes, and what a person should know."""
        outlook = self.outlook
        if problem := self.hours_problem():
            yield problem
        yield f"lengths: {outlook.lengths.source}"
        if outlook.calibrated is not None:
            yield f"times: {outlook.calibrated}"
        if outlook.auto:
            chosen = ", ".join(f"{key} = {size}" for key, size in outlook.auto.items())
            yield f'"auto" chooses {chosen} here; a run tries them before its first step'
        if idle := outlook.hardware.count - outlook.recipe.learner.ranks if outlook.fits else 0:
            yield f"{idle} of {outlook.hardware.count} devices train nothing (learner.ranks)"
        if self.advice and not self.advice[-1].after.fits:
            after = self.advice[-1].after.memory
            peak, room = gigabytes(after.peak_bytes), gigabytes(after.capacity)
            yield f"with all of the advice it still does not fit: {peak} of {room}"
        yield from engine_notes(outlook.recipe, outlook.hardware.device)
        logits = full_logits_bytes(outlook)
        if logits > LARGE:
            yield (
                f"all logits of {outlook.sizes.micro_tokens} tokens over a vocabulary of "
                f"{outlook.roles[0].shape.vocab_size} would take {gigabytes(logits)} with their "
                "gradient; they are made a chunk at a time and never kept"
            )

    def to_json(self) -> dict[str, Any]:
        """The output of --json: the plan, its advice, and what they were computed from."""
        outlook = self.outlook
        return {
            "fits": outlook.fits,
            "hours": outlook.timing.hours,
            "hours_problem": self.hours_problem(),
            "devices": outlook.recipe.learner.ranks,
            "hardware": {"device": outlook.hardware.device.name, "count": outlook.hardware.count},
            "memory": outlook.memory.to_json(),
            "time": outlook.timing.to_json(),
            "batch": batch_json(outlook),
            "sizes": _sizes(outlook),
            "auto": dict(outlook.auto),
            "calibrated": outlook.calibrated,
            "advice": [advice.to_json() for advice in self.advice],
            "notes": list(self.notes()),
        }


def advice_rows(advice: Sequence[Advice]) -> TableRows:
    """A row for each advice: its number, the change, the effect."""
    return [[str(n), entry.change, entry.effect] for n, entry in enumerate(advice, 1)]


def _sizes(outlook: Outlook) -> dict[str, Any]:
    engine = outlook.sizes.engine
    return {
        "micro_tokens": outlook.sizes.micro_tokens,
        **({} if engine is None else engine.to_json()),
    }


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f}" if count else ""


def engine_notes(recipe: Recipe, device: Device) -> Iterator[str]:
    """Sentences for people about the recipe's engine; none where it is the built-in one."""
    rollout = recipe.rollout_settings
    if rollout is None:
        return
    vllm = rollout.vllm
    if rollout.type == "openai":
        yield (
            f"answers come from {rollout.openai.base_url}: what that server takes is not in this "
            "plan"
        )
    if rollout.type != "vllm":
        return
    places = "" if vllm.tensor_parallel == 1 else f" over {vllm.tensor_parallel} devices each"
    copies = "1 process" if vllm.engines == 1 else f"{vllm.engines} processes"
    about = f"vLLM: {copies}{places}, each with a whole copy of the weights and a cache"
    if device.is_cpu or rollout.cache_tokens is not None:
        yield f"{about}; the engine's lines are those of one built-in engine"
        return
    taken = vllm.memory_fraction * device.memory_bytes / 1e9
    yield (
        f"{about}; it reserves rollout.vllm.memory_fraction = {vllm.memory_fraction:g} of each of "
        f"its devices, {taken:.1f} GB, which is a line above where a learner has the device too"
    )
