"""Which card has what: groups of cards that hold the same roles, with the memory of each card.

The learner's ranks have the first cards, engines of their own the last ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.plan.engines import EnginePlaces, vllm_share
from postgrad.plan.hardware import Device
from postgrad.plan.held import PHASES, MemoryPhase
from postgrad.plan.lengths import RowLengths
from postgrad.plan.memory import Memory, engine_memory, memory
from postgrad.plan.roles import PlannedRole
from postgrad.plan.sizes import Sharing, Sizes
from postgrad.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class CardGroup:
    """Cards that hold the same."""

    first: int  # number of the first card
    count: int
    roles: tuple[str, ...]  # "policy", "critic", ...; an engine by EnginePlaces.name
    memory: Memory  # of each card
    trains: bool  # ranks of a learner work on them
    samples: bool  # engines work on them
    problem: str | None = None  # why a run refuses what is on them

    @property
    def numbers(self) -> str:
        """The cards' numbers: "0-6"."""
        last = self.first + self.count - 1
        return f"{self.first}-{last}" if self.count > 1 else str(self.first)

    @property
    def fits(self) -> bool:
        """Whether each card has room, and what is on it can start."""
        return self.memory.fits and self.problem is None

    @property
    def lacks(self) -> str | None:
        """Why it does not fit, with the numbers of the cards; None where it does."""
        if self.fits:
            return None
        name = f"card{'s' if self.count > 1 else ''} {self.numbers} ({', '.join(self.roles)})"
        if self.problem is not None:
            return f"{name}: {self.problem}"
        each = " each" if self.count > 1 else ""
        return (
            f"{name}: {self.memory.peak_bytes / 1e9:.1f} GB of {self.memory.capacity / 1e9:.1f}"
            f"{each} at the peak ({self.memory.peak})"
        )

    def to_json(self) -> dict[str, Any]:
        """Its entry in the output of --json: bytes of each card."""
        return {
            "cards": self.numbers,
            "count": self.count,
            "roles": list(self.roles),
            "phases": {phase: self.memory.at(phase) for phase in PHASES},
            "peak_phase": self.memory.peak,
            "peak_bytes": self.memory.peak_bytes,
            "capacity_bytes": self.memory.capacity,
            "fits": self.fits,
            "problem": self.lacks,
        }


def card_groups(
    recipe: Recipe,
    roles: Sequence[PlannedRole],
    sizes: Sizes,
    sharing: Sharing,
    device: Device,
    lengths: RowLengths,
    places: EnginePlaces,
) -> tuple[CardGroup, ...]:
    """The cards of a run, in order."""
    policy = roles[0]
    share = vllm_share(recipe, policy, device, places, sizes.places)
    problem = places.problem or (
        share and share.problem(recipe.rollout_settings.vllm.memory_fraction, device)  # pyright: ignore[reportOptionalMemberAccess]
    )
    groups, first = list[CardGroup](), 0
    for count, on_them, engine in _of_learners(recipe, roles, places):
        kept = memory(recipe, on_them, sizes, sharing, device, lengths, engine)
        names = tuple(role.name for role in on_them) + ((places.name,) if engine else ())
        refused = problem if engine else None
        groups.append(CardGroup(first, count, names, kept, True, bool(engine), refused))
        first += count
    if places.own_cards:
        kept = engine_memory(recipe, policy, sizes, device, lengths, places)
        names = (places.name,)
        groups.append(CardGroup(first, places.own_cards, names, kept, False, True, problem))
    return tuple(groups)


def _of_learners(
    recipe: Recipe, roles: Sequence[PlannedRole], places: EnginePlaces
) -> Iterator[tuple[int, Sequence[PlannedRole], EnginePlaces | None]]:
    """(number of cards, the roles on each, an engine that is there too) of the cards of ranks.

    All roles are on all ranks, and only some of the ranks may have an engine. Roles on cards of
    their own would be further entries.
    """
    ranks = recipe.learner.ranks
    shared = min(places.shared_cards, ranks)
    if shared:
        yield shared, roles, places
    if ranks > shared:
        yield ranks - shared, roles, None


def fullest(groups: Sequence[CardGroup]) -> CardGroup:
    """The group that decides whether a run fits: one that does not, else that with most bytes."""
    return max(groups, key=lambda group: (not group.fits, group.memory.peak_bytes))


def total_bytes(groups: Sequence[CardGroup]) -> dict[MemoryPhase, int]:
    """Bytes of all cards together, by phase."""
    return {phase: sum(g.count * g.memory.at(phase) for g in groups) for phase in PHASES}
