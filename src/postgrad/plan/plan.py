"""The plan of a run on some hardware: batches, memory and time. Nothing is run or loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from postgrad.core.batch import BatchGeometry
from postgrad.models.settings import ModelSettings
from postgrad.plan.activations import FLOAT32
from postgrad.plan.auto import AutoSizes
from postgrad.plan.calibration import Measured, factors, machine_of
from postgrad.plan.hardware import Efficiency, Hardware, efficiency_of
from postgrad.plan.held import MemoryPhase
from postgrad.plan.lengths import RowLengths, longest
from postgrad.plan.memory import Memory, engine_width, memory, shares_weights
from postgrad.plan.roles import Find, PlannedRole, planned_roles
from postgrad.plan.sizes import Sharing, Sizes, sizes
from postgrad.plan.timing import CostModel, Timing, timing
from postgrad.recipe.recipe import Recipe

FREE = 0.8  # the share of a GPU's memory, beside loaded weights, that the engine finds free

# By job: a run's phases and parts of phases, and which phases of the plan each consists of.
_SUPERVISED = {"train": ("update",)}
PHASE_OF: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "rl": {
        "sample": ("sample",),
        "train": ("score", "update"),
        "train/columns": ("score",),
        "train/update": ("update",),
    },
    "sft": _SUPERVISED,
    "reward": _SUPERVISED,
    "preference": _SUPERVISED,
}
MEMORY_OF: Mapping[str, tuple[MemoryPhase, ...]] = {
    "load": ("load",),
    "sample": ("rollout",),
    "train/columns": ("score",),
    "train/update": ("update",),
    "train": ("score", "update"),
    "save": ("save",),
}


@dataclass(frozen=True, slots=True)
class Outlook:
    """The plan of a recipe on some hardware. Advice compares several of these."""

    recipe: Recipe  # sizes that it left to the plan ("auto") are numbers here
    hardware: Hardware
    geometry: BatchGeometry
    roles: tuple[PlannedRole, ...]  # the one that the job trains first
    sizes: Sizes
    lengths: RowLengths  # mean lengths of the training data
    memory: Memory
    timing: Timing
    # Sizes that the recipe left to the plan, by key: {"batch.micro_train_tokens": 8192}.
    auto: Mapping[str, int] = field(default_factory=dict[str, int])
    calibrated: str | None = None  # which runs corrected its times; None: the table's alone

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
    """What a plan is computed from beside the recipe."""

    find: Find  # the shape of a model
    hardware: Hardware
    lengths: RowLengths | None = None  # of the training data; None: it is not on this machine
    efficiency: Efficiency | None = None  # None: the guess for the device
    calibration: Sequence[Measured] = ()  # what runs have measured
    shapes: dict[str, Any] = field(default_factory=dict[str, Any])  # a cache of `shape`
    rows: int | None = None  # of an epoch, in place of the counted ones (--rows)

    def lengths_of(self, recipe: Recipe) -> RowLengths:
        """Lengths of the data, else as long as rows may be; with `rows` where that is given."""
        lengths = self.lengths or longest(recipe)
        return lengths if self.rows is None else replace(lengths, rows=self.rows)

    def shape(self, model: ModelSettings) -> Any:
        """The ModelShape that `find` gives, which is called once for each model."""
        key = model.model_dump_json(include={"path", "init"})
        if key not in self.shapes:
            self.shapes[key] = self.find(model)
        return self.shapes[key]


def outlook(recipe: Recipe, facts: Facts) -> Outlook:
    """Plans a recipe. Sizes that are "auto" become the largest that fit. Raises UsageError where
    the shape of one of its models cannot be found.
    """
    auto = AutoSizes.largest(recipe, cpu=facts.hardware.device.is_cpu)
    while True:
        planned = replace(_outlook(auto.applied(recipe), facts), auto=auto.to_json())
        smaller = None if planned.memory.fits else auto.smaller(planned.memory.peak)
        if smaller is None:
            return planned
        auto = smaller


def _outlook(recipe: Recipe, facts: Facts) -> Outlook:
    device = facts.hardware.device
    lengths = facts.lengths_of(recipe)
    geometry, sharing = recipe.geometry(lengths.rows), Sharing.of(recipe.learner)
    roles = planned_roles(recipe, facts.shape)
    policy, rollout = roles[0], recipe.rollout_settings
    b = 0 if rollout is None else engine_width(rollout, policy, cpu=device.is_cpu)
    before = memory(recipe, roles, Sizes(0, 0, None, 0), sharing, device, lengths).at("load")
    shared = shares_weights(recipe, policy, cpu=device.is_cpu)
    copied = 0 if shared else policy.shape.parameters() * b
    free = int((device.memory_bytes - before - copied) * FREE)
    planned_sizes = sizes(
        recipe,
        geometry,
        sharing,
        device=device,
        token_bytes=policy.shape.cache_bytes_per_token(b),
        free_bytes=max(0, free),
    )
    costs = CostModel(device, facts.efficiency or efficiency_of(device), sharing)
    measured = factors(facts.calibration, machine_of(recipe, device), recipe.job)
    times = timing(recipe, geometry, roles, planned_sizes, lengths, costs)
    return Outlook(
        recipe=recipe,
        hardware=facts.hardware,
        geometry=geometry,
        roles=roles,
        sizes=planned_sizes,
        lengths=lengths,
        memory=memory(recipe, roles, planned_sizes, sharing, device, lengths, facts.hardware.count),
        timing=times if measured is None else measured.applied(times),
        calibrated=measured and measured.source,
    )


def full_logits_bytes(planned: Outlook) -> int:
    """Bytes of all logits of a micro-batch, forward and backward, in a trainer that computes them
    at once; 0 for a job without logits.
    """
    policy = planned.roles[0]
    if policy.scores:
        return 0
    return 2 * planned.sizes.micro_tokens * policy.shape.vocab_size * FLOAT32


def phase_seconds(planned: Outlook) -> dict[str, float]:
    """Seconds of a step by phase of the run; "step": of all phases."""
    seconds = {
        name: sum(planned.timing.step.get(phase, 0.0) for phase in phases)
        for name, phases in PHASE_OF[planned.recipe.job].items()
    }
    seconds["step"] = planned.timing.step_seconds
    return {name: value for name, value in seconds.items() if value}


def phase_bytes(planned: Outlook) -> dict[str, int]:
    """Bytes by phase of the run, as a run measures them: of its own process, above what that took
    before the run.
    """
    timed = PHASE_OF[planned.recipe.job]
    return {
        name: max(planned.memory.above_baseline(phase) for phase in phases)
        for name, phases in MEMORY_OF.items()
        if name in timed or name in ("load", "save")
    }


def foreseen_columns(
    seconds: Mapping[str, float], peaks: Mapping[str, int], kind: str = "memory"
) -> dict[str, float]:
    """The columns foreseen/NAME_seconds and foreseen/NAME_memory_bytes of metrics.jsonl, for the
    phases of a step. seconds, peaks: as phase_seconds and phase_bytes give them. kind: "reserved"
    for a GPU, where the plan's bytes are those that torch's allocator reserves.
    """
    columns: dict[str, float] = {
        f"foreseen/{name}_seconds": round(value, 6) for name, value in seconds.items()
    }
    for name, count in peaks.items():
        if name not in ("load", "save"):
            columns[f"foreseen/{name}_{kind}_bytes"] = count
    return columns
