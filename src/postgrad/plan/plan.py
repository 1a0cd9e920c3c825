"""The plan of a run on some hardware: batches, memory and time. Nothing is run or loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from postgrad.cluster.settings import POLICY
from postgrad.core.batch import BatchGeometry
from postgrad.models.settings import ModelSettings
from postgrad.plan.activations import FLOAT32
from postgrad.plan.auto import AutoSizes
from postgrad.plan.calibration import Measured, chosen, factors, machine_of
from postgrad.plan.cards import CardGroup, card_groups, fullest
from postgrad.plan.costs import CostModel
from postgrad.plan.engines import EnginePlaces, engine_sizes, engine_width, shares_weights
from postgrad.plan.exchange import require_shareable
from postgrad.plan.hardware import Device, Efficiency, Hardware, efficiency_of
from postgrad.plan.held import MemoryPhase
from postgrad.plan.lengths import RowLengths, is_generated, longest, of_one_turn
from postgrad.plan.memory import FRAMEWORK, Memory, memory
from postgrad.plan.offload import host_share, offloaded_at_start
from postgrad.plan.roles import Find, PlannedRole, planned_roles
from postgrad.plan.sizes import Sharing, Sizes, longest_sampled, planned_ranks
from postgrad.plan.timing import REWARD, Timing, timing
from postgrad.plan.towers import assumed_images
from postgrad.recipe.recipe import Recipe

FREE = 0.8  # the share of a GPU's memory, beside loaded weights, that the engine finds free

# By job: a run's phases and parts of phases, and which phases of the plan each consists of.
_SUPERVISED = {"train": ("update",)}
_PHASE_OF: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "rl": {
        "sample": ("sample", REWARD),
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


def phases_of(recipe: Recipe) -> Mapping[str, tuple[str, ...]]:
    """The timed phases of a run's step, and of which of the plan's each consists."""
    phases = _PHASE_OF[recipe.job]
    return {"sample": ("sample",), **phases} if recipe.own_answers else phases


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The plan of a recipe on some hardware. Advice compares several of these."""

    recipe: Recipe  # sizes that it left to the plan ("auto") are numbers here
    hardware: Hardware
    geometry: BatchGeometry
    roles: tuple[PlannedRole, ...]  # the one that the job trains first
    sizes: Sizes
    lengths: RowLengths  # mean lengths of the training data
    places: EnginePlaces
    cards: tuple[CardGroup, ...]  # the learner's first
    timing: Timing
    # Sizes that the recipe left to the plan, by key: {"batch.micro_train_tokens": 8192}.
    auto: Mapping[str, int] = field(default_factory=dict[str, int])
    calibrated: str | None = None  # which runs corrected its times; None: the table's alone

    @property
    def memory(self) -> Memory:
        """That of the card that decides whether the run fits: one that is too small, else the
        fullest.
        """
        return fullest(self.cards).memory

    @property
    def used_devices(self) -> int:
        """Cards of the run: of ranks, of the policy and of other roles, and of engines."""
        return sum(group.count for group in self.cards)

    @property
    def missing_devices(self) -> int:
        """Devices that ranks, of all roles, and engines need and the hardware lacks."""
        return max(0, self.used_devices - self.hardware.count)

    @property
    def idle_devices(self) -> int:
        """Devices of the hardware that the recipe leaves unused."""
        return max(0, self.hardware.count - self.used_devices)

    @property
    def problems(self) -> tuple[str, ...]:
        """What does not fit, by card."""
        return tuple(group.lacks for group in self.cards if group.lacks is not None)

    @property
    def fits(self) -> bool:
        """Whether every rank and every engine has a device, and each of these has room."""
        return not self.problems and not self.missing_devices


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


def make_plan(recipe: Recipe, facts: Facts) -> RunPlan:
    """Plans a recipe. Sizes that are "auto" become the largest that fit. Raises UsageError where
    the shape of one of its models cannot be found, or its experts do not divide.
    """
    device = facts.hardware.device
    if recipe.model.dtype == "auto" and not device.bfloat16:
        recipe = chosen(recipe, "float32", recipe.learner.threads)
    auto = AutoSizes.largest(recipe, cpu=device.is_cpu)
    while True:
        planned = replace(_plan_with_sizes(auto.applied(recipe), facts), auto=auto.to_json())
        smaller = None if not planned.problems else auto.smaller(planned.memory.peak)
        if smaller is None:
            return planned
        auto = smaller


