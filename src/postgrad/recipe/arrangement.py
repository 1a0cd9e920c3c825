"""Checks of how the learner's ranks divide state, matrices and experts. Each yields (place, what is
wrong).
"""

from collections.abc import Iterable, Iterator

from postgrad.learner.settings import LearnerSettings
from postgrad.models.settings import EXPERTS, LoraSettings
from postgrad.recipe.lines import RecipeProblem
from postgrad.recipe.settings import CommonSections

SHARED = (  # by all roles
    "ranks", "tensor_parallel", "context_parallel", "expert_parallel", "shard_groups",
)  # fmt: skip


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
    for place, table in recipe.learner_tables.items():
        if table.offload != "sampling":
            continue
        if (why := _never_rests(recipe)) is not None:
            yield (*place, "offload"), f'"sampling": {why}: leave it out'
    if learner.expert_parallel > 1:
        targets = [t for m in recipe.trained_models.values() if m.lora for t in m.lora.targets]
        yield from _sharing_experts(learner, quantized, targets)
    if learner.tensor_parallel > 1:
        adapters = [m.lora for m in recipe.trained_models.values() if m.lora is not None]
        yield from _cut_adapters(adapters, learner.tensor_parallel)
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


def _never_rests(recipe: CommonSections) -> str | None:
    """Why a learner has no engine beside it to leave its GPU to; None where it may have one."""
    if not recipe.samples_answers:
        return "this job samples nothing, so that no engine waits for the memory"
    cluster = recipe.cluster
    apart = cluster.type != "local" and cluster.policy.colocate is None
    if apart and cluster.engines(recipe.learner.ranks):
        return (
            "the rollout engines have GPUs of their own (cluster.rollout), and no use for the "
            "memory of the learner's"
        )
    return None


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
                f"{groups} groups of equally many replicas cannot be formed from {replicas} "
                "(ranks / (tensor_parallel * context_parallel)): it has to divide that number",
            )
    way = 'set sharding to "zero1", "zero2" or "zero3" (docs/distributed.md)'
    if learner.ranks == 1:
        way = "with one rank leave it out"
    for key, default in (("shard_groups", 1), ("offload", False)):
        value = getattr(learner, key)
        if learner.sharding == "none" and value not in (default, "sampling"):
            yield (
                ("learner", key),
                f"{str(value).lower()} is about state that is divided over ranks: {way}",
            )


def _cut_adapters(adapters: Iterable[LoraSettings], size: int) -> Iterator[RecipeProblem]:
    """Adapters that tensor parallelism cannot cut."""
    place = ("learner", "tensor_parallel")
    for lora in adapters:
        if lora.dora:
            yield (
                place,
                f"{size}: DoRA needs the lengths of whole rows, which this would cut: use 1, or "
                "model.lora.dora = false",
            )
            return
        if lora.keeps_start:
            yield (
                place,
                f'{size}: what an adapter of PiSSA begins with (init = "{lora.init}") is kept '
                'whole on every rank: use 1, or model.lora.init = "kaiming"',
            )
            return


def _sharing_experts(
    learner: LearnerSettings, quantized: bool, targets: Iterable[str]
) -> Iterator[RecipeProblem]:
    """What expert parallelism does not go with. That the policy is a mixture whose experts divide
    is seen when its config is read. targets: of the adapters of all roles.
    """
    place, size = ("learner", "expert_parallel"), learner.expert_parallel
    if quantized:
        yield (
            place,
            f"{size}: experts beside weights in four bits are not divided: use 1, or "
            'model.quantize = "none"',
        )
    if adapted := next((target for target in targets if EXPERTS in target.split(".")), None):
        yield (
            place,
            f"{size}: the adapter of experts that model.lora.targets names ({adapted!r}) is not "
            "divided: use 1, or other targets",
        )
    each = size * learner.shard_groups
    if learner.ranks % each:
        groups = " * shard_groups" if learner.shard_groups > 1 else ""
        yield (
            place,
            f"{size}: {learner.ranks} ranks do not divide into groups of {each} (expert_parallel"
            f"{groups}), each with all experts: use a multiple of {each} for learner.ranks",
        )
