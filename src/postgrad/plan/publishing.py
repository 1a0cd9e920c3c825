"""What a publish takes: bytes that each engine gets, seconds, and memory on the learner's cards."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, Protocol

from postgrad.plan.activations import FLOAT32
from postgrad.plan.adapters import adapter_parameters, alike, merged_sizes
from postgrad.plan.engines import EnginePlaces, engine_width, shares_weights
from postgrad.plan.exchange import lacking
from postgrad.plan.hardware import Device
from postgrad.plan.held import MemoryLine
from postgrad.plan.roles import PlannedRole
from postgrad.plan.sizes import Sharing, width
from postgrad.recipe.recipe import RLRecipe, SFTRecipe

# How often each byte of a payload moves to or from memory at either end, which work at once: it is
# packed or loaded (read and written), and its checksum reads it twice.
PASSES = 4


class LearnerCosts(Protocol):
    """Seconds of work on the learner's cards."""

    @property
    def device(self) -> Device: ...
    @property
    def sharing(self) -> Sharing: ...

    def reads(self, count: float) -> float:
        """Of `count` bytes that a card reads or writes."""
        ...

    def sends(self, count: float) -> float:
        """Of `count` bytes that every rank sends over its link."""
        ...

    def sends_to_one(self, count: float) -> float:
        """Of `count` bytes that a card sends to one other."""
        ...

    def copies(self, count: float) -> float:
        """Of `count` bytes between a card and its host's memory."""
        ...


def publish_bytes(recipe: RLRecipe | SFTRecipe, policy: PlannedRole, *, cpu: bool) -> int:
    """Bytes that each engine gets: whole weights in its dtype, or the adapter in float32."""
    lora = policy.model.lora
    if recipe.rollout.sends_adapter and lora is not None:
        return adapter_parameters(policy.shape, lora) * FLOAT32
    return policy.shape.parameters() * engine_width(recipe.rollout, policy, cpu=cpu)


PlannedWay = Literal["none", "copy", "ipc", "nccl", "memory"]


@dataclass(frozen=True, slots=True)
class PlannedPublish:
    """The way of the policy's weights to the engines, and what it takes."""

    # "none": the engine reads the learner's weights; "copy": it is in the learner's process;
    # "ipc": within a card; "nccl": over the cards' link; "memory": through the host's memory.
    way: PlannedWay = "none"
    size: int = 0  # bytes that each engine gets
    seconds: float = 0.0  # from the first parcel to the commit of all engines
    host_seconds: float = 0.0  # the same through the host's memory, where a run may fall back to it

    def to_json(self) -> dict[str, Any]:
        """The value of "publish" in plan.json."""
        return {
            "way": self.way,
            "bytes": self.size,
            "seconds": round(self.seconds, 6),
            "host_memory_seconds": round(self.host_seconds, 6),
        }


def planned_publish(
    recipe: RLRecipe | SFTRecipe, policy: PlannedRole, costs: LearnerCosts, places: EnginePlaces
) -> PlannedPublish:
    """How weights go to the engines after a step.

    Ranks gather what is divided, in the dtype in which it lies. Then payloads go by the fastest way
    that the cards have (rollout.transport.route.choose; a plan knows no versions): within a card
    that both share, over the cards' link, or through the host's memory, for an adapter too. The
    ranks share out the engines.
    """
    cpu, sharing, lora = costs.device.is_cpu, costs.sharing, policy.model.lora
    if not places.engines or shares_weights(recipe, policy, cpu=cpu):
        return PlannedPublish()
    size = publish_bytes(recipe, policy, cpu=cpu)
    in_file = lora is not None and recipe.rollout.sends_adapter
    count = adapter_parameters(policy.shape, lora) if in_file and lora else policy.parameters
    each = FLOAT32 if lora is None or in_file else width(policy.model.dtype, cpu=cpu)
    divided = sharing.divided if lora is None or in_file or sharing.gathers else 1
    gathers = count * (1 - 1 / (divided * sharing.tensor))
    if divided * sharing.tensor == 1:
        gathers = lacking(policy, sharing)
    seconds = costs.sends(gathers * each)
    if not places.apart:
        return PlannedPublish("copy", size, seconds + costs.reads(2 * size))
    workers = recipe.cluster.engines(recipe.learner.ranks)
    senders = min(places.engines, recipe.learner.ranks if workers else 1)
    in_turn = ceil(places.engines / senders)  # engines of the rank that has most
    seconds += costs.reads(PASSES * size)
    if cpu:
        return PlannedPublish("memory", size, seconds, seconds)
    by_host = seconds + costs.copies(size) + costs.copies(size * in_turn)
    transport = recipe.rollout.transport
    on_one = places.shared_cards > 0 and places.own_cards > 0  # of its cards the learner has one
    if in_file or on_one or transport == "memory":
        return PlannedPublish("memory", size, by_host, by_host)
    if places.shared_cards and transport != "broadcast":
        return PlannedPublish("ipc", size, seconds, by_host)
    return PlannedPublish("nccl", size, seconds + costs.sends_to_one(size * in_turn), by_host)


def publish_lines(
    policy: PlannedRole, sharing: Sharing, b: int, *, sampled: bool
) -> Iterator[MemoryLine]:
    """What a weight takes on its way to the engine: where it is divided, the parts of all ranks and
    the weight that they make (parallel.sharding.whole_tensor); with an adapter, a matrix and its
    product of A and B in float32.
    """
    if not sampled:
        return
    shape, count = policy.shape, 0
    largest = shape.largest_parameters
    each = FLOAT32 if policy.model.lora is None else b
    if (parts := max(sharing.divided, sharing.tensor, sharing.expert)) > 1:
        count = int(largest * each * (2 + 1 / parts))
    if policy.model.lora is not None:
        lora = policy.model.lora
        matrices = [size for n in alike(shape, lora) for size in merged_sizes(shape, lora, n)]
        count = max(count, 2 * FLOAT32 * max(matrices, default=0))
    yield MemoryLine("run", "weights on their way to the engine", {"save": count})
