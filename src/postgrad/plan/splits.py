"""Ways to give a number of cards to learner and engines, as flags of a recipe, and the best one."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from postgrad.cluster.settings import PolicyPlacement
from postgrad.core.errors import UsageError
from postgrad.core.settings import ShardingStage
from postgrad.plan.engines import FULLEST, HALF
from postgrad.plan.hardware import Hardware
from postgrad.plan.plan import Facts, RunPlan, make_plan
from postgrad.recipe.load import with_overrides
from postgrad.recipe.recipe import Recipe

Overrides = tuple[str, ...]
STAGES: tuple[ShardingStage, ...] = ("none", "zero1", "zero2", "zero3")
FRACTIONS = (FULLEST, 0.8, 0.7, 0.6, HALF)  # of a card, for vLLM
FINE = 16  # up to so many cards each number of engines is tried, beyond it every sixteenth


def flags(key: str, value: object) -> Overrides:
    """The flag of a recipe's key as it is typed: ("--model.lora", "...")."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return (f"--{key}", text)


def engine_place(recipe: Recipe) -> Overrides:
    """Flags that give the rollout engine a place on GPUs behind Ray, where the recipe states none:
    on those of the ranks, or its own where one rank's GPU is not enough.
    """
    if not _samples(recipe) or recipe.cluster.engines(1):
        return ()
    if cards_of_worker(recipe) > 1:
        return flags("cluster.rollout.workers", 1)
    return flags("cluster.policy.colocate", "rollout")


def ranked(recipe: Recipe, count: int, stage: str) -> Overrides:
    """Flags for training on `count` ranks, sharded by `stage`; engines stay where they are."""
    if count == 1 and not recipe.cluster.rollout and not recipe.cluster.homes:
        return (
            *flags("learner.ranks", 1),
            *flags("learner.sharding", "none"),
            *(() if recipe.learner.offload == "sampling" else flags("learner.offload", False)),
            *flags("cluster.type", "local"),
            *(flags("cluster.policy", "{}") if _places_policy(recipe) else ()),
        )
    gpus = recipe.cluster.policy.gpus
    return (
        *_learner(recipe, count, stage),
        *(flags("cluster.policy.gpus", count) if gpus else ()),
        *engine_place(recipe),
    )


def _learner(recipe: Recipe, count: int, stage: str) -> Overrides:
    alone = count == 1
    return (
        *flags("learner.ranks", count),
        *flags("cluster.type", "ray"),
        *flags("learner.sharding", "none" if alone else stage),
        *(flags("learner.offload", False) if alone and recipe.learner.offload is True else ()),
    )


def _places_policy(recipe: Recipe) -> bool:
    return recipe.cluster.policy != PolicyPlacement()


def _samples(recipe: Recipe) -> bool:
    """Whether the run has engines of its own that need cards."""
    rollout = recipe.rollout_settings
    return rollout is not None and recipe.samples_answers and rollout.type != "openai"


def vllm_ways(recipe: Recipe) -> Iterator[Overrides]:
    """Flags that sample with vLLM in place of the built-in engine, with the largest share of a card
    first; none where vLLM, or sizes of the built-in engine, are stated.
    """
    rollout = recipe.rollout_settings
    if rollout is None or rollout.type != "local" or not recipe.trains_on_rollouts:
        return
    if rollout.cache_tokens is None and rollout.slots is None:
        for share in FRACTIONS:
            chosen = flags("rollout.vllm.memory_fraction", share)
            yield (*flags("rollout.type", "vllm"), *chosen)


def cards_of_worker(recipe: Recipe) -> int:
    """Cards that one rollout worker needs."""
    rollout = recipe.rollout_settings
    if rollout is None or rollout.type != "vllm":
        return 1
    return rollout.vllm.devices


