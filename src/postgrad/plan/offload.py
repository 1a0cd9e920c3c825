"""What learners leave to an engine that samples on their cards (`learner.offload = "sampling"`): by
purpose of the lines of `plan.held`, in bytes and in seconds of copies.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from postgrad.plan.activations import FLOAT32
from postgrad.plan.engines import EnginePlaces, engine_width
from postgrad.plan.held import MemoryLine, MemoryPhase, held
from postgrad.plan.reserved import VLLM
from postgrad.plan.roles import PlannedRole
from postgrad.plan.sizes import Sharing, width
from postgrad.recipe.recipe import Recipe

STATE = frozenset({"optimizer", "moving average"})  # what only an update reads
MASTERS = frozenset({"master weights"})  # what an update and a publish read
COMPUTING = frozenset({"weights", "adapter", "trained copies"})  # what a forward pass reads too
CACHE = "key-value cache"


class CopyCosts(Protocol):
    """The learner's cards, and seconds of copies between one and its host's memory."""

    @property
    def sharing(self) -> Sharing: ...

    def copies(self, count: float) -> float:
        """Of `count` bytes, one way."""
        ...


def offloaded_purposes(
    recipe: Recipe, role: PlannedRole, places: EnginePlaces | None
) -> frozenset[str]:
    """Purposes of the role's lines that leave its card while an engine samples there; none: all
    stay. places: of an engine that works on the card too.
    """
    asked = role.learner is not None and role.learner.offload == "sampling"
    if places is None or not places.shared_cards or not asked:
        return frozenset()
    rollout = recipe.rollout_settings
    if rollout is None or role.name != "policy" or places.apart:
        return STATE | MASTERS | COMPUTING
    reads_masters = engine_width(rollout, role, cpu=False) == FLOAT32  # LocalFleet.free_memory
    return STATE if reads_masters else STATE | MASTERS


def offloaded_lines(
    lines: Sequence[MemoryLine], purposes: frozenset[str], *, asked: bool
) -> Iterator[MemoryLine]:
    """The lines of a role whose `purposes` leave its card. asked: another role computes with its
    weights while samples are drawn.
    """
    computing: tuple[MemoryPhase, ...] = ("load", "score", "update")
    for line in lines:
        if line.purpose not in purposes:
            yield line
            continue
        phases: tuple[MemoryPhase, ...] = ("load", "update")
        if line.purpose in COMPUTING:
            phases = (*computing, "rollout") if asked else computing
        yield replace(line, bytes={p: line.bytes[p] for p in phases if p in line.bytes})


def publishing(lines: Sequence[MemoryLine], purposes: frozenset[str], weights: int) -> MemoryLine:
    """What the policy has on its card until its weights are published, beyond what the engine takes
    there for its cache afterwards. lines: of the role as it works, and of the engine. weights: of a
    vLLM engine, which are there before its cache.
    """
    gone = purposes - STATE
    left = sum(
        line.bytes.get("update", 0)
        for line in lines
        if line.role == "policy" and line.purpose in gone
    )
    later = 0
    for line in lines:
        if line.purpose == CACHE:
            later += line.bytes.get("save", 0)
        elif line.purpose == VLLM:
            later += max(0, line.bytes.get("save", 0) - weights)
    return MemoryLine("policy", "weights until they are published", {"save": max(0, left - later)})


@dataclass(frozen=True, slots=True)
class HostShare:
    """What the learners on a rank have in the host's memory while an engine samples."""

    bytes: int = 0
    seconds: float = 0.0  # of the copies of a step, both ways; frozen weights go one way

    def added_to(self, step: Mapping[str, float]) -> dict[str, float]:
        """Seconds of a step by phase with the copies: to the host in the publish, back before an
        update. Without a publish in it there are none.
        """
        half = self.seconds / 2 if "publish" in step else 0.0
        copied = ("publish", "update")
        return {name: value + half * (name in copied) for name, value in step.items()}

    @property
    def note(self) -> str:
        """For people: the memory and the time."""
        return (
            f'learner.offload = "sampling": {self.bytes / 1e9:.1f} GB of each rank are in the '
            "host's memory while the engine samples (pinned, for which torch takes up to twice as "
            f"much); the copies take {self.seconds:.2f} s for each publish"
        )


def host_share(
    recipe: Recipe, roles: Sequence[PlannedRole], costs: CopyCosts, places: EnginePlaces
) -> HostShare:
    """Of all learners on the policy's ranks together."""
    total = copied = 0
    for role, line in _offloaded(recipe, roles, costs.sharing, places):
        size = max(line.bytes.values())
        total += size
        copied += size if line.purpose == "weights" and role.model.lora is not None else 2 * size
    return HostShare(total, costs.copies(copied))


def offloaded_at_start(
    recipe: Recipe, roles: Sequence[PlannedRole], sharing: Sharing, places: EnginePlaces
) -> int:
    """Bytes that learners have loaded on a GPU and left before the engine starts there."""
    lines = (line for _, line in _offloaded(recipe, roles, sharing, places))
    return sum(line.bytes.get("load", 0) for line in lines)


def _offloaded(
    recipe: Recipe, roles: Sequence[PlannedRole], sharing: Sharing, places: EnginePlaces
) -> Iterator[tuple[PlannedRole, MemoryLine]]:
    for role in roles:
        purposes = offloaded_purposes(recipe, role, places)
        for line in held(role, width(role.model.dtype, cpu=False), sharing, cpu=False):
            if line.purpose in purposes:
                yield role, line
