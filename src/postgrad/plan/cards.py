"""Which card has what: groups of cards that hold the same roles, with the memory of each card.

The policy's ranks have the first cards, then roles that have ranks of their own, engines of their
own the last ones.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.plan.engines import EnginePlaces, vllm_share
from postgrad.plan.hardware import Device
from postgrad.plan.held import PHASES, MemoryPhase
from postgrad.plan.lengths import RowLengths
from postgrad.plan.memory import Memory, engine_memory, memory
from postgrad.plan.sizes import PlannedRanks
from postgrad.plan.timing import REWARD, START
from postgrad.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class CardGroup:
    """Cards that hold the same."""

    first: int  # number of the first card
    count: int
    roles: tuple[str, ...]  # "policy", "critic", ...; an engine by EnginePlaces.name
    memory: Memory  # of each card
    trains: bool  # a role on them learns
    samples: bool  # engines work on them
    reads: bool  # a role on them computes columns: logprobs or values
    judges: bool = False  # the reward model of [[rewards]] is on them
    problem: str | None = None  # why a run refuses what is on them

    @property
    def numbers(self) -> str:
        """The cards' numbers: "0-6"."""
        return card_numbers([self])

    def works_in(self, phase: str) -> bool:
        """Whether something on the cards works in a phase of a step."""
        if phase in ("sample", "publish"):
            return self.samples or (phase == "publish" and "policy" in self.roles)
        if phase == REWARD:
            return self.judges
        return self.trains if phase in ("update", START) else self.reads

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
    ranks: Sequence[PlannedRanks],
    device: Device,
    lengths: RowLengths,
    places: EnginePlaces,
) -> tuple[CardGroup, ...]:
    """The cards of a run, in order. ranks: the policy's first."""
    policy, sizes = ranks[0].roles[0], ranks[0].sizes
    share = vllm_share(recipe, policy, device, places, sizes.places)
    problem = places.problem or (
        share and share.problem(recipe.rollout_settings.vllm.memory_fraction, device)  # pyright: ignore[reportOptionalMemberAccess]
    )
    groups, first = list[CardGroup](), 0
    for there, count, engine in _of_ranks(ranks, places):
        kept = memory(recipe, there.roles, there.sizes, there.sharing, device, lengths, engine)
        names = tuple(role.name for role in there.roles) + ((places.name,) if engine else ())
        groups.append(
            CardGroup(
                first,
                count,
                names,
                kept,
                trains=any(role.learner is not None for role in there.roles),
                samples=engine is not None,
                reads=any(not role.judges for role in there.roles),
                judges=any(role.judges for role in there.roles),
                problem=problem if engine else None,
            )
        )
        first += count
    if places.own_cards:
        kept = engine_memory(recipe, policy, sizes, device, lengths, places)
        names, count = (places.name,), places.own_cards
        groups.append(CardGroup(first, count, names, kept, False, True, False, problem=problem))
    return tuple(groups)


def _of_ranks(
    ranks: Sequence[PlannedRanks], places: EnginePlaces
) -> Iterator[tuple[PlannedRanks, int, EnginePlaces | None]]:
    """(ranks, how many of them, an engine that is there too). Only some of the policy's may have an
    engine.
    """
    policy = ranks[0]
    shared = min(places.shared_cards, policy.count)
    if shared:
        yield policy, shared, places
    if policy.count > shared:
        yield policy, policy.count - shared, None
    for there in ranks[1:]:
        yield there, there.count, None


def card_numbers(groups: Iterable[CardGroup]) -> str:
    """The numbers of the groups' cards, in order: "0-3, 6"."""
    stretches = list[list[int]]()
    for group in groups:
        end = group.first + group.count
        if stretches and stretches[-1][1] == group.first:
            stretches[-1][1] = end
        else:
            stretches.append([group.first, end])
    return ", ".join(f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in stretches)


def fullest(groups: Sequence[CardGroup]) -> CardGroup:
    """The group that decides whether a run fits: one that does not, else that with most bytes."""
    return max(groups, key=lambda group: (not group.fits, group.memory.peak_bytes))


def total_bytes(groups: Sequence[CardGroup]) -> dict[MemoryPhase, int]:
    """Bytes of all cards together, by phase."""
    return {phase: sum(g.count * g.memory.at(phase) for g in groups) for phase in PHASES}
