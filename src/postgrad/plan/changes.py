"""Changes of a recipe that take less memory, or less time, in the order in which they are tried."""

from collections.abc import Iterator
from typing import Literal

from postgrad.plan.plan import Outlook
from postgrad.recipe.recipe import Recipe

Overrides = tuple[str, ...]
Change = tuple[Overrides, str]  # flags of the command line, and what they do
Stage = Literal["none", "zero1", "zero2", "zero3"]
STAGES: tuple[Stage, ...] = ("none", "zero1", "zero2", "zero3")
FEW = 16  # sequences sampled together: with fewer, decoding only reads weights
ALL = "all devices train"


def smaller(now: Outlook) -> Iterator[Change]:
    """Changes that take less memory, those first that cost least time and change least."""
    recipe = now.recipe
    if now.missing_devices:
        stage = recipe.learner.sharding
        yield ranked(now.hardware.count, stage), "as many ranks as there are devices"
    yield from _smaller_forward(now)
    if not recipe.model.gradient_checkpointing:
        text = "activations are computed again in the backward pass"
        yield flags("model.gradient_checkpointing", True), text
    gathers_cross_host = now.hardware.device.link == "pcie"
    yield from _sharded(now, last="zero2" if gathers_cross_host else "zero3")
    yield from _fewer_places(now, least=FEW)
    if recipe.model.lora is None:
        change = ("--model.lora", "{ rank = 64, alpha = 64 }")
        yield change, "an adapter trains, the model is frozen"
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
    learner, count = recipe.learner, start.hardware.count
    if count > learner.ranks:
        stage = learner.sharding if learner.ranks > 1 else "zero1"
        yield ranked(count, stage), ALL
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
        yield ranked(half, learner.sharding), "fewer devices, which wait less for each other"


def ranked(count: int, stage: str) -> Overrides:
    """Flags for training on `count` ranks, sharded by `stage`."""
    if count == 1:
        return (
            *flags("learner.ranks", 1),
            *flags("learner.sharding", "none"),
            *flags("learner.offload", False),
            *flags("cluster.type", "local"),
        )
    return (
        *flags("learner.ranks", count),
        *flags("cluster.type", "ray"),
        *flags("learner.sharding", stage),
    )


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


def _fewer_places(now: Outlook, least: int) -> Iterator[Change]:
    """Half of the engine's slots and cache, for at least `least` sequences."""
    engine = now.sizes.engine
    if engine is None or engine.slots < 2 * least:
        return
    slots = engine.slots // 2
    tokens = engine.cache_tokens // engine.slots * slots
    change = (*flags("rollout.slots", slots), *flags("rollout.cache_tokens", tokens))
    yield change, "fewer sequences are sampled together"


def _sharded(now: Outlook, last: Stage) -> Iterator[Change]:
    """The next stage of sharding up to `last`, and more ranks where devices are idle."""
    learner, idle = now.recipe.learner, now.hardware.count - now.recipe.learner.ranks
    stage = STAGES.index(learner.sharding)
    if learner.ranks > 1 and stage < STAGES.index(last):
        text = "divides more of the state over the ranks"
        yield flags("learner.sharding", STAGES[stage + 1]), text
    if idle > 0:
        yield ranked(now.hardware.count, learner.sharding if stage else "zero2"), ALL


def _shorter(recipe: Recipe) -> Overrides:
    """Flags for half of data.max_len, and for fewer new tokens where those would not fit in it."""
    half = recipe.data.max_len // 2
    overrides = flags("data.max_len", half)
    rollout = recipe.rollout_settings
    if rollout is not None and rollout.max_new_tokens >= half:
        new = half * rollout.max_new_tokens // recipe.data.max_len
        overrides += flags("rollout.max_new_tokens", max(1, new))
    return overrides


def flags(key: str, value: object) -> Overrides:
    """The flag of a recipe's key as it is typed: ("--model.lora", "...")."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return (f"--{key}", text)
