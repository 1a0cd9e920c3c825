"""Checks of the ranks that train: what all roles share, and settings that exclude each other. Each
yields (place, what is wrong).
"""

from collections.abc import Iterator

from postgrad.learner.settings import LearnerSettings
from postgrad.recipe.lines import RecipeProblem
from postgrad.recipe.settings import CommonSections

SHARED = ("ranks", "tensor_parallel", "context_parallel", "shard_groups")  # by all roles


def rank_problems(recipe: CommonSections) -> Iterator[RecipeProblem]:
    """Ranks that roles do not share, and sharding that cannot be done on them."""
    learner = recipe.learner
    for key in SHARED:
        policy_value = getattr(learner, key)
        for place, other in recipe.learner_tables.items():
            if getattr(other, key) != policy_value:
                yield (
                    (*place, key),
                    f"{getattr(other, key)} beside the policy's {policy_value}: all roles share "
                    "ranks: leave it out",
                )
    quantized = any(model.quantize != "none" for model in recipe.trained_models.values())
    if learner.sharding != "none" and quantized:
        yield (
            ("learner", "sharding"),
            f'"{learner.sharding}": weights in four bits cannot be divided over ranks: use '
            '"none", which holds them whole on each',
        )
    yield from _arranged(learner, quantized)
    if learner.ranks > 1 and recipe.cluster.type == "local":
        yield (
            ("learner", "ranks"),
            f"{learner.ranks} ranks need a cluster, on one machine too: --cluster.type ray",
        )
    elif learner.ranks == 1 and learner.sharding != "none":
        yield (
            ("learner", "sharding"),
            f'"{learner.sharding}" divides state over ranks, and there is one: use "none"',
        )


def _arranged(learner: LearnerSettings, quantized: bool) -> Iterator[RecipeProblem]:
    """Tensor parallelism of quantized weights, and groups or offload without sharding."""
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
