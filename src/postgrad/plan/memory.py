"""Memory of one device, role by role and phase by phase.

Phases: load (weights are read), rollout (the engine samples), score (roles that do not learn here
read the samples), update (forward, backward and the optimizer's step), save (the state is copied).
What a role holds is there in every phase but its gradients, which live from the first micro-batch
of an update to its end. Passes of one role at a time come on top (plan.passes).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from postgrad.models.settings import LLAMA_TYPES
from postgrad.plan.activations import FLOAT32
from postgrad.plan.hardware import Device
from postgrad.plan.lengths import Lengths
from postgrad.plan.passes import Bytes, Passes
from postgrad.plan.roles import PlannedRole
from postgrad.plan.sharing import Sharing
from postgrad.plan.sizes import Sizes, width
from postgrad.recipe.recipe import Answering, Recipe

Phase = Literal["load", "rollout", "score", "update", "save"]
PHASES: tuple[Phase, ...] = get_args(Phase)
# Context and kernels of a GPU; interpreter and libraries, after imports, of a CPU.
FRAMEWORK = {"cpu": 450_000_000, "gpu": 1_000_000_000}
# Of a CPU's run, measured (docs/planning.md): data, tokenizer, logs, buffers of libraries; and of
# what layers hold, how much more stays with the C library's allocator. An adapter makes and frees
# three products more for each layer that it stands on.
OBJECTS = 120_000_000
KEPT_BACK, KEPT_BACK_ADAPTED = 0.5, 1.4
FOUR_BITS = 4.127 / 8  # bytes a weight, NF4 with double quantization (arXiv:2305.14314)


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes on one device that a role takes for something, in each phase."""

    role: str
    what: str
    bytes: Mapping[Phase, int]


@dataclass(frozen=True, slots=True)
class Memory:
    """Of the fullest device. capacity: bytes that it has."""

    lines: tuple[Line, ...]
    capacity: int

    def at(self, phase: Phase) -> int:
        """Bytes that are taken in a phase."""
        return sum(line.bytes.get(phase, 0) for line in self.lines)

    @property
    def peak(self) -> Phase:
        """The phase that takes most."""
        return max(PHASES, key=self.at)

    @property
    def peak_bytes(self) -> int:
        """What it takes."""
        return self.at(self.peak)

    @property
    def fits(self) -> bool:
        """Whether a device has that much."""
        return self.peak_bytes <= self.capacity

    def to_json(self) -> dict[str, Any]:
        """{role: {what: {phase: bytes}}}, and the sums."""
        roles: dict[str, dict[str, Mapping[Phase, int]]] = {}
        for line in self.lines:
            roles.setdefault(line.role, {})[line.what] = dict(line.bytes)
        return {
            "roles": roles,
            "phases": {phase: self.at(phase) for phase in PHASES},
            "peak_phase": self.peak,
            "peak_bytes": self.peak_bytes,
            "capacity_bytes": self.capacity,
        }


def memory(
    recipe: Recipe,
    roles: Iterable[PlannedRole],
    sizes: Sizes,
    sharing: Sharing,
    device: Device,
    lengths: Lengths,
) -> Memory:
    """What the run takes on one device. Ranks have a device each, and the engine works on it."""
    roles = tuple(roles)
    cpu = device.is_cpu
    lines = [Line("run", "framework", _always(FRAMEWORK["cpu" if cpu else "gpu"]))]
    for role in roles:
        lines += _held(role, width(role.model.dtype, cpu=cpu), sharing)
    passes = Passes(recipe, sizes, lengths, cpu=cpu)
    lines += _engine(recipe, roles[0], passes, sharing, cpu=cpu)
    lines += _passing(roles, passes, sharing)
    if cpu:
        lines += _of_host(recipe, roles)
        lines.append(Line("run", "objects and buffers", _always(OBJECTS)))
        lines.append(Line("run", "kept by the allocator", _kept_back(roles, passes)))
    return Memory(tuple(line for line in lines if any(line.bytes.values())), device.memory_bytes)


