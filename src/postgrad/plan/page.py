"""A plan as tables for people and as JSON for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.plan.batches import batch_json, batch_rows
from postgrad.plan.cards import CardGroup, card_numbers, total_bytes
from postgrad.plan.change import Advice, digits, gigabytes, long_as
from postgrad.plan.engines import FULLEST, EnginePlaces, dealt
from postgrad.plan.exchange import expert_notes
from postgrad.plan.held import PHASES
from postgrad.plan.host_inputs import host_input_notes
from postgrad.plan.lengths import RowLengths
from postgrad.plan.memory import Memory
from postgrad.plan.plan import Outlook, full_logits_bytes
from postgrad.plan.publishing import PlannedPublish
from postgrad.plan.roles import parameters_json, stored_bytes
from postgrad.plan.sampling import SampledShare
from postgrad.plan.sizes import ahead_bytes
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
            engines = outlook.places.own_cards
            ranks = outlook.used_devices - engines
            needs = f"{ranks} ranks need a device each"
            if engines:
                needs = f"{ranks} ranks and {engines} for engines are {ranks + engines} devices"
            return f"does not fit: {needs}, there are {where}"
        peak = f"{gigabytes(outlook.memory.peak_bytes)} of {gigabytes(outlook.memory.capacity)}"
        word = "fits" if outlook.fits else "does not fit"
        hours = outlook.timing.hours
        long = (
            "; hours unknown"
            if hours is None
            else f"; {long_as(hours)}, {digits(hours * outlook.timing.devices)} device-hours"
        )
        return f"{word}: {peak} at the peak ({outlook.memory.peak}) on {where}{long}"

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
        outlook = self.outlook
        memory = outlook.memory
        if not outlook.fits or memory.leaves_room:
            return None
        free = gigabytes(memory.capacity - memory.peak_bytes)
        return (
            f"only {free} stay free at the peak; plans were off by up to a twentieth "
            f"({gigabytes(memory.capacity / 20)}), so this may run out of memory"
        )

    def _sampling(self) -> str | None:
        """What draws the samples of RL, where, how many at a time, and its share of a step."""
        outlook = self.outlook
        places, size = outlook.places, outlook.sizes.engine
        if not outlook.recipe.trains_on_rollouts or size is None:
            return None
        timing, recipe = outlook.timing, outlook.recipe
        share = SampledShare.of(
            outlook.geometry, outlook.lengths, size, places, recipe.answers_per_prompt,
            recipe.sampled_tokens or 0, timing.staleness,
        )  # fmt: skip
        cards, each = self._working("sample"), "each " if places.engines > 1 else ""
        where = f" on card{'' if cards.isdecimal() else 's'} {cards}"
        if outlook.hardware.device.is_cpu:
            where = ""
        ahead = ", while the learner works on an earlier one" if timing.overlaps else ""
        return (
            f"sampling: {places.name}{where}, {each}{share.sequences} samples of a step, "
            f"{share.together} at a time: {digits(timing.step['sample'])} of the "
            f"{digits(timing.step_seconds)} s of a step{ahead}"
        )

    def _idle(self) -> str | None:
        """Which cards no role has, and what to do about them."""
        outlook = self.outlook
        if not (idle := outlook.idle_devices):
            return None
        device, used = outlook.hardware.device.name, outlook.used_devices
        uses = [n for n, entry in enumerate(self.advice, 1) if not entry.after.idle_devices]
        use = f"advice {uses[0]} uses them" if uses else "more learner.ranks or engines use them"
        return (
            f"{idle} of {outlook.hardware.count} devices are idle and count in device-hours: "
            f"{use}; or take --hardware {used}x{device}"
        )

    def misfits(self) -> Sequence[str]:
        """What does not fit, by card, where that is not all in the verdict."""
        outlook = self.outlook
        refused = any(group.problem is not None for group in outlook.cards)
        return outlook.problems if len(outlook.cards) > 1 or refused else ()

    def cards_title(self) -> str:
        """The heading of the table of cards."""
        return f"cards, GB of {self.outlook.memory.capacity / 1e9:.1f} on each"

    def card_rows(self) -> TableRows:
        """A row for each group of cards: their numbers, what works there, gigabytes of each card by
        phase, what is free at the peak; and where there are several, the sums over all cards.
        """
        cards = self.outlook.cards
        rows = [
            [
                group.numbers,
                ", ".join(group.roles),
                *(_tenths(group.memory.at(phase)) for phase in PHASES),
                _free(group),
            ]
            for group in cards
        ]
        if idle := self.outlook.idle_devices:
            first = self.outlook.used_devices
            numbers = f"{first}-{first + idle - 1}" if idle > 1 else str(first)
            rows.append([numbers, "idle", *[""] * (len(PHASES) + 1)])
        if self.outlook.used_devices > 1:
            total = total_bytes(cards)
            sums = (_tenths(total[phase]) for phase in PHASES)
            rows.append([f"all {self.outlook.used_devices}", "sum", *sums, ""])
        return rows

    def batch_rows(self) -> TableRows:
        """A row for each batch number: its name, the number, its unit and formula."""
        return batch_rows(self.outlook)

    def memory_tables(self) -> Iterator[tuple[str, TableRows]]:
        """A table of memory for each group of cards: its title and its rows."""
        cards = self.outlook.cards
        for group in cards:
            title = "memory of one device, GB"
            if len(cards) > 1:
                each = "each of cards" if group.count > 1 else "card"
                title = f"memory of {each} {group.numbers}, GB"
            yield title, _memory_rows(group.memory)

    def time_rows(self) -> TableRows:
        """Seconds of a step by phase, with their share and the cards that work."""
        timing = self.outlook.timing
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
        return card_numbers(group for group in self.outlook.cards if group.works_in(phase))

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
        rows, shared = outlook.lengths.rows, outlook.lengths.shared
        yield f"lengths: {outlook.lengths.source}" + (f"; {rows} rows an epoch" if rows else "")
        yield from expert_notes(outlook.roles, outlook.timing.exchanged, outlook.recipe.learner)
        if states := outlook.roles[0].shape.state_bytes:
            times = "once" if shared else f"{outlook.recipe.answers_per_prompt} times"
            yield (
                f"layers of a {outlook.roles[0].shape.model_type} model carry a state along the "
                f"sequence, {states / 1e6:.3g} MB each: the learner computes a prompt {times}"
            )
        if outlook.calibrated is not None:
            yield f"times: {outlook.calibrated}"
        if outlook.auto:
            chosen = ", ".join(f"{key} = {size}" for key, size in outlook.auto.items())
            yield f'"auto" chooses {chosen} here; a run tries them before its first step'
        if ahead := ahead_bytes(outlook.recipe):
            yield (
                f"samples ahead take up to {ahead / 1e6:.3g} MB in the first process, and in each "
                "checkpoint"
            )
        if each := stored_bytes(outlook.recipe):
            yield _stored(each, outlook.lengths)
        if outlook.timing.overlaps:
            yield (
                "engines sample later steps while the learner works: a step takes the longer of "
                "the two, and the publish"
            )
        if outlook.timing.publish and (way := _publish(outlook.timing.publish)):
            yield way
        yield from outlook.timing.offload_notes
        yield from host_input_notes(outlook.roles, outlook.sizes, outlook.hardware.device)
        if note := _no_place(outlook):
            yield note
        if self.advice and not self.advice[-1].after.fits:
            after = self.advice[-1].after.memory
            peak, room = gigabytes(after.peak_bytes), gigabytes(after.capacity)
            yield f"with all of the advice it still does not fit: {peak} of {room}"
        yield from engine_notes(outlook)
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
            "devices": outlook.used_devices,
            "hardware": {"device": outlook.hardware.device.name, "count": outlook.hardware.count},
            "memory": outlook.memory.to_json(),
            "cards": [group.to_json() for group in outlook.cards],
            "cards_bytes": total_bytes(outlook.cards),
            "problems": list(outlook.problems),
            "time": outlook.timing.to_json(),
            "publish": outlook.timing.publish and outlook.timing.publish.to_json(),
            "batch": batch_json(outlook),
            "sizes": _sizes(outlook),
            "parameters": parameters_json(outlook.roles),
            "auto": dict(outlook.auto),
            "calibrated": outlook.calibrated,
            "advice": [advice.to_json() for advice in self.advice],
            "summary": list(self.summary()),
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


def _stored(each: int, lengths: RowLengths) -> str:
    """Where what a teacher says of the rows is kept. each: bytes of a token."""
    if not lengths.rows:
        where = "in the first process; their number is unknown here (--rows)"
        return f"what the teacher says takes {each} bytes a token of all rows, {where}"
    kept = each * lengths.rows * lengths.computed(1)
    return f"what the teacher says of the rows takes {kept / 1e6:.3g} MB in the first process"


def _no_place(outlook: Outlook) -> str | None:
    """What is wrong where ranks behind Ray leave the engine no GPU; None where nothing is."""
    recipe, places = outlook.recipe, outlook.places
    on_gpus = recipe.cluster.type == "ray" and not outlook.hardware.device.is_cpu
    if not on_gpus or not places.engines or recipe.cluster.engines(recipe.learner.ranks):
        return None
    return (
        "the engine has no place of its own, and a run on GPUs refuses that; it is planned on card "
        "0. Let engines share the ranks' cards (--cluster.policy.colocate rollout), or give them "
        "their own (--cluster.rollout.workers 1)"
    )


def _publish(publish: PlannedPublish) -> str | None:
    """Which way weights go to the engines, and its seconds; None where they stay in a process."""
    if publish.way in ("none", "copy"):
        return None
    sent = f"a publish sends {gigabytes(publish.size)} to each engine"
    by_host = f"through the host's memory: {digits(publish.host_seconds)} s"
    if publish.way == "memory":
        return f"{sent} {by_host} of a step"
    name = "CUDA IPC" if publish.way == "ipc" else "NCCL"
    return (
        f"{sent} by {name}: {digits(publish.seconds)} s of a step; where versions or drivers do "
        f"not allow that, {by_host}"
    )


def _joining(places: EnginePlaces, recipe: Recipe) -> str:
    """How many rollout workers the plan has counted, of those that may come."""
    workers = recipe.cluster.engines(recipe.learner.ranks)
    least = recipe.cluster.first_engines(recipe.learner.ranks)
    lack = ", as many as have cards here" * (places.absent > 0)
    return (
        f"a step is counted with {workers - places.absent} of {workers} rollout workers{lack}; the "
        f"run starts with {least} (cluster.rollout.least), and the others join as there is room"
    )


def engine_notes(outlook: Outlook) -> Iterator[str]:
    """Sentences for people about the recipe's engines; none where it is a single built-in one."""
    rollout, places = outlook.recipe.rollout_settings, outlook.places
    if rollout is None:
        return
    if rollout.type == "openai":
        yield (
            f"answers come from {rollout.openai.base_url}: what that server takes is not in this "
            "plan"
        )
    if not places.engines or (places.engines == 1 and not places.is_vllm):
        return
    size = outlook.sizes.engine
    assert size is not None  # there are engines
    about = places.name + (", each" if places.engines > 1 else "") + " with all of the weights"
    if outlook.recipe.trains_on_rollouts:
        answers = outlook.recipe.answers_per_prompt
        share = dealt(outlook.geometry.samples_per_step, answers, places.engines)
        about += f", {share} samples of a step and {size.slots} slots"
    if places.absent or 0 < places.first < places.engines:
        yield _joining(places, outlook.recipe)
    if not places.is_vllm:
        yield about
        return
    device = outlook.hardware.device
    if device.is_cpu or rollout.cache_tokens is not None:
        yield f"{about}; memory is counted as that of the built-in engine"
        return
    fraction = rollout.vllm.memory_fraction
    yield (
        f"{about}; vLLM reserves rollout.vllm.memory_fraction = {fraction:g} of a card, "
        f"{fraction * device.memory_bytes / 1e9:.1f} GB"
    )
    if places.own_cards and fraction < FULLEST:
        yield (
            f"engines have cards of their own: --rollout.vllm.memory_fraction {FULLEST:g} gives "
            "them more cache"
        )
