"""What to change where a run does not fit or wastes devices: the cheapest first, with its effect.

Every advice was planned as a recipe of its own, so that its effect is that of a plan.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from postgrad.plan.change import Advice, Change, digits
from postgrad.plan.engines import dealt
from postgrad.plan.hardware import Hardware
from postgrad.plan.plan import Facts, RunPlan
from postgrad.plan.sizes import engine_sequences
from postgrad.plan.smaller import ALL, less_memory
from postgrad.plan.splits import best_split, flags, planned, ranked, vllm_ways
from postgrad.rollout.local.budget import MAX_SLOTS, places_for

WORTH = 0.95  # a change that only saves time has to save a twentieth
SHARES = "learner and engines share the cards better"
SPREADS = (ALL, SHARES)
WASTED = 2 / 3  # half of the devices are advised where they take less of the device-hours


def advise(start: RunPlan, facts: Facts) -> tuple[Advice, ...]:
    """Changes in order, each on top of those before it: until the run fits, then those that save
    time or devices. Where no change helps enough, the last plan does not fit.
    """
    needed = less_memory(start, facts)
    now = needed[-1].after if needed else start
    if not now.fits:
        return needed
    there = replace(facts, hardware=now.hardware)
    keys = {flag for step in needed for flag in step.overrides if flag.startswith("--")}
    return (*needed, *_without_waste(now, there, keys))


def _without_waste(start: RunPlan, facts: Facts, keys: set[str]) -> Iterator[Advice]:
    """Advice for a run that fits: uses what is idle, undoes what costs time and is not needed. Of
    the ways that a proposal has the first that helps is taken. keys: flags that made the run fit.
    """
    proposals: list[Callable[[RunPlan], Iterator[Change]]] = [
        partial(_arranged, facts=facts),
        *(partial(_again, change) for change in faster(start)),
        partial(_sampled_together, facts=facts),
    ]
    now, spread = start, "--learner.ranks" in keys
    for propose in proposals:
        for overrides, reason in propose(now):
            if keys.intersection(overrides) and reason not in SPREADS:
                continue
            tried = planned(now.recipe, overrides, facts)
            if tried is None or not _leaves_room(tried, now):
                continue
            if tried.timing.step_seconds < WORTH * now.timing.step_seconds:
                yield Advice(overrides, reason, now, tried)
                now, spread = tried, spread or reason in SPREADS
                break
    if not spread and (half := _halved(now, facts)) is not None:
        yield half


def _leaves_room(tried: RunPlan, now: RunPlan) -> bool:
    """Whether a plan fits with room for the plan's error, or takes no more than the one before."""
    less = tried.memory.peak_bytes <= now.memory.peak_bytes
    return tried.fits and (tried.memory.leaves_room or less)


def _again(change: Change, now: RunPlan) -> Iterator[Change]:
    """The change, whatever came before it."""
    yield change


def _arranged(now: RunPlan, facts: Facts) -> Iterator[Change]:
    """The fastest way to give the cards to learner and engines, idle ones too."""
    learner = now.recipe.learner
    if now.hardware.count == 1 or not (now.idle_devices or now.recipe.trains_on_rollouts):
        return
    stage = learner.sharding if learner.ranks > 1 else "zero1"
    best = best_split(now.recipe, now.hardware.count, facts, (stage,))
    if best is not None:
        yield best.overrides, ALL if now.idle_devices else SHARES


def faster(start: RunPlan) -> Iterator[Change]:
    """Changes that save time where there is room: idle devices work, savings of memory end."""
    recipe = start.recipe
    learner = recipe.learner
    if recipe.model.gradient_checkpointing:
        yield flags("model.gradient_checkpointing", False), "there is room without"
    if recipe.model.gradient_checkpointing == "offload":
        yield flags("model.gradient_checkpointing", True), "there is room on the device"
    if learner.offload:
        yield flags("learner.offload", False), "there is room on the device"
    if learner.sharding == "zero3":
        yield flags("learner.sharding", "zero2"), "weights need not be gathered"
    if recipe.batch.micro_train_batch_size is None:
        tokens = 2 * start.sizes.micro_tokens * learner.context_parallel
        yield flags("batch.micro_train_tokens", tokens), "fewer, larger forward passes"


