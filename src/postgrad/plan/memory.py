"""Memory of one device, role by role and phase by phase.

Phases: load (weights are read), rollout (the engine samples), score (roles that do not learn here
read the samples), update (forward, backward and the optimizer's step), save (the state is copied).
What a role holds is there in every phase but its gradients, which live from the first micro-batch
of an update to its end.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from postgrad.models.shapes import ModelShape
from postgrad.plan import activations
from postgrad.plan.activations import FLOAT32
from postgrad.plan.hardware import Device
from postgrad.plan.roles import PlannedRole
from postgrad.plan.sharing import Sharing
from postgrad.plan.sizes import Sizes, width
from postgrad.recipe.recipe import Answering, Recipe

Phase = Literal["load", "rollout", "score", "update", "save"]
PHASES: tuple[Phase, ...] = get_args(Phase)
FRAMEWORK = {"cpu": 0, "gpu": 1_000_000_000}  # context and kernels; of a CPU counted as baseline
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
    recipe: Recipe, roles: Iterable[PlannedRole], sizes: Sizes, sharing: Sharing, device: Device
) -> Memory:
    """What the run takes on one device. Ranks have a device each, and the engine works on it."""
    roles = tuple(roles)
    cpu = device.is_cpu
    lines = [Line("run", "framework", _always(FRAMEWORK["cpu" if cpu else "gpu"]))]
    for role in roles:
        b = width(role.model.dtype, cpu=cpu)
        lines += _held(role, b, sharing)
        lines += _computing(role, b, sizes, sharing)
    if cpu:
        state = sum(state_bytes(role) for role in roles) // sharing.optimizer
        lines.append(Line("run", "copy of the state", {"save": state}))
    lines += _engine(recipe, roles[0], sizes, sharing, cpu=cpu)
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
    yield Line(role.name, "gradients", {"update": FLOAT32 * trained // sharing.gradients})
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


def _computing(role: PlannedRole, b: int, sizes: Sizes, sharing: Sharing) -> Iterator[Line]:
    """What lives while the role reads a micro-batch."""
    shape, tokens = role.shape, sizes.micro_tokens
    alone = tokens * activations.forward_only(shape, b) // sharing.tensor
    head = 0 if role.scores else activations.head_bytes(shape, b, backward=False, trains=False)
    if role.learner is None:
        yield Line(role.name, "activations", {"score": alone})
        yield Line(role.name, "logits of a chunk", {"score": head})
        return
    kept = activations.kept(
        shape, b, role.model.lora, checkpointing=role.model.gradient_checkpointing
    )
    inside = tokens * (kept + activations.working(shape, b)) // sharing.tensor
    yield Line(role.name, "activations", {"score": alone, "update": inside})
    if role.scores:
        return
    trains = role.model.lora is None
    back = activations.head_bytes(shape, b, backward=True, trains=trains) // sharing.tensor
    yield Line(role.name, "logits of a chunk", {"score": head, "update": back})
    if b != FLOAT32 and trains:
        largest = shape.vocab_size * shape.hidden_size * b // sharing.tensor
        yield Line(role.name, "gradient being added", {"update": largest})


def _engine(
    recipe: Recipe, policy: PlannedRole, sizes: Sizes, sharing: Sharing, *, cpu: bool
) -> Iterator[Line]:
    """The engine's own copy of the policy, its cache, and what a prefill takes."""
    if sizes.engine is None:
        return
    shape: ModelShape = policy.shape
    assert isinstance(recipe, Answering)
    b = engine_width(recipe, policy, cpu=cpu)
    yield Line("engine", "weights", _always(shape.parameters() * b // sharing.tensor))
    cache = sizes.engine.cache_tokens * shape.cache_bytes_per_token(b) // sharing.tensor
    yield Line("engine", "key-value cache", _always(cache))
    prompts = sizes.prefill_tokens * (
        activations.forward_only(shape, b) + shape.cache_bytes_per_token(b)
    )
    logits = 3 * sizes.engine.slots * shape.vocab_size * FLOAT32
    yield Line("engine", "prompts and logits", {"rollout": (prompts + logits) // sharing.tensor})


def engine_width(recipe: Answering, policy: PlannedRole, *, cpu: bool) -> int:
    """Bytes of a number in the engine."""
    stated = recipe.rollout.dtype
    return width(policy.model.dtype if stated == "auto" else stated, cpu=cpu)


def _always(value: int) -> dict[Phase, int]:
    return dict.fromkeys(PHASES, value)