def arrangements(recipe: Recipe, count: int, stage: str) -> Iterator[Overrides]:
    """Flags of each way to use `count` cards: all for ranks whose cards engines share, then more
    and more cards for engines alone. A recipe without engines has one way. Roles that have cards of
    their own keep them.
    """
    beside = sum(recipe.cluster.homes.values())
    count -= beside
    if count < 1:
        return
    if not recipe.trains_on_rollouts or not _samples(recipe):
        yield ranked(recipe, count, stage)
        return
    each = cards_of_worker(recipe)
    if count == 1 and not beside and each == 1:
        yield ranked(recipe, 1, stage)
    elif count % each == 0:
        yield _shared(recipe, count, stage)
    step = max(1, count // (FINE * each))
    for workers in range(step, (count - 1) // each + 1, step):
        yield _apart(recipe, count - workers * each, workers, stage)


def _shared(recipe: Recipe, count: int, stage: str) -> Overrides:
    """Flags for engines on the cards of `count` ranks."""
    each = cards_of_worker(recipe)
    workers = f"{{ workers = {count // each} }}" if each > 1 else "{}"
    return (
        *_learner(recipe, count, stage),
        *(flags("cluster.policy", "{}") if _places_policy(recipe) else ()),
        *flags("cluster.policy.colocate", "rollout"),
        *(flags("cluster.rollout", workers) if recipe.cluster.rollout or each > 1 else ()),
        *_share(recipe, most=HALF),
    )


def _apart(recipe: Recipe, ranks: int, workers: int, stage: str) -> Overrides:
    """Flags for `workers` rollout workers with cards of their own, which vLLM then fills."""
    return (
        *_learner(recipe, ranks, stage),
        *(flags("cluster.policy", "{}") if _places_policy(recipe) else ()),
        *flags("cluster.rollout", f"{{ workers = {workers} }}"),
        # which is of no use to engines elsewhere
        *(flags("learner.offload", False) if recipe.learner.offload == "sampling" else ()),
        *_share(recipe, least=FULLEST),
    )


def _share(recipe: Recipe, least: float = 0.0, most: float = 1.0) -> Overrides:
    """Flags that bring vLLM's share of a card between two bounds; none where it is there."""
    rollout = recipe.rollout_settings
    if rollout is None or rollout.type != "vllm" or rollout.cache_tokens is not None:
        return ()
    stated = rollout.vllm.memory_fraction
    bounded = min(max(stated, least), most)
    return () if bounded == stated else flags("rollout.vllm.memory_fraction", bounded)


@dataclass(frozen=True, slots=True)
class Split:
    """A way to give cards to learner and engines, and its plan."""

    overrides: Overrides
    plan: RunPlan

    @property
    def engines(self) -> str:
        """The engines and where they are, for people."""
        places = self.plan.places
        where = "on the same" if places.shared_cards else f"on {places.own_cards}"
        return f"{places.name}, {where}" if places.engines else ""

    def to_json(self) -> dict[str, Any]:
        """Its entry in the output of --json."""
        timing = self.plan.timing
        return {
            "overrides": shlex.join(self.overrides),
            "flags": list(self.overrides),
            "learner_devices": self.plan.recipe.learner.ranks,
            "engine_devices": self.plan.places.own_cards,
            "sharding": self.plan.recipe.learner.sharding,
            "peak_bytes": self.plan.memory.peak_bytes,
            "step_seconds": timing.step_seconds,
            "hours": timing.hours,
        }


def planned(recipe: Recipe, overrides: Overrides, facts: Facts) -> RunPlan | None:
    """The plan of a changed recipe; None where that is no valid recipe."""
    try:
        return make_plan(with_overrides(recipe, overrides), facts)
    except UsageError:  # batches that do not divide into so many ranks, for one
        return None


def fitting_splits(
    recipe: Recipe, count: int, facts: Facts, stages: Sequence[ShardingStage] = STAGES[1:]
) -> list[Split]:
    """All arrangements of `count` cards that fit, the fastest first: each with the first of
    `stages` that is enough for it.
    """
    there = replace(facts, hardware=Hardware(count=count, device=facts.hardware.device))
    splits: dict[tuple[int, int], Split] = {}
    for stage in stages:
        for overrides in arrangements(recipe, count, stage):
            after = planned(recipe, overrides, there)
            if after is None or not after.fits:
                continue
            key = after.recipe.learner.ranks, after.places.own_cards
            splits.setdefault(key, Split(overrides, after))
    return sorted(splits.values(), key=lambda split: split.plan.timing.step_seconds)


def best_split(
    recipe: Recipe, count: int, facts: Facts, stages: Sequence[ShardingStage] = STAGES[1:]
) -> Split | None:
    """The fastest arrangement of `count` cards with the first of `stages` with which any fits."""
    for stage in stages:
        if splits := fitting_splits(recipe, count, facts, (stage,)):
            return splits[0]
    return None
