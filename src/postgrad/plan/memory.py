"""Memory of one device, role by role and phase by phase: a learner's, or one of engines alone.

Weights and optimizer state of a role (plan.held) are there in every phase; gradients from the first
micro-batch of an update to its end. The passes of one role at a time come on top (plan.passes).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from postgrad.core.process import TRIM_BYTES
from postgrad.data.packed import IN_MEMORY
from postgrad.models.towers import KEPT_BYTES
from postgrad.plan import reserved
from postgrad.plan.activations import FLOAT32
from postgrad.plan.engines import ENGINE, EnginePlaces, engine_lines, vllm_share
from postgrad.plan.exchange import buffers
from postgrad.plan.hardware import Device
from postgrad.plan.held import (
    PHASES,
    MemoryLine,
    MemoryPhase,
    always,
    expanded,
    gathered,
    gradients,
    held,
    loading,
    state_bytes,
)
from postgrad.plan.lengths import RowLengths
from postgrad.plan.offload import offloaded_lines, offloaded_purposes, publishing
from postgrad.plan.passes import Bytes, Passes
from postgrad.plan.publishing import publish_lines
from postgrad.plan.roles import PlannedRole, beside_student, stored_bytes
from postgrad.plan.sizes import ALONE, Sharing, Sizes, ahead_bytes, width
from postgrad.recipe.recipe import Answering, Recipe
from postgrad.rewards.pool import worker_bytes
from postgrad.rewards.registry import for_rollout

ROOM = 0.95  # of a device at most: plans of GPUs were within a twentieth of what the stub measured
VERIFIERS = "verifiers"  # the role of lines whose memory is that of other processes
FRAME = "framework"  # the purpose of a line that is there before the run begins
# Context and kernels of a GPU; interpreter and libraries, after imports, of a CPU.
FRAMEWORK = {"cpu": 450_000_000, "gpu": 1_000_000_000}
# Of a CPU's run, measured (docs/planning.md): data, tokenizer, logs, buffers of libraries; and of
# what layers make, how much stays with the C library's allocator. An adapter makes and frees three
# products more for each layer that it stands on.
OBJECTS = 60_000_000
KEPT_BACK = {  # with an adapter, with checkpointing
    (False, False): 0.5, (False, True): 0.25, (True, False): 0.8, (True, True): 0.6,
}  # fmt: skip
# Of a CPU's run too: bytes a second at which checkpoints are written, and what a forward pass does
# of matrix products meanwhile. Guesses.
WRITTEN, FORWARD_FLOPS = 1e9, 1e11


@dataclass(frozen=True)
class Memory:
    """Planned memory of one device."""

    lines: tuple[MemoryLine, ...]
    capacity: int  # bytes of the device

    @cached_property
    def _taken(self) -> dict[MemoryPhase, int]:
        """Bytes taken in each phase."""
        return {phase: sum(line.bytes.get(phase, 0) for line in self.lines) for phase in PHASES}

    def at(self, phase: MemoryPhase) -> int:
        """Bytes taken in a phase."""
        return self._taken[phase]

    @property
    def own_lines(self) -> tuple[MemoryLine, ...]:
        """Lines of what a run adds to its own process, as it measures that: not the framework,
        which was there before; not verifiers and vLLM, which are processes of their own; not what
        libraries take without torch's allocator.
        """
        outside = {FRAME, *reserved.OUTSIDE}
        return tuple(
            line for line in self.lines if line.role != VERIFIERS and line.purpose not in outside
        )

    def above_baseline(self, phase: MemoryPhase) -> int:
        """Bytes of `own_lines` in a phase."""
        return sum(line.bytes.get(phase, 0) for line in self.own_lines)

    def with_held(self, held: int) -> int:
        """Bytes at the peak of a process that had taken `held` bytes before the run began: they
        replace the framework's planned ones.
        """
        framework = (line.bytes[self.peak] for line in self.lines if line.purpose == FRAME)
        return held + self.peak_bytes - sum(framework)

    @property
    def peak(self) -> MemoryPhase:
        """The phase that takes most memory."""
        return max(PHASES, key=self.at)

    @property
    def peak_bytes(self) -> int:
        """Bytes taken in that phase."""
        return self.at(self.peak)

    @property
    def fits(self) -> bool:
        """Whether the device has as many bytes as the peak takes."""
        return self.peak_bytes <= self.capacity

    @property
    def leaves_room(self) -> bool:
        """Whether it fits even if the plan is off by as much as measured plans are."""
        return self.peak_bytes <= ROOM * self.capacity

    def to_json(self) -> dict[str, Any]:
        """Bytes by role, purpose and phase, and the sums."""
        roles: dict[str, dict[str, Mapping[MemoryPhase, int]]] = {}
        for line in self.lines:
            roles.setdefault(line.role, {})[line.purpose] = dict(line.bytes)
        return {
            "roles": roles,
            "phases": {phase: self.at(phase) for phase in PHASES},
            "peak_phase": self.peak,
            "peak_bytes": self.peak_bytes,
            "capacity_bytes": self.capacity,
        }


def memory(
    recipe: Recipe,
    roles: Sequence[PlannedRole],
    sizes: Sizes,
    sharing: Sharing,
    device: Device,
    lengths: RowLengths,
    engine: EnginePlaces | None = None,
) -> Memory:
    """Memory of the card of a rank, with what roles do there. engine: of one that works on the card
    too.
    """
    cpu = device.is_cpu
    lines = [MemoryLine("run", FRAME, always(FRAMEWORK["cpu" if cpu else "gpu"]))]
    passes = Passes(recipe, sizes, lengths, cpu=cpu, sharing=sharing)
    sampling = list[MemoryLine]()
    if engine is not None:
        if engine.apart and not cpu:  # its process stays when it sleeps
            lines.append(MemoryLine(ENGINE, FRAME, always(FRAMEWORK["gpu"])))
        sampling += engine_lines(recipe, roles[0], passes, device, engine, shared=True)
    for role in roles:
        lines += _held(recipe, roles, role, sharing, device, sampling, engine)
    read = max(loading(role, width(role.model.dtype, cpu=cpu), sharing) for role in roles)
    read -= sum(line.bytes.get("load", 0) for line in sampling)  # the engine comes after the roles
    lines += [MemoryLine("run", "tensors as they are read", {"load": max(0, read)}), *sampling]
    passing = list(_passing(roles, passes, sharing))
    lines += passing
    if not cpu:
        lines += _of_gpu(recipe, roles, passing, sharing, device)
    if cpu:
        lines += _of_host(recipe, roles, passes)
        lines.append(MemoryLine("run", "objects and buffers", always(OBJECTS)))
        lines.append(MemoryLine("run", "kept by the allocator", _kept_back(recipe, roles, passes)))
    return Memory(tuple(line for line in lines if any(line.bytes.values())), device.memory_bytes)


def _held(
    recipe: Recipe,
    roles: Sequence[PlannedRole],
    role: PlannedRole,
    sharing: Sharing,
    device: Device,
    sampling: Sequence[MemoryLine],
    engine: EnginePlaces | None,
) -> Iterator[MemoryLine]:
    """What a role holds; of a learner that leaves its card to an engine when it needs it.
    sampling: what the engine takes.
    """
    cpu = device.is_cpu
    lines = list(held(role, width(role.model.dtype, cpu=cpu), sharing, cpu=cpu))
    gone = frozenset[str]() if cpu else offloaded_purposes(recipe, role, engine)
    asked = any(other.on == role.name and other.judges for other in roles)
    yield from offloaded_lines(lines, gone, asked=asked)
    if gone and role.name == "policy":
        share = vllm_share(recipe, role, device, engine, 0) if engine is not None else None
        yield publishing([*lines, *sampling], gone, share.weights if share else 0)


def engine_memory(
    recipe: Recipe,
    policy: PlannedRole,
    sizes: Sizes,
    device: Device,
    lengths: RowLengths,
    places: EnginePlaces,
) -> Memory:
    """Memory of a card that engines alone have."""
    passes = Passes(recipe, sizes, lengths, cpu=False)
    lines = [MemoryLine("run", FRAME, always(FRAMEWORK["gpu"]))]
    lines += engine_lines(recipe, policy, passes, device, places, shared=False)
    if not places.is_vllm:
        lines += [*reserved.workspaces(), *reserved.pages(ALONE)]
    return Memory(tuple(line for line in lines if any(line.bytes.values())), device.memory_bytes)


def _passing(
    roles: Sequence[PlannedRole], passes: Passes, sharing: Sharing
) -> Iterator[MemoryLine]:
    """Memory of the passes of one role. One role computes at a time: the one that takes most
    counts. A reward model computes while samples are drawn.
    """
    if not passes.sizes.micro_tokens:
        return
    learning: dict[str, Bytes] = {}
    reading: dict[str, Bytes] = {}
    judging: dict[str, Bytes] = {}
    by_name = {role.name: role for role in roles}
    for role in roles:
        b = width(role.model.dtype, cpu=passes.cpu)
        copies = {
            "gathered weights": gathered(by_name[role.on or role.name], b, sharing),
            "a matrix of four bits, expanded": expanded(role, b, cpu=passes.cpu),
            "tokens that ranks exchange": buffers(role, passes.sizes.micro_tokens, b, sharing),
        }
        phase = judging if role.judges else reading
        phase[role.name] = copies | dict(passes.reading(role))
        if role.learner is not None:
            summed = copies | {"gradients": gradients(role, b, sharing, cpu=passes.cpu)}
            if beside_student(passes.recipe):
                teacher = by_name["teacher"]
                hidden = passes.sizes.micro_tokens * teacher.shape.hidden_size
                each = width(teacher.model.dtype, cpu=passes.cpu)
                summed["hidden states of the teacher"] = hidden * each
            if each := stored_bytes(passes.recipe):
                samples = passes.recipe.geometry(passes.lengths.rows).train_batch_size
                places = 2 if passes.cpu else 1  # on a CPU the step's own beside the update's
                tokens = samples * passes.lengths.computed(1)
                summed["the teacher's tokens of an update"] = int(places * each * tokens)
            learning[role.name] = summed | dict(passes.learning(role))
    phases: tuple[tuple[MemoryPhase, dict[str, Bytes]], ...] = (
        ("rollout", judging),
        ("score", reading),
        ("update", learning),
    )
    lines: dict[tuple[str, str], dict[MemoryPhase, int]] = {}
    for phase, by_role in phases:
        if not by_role:
            continue
        name, fullest = max(by_role.items(), key=lambda entry: sum(entry[1].values()))
        for purpose, count in fullest.items():
            lines.setdefault((name, purpose), {})[phase] = count
    yield from (MemoryLine(name, purpose, counts) for (name, purpose), counts in lines.items())


def _of_gpu(
    recipe: Recipe,
    roles: Sequence[PlannedRole],
    passing: Sequence[MemoryLine],
    sharing: Sharing,
    device: Device,
) -> Iterator[MemoryLine]:
    """What a GPU holds beside tensors and what they are sent through."""
    policy, b = roles[0], width(roles[0].model.dtype, cpu=False)
    sampled = recipe.trains_on_rollouts and recipe.samples_answers and policy.name == "policy"
    yield from reserved.gathering(roles, sharing)
    yield from publish_lines(policy, sharing, b, sampled=sampled)
    yield from reserved.workspaces()
    yield from reserved.pages(sharing)
    yield from reserved.holes(passing, roles)
    yield from reserved.communication(sharing, device)


def _processed(roles: Sequence[PlannedRole], lengths: RowLengths) -> int:
    """Bytes of the images of the rows that a process has read and keeps processed, in float32."""
    tower, images = roles[0].shape.tower, lengths.images
    if tower is None or images is None:
        return 0
    each = images.patches * tower.patch_values * FLOAT32
    return KEPT_BYTES if lengths.rows is None else min(KEPT_BYTES, int(each * lengths.rows))


def _of_host(recipe: Recipe, roles: Sequence[PlannedRole], passes: Passes) -> Iterator[MemoryLine]:
    """Memory that counts on a CPU alone, because beside a GPU it is the host's: verifiers, images
    that are kept as the tower reads them, the copy of the state from which a checkpoint is written
    during the next step, and the exported model that is read back.

    The copy lives until it is written. Sampling takes longer than that. Where nothing is sampled,
    it coincides with what the next update's first forward pass has kept by then; gradients do not
    exist yet.
    """
    if isinstance(recipe, Answering) and passes.sizes.engine is not None:
        rewards = for_rollout(recipe.rewards, recipe.rollout.max_new_tokens)
        yield MemoryLine(
            VERIFIERS, "worker processes", always(worker_bytes(rewards, recipe.scoring))
        )
    if roles[0].name == "policy":
        yield MemoryLine("run", "samples ahead", always(ahead_bytes(recipe)))
    if (each := stored_bytes(recipe)) and (rows := passes.lengths.rows):
        kept = min(IN_MEMORY, int(each * rows * passes.lengths.computed(1)))  # the rest in a file
        yield MemoryLine("run", "what the teacher said", {p: kept for p in PHASES if p != "load"})
    if pixels := _processed(roles, passes.lengths):
        yield MemoryLine("run", "processed images", {p: pixels for p in PHASES if p != "load"})
    settings = recipe.checkpoint
    by_times = settings.save_steps or settings.save_minutes or settings.save_epochs
    if by_times or settings.best_metric:
        state = sum(state_bytes(role) for role in roles)
        copies: dict[MemoryPhase, int] = {"rollout": state, "score": state, "save": state}
        if not recipe.trains_on_rollouts and passes.sizes.micro_tokens:
            copies["update"] = max(0, state - _not_yet(roles[0], passes, state / WRITTEN))
        yield MemoryLine("run", "copy of the state", copies)
    if settings.save_hf and roles[0].name == recipe.trained_role:
        yield MemoryLine("run", "exported model", {"save": 2 * FLOAT32 * roles[0].parameters})


def _not_yet(role: PlannedRole, passes: Passes, seconds: float) -> int:
    """How many bytes of an update's peak are not taken yet after its first seconds."""
    learning = passes.learning(role)
    computed = passes.sizes.micro_tokens * role.shape.layers * role.shape.layer_matrix_parameters
    share = min(1.0, seconds * FORWARD_FLOPS / (2 * computed))  # of the forward pass
    kept = learning["activations"]
    return FLOAT32 * role.trained + sum(learning.values()) - int(share * kept)


def _kept_back(
    recipe: Recipe, roles: Sequence[PlannedRole], passes: Passes
) -> dict[MemoryPhase, int]:
    """Freed memory that the C library's allocator does not return to the system.

    It keeps blocks too small to have pages of their own, and seldom uses aligned ones again for
    another block of their size (glibc before 2.38). So the activations that each layer computes
    anew under checkpointing leave holes too. What the learning roles leave stays in all phases of
    the following steps; before an engine samples, core.process limits it to TRIM_BYTES.
    """
    after_update = 0
    for role in roles:
        if role.learner is not None:
            kind = role.model.lora is not None, bool(role.model.gradient_checkpointing)
            after_update += int(KEPT_BACK[kind] * passes.allocated(role))
            after_update += int(KEPT_BACK[False, False] * passes.encoded_frozen(role))
    later = min(after_update, TRIM_BYTES) if recipe.trains_on_rollouts else after_update
    return {"rollout": later, "score": later, "update": after_update, "save": later}
