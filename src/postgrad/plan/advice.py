"""What to change where a run does not fit or wastes: the cheapest first, each with its effect.

Every advice is a recipe that was planned: what is said to fit fits by the planner's own word.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.plan.plan import Facts, Outlook, outlook
from postgrad.recipe.load import with_overrides
from postgrad.recipe.recipe import Comparing, Recipe

Overrides = tuple[str, ...]
FEW = 16  # sequences sampled together: with fewer, decoding only reads weights
WORTH = 0.95  # a change that only saves time has to save a twentieth


@dataclass(frozen=True, slots=True)
class Advice:
    """overrides: flags of the command line; after: the outlook with it and all advice before."""

    overrides: Overrides
    reason: str
    before: Outlook
    after: Outlook

    @property
    def change(self) -> str:
        """As it is typed."""
        return shlex.join(self.overrides)

    @property
    def effect(self) -> str:
        """Peak memory, and time of a step and of the run, before and after."""
        was, now = self.before, self.after
        hours = ""
        if was.timing.hours is not None and now.timing.hours is not None:
            hours = f", the run {_digits(was.timing.hours)} -> {_digits(now.timing.hours)} h"
        return (
            f"{self.reason}: {gigabytes(was.memory.peak_bytes)} -> "
            f"{gigabytes(now.memory.peak_bytes)} at the peak, a step "
            f"{_digits(was.timing.step_seconds)} -> {_digits(now.timing.step_seconds)} s{hours}"
        )

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
        return tuple(_faster(start, facts))
    steps: list[tuple[Overrides, str]] = []
    now = start
    while not now.fits:
        for overrides, reason in _smaller(now):
            tried = _planned(now.recipe, overrides, facts)
            if tried is not None and _better(tried, now):
                steps.append((overrides, reason))
                now = tried
                break
        else:
            break
    if now.fits:
        steps = _needed(start, steps, facts)
    return tuple(_told(start, steps, facts))


def _better(tried: Outlook, now: Outlook) -> bool:
    """Needs fewer missing devices, or less memory on a device."""
    before = now.missing_devices, now.memory.peak_bytes
    return (tried.missing_devices, tried.memory.peak_bytes) < before


def _smaller(now: Outlook) -> Iterator[tuple[Overrides, str]]:
    """Changes that take less memory, those first that cost least time and change least."""
    recipe = now.recipe
    if now.missing_devices:
        yield _flags("learner.ranks", now.hardware.count), "as many ranks as there are devices"
    least = recipe.data.max_len * (2 if isinstance(recipe, Comparing) else 1)
    if recipe.batch.micro_train_batch_size is None and now.sizes.micro_tokens > least:
        tokens = max(least, now.sizes.micro_tokens // 2)
        yield _flags("batch.micro_train_tokens", tokens), "a smaller forward pass"
    elif (recipe.batch.micro_train_batch_size or 1) > 1:
        size = _smaller_divisor(recipe.batch.micro_train_batch_size or 1)
        yield _flags("batch.micro_train_batch_size", size), "a smaller forward pass"
    if not recipe.model.gradient_checkpointing:
        flags = _flags("model.gradient_checkpointing", True)
        yield flags, "activations are computed again in the backward pass"
    gathers_cross_host = now.hardware.device.link == "pcie"
    yield from _sharded(now, last="zero2" if gathers_cross_host else "zero3")
    yield from _fewer_places(now, least=FEW)
    if recipe.model.lora is None:
        flags = ("--model.lora", "{ rank = 64, alpha = 64 }")
        yield flags, "an adapter trains, the model is frozen"
    yield from _fewer_places(now, least=1)
    if recipe.data.max_len >= 512:
        yield _shorter(recipe), "shorter rows; longer ones are dropped"
    if gathers_cross_host:
        yield from _sharded(now, last="zero3")


def _fewer_places(now: Outlook, least: int) -> Iterator[tuple[Overrides, str]]:
    """Half the cache of the engine, for at least so many sequences."""
    engine = now.sizes.engine
    if engine is None or engine.slots < 2 * least:
        return
    slots = engine.slots // 2
    tokens = engine.cache_tokens // engine.slots * slots
    flags = (*_flags("rollout.slots", slots), *_flags("rollout.cache_tokens", tokens))
    yield flags, "fewer sequences are sampled together"


def _sharded(now: Outlook, last: str) -> Iterator[tuple[Overrides, str]]:
    """The next stage of sharding up to `last`, or more ranks where devices are idle."""
    learner, idle = now.recipe.learner, now.hardware.count - now.recipe.learner.ranks
    stages = ("none", "zero1", "zero2", "zero3")
    stage = stages.index(learner.sharding)
    if learner.ranks > 1 and stage < stages.index(last):
        text = "divides more of the state over the ranks"
        yield _flags("learner.sharding", stages[stage + 1]), text
    if idle > 0:
        flags = (
            *_flags("learner.ranks", now.hardware.count),
            *_flags("cluster.type", "ray"),
            *_flags("learner.sharding", learner.sharding if stage else "zero2"),
        )
        yield flags, "all devices train"


def _shorter(recipe: Recipe) -> Overrides:
    """Half of data.max_len, and of what has to fit into it."""
    half = recipe.data.max_len // 2
    flags = _flags("data.max_len", half)
    rollout = getattr(recipe, "rollout", None)
    if rollout is not None and rollout.max_new_tokens >= half:
        flags += _flags(
            "rollout.max_new_tokens", half * rollout.max_new_tokens // recipe.data.max_len
        )
    return flags


def _faster(start: Outlook, facts: Facts) -> Iterator[Advice]:
    """Where there is room: what costs time and is not needed."""
    recipe, now = start.recipe, start
    ways: list[tuple[Overrides, str]] = []
    if recipe.model.gradient_checkpointing:
        ways.append((_flags("model.gradient_checkpointing", False), "there is room without"))
    if recipe.learner.sharding == "zero3":
        ways.append((_flags("learner.sharding", "zero2"), "weights need not be gathered"))
    if recipe.batch.micro_train_batch_size is None:
        tokens = _flags("batch.micro_train_tokens", 2 * now.sizes.micro_tokens)
        ways.append((tokens, "fewer, larger forward passes"))
    for overrides, reason in ways:
        tried = _planned(now.recipe, overrides, facts)
        if tried is None or not tried.fits:
            continue
        if tried.timing.step_seconds < WORTH * now.timing.step_seconds:
            yield Advice(overrides, reason, now, tried)
            now = tried


def _needed(
    start: Outlook, steps: list[tuple[Overrides, str]], facts: Facts
) -> list[tuple[Overrides, str]]:
    """Without those that a later one made superfluous, the dearest being left out first."""
    for step in reversed(steps[:-1]):
        rest = [other for other in steps if other is not step]
        tried = _planned(start.recipe, tuple(flag for flags, _ in rest for flag in flags), facts)
        if tried is not None and tried.fits:
            steps = rest
    return steps


def _told(start: Outlook, steps: Sequence[tuple[Overrides, str]], facts: Facts) -> Iterator[Advice]:
    """The steps with what each does on top of those before it; several of one key are one."""
    last = {overrides[0]: place for place, (overrides, _) in enumerate(steps)}
    now = start
    for place, (overrides, reason) in enumerate(steps):
        if last[overrides[0]] != place:
            continue
        after = _planned(now.recipe, overrides, facts)
        assert after is not None  # it was planned before
        yield Advice(overrides, reason, now, after)
        now = after


def _planned(recipe: Recipe, overrides: Overrides, facts: Facts) -> Outlook | None:
    """None for a change that is no recipe, such as a budget that a row does not fit."""
    try:
        return outlook(with_overrides(recipe, overrides), facts)
    except UsageError:
        return None


def _flags(key: str, value: object) -> Overrides:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return (f"--{key}", text)


def _smaller_divisor(value: int) -> int:
    """The largest divisor below it."""
    return max(n for n in range(1, value) if value % n == 0)


def gigabytes(count: float) -> str:
    """In units of 10^9 bytes."""
    return f"{count / 1e9:.1f} GB"
