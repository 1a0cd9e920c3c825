"""What a recipe says of the learner's ranks: what all roles share, and what cannot be together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from postgrad.learner.settings import LearnerSettings

if TYPE_CHECKING:
    from postgrad.recipe.recipe import Recipe

Problem = tuple[tuple[str | int, ...], str]
SHARED = ("ranks", "tensor_parallel", "context_parallel", "shard_groups")  # by all roles


def problems(recipe: Recipe) -> Iterator[Problem]:
    """What a recipe says of ranks that cannot be."""
    ranks = recipe.learner.ranks
    critic = getattr(recipe, "critic", None)
    for key in SHARED:
        mine = getattr(recipe.learner, key)
        other = mine if critic is None else getattr(critic.learner, key)
        if other != mine:
            yield (
                ("critic", "learner", key),
                f"{other} beside the policy's {mine}: all roles share ranks: leave it out",
            )
    four = [recipe.model, *([critic.model] if critic is not None else [])]
    if recipe.learner.sharding != "none" and any(one.quantize != "none" for one in four):
        yield (
            ("learner", "sharding"),
            f'"{recipe.learner.sharding}": weights in four bits cannot be divided over ranks: use '
            '"none", which holds them whole on each',
        )
    yield from _arranged(recipe.learner, any(one.quantize != "none" for one in four))
    if ranks > 1 and recipe.cluster.type == "local":
        yield (
            ("learner", "ranks"),
            f"{ranks} ranks need a cluster, on one machine too: --cluster.type ray",
        )
    elif ranks == 1 and recipe.learner.sharding != "none":
        yield (
            ("learner", "sharding"),
            f'"{recipe.learner.sharding}" divides state over ranks, and there is one: use "none"',
        )


def _arranged(learner: LearnerSettings, quantized: bool) -> Iterator[Problem]:
    """What tensor parallelism, groups and offload ask of the rest."""
    each = learner.tensor_parallel * learner.context_parallel
    if learner.tensor_parallel > 1 and quantized:
        yield (
            ("learner", "tensor_parallel"),
            f"{learner.tensor_parallel}: matrices in four bits cannot be cut: use 1",
        )
    if learner.shard_groups > 1 and learner.ranks % each == 0:
        groups, replicas = learner.shard_groups, learner.ranks // each
        if replicas % groups:
            yield (
                ("learner", "shard_groups"),
                f"{groups} groups of equally many replicas cannot be made of {replicas} "
                "(ranks / (tensor_parallel * context_parallel)): it has to divide that number",
            )
    for key in ("shard_groups", "offload"):
        value = getattr(learner, key)
        if learner.sharding == "none" and value != type(learner).model_fields[key].default:
            yield (
                ("learner", key),
                f"{str(value).lower()} is about state that is divided over ranks: set sharding to "
                '"zero1", "zero2" or "zero3" (docs/distributed.md)',
            )
