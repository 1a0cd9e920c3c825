"""What to change where a run does not fit or wastes devices: the cheapest first, with its effect.

Every advice was planned as a recipe of its own, so that its effect is that of a plan.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.core.settings import ShardingStage
from postgrad.plan.engines import vllm_share
from postgrad.plan.plan import Facts, Outlook
from postgrad.plan.splits import STAGES, Overrides, best_split, flags, planned, ranked
from postgrad.recipe.recipe import Recipe

Change = tuple[Overrides, str]  # flags of the command line, and what they do
FEW = 16  # sequences sampled together: with fewer, decoding only reads weights
ALL = "all devices train"

COUNTS = (2, 4, 8, 16, 32, 64)  # devices to try where those that are there are too few
WORTH = 0.95  # a change that only saves time has to save a twentieth
WASTED = 2 / 3  # half of the devices are advised where they take less of the device-hours
CHANGES_LEARNING = (
    "--learner.optimizer_state",
    "--model.lora",
    "--model.quantize",
    "--data.max_len",
)
DIVIDES = ("--learner.ranks", "--learner.sharding", "--learner.offload")


def smaller(now: Outlook) -> Iterator[Change]:
    """Changes that take less memory, those first that cost least time and change least."""
    recipe = now.recipe
    if now.missing_devices:
        yield from _fewer_ranks(now)
    yield from _larger_share(now)
    yield from _smaller_forward(now)
    if not recipe.model.gradient_checkpointing:
        text = "activations are computed again in the backward pass"
        yield flags("model.gradient_checkpointing", True), text
    gathers_cross_host = now.hardware.device.link == "pcie"
    yield from _sharded(now, last="zero2" if gathers_cross_host else "zero3")
    yield from _fewer_places(now, least=FEW)
    yield from _fewer_bits(recipe)
    yield from _fewer_places(now, least=1)
    if recipe.learner.sharding != "none" and not recipe.learner.offload:
        text = "what is divided lies in the host's memory"
        yield flags("learner.offload", True), text
    if recipe.data.max_len >= 512:
        yield _shorter(recipe), "shorter rows; longer ones are dropped"
    if gathers_cross_host:
        yield from _sharded(now, last="zero3")


def faster(start: Outlook) -> Iterator[Change]:
    """Changes that save time where there is room: idle devices work, savings of memory end."""
    recipe = start.recipe
    learner = recipe.learner
    if recipe.model.gradient_checkpointing:
        yield flags("model.gradient_checkpointing", False), "there is room without"
    if learner.offload:
        yield flags("learner.offload", False), "there is room on the device"
    if learner.sharding == "zero3":
        yield flags("learner.sharding", "zero2"), "weights need not be gathered"
    if recipe.batch.micro_train_batch_size is None:
        tokens = flags("batch.micro_train_tokens", 2 * start.sizes.micro_tokens)
        yield tokens, "fewer, larger forward passes"


def fewer_devices(now: Outlook) -> Iterator[Change]:
    """Half of the ranks, with the same sharding where more than one is left."""
    learner = now.recipe.learner
    half = learner.ranks // 2
    if learner.ranks % 2 == 0 and half % (learner.tensor_parallel * learner.context_parallel) == 0:
        fewer = ranked(now.recipe, half, learner.sharding)
        yield fewer, "fewer devices, which wait less for each other"


def _fewer_ranks(now: Outlook) -> Iterator[Change]:
    """As many ranks as the engines leave devices, or as there are, with the engines beside them."""
    recipe, count, stage = now.recipe, now.hardware.count, now.recipe.learner.sharding
    left = count - now.places.own_cards
    text = "as many ranks as there are devices"
    if left >= 1:
        yield ranked(recipe, left, stage), text
    if now.places.own_cards:
        place = (*flags("cluster.rollout", "{}"), *flags("cluster.policy.colocate", "rollout"))
        yield (*ranked(recipe, count, stage), *place), f"{text}, which engines share"


def _larger_share(now: Outlook) -> Iterator[Change]:
    """The least share of a card with which vLLM starts, where the recipe's is too small."""
    rollout, device = now.recipe.rollout_settings, now.hardware.device
    longest = now.sizes.places
    share = vllm_share(now.recipe, now.roles[0], device, now.places, longest)
    if rollout is None or share is None or share.least <= share.share:
        return
    if (fraction := share.least_fraction(device)) <= 1.0:
        yield flags("rollout.vllm.memory_fraction", fraction), "vLLM's share holds its weights"
    twice = 2 * rollout.vllm.tensor_parallel
    yield flags("rollout.vllm.tensor_parallel", twice), "an engine's weights are divided"


