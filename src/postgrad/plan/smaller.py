"""What to change where a run does not fit: the cheapest first.

Every change was planned as a recipe of its own, so that its effect is that of a plan.
"""

from collections.abc import Iterator, Sequence

from postgrad.core.settings import ShardingStage
from postgrad.plan.change import Advice, Change, advised
from postgrad.plan.engines import VLLMShare, vllm_share
from postgrad.plan.plan import Facts, RunPlan
from postgrad.plan.splits import STAGES, Overrides, best_split, flags, planned, ranked
from postgrad.recipe.recipe import Recipe

FEW = 16  # sequences sampled together: with fewer, decoding only reads weights
ALL = "all devices train"
COUNTS = (2, 4, 8, 16, 32, 64)  # devices to try where those that are there are too few
CHANGES_LEARNING = (
    "--learner.optimizer_state",
    "--model.lora",
    "--model.quantize",
    "--data.max_len",
)
DIVIDES = ("--learner.ranks", "--learner.sharding", "--learner.offload")


def less_memory(start: RunPlan, facts: Facts) -> tuple[Advice, ...]:
    """Changes in order, each on top of those before it, until the run fits; none where it does.
    Where no change helps enough, the last plan does not fit either.
    """
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
            return tuple(_on_more_devices(start, steps, facts))
    return tuple(advised(start, _needed(start, steps, facts), facts))


def smaller(now: RunPlan) -> Iterator[Change]:
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
    sampling = now.memory.peak in ("rollout", "save") and now.places.shared_cards > 0
    if sampling and not recipe.learner.offload and not now.hardware.device.is_cpu:
        text = "the learner leaves the card to the engine while it samples"
        yield flags("learner.offload", "sampling"), text
    yield from _fewer_places(now, least=FEW)
    if recipe.model.gradient_checkpointing is True and not now.hardware.device.is_cpu:
        text = "what layers read is kept in the host's memory"
        yield flags("model.gradient_checkpointing", "offload"), text
    yield from _fewer_bits(recipe)
    yield from _fewer_places(now, least=1)
    if recipe.learner.sharding != "none" and recipe.learner.offload is not True:
        text = "what is divided is kept in the host's memory"
        yield flags("learner.offload", True), text
    if recipe.data.max_len >= 512:
        yield _shorter(recipe), "shorter rows; longer ones are dropped"
    if gathers_cross_host:
        yield from _sharded(now, last="zero3")


def _fewer_ranks(now: RunPlan) -> Iterator[Change]:
    """As many ranks as the engines leave devices, or as there are, with the engines beside them."""
    recipe, count, stage = now.recipe, now.hardware.count, now.recipe.learner.sharding
    count -= sum(recipe.cluster.homes.values())
    left = count - now.places.own_cards
    text = "as many ranks as there are devices"
    if left >= 1:
        yield ranked(recipe, left, stage), text
    if now.places.own_cards and count >= 1:
        place = (*flags("cluster.rollout", "{}"), *flags("cluster.policy.colocate", "rollout"))
        yield (*ranked(recipe, count, stage), *place), f"{text}, which engines share"


def _larger_share(now: RunPlan) -> Iterator[Change]:
    """The least share of a card with which vLLM starts, where the recipe's is too small."""
    rollout, device = now.recipe.rollout_settings, now.hardware.device
    longest = now.sizes.places
    share = vllm_share(now.recipe, now.roles[0], device, now.places, longest)
    if rollout is None or share is None or share.least <= share.share:
        return
    if (fraction := share.least_fraction(device)) <= 1.0:
        yield flags("rollout.vllm.memory_fraction", fraction), "vLLM's share holds its weights"
    for times in (2, 4, 8):
        vllm = rollout.vllm.model_copy(
            update={"tensor_parallel": times * rollout.vllm.tensor_parallel}
        )
        divided = rollout.model_copy(update={"vllm": vllm})
        share = VLLMShare.of(divided, now.roles[0], device, longest)
        if share.least <= share.share:
            overrides = flags("rollout.vllm.tensor_parallel", vllm.tensor_parallel)
            workers = now.recipe.learner.ranks // vllm.devices
            if now.recipe.cluster.policy.colocate and workers:
                overrides = (*overrides, *flags("cluster.rollout.workers", workers))
            yield overrides, "an engine's weights are divided"
            return


def _smaller_forward(now: RunPlan) -> Iterator[Change]:
    """Half of the tokens, or the next divisor of the samples, of one forward pass."""
    recipe, samples = now.recipe, now.recipe.batch.micro_train_batch_size
    least, tokens = (
        recipe.min_micro_tokens,
        now.sizes.micro_tokens * recipe.learner.context_parallel,
    )
    if samples is None and tokens > least:
        tokens = max(least, tokens // 2)
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


def _fewer_places(now: RunPlan, least: int) -> Iterator[Change]:
    """Half of the engine's slots and cache, for at least `least` sequences."""
    engine = now.sizes.engine
    if engine is None or engine.slots < 2 * least:
        return
    slots = engine.slots // 2
    tokens = engine.cache_tokens // engine.slots * slots
    change = (*flags("rollout.slots", slots), *flags("rollout.cache_tokens", tokens))
    yield change, "fewer sequences are sampled together"


def _sharded(now: RunPlan, last: ShardingStage) -> Iterator[Change]:
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


def _better(tried: RunPlan, now: RunPlan) -> bool:
    """Whether a change leaves fewer devices missing, or fewer cards that refuse what is on them, or
    else takes less memory on a device.
    """

    def misses(of: RunPlan) -> tuple[int, int, int]:
        refused = sum(group.problem is not None for group in of.cards)
        return of.missing_devices, refused, of.memory.peak_bytes

    return misses(tried) < misses(now)


def _on_more_devices(start: RunPlan, steps: Sequence[Change], facts: Facts) -> Iterator[Advice]:
    """The fewest devices of this kind on which the run fits: with those steps that do not change
    what is learned, else with all steps. Where no number of devices is enough, the steps alone.
    """
    others = [step for step in steps if not step[0][0].startswith(DIVIDES)]
    lossless = [step for step in others if not step[0][0].startswith(CHANGES_LEARNING)]
    for chosen in (lossless, others):
        changes = list(advised(start, chosen, facts))
        now = changes[-1].after if changes else start
        for count in COUNTS:
            if count <= start.hardware.count:
                continue
            best = best_split(now.recipe, count, facts, ("zero2", "zero3"))
            if best is not None:
                yield from changes
                yield Advice(best.overrides, "more devices", now, best.plan)
                return
    yield from advised(start, steps, facts)


def _needed(start: RunPlan, steps: list[Change], facts: Facts) -> list[Change]:
    """The steps without those that a later one made superfluous; costly ones are left out first."""
    for step in reversed(steps[:-1]):
        rest = [other for other in steps if other is not step]
        tried = planned(start.recipe, tuple(flag for flags, _ in rest for flag in flags), facts)
        if tried is not None and tried.fits:
            steps = rest
    return steps