def _sampled_together(now: RunPlan, facts: Facts) -> Iterator[Change]:
    """More samples of each engine at a time: by vLLM, whose cache has a prompt once for its answers
    and takes what is free, or in a larger cache of the built-in engine.
    """
    slots = next(_larger_caches(now, facts), None)
    built_in = now if slots is None else planned(now.recipe, slots[0], facts)
    assert built_in is not None  # its recipe was planned with these slots
    before = built_in.timing.step_seconds
    if not now.hardware.device.is_cpu:
        for vllm in vllm_ways(now.recipe):
            tried = planned(now.recipe, vllm, facts)
            if tried is None or not _leaves_room(tried, now):
                continue
            if tried.timing.step_seconds < WORTH * before:
                reason = "vLLM samples more together (docs/vllm.md installs it"
                if slots is not None:
                    reason += f"; without it {' '.join(slots[0])}, a step {digits(before)} s"
                yield vllm, f"{reason})"
            break
    if slots is not None:
        yield slots


def _larger_caches(now: RunPlan, facts: Facts) -> Iterator[Change]:
    """More slots and cache for the built-in engine, the most first that fit: as many as sample a
    step in one wave, in two, and so on. Where MAX_SLOTS need several, in these, twice these, ...
    """
    recipe, size = now.recipe, now.sizes.engine
    rollout = recipe.rollout_settings
    if size is None or rollout is None or rollout.type != "local":
        return
    sequences = engine_sequences(recipe, now.geometry)
    share = dealt(sequences, recipe.answers_per_prompt, now.places.engines)
    fewest = max(1, -(-share // MAX_SLOTS))
    for waves in range(fewest, share + 1, fewest):
        slots = -(-share // waves)
        if slots <= size.slots:
            return
        cache = slots * places_for(now.sizes.places)
        change = (*flags("rollout.slots", slots), *flags("rollout.cache_tokens", cache))
        tried = planned(recipe, change, facts)
        if tried is not None and _leaves_room(tried, now):
            yield change, "more sequences are sampled together"


def fewer_devices(now: RunPlan) -> Iterator[Change]:
    """Half of the ranks, with the same sharding where more than one is left."""
    learner = now.recipe.learner
    half = learner.ranks // 2
    if learner.ranks % 2 == 0 and half % (learner.tensor_parallel * learner.context_parallel) == 0:
        fewer = ranked(now.recipe, half, learner.sharding)
        yield fewer, "fewer devices, which wait less for each other"


def _halved(now: RunPlan, facts: Facts) -> Advice | None:
    """Halves the devices as often as that saves many device-hours; None where it never does. The
    other half is given back: it does not count.
    """
    advice: Advice | None = None
    last = now
    while True:
        for overrides, reason in fewer_devices(last):
            tried = _on_fewer(last, overrides, facts)
            if tried is not None and _leaves_room(tried, last) and _cheaper(tried, last):
                advice, last = Advice(overrides, reason, now, tried), tried
                break
        else:
            return advice


def _on_fewer(last: RunPlan, overrides: Sequence[str], facts: Facts) -> RunPlan | None:
    """The changed recipe on as many devices as it uses; None where it is not valid."""
    tried = planned(last.recipe, tuple(overrides), facts)
    if tried is None:
        return None
    hardware = Hardware(count=tried.used_devices, device=facts.hardware.device)
    return planned(last.recipe, tuple(overrides), replace(facts, hardware=hardware))


def _cheaper(tried: RunPlan, now: RunPlan) -> bool:
    return tried.timing.device_seconds < WASTED * now.timing.device_seconds