def _smaller_forward(now: Outlook) -> Iterator[Change]:
    """Half of the tokens, or the next divisor of the samples, of one forward pass."""
    recipe, samples = now.recipe, now.recipe.batch.micro_train_batch_size
    least = recipe.min_micro_tokens
    if samples is None and now.sizes.micro_tokens > least:
        tokens = max(least, now.sizes.micro_tokens // 2)
        yield flags("batch.micro_train_tokens", tokens), "a smaller forward pass"
    elif samples is not None and samples > 1:
        size = max(n for n in range(1, samples) if samples % n == 0)
        yield flags("batch.micro_train_batch_size", size), "a smaller forward pass"


def _fewer_bits(recipe: Recipe) -> Iterator[Change]:
    """Moments of a byte a number; an adapter in place of the model; that model in four bits."""
    learner, model = recipe.learner, recipe.model
    if learner.optimizer == "adamw" and learner.optimizer_state == "float32":
        yield flags("learner.optimizer_state", "8bit"), "AdamW's moments of matrices in eight bits"
    if model.lora is None:
        change = ("--model.lora", "{ rank = 64, alpha = 64 }")
        yield change, "an adapter trains, the model is frozen"
    elif model.quantize == "none":
        yield flags("model.quantize", "4bit"), "the frozen matrices in four bits"


def _fewer_places(now: Outlook, least: int) -> Iterator[Change]:
    """Half of the engine's slots and cache, for at least `least` sequences."""
    engine = now.sizes.engine
    if engine is None or engine.slots < 2 * least:
        return
    slots = engine.slots // 2
    tokens = engine.cache_tokens // engine.slots * slots
    change = (*flags("rollout.slots", slots), *flags("rollout.cache_tokens", tokens))
    yield change, "fewer sequences are sampled together"


def _sharded(now: Outlook, last: ShardingStage) -> Iterator[Change]:
    """The next stage of sharding up to `last`, and more ranks where devices are idle."""
    learner, idle = now.recipe.learner, now.idle_devices
    stage = STAGES.index(learner.sharding)
    if learner.ranks > 1 and stage < STAGES.index(last):
        text = "divides more of the state over the ranks"
        yield flags("learner.sharding", STAGES[stage + 1]), text
    if idle > 0:
        more = learner.ranks + idle
        yield ranked(now.recipe, more, learner.sharding if stage else "zero2"), ALL


def _shorter(recipe: Recipe) -> Overrides:
    """Flags for half of data.max_len, and for fewer new tokens where those would not fit in it."""
    half = recipe.data.max_len // 2
    overrides = flags("data.max_len", half)
    rollout = recipe.rollout_settings
    if rollout is not None and rollout.max_new_tokens >= half:
        new = half * rollout.max_new_tokens // recipe.data.max_len
        overrides += flags("rollout.max_new_tokens", max(1, new))
    return overrides


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of a recipe and its effect."""

    overrides: Overrides  # flags of the command line: ("--model.gradient_checkpointing", "true")
    reason: str  # what the flags do
    before: Outlook  # with all advice before this one
    after: Outlook  # with this one too; it may be on more devices than there are

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
        """Its entry in the output of --json."""
        return {"change": self.change, "effect": self.effect}


def _digits(value: float) -> str:
    """The number with three digits and without an exponent: 0.0123, 4.56, 17,900."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def advise(start: Outlook, facts: Facts) -> tuple[Advice, ...]:
    """Changes in order, each on top of those before it; none where the run fits and wastes
    nothing. Where no change helps enough, the last outlook does not fit either.
    """
    if start.fits:
        return tuple(_without_waste(start, facts))
    steps: list[Change] = []
    now = start
    while not now.fits:
        for change in smaller(now):
            tried = planned(now.recipe, change[0], facts)
            if tried is not None and _better(tried, now):
                steps.append(change)
                now = tried
                break
        else:
            break
    if now.fits:
        return tuple(_advised(start, _needed(start, steps, facts), facts))
    return tuple(_on_more_devices(start, steps, facts))


def _better(tried: Outlook, now: Outlook) -> bool:
    """Whether a change leaves fewer devices missing, or fewer cards that refuse what is on them, or
    else takes less memory on a device.
    """

    def misses(of: Outlook) -> tuple[int, int, int]:
        refused = sum(group.problem is not None for group in of.cards)
        return of.missing_devices, refused, of.memory.peak_bytes

    return misses(tried) < misses(now)


def _without_waste(start: Outlook, facts: Facts) -> Iterator[Advice]:
    """Advice for a run that fits: undoes what costs time or devices and is not needed."""
    now, spread = start, False
    for overrides, reason in [*_idle(start, facts), *faster(start)]:
        tried = planned(now.recipe, overrides, facts)
        if tried is None or not tried.fits:
            continue
        more = tried.timing.devices > now.timing.devices
        if more and tried.timing.device_seconds * WASTED > now.timing.device_seconds:
            continue
        if tried.timing.step_seconds < WORTH * now.timing.step_seconds:
            yield Advice(overrides, reason, now, tried)
            now, spread = tried, spread or reason == ALL
    if not spread and (half := _halved(now, facts)) is not None:
        yield half


def _idle(start: Outlook, facts: Facts) -> Iterator[Change]:
    """The fastest way to use all devices, where some are idle."""
    learner = start.recipe.learner
    if start.idle_devices:
        stage = learner.sharding if learner.ranks > 1 else "zero1"
        best = best_split(start.recipe, start.hardware.count, facts, (stage,))
        if best is not None:
            yield best.overrides, ALL


def _halved(now: Outlook, facts: Facts) -> Advice | None:
    """Halves the devices as often as that saves many device-hours; None where it never does."""
    advice: Advice | None = None
    last = now
    while True:
        for overrides, reason in fewer_devices(last):
            tried = planned(last.recipe, overrides, facts)
            if tried is not None and tried.fits and _cheaper(tried, last):
                advice, last = Advice(overrides, reason, now, tried), tried
                break
        else:
            return advice


def _cheaper(tried: Outlook, now: Outlook) -> bool:
    return tried.timing.device_seconds < WASTED * now.timing.device_seconds


def _on_more_devices(start: Outlook, steps: Sequence[Change], facts: Facts) -> Iterator[Advice]:
    """The fewest devices of this kind on which the run fits: with those steps that do not change
    what is learned, else with all steps. Where no number of devices is enough, the steps alone.
    """
    others = [step for step in steps if not step[0][0].startswith(DIVIDES)]
    lossless = [step for step in others if not step[0][0].startswith(CHANGES_LEARNING)]
    for chosen in (lossless, others):
        advised = list(_advised(start, chosen, facts))
        now = advised[-1].after if advised else start
        for count in COUNTS:
            if count <= start.hardware.count:
                continue
            best = best_split(now.recipe, count, facts, ("zero2", "zero3"))
            if best is not None:
                yield from advised
                yield Advice(best.overrides, "more devices", now, best.outlook)
                return
    yield from _advised(start, steps, facts)


def _needed(start: Outlook, steps: list[Change], facts: Facts) -> list[Change]:
    """The steps without those that a later one made superfluous; costly ones are left out first."""
    for step in reversed(steps[:-1]):
        rest = [other for other in steps if other is not step]
        tried = planned(start.recipe, tuple(flag for flags, _ in rest for flag in flags), facts)
        if tried is not None and tried.fits:
            steps = rest
    return steps


def _advised(start: Outlook, steps: Sequence[Change], facts: Facts) -> Iterator[Advice]:
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


def gigabytes(count: float) -> str:
    """The bytes as text in units of 10^9: "13.4 GB"."""
    return f"{count / 1e9:.1f} GB"
