"""Memory of one device, role by role and phase by phase.

What a role holds (plan.held) is there in every phase but its gradients, which live from the first
micro-batch of an update to its end. Passes of one role at a time come on top (plan.passes).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.core.heap import TRIM_BYTES
from postgrad.models.settings import LLAMA_TYPES
from postgrad.plan.activations import FLOAT32
from postgrad.plan.hardware import Device
from postgrad.plan.held import gathered, gradients, held, loading, state_bytes
from postgrad.plan.lengths import Lengths
from postgrad.plan.passes import Bytes, Passes
from postgrad.plan.phases import PHASES, Line, Phase, always, awake
from postgrad.plan.roles import PlannedRole, adapted_layers
from postgrad.plan.sharing import Sharing
from postgrad.plan.sizes import Sizes, width
from postgrad.recipe.recipe import Answering, Recipe
from postgrad.rewards.footprint import worker_bytes
from postgrad.rewards.registry import for_rollout

VERIFIERS, FRAME = "verifiers", "framework"  # a role, and a line of the run's
# Context and kernels of a GPU; interpreter and libraries, after imports, of a CPU.
FRAMEWORK = {"cpu": 450_000_000, "gpu": 1_000_000_000}
# Of a CPU's run, measured (docs/planning.md): data, tokenizer, logs, buffers of libraries; and of
# what layers make, how much stays with the C library's allocator. An adapter makes and frees three
# products more for each layer that it stands on.
OBJECTS = 60_000_000
KEPT_BACK = {  # with an adapter, with checkpointing
    (False, False): 0.5, (False, True): 0.25, (True, False): 1.2, (True, True): 1.1,
}  # fmt: skip
# Of a CPU's run too: bytes a second at which checkpoints are written, and what a forward pass does
# of matrix products meanwhile. Guesses.
WRITTEN, FORWARD_FLOPS = 1e9, 1e11


@dataclass(frozen=True, slots=True)
class Memory:
    """Of the fullest device. capacity: bytes that it has."""

    lines: tuple[Line, ...]
    capacity: int

    def at(self, phase: Phase) -> int:
        """Bytes that are taken in a phase."""
        return sum(line.bytes.get(phase, 0) for line in self.lines)

    @property
    def own_lines(self) -> tuple[Line, ...]:
        """What a run adds to its own process: without the framework, which was there before, and
        verifiers, whose processes are others.
        """
        return tuple(line for line in self.lines if line.role != VERIFIERS and line.what != FRAME)

    def above_baseline(self, phase: Phase) -> int:
        """Bytes of `own_lines` in a phase."""
        return sum(line.bytes.get(phase, 0) for line in self.own_lines)

    def with_held(self, held: int) -> int:
        """The peak where a process had taken `held` bytes before, whatever its framework should."""
        framework = (line.bytes[self.peak] for line in self.lines if line.what == FRAME)
        return held + self.peak_bytes - sum(framework)

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
    lines = [Line("run", FRAME, always(FRAMEWORK["cpu" if cpu else "gpu"]))]
    for role in roles:
        lines += held(role, width(role.model.dtype, cpu=cpu), sharing, cpu=cpu)
    passes = Passes(recipe, sizes, lengths, cpu=cpu)
    engine = list(_engine(recipe, roles[0], passes, cpu=cpu))
    whole = max(loading(role, width(role.model.dtype, cpu=cpu), sharing) for role in roles)
    whole -= sum(line.bytes.get("load", 0) for line in engine)  # which is made after the roles
    lines += [Line("run", "a model as it is read", {"load": max(0, whole)}), *engine]
    lines += _passing(roles, passes, sharing)
    if cpu:
        lines += _of_host(recipe, roles, passes)
        lines.append(Line("run", "objects and buffers", always(OBJECTS)))
        lines.append(Line("run", "kept by the allocator", _kept_back(recipe, roles, passes)))
    return Memory(tuple(line for line in lines if any(line.bytes.values())), device.memory_bytes)


def _passing(roles: Sequence[PlannedRole], passes: Passes, sharing: Sharing) -> Iterator[Line]:
    """What lives while a role computes, of the role that takes most: one does at a time."""
    if not passes.sizes.micro_tokens:
        return
    learning: dict[str, Bytes] = {}
    reading: dict[str, Bytes] = {}
    by_name = {role.name: role for role in roles}
    for role in roles:
        b = width(role.model.dtype, cpu=passes.cpu)
        copies = {"gathered weights": gathered(by_name[role.on or role.name], b, sharing)}
        reading[role.name] = copies | _divided(passes.reading(role), sharing)
        if role.learner is not None:
            summed = copies | {"gradients": gradients(role, b, sharing, cpu=passes.cpu)}
            learning[role.name] = summed | _divided(passes.learning(role), sharing)
    phases: tuple[tuple[Phase, dict[str, Bytes]], ...] = (("score", reading), ("update", learning))
    found: dict[tuple[str, str], dict[Phase, int]] = {}
    for phase, candidates in phases:
        name, fullest = max(candidates.items(), key=lambda one: sum(one[1].values()))
        for what, count in fullest.items():
            found.setdefault((name, what), {})[phase] = count
    yield from (Line(name, what, counts) for (name, what), counts in found.items())


def _divided(found: Bytes, sharing: Sharing) -> dict[str, int]:
    return {what: count // sharing.tensor for what, count in found.items()}


def _engine(recipe: Recipe, policy: PlannedRole, passes: Passes, *, cpu: bool) -> Iterator[Line]:
    """What the engine has of the policy's weights, its cache, and what it computes: whole, beside
    the first rank. While learners work it keeps the weights alone (Engine.rest).
    """
    if passes.sizes.engine is None:
        return
    assert isinstance(recipe, Answering)
    b = engine_width(recipe, policy, cpu=cpu)
    yield Line("engine", "weights", _engine_weights(recipe, policy, b, cpu=cpu))
    if cpu and b == FLOAT32 and policy.shape.model_type in LLAMA_TYPES:  # models.linear.in_order
        ordered = policy.shape.matrix_parameters * FLOAT32
        yield Line("engine", "weights as products read them", awake(ordered))
    yield Line("engine", "key-value cache", awake(passes.cache(policy, b)))
    for what, count in passes.sampling(policy, b).items():
        yield Line("engine", what, {"rollout": count})


def _engine_weights(
    recipe: Answering, policy: PlannedRole, b: int, *, cpu: bool
) -> Mapping[Phase, int]:
    """A copy, as it is made. In the policy's process and in float32 the first publish leaves of it
    what products read side by side, and what an adapter is merged into (LocalEngine's `borrows`).
    """
    shape, lora = policy.shape, policy.model.lora
    whole = always(shape.parameters() * b)
    here = recipe.rollout.type == "local" and recipe.learner.ranks == 1
    frozen_in = FLOAT32 if lora is None else width(policy.model.dtype, cpu=cpu)
    if not here or recipe.cluster.engines(1) or b != FLOAT32 or frozen_in != FLOAT32:
        return whole
    outputs = shape.query_size + 2 * shape.key_size + 2 * shape.intermediate_size
    joined = shape.hidden_size * outputs if shape.model_type in LLAMA_TYPES else 0
    merged = sum(m * k for m, k in adapted_layers(shape, lora)) if lora is not None else 0
    return {**always(shape.layers * max(joined, merged) * b), "load": whole["load"]}


def _of_host(recipe: Recipe, roles: Sequence[PlannedRole], passes: Passes) -> Iterator[Line]:
    """What a GPU's host holds, and a CPU itself: verifiers, the copy of the state that is written
    behind the next step, the model that is exported and read back.

    Once the copy is written it is gone. Sampling takes longer than that; where nothing is sampled
    it stands beside what the next update's first forward pass has kept by then, before there are
    gradients.
    """
    if isinstance(recipe, Answering) and passes.sizes.engine is not None:
        rewards = for_rollout(recipe.rewards, recipe.rollout.max_new_tokens)
        yield Line(VERIFIERS, "worker processes", always(worker_bytes(rewards, recipe.scoring)))
    settings = recipe.checkpoint
    if settings.save_steps or settings.save_minutes or settings.best_metric:
        state = sum(state_bytes(role) for role in roles)
        copies: dict[Phase, int] = {"rollout": state, "score": state, "save": state}
        if not recipe.trains_on_rollouts and passes.sizes.micro_tokens:
            copies["update"] = max(0, state - _not_yet(roles[0], passes, state / WRITTEN))
        yield Line("run", "copy of the state", copies)
    if settings.save_hf:
        yield Line("run", "exported model", {"save": 2 * FLOAT32 * roles[0].parameters})


def _not_yet(role: PlannedRole, passes: Passes, seconds: float) -> int:
    """Of what an update holds at its peak, what is not there after its first seconds."""
    found = passes.learning(role)
    computed = passes.sizes.micro_tokens * role.shape.layers * role.shape.layer_matrix_parameters
    share = min(1.0, seconds * FORWARD_FLOPS / (2 * computed))  # of the forward pass
    kept = found["activations"]
    return FLOAT32 * role.trained + sum(found.values()) - int(share * kept)


def _kept_back(recipe: Recipe, roles: Sequence[PlannedRole], passes: Passes) -> dict[Phase, int]:
    """Freed blocks too small to have pages of their own are not given back, and those that are
    aligned are seldom used again for another of their size (glibc before 2.38), so that what each
    layer computes anew under checkpointing leaves holes too. What roles that learn have left is
    there in all phases of the following steps; where an engine takes memory next, no more than
    core.heap lets it keep.
    """
    found = 0
    for role in roles:
        if role.learner is not None:
            kind = role.model.lora is not None, role.model.gradient_checkpointing
            found += int(KEPT_BACK[kind] * passes.made(role))
    left = min(found, TRIM_BYTES) if recipe.trains_on_rollouts else found
    return {"rollout": left, "score": left, "update": found, "save": left}


def engine_width(recipe: Answering, policy: PlannedRole, *, cpu: bool) -> int:
    """Bytes of a number in the engine."""
    stated = recipe.rollout.dtype
    return width(policy.model.dtype if stated == "auto" else stated, cpu=cpu)
