"""The whole plan of a run on some hardware: batches, memory, time; nothing is run or loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from postgrad.core.batch import BatchGeometry
from postgrad.models.settings import ModelSettings
from postgrad.plan.activations import FLOAT32
from postgrad.plan.auto import AutoSizes
from postgrad.plan.calibration import Measured, factors, machine_of
from postgrad.plan.efficiency import Efficiency, efficiency_of
from postgrad.plan.hardware import Hardware
from postgrad.plan.lengths import Lengths, longest
from postgrad.plan.memory import Memory, engine_width, memory
from postgrad.plan.roles import Find, PlannedRole, planned_roles
from postgrad.plan.sharing import Sharing
from postgrad.plan.sizes import Sizes, sizes
from postgrad.plan.timing import Machine, Timing, timing
from postgrad.recipe.recipe import Answering, Recipe

FREE = 0.8  # of what is left when weights are loaded: what the engine finds free on a GPU


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a recipe will do on some hardware. advice is made from several of these.

    auto: sizes that the recipe left to the plan, by key; in `recipe` they are numbers. calibrated:
    where its times come from, None where from the hardware table alone.
    """

    recipe: Recipe
    hardware: Hardware
    geometry: BatchGeometry
    roles: tuple[PlannedRole, ...]
    sizes: Sizes
    lengths: Lengths
    memory: Memory
    timing: Timing
    auto: Mapping[str, int] = field(default_factory=dict[str, int])
    calibrated: str | None = None

    @property
    def missing_devices(self) -> int:
        """Devices that the recipe's ranks need and the hardware lacks."""
        return max(0, self.recipe.learner.ranks - self.hardware.count)

    @property
    def fits(self) -> bool:
        """Whether every rank has a device, and the fullest one has room."""
        return self.memory.fits and not self.missing_devices


@dataclass(frozen=True, slots=True)
class Facts:
    """What a plan is made from beside the recipe. lengths: of the training data, if at hand.
    calibration: what runs have shown. rows: of an epoch, where a person says how many there are.
    """

    find: Find
    hardware: Hardware
    lengths: Lengths | None = None
    efficiency: Efficiency | None = None
    calibration: Sequence[Measured] = ()
    shapes: dict[str, Any] = field(default_factory=dict[str, Any])
    rows: int | None = None

    def lengths_of(self, recipe: Recipe) -> Lengths:
        """Of the data, else as long as rows may be; with the rows that a person says."""
        found = self.lengths or longest(recipe)
        return found if self.rows is None else replace(found, rows=self.rows)

    def shape(self, model: ModelSettings) -> Any:
        """`find`, each model once."""
        key = model.model_dump_json(include={"path", "init"})
        if key not in self.shapes:
            self.shapes[key] = self.find(model)
        return self.shapes[key]


def outlook(recipe: Recipe, facts: Facts) -> Outlook:
    """Plans `recipe`, sizes that are "auto" as large as they fit. Raises UsageError where the shape
    of one of its models is not to be had.
    """
    sizes = AutoSizes.largest(recipe, cpu=facts.hardware.device.is_cpu)
    while True:
        found = replace(_outlook(sizes.applied(recipe), facts), auto=sizes.to_json())
        smaller = None if found.memory.fits else sizes.smaller(found.memory.peak)
        if smaller is None:
            return found
        sizes = smaller


def _outlook(recipe: Recipe, facts: Facts) -> Outlook:
    device = facts.hardware.device
    lengths = facts.lengths_of(recipe)
    geometry, sharing = recipe.geometry(lengths.rows), Sharing.of(recipe.learner)
    roles = planned_roles(recipe, facts.shape)
    policy = roles[0]
    b = engine_width(recipe, policy, cpu=device.is_cpu) if isinstance(recipe, Answering) else 0
    before = memory(recipe, roles, Sizes(0, 0, None, 0), sharing, device, lengths).at("load")
    free = int((device.memory_bytes - before - policy.shape.parameters() * b) * FREE)
    found = sizes(
        recipe,
        geometry,
        sharing,
        device=device,
        token_bytes=policy.shape.cache_bytes_per_token(b),
        free_bytes=max(0, free),
    )
    machine = Machine(device, facts.efficiency or efficiency_of(device), sharing)
    shown = factors(facts.calibration, machine_of(recipe, device), recipe.job)
    times = timing(recipe, geometry, roles, found, lengths, machine)
    return Outlook(
        recipe=recipe,
        hardware=facts.hardware,
        geometry=geometry,
        roles=roles,
        sizes=found,
        lengths=lengths,
        memory=memory(recipe, roles, found, sharing, device, lengths),
        timing=times if shown is None else shown.applied(times),
        calibrated=shown and shown.source,
    )


def full_logits_bytes(of: Outlook) -> int:
    """What all logits of a micro-batch would take, forward and backward, in a trainer that makes
    them; 0 for a job that has none.
    """
    policy = of.roles[0]
    if policy.scores:
        return 0
    return 2 * of.sizes.micro_tokens * policy.shape.vocab_size * FLOAT32