def _held(role: PlannedRole, b: int, sharing: Sharing) -> Iterator[Line]:
    """Weights and what an optimizer has of them."""
    if role.on is None:
        yield Line(role.name, "weights", _always(_weight_bytes(role, b, sharing)))
    if role.follows:
        yield Line(role.name, "average", _always(FLOAT32 * role.parameters // sharing.tensor))
    if role.learner is None:
        return
    trained = role.trained
    if role.model.lora is not None:
        yield Line(role.name, "adapter", _always(FLOAT32 * trained // sharing.weights))
    elif b != FLOAT32 and not sharing.gathers:
        yield Line(role.name, "master weights", _always(FLOAT32 * trained // sharing.optimizer))
    moments = moment_bytes(role) // sharing.optimizer
    yield Line(role.name, "optimizer", {p: moments for p in PHASES if p != "load"})
    if role.learner.ema_decay:
        yield Line(role.name, "moving average", _always(FLOAT32 * trained // sharing.optimizer))


def _weight_bytes(role: PlannedRole, b: int, sharing: Sharing) -> int:
    """Of the weights that compute. Divided ones are the float32 master weights themselves, beside
    which embeddings, head and two layers are gathered.
    """
    shape, count = role.shape, role.parameters
    if role.model.quantize == "4bit":
        inside = shape.layers * shape.layer_matrix_parameters
        return int(inside * FOUR_BITS + (count - inside) * b) // sharing.tensor
    if not sharing.gathers:
        return count * b // sharing.tensor
    frozen = role.model.lora is not None or role.learner is None
    layer = shape.layer_parameters
    gathered = (count - shape.layers * layer + 2 * layer) * b // sharing.tensor
    return count * (b if frozen else FLOAT32) // sharing.weights + gathered


def moment_bytes(role: PlannedRole) -> int:
    """What the optimizer keeps of all trained weights: two float32 numbers each, Muon one."""
    if role.learner is None:
        return 0
    both = 2 * FLOAT32 * role.trained
    if role.learner.optimizer == "adamw":
        return both
    if role.model.lora is not None:
        return FLOAT32 * role.trained
    return both - FLOAT32 * role.shape.layers * role.shape.layer_matrix_parameters


def state_bytes(role: PlannedRole) -> int:
    """What a checkpoint holds of the role, on all ranks together."""
    if role.learner is None:
        return FLOAT32 * role.parameters if role.follows else 0
    whole = FLOAT32 * role.trained * (2 if role.learner.ema_decay else 1)
    return whole + moment_bytes(role)


def _passing(roles: Sequence[PlannedRole], passes: Passes, sharing: Sharing) -> Iterator[Line]:
    """What lives while a role computes, of the role that takes most: one does at a time."""
    if not passes.sizes.micro_tokens:
        return
    learning: dict[str, Bytes] = {}
    reading: dict[str, Bytes] = {}
    for role in roles:
        reading[role.name] = _divided(passes.reading(role), sharing)
        if role.learner is not None:
            gradients = {"gradients": FLOAT32 * role.trained // sharing.gradients}
            learning[role.name] = gradients | _divided(passes.learning(role), sharing)
    phases: tuple[tuple[Phase, dict[str, Bytes]], ...] = (("score", reading), ("update", learning))
    found: dict[tuple[str, str], dict[Phase, int]] = {}
    for phase, candidates in phases:
        name, fullest = max(candidates.items(), key=lambda one: sum(one[1].values()))
        for what, count in fullest.items():
            found.setdefault((name, what), {})[phase] = count
    yield from (Line(name, what, counts) for (name, what), counts in found.items())


def _divided(found: Bytes, sharing: Sharing) -> dict[str, int]:
    return {what: count // sharing.tensor for what, count in found.items()}


def _engine(
    recipe: Recipe, policy: PlannedRole, passes: Passes, sharing: Sharing, *, cpu: bool
) -> Iterator[Line]:
    """The engine's own copy of the policy, its cache, and what it computes."""
    if passes.sizes.engine is None:
        return
    assert isinstance(recipe, Answering)
    b = engine_width(recipe, policy, cpu=cpu)
    yield Line("engine", "weights", _always(policy.shape.parameters() * b // sharing.tensor))
    if cpu and b == FLOAT32 and policy.shape.model_type in LLAMA_TYPES:  # models.linear.in_order
        ordered = policy.shape.matrix_parameters * FLOAT32
        yield Line("engine", "weights as products read them", _always(ordered))
    yield Line("engine", "key-value cache", _always(passes.cache(policy, b) // sharing.tensor))
    for what, count in _divided(passes.sampling(policy, b), sharing).items():
        yield Line("engine", what, {"rollout": count})


def _of_host(recipe: Recipe, roles: Sequence[PlannedRole]) -> Iterator[Line]:
    """What a GPU's host holds, and a CPU itself: the copy of the state that is written behind the
    next step, the model that is exported and read back.
    """
    settings = recipe.checkpoint
    if settings.save_steps or settings.save_minutes or settings.best_metric:
        state = sum(state_bytes(role) for role in roles)
        phases: tuple[Phase, ...] = ("rollout", "score", "update", "save")
        yield Line("run", "copy of the state", dict.fromkeys(phases, state))
    if settings.save_hf:
        yield Line("run", "exported model", {"save": 2 * FLOAT32 * roles[0].parameters})


def _kept_back(roles: Sequence[PlannedRole], passes: Passes) -> dict[Phase, int]:
    """Freed blocks too small to have pages of their own are not given back, and those that are
    aligned are seldom used again for another of their size: what roles that learn have left is
    there in all phases of the following steps.
    """
    found = 0
    for role in roles:
        if role.learner is not None:
            share = KEPT_BACK if role.model.lora is None else KEPT_BACK_ADAPTED
            passed = 2 if role.model.gradient_checkpointing else 1  # forward passes
            found += int(share * passed * passes.freed(role))
    return {"rollout": found, "score": found, "update": found, "save": found}


def engine_width(recipe: Answering, policy: PlannedRole, *, cpu: bool) -> int:
    """Bytes of a number in the engine."""
    stated = recipe.rollout.dtype
    return width(policy.model.dtype if stated == "auto" else stated, cpu=cpu)


def _always(value: int) -> dict[Phase, int]:
    return dict.fromkeys(PHASES, value)