def _plan_with_sizes(recipe: Recipe, facts: Facts) -> RunPlan:
    hardware, device = facts.hardware, facts.hardware.device
    lengths = facts.lengths_of(recipe)
    geometry, sharing = recipe.geometry(lengths.rows), Sharing.of(recipe.learner)
    roles = planned_roles(recipe, facts.shape)
    tower = roles[0].shape.tower
    if facts.lengths is None and tower is not None and not is_generated(recipe):
        sized = of_one_turn(lengths, recipe, read=False)  # images are as large as fit its prompt
        sized = assumed_images(sized, tower, roles[0].model.source)
        lengths = replace(lengths, images=sized.images, source=sized.source)
    shortest = max(role.shape.min_shared for role in roles)
    lengths = replace(lengths, shared=lengths.prompt >= shortest)
    held = of_one_turn(lengths, recipe, read=facts.lengths is not None)
    held = replace(held, shared=held.prompt >= shortest)
    beside = tuple(role for role in roles if role.home == POLICY)  # engines on the same card
    require_shareable(beside, sharing)
    places = EnginePlaces.of(recipe, hardware)
    free = _free_bytes(recipe, beside, sharing, device, held, places)
    longest = longest_sampled(recipe)
    engine = engine_sizes(recipe, geometry, roles[0], places, device, free, longest)
    ranks = planned_ranks(recipe, geometry, roles, device=device, engine=engine)
    cards = card_groups(recipe, ranks, device, held, places)
    devices = max(hardware.count, sum(group.count for group in cards))
    costs = CostModel(device, facts.efficiency or efficiency_of(device), sharing)
    measured = factors(facts.calibration, machine_of(recipe, device), recipe.job)
    times = timing(recipe, geometry, ranks, lengths, costs, places, devices)
    if not device.is_cpu:
        offload = host_share(recipe, beside, costs, places)
        times = replace(times, step=offload.added_to(times.step), offload=offload)
    return RunPlan(
        recipe=recipe,
        hardware=hardware,
        geometry=geometry,
        roles=roles,
        sizes=ranks[0].sizes,
        lengths=lengths,
        places=places,
        cards=cards,
        timing=times if measured is None else measured.applied(times),
        calibrated=measured and measured.source,
    )


def _free_bytes(
    recipe: Recipe,
    roles: tuple[PlannedRole, ...],
    sharing: Sharing,
    device: Device,
    lengths: RowLengths,
    places: EnginePlaces,
) -> int:
    """Bytes that the built-in engine finds free on its card when it has loaded its weights: on one
    of its own, or beside the learner's models.
    """
    rollout = recipe.rollout_settings
    if rollout is None:
        return 0
    cpu = device.is_cpu
    if places.shared_cards:
        before = memory(recipe, roles, Sizes(0, 0), sharing, device, lengths).at("load")
        before -= 0 if cpu else offloaded_at_start(recipe, roles, sharing, places)
    else:
        before = FRAMEWORK["cpu" if cpu else "gpu"]
    shared = shares_weights(recipe, roles[0], cpu=cpu)
    b = engine_width(rollout, roles[0], cpu=cpu)
    copied = 0 if shared else roles[0].shape.parameters() * b
    return max(0, int((device.memory_bytes - before - copied) * FREE))


def full_logits_bytes(planned: RunPlan) -> int:
    """Bytes of all logits of a micro-batch, forward and backward, in a trainer that computes them
    at once; 0 for a job without logits.
    """
    policy = planned.roles[0]
    if policy.scores:
        return 0
    return 2 * planned.sizes.micro_tokens * policy.shape.vocab_size * FLOAT32


def phase_seconds(planned: RunPlan) -> dict[str, float]:
    """Seconds of a step by phase of the run; "step": of all phases."""
    seconds = {
        name: sum(planned.timing.step.get(phase, 0.0) for phase in phases)
        for name, phases in phases_of(planned.recipe).items()
    }
    seconds["step"] = planned.timing.step_seconds
    return {name: value for name, value in seconds.items() if value}


def phase_bytes(planned: RunPlan) -> dict[str, int]:
    """Bytes by phase of the run, as a run measures them: of its own process, which has the first
    card, above what that took before the run.
    """
    timed = phases_of(planned.recipe)
    return {
        name: max(planned.cards[0].memory.above_baseline(phase) for phase in phases)
        for name, phases in MEMORY_OF.items()
        if name in timed or name in ("load", "save")
    }


def estimated_columns(
    seconds: Mapping[str, float], peaks: Mapping[str, int], kind: str = "memory"
) -> dict[str, float]:
    """The columns estimated/NAME_seconds and estimated/NAME_memory_bytes of metrics.jsonl, for the
    phases of a step. seconds, peaks: as phase_seconds and phase_bytes give them. kind: "reserved"
    for a GPU, where the plan's bytes are those that torch's allocator reserves.
    """
    columns: dict[str, float] = {
        f"estimated/{name}_seconds": round(value, 6) for name, value in seconds.items()
    }
    for name, count in peaks.items():
        if name not in ("load", "save"):
            columns[f"estimated/{name}_{kind}_bytes"] = count
    return columns
