"""A plan as tables for people and as JSON for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.plan.batches import batch_json, batch_rows
from postgrad.plan.cards import CardGroup, card_numbers, total_bytes
from postgrad.plan.change import Advice, digits, gigabytes, long_as
from postgrad.plan.held import PHASES
from postgrad.plan.memory import Memory
from postgrad.plan.notes import hours_problem, plan_notes
from postgrad.plan.plan import RunPlan
from postgrad.plan.roles import parameters_json
from postgrad.plan.sampling import SampledShare

TableRows = list[list[str]]


@dataclass(frozen=True, slots=True)
class Page:
    """The output of `postgrad plan` for a recipe."""

    plan: RunPlan
    advice: tuple[Advice, ...]

    def verdict(self) -> str:
        """In a line or two: whether the run fits, by how much, and how long it takes."""
        plan = self.plan
        where = f"{plan.hardware.count} x {plan.hardware.device.name}"
        if plan.missing_devices:
            engines = plan.places.own_cards
            ranks = plan.used_devices - engines
            needs = f"{ranks} ranks need a device each"
            if engines:
                needs = f"{ranks} ranks and {engines} for engines are {ranks + engines} devices"
            return f"does not fit: {needs}, there are {where}"
        peak = f"{gigabytes(plan.memory.peak_bytes)} of {gigabytes(plan.memory.capacity)}"
        word = "fits" if plan.fits else "does not fit"
        hours = plan.timing.hours
        long = (
            "; hours unknown"
            if hours is None
            else f"; {long_as(hours)}, {digits(hours * plan.timing.devices)} device-hours"
        )
        return f"{word}: {peak} at the peak ({plan.memory.peak}) on {where}{long}"

    def summary(self) -> Iterator[str]:
        """Lines below the verdict: what does not fit, how samples are drawn, idle cards."""
        yield from self.misfits()
        if tight := self._tight():
            yield tight
        if sampling := self._sampling():
            yield sampling
        if idle := self._idle():
            yield idle

    def _tight(self) -> str | None:
        """Says where a run fits by less than plans may be off."""
        plan = self.plan
        memory = plan.memory
        if not plan.fits or memory.leaves_room:
            return None
        free = gigabytes(memory.capacity - memory.peak_bytes)
        return (
            f"only {free} stay free at the peak; plans were off by up to a twentieth "
            f"({gigabytes(memory.capacity / 20)}), so this may run out of memory"
        )

    def _sampling(self) -> str | None:
        """What draws the samples of RL, where, how many at a time, and its share of a step."""
        plan = self.plan
        places, size = plan.places, plan.sizes.engine
        if not plan.recipe.trains_on_rollouts or size is None:
            return None
        timing, recipe = plan.timing, plan.recipe
        share = SampledShare.of(
            plan.geometry, plan.lengths, size, places, recipe.answers_per_prompt,
            recipe.sampled_tokens or 0, timing.staleness,
        )  # fmt: skip
        cards, each = self._working("sample"), "each " if places.engines > 1 else ""
        where = f" on card{'' if cards.isdecimal() else 's'} {cards}"
        if plan.hardware.device.is_cpu:
            where = ""
        ahead = ", while the learner works on an earlier one" if timing.overlaps else ""
        return (
            f"sampling: {places.name}{where}, {each}{share.sequences} samples of a step, "
            f"{share.together} at a time: {digits(timing.step['sample'])} of the "
            f"{digits(timing.step_seconds)} s of a step{ahead}"
        )

    def _idle(self) -> str | None:
        """Which cards no role has, and what to do about them."""
        plan = self.plan
        if not (idle := plan.idle_devices):
            return None
        device, used = plan.hardware.device.name, plan.used_devices
        uses = [n for n, entry in enumerate(self.advice, 1) if not entry.after.idle_devices]
        use = f"advice {uses[0]} uses them" if uses else "more learner.ranks or engines use them"
        return (
            f"{idle} of {plan.hardware.count} devices are idle and count in device-hours: "
            f"{use}; or take --hardware {used}x{device}"
        )

    def misfits(self) -> Sequence[str]:
        """What does not fit, by card, where that is not all in the verdict."""
        plan = self.plan
        refused = any(group.problem is not None for group in plan.cards)
        return plan.problems if len(plan.cards) > 1 or refused else ()

    def cards_title(self) -> str:
        """The heading of the table of cards."""
        return f"cards, GB of {self.plan.memory.capacity / 1e9:.1f} on each"

    def card_rows(self) -> TableRows:
        """A row for each group of cards: their numbers, what works there, gigabytes of each card by
        phase, what is free at the peak; and where there are several, the sums over all cards.
        """
        cards = self.plan.cards
        rows = [
            [
                group.numbers,
                ", ".join(group.roles),
                *(_tenths(group.memory.at(phase)) for phase in PHASES),
                _free(group),
            ]
            for group in cards
        ]
        if idle := self.plan.idle_devices:
            first = self.plan.used_devices
            numbers = f"{first}-{first + idle - 1}" if idle > 1 else str(first)
            rows.append([numbers, "idle", *[""] * (len(PHASES) + 1)])
        if self.plan.used_devices > 1:
            total = total_bytes(cards)
            sums = (_tenths(total[phase]) for phase in PHASES)
            rows.append([f"all {self.plan.used_devices}", "sum", *sums, ""])
        return rows

    def batch_rows(self) -> TableRows:
        """A row for each batch number: its name, the number, its unit and formula."""
        return batch_rows(self.plan)

    def memory_tables(self) -> Iterator[tuple[str, TableRows]]:
        """A table of memory for each group of cards: its title and its rows."""
        cards = self.plan.cards
        for group in cards:
            title = "memory of one device, GB"
            if len(cards) > 1:
                each = "each of cards" if group.count > 1 else "card"
                title = f"memory of {each} {group.numbers}, GB"
            yield title, _memory_rows(group.memory)

    def time_rows(self) -> TableRows:
        """Seconds of a step by phase, with their share and the cards that work."""
        timing = self.plan.timing
        step_seconds = timing.step_seconds or 1.0
        rows = [
            [
                f"{name}, each step",
                digits(seconds),
                f"{seconds / step_seconds:.0%}",
                self._working(name),
            ]
            for name, seconds in timing.step.items()
            if seconds
        ]
        rows += [
            [f"{name}, once", digits(seconds), "", self._working(name)]
            for name, seconds in timing.once.items()
        ]
        return rows

    def _working(self, phase: str) -> str:
        """Numbers of the cards that work in a phase: "0-3, 6"."""
        return card_numbers(group for group in self.plan.cards if group.works_in(phase))

    def notes(self) -> Iterator[str]:
        """Sentences below the tables: what the plan assumes, and what a person should know."""
        return plan_notes(self.plan, self.advice)

    def to_json(self) -> dict[str, Any]:
        """The output of --json: the plan, its advice, and what they were computed from."""
        plan = self.plan
        return {
            "fits": plan.fits,
            "hours": plan.timing.hours,
            "hours_problem": hours_problem(self.plan),
            "devices": plan.used_devices,
            "hardware": {"device": plan.hardware.device.name, "count": plan.hardware.count},
            "memory": plan.memory.to_json(),
            "cards": [group.to_json() for group in plan.cards],
            "cards_bytes": total_bytes(plan.cards),
            "problems": list(plan.problems),
            "time": plan.timing.to_json(),
            "publish": plan.timing.publish and plan.timing.publish.to_json(),
            "batch": batch_json(plan),
            "sizes": _sizes(plan),
            "parameters": parameters_json(plan.roles),
            "auto": dict(plan.auto),
            "calibrated": plan.calibrated,
            "advice": [advice.to_json() for advice in self.advice],
            "summary": list(self.summary()),
            "notes": list(self.notes()),
        }


def advice_rows(advice: Sequence[Advice]) -> TableRows:
    """A row for each advice: its number, the change, the effect."""
    return [[str(n), entry.change, entry.effect] for n, entry in enumerate(advice, 1)]


def _sizes(plan: RunPlan) -> dict[str, Any]:
    engine = plan.sizes.engine
    return {
        "micro_tokens": plan.sizes.micro_tokens,
        **({} if engine is None else engine.to_json()),
    }


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f}" if count else ""


def _memory_rows(memory: Memory) -> TableRows:
    """A row for each line of memory, with gigabytes by phase, and a last row with the sums."""
    rows = [
        [line.role, line.purpose, *(_bytes(line.bytes.get(phase, 0)) for phase in PHASES)]
        for line in memory.lines
    ]
    return [*rows, ["sum", "", *(_bytes(memory.at(phase)) for phase in PHASES)]]


def _tenths(count: int) -> str:
    return f"{count / 1e9:.1f}"


def _free(group: CardGroup) -> str:
    """Gigabytes that are free at the peak, or how many are lacking."""
    free = (group.memory.capacity - group.memory.peak_bytes) / 1e9
    if free < 0:
        return f"{-free:.1f} short"
    return "refused" if group.problem else f"{free:.1f}"
