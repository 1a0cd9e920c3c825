"""Memory of a role's weights, optimizer state and gradients on one device.

Sharded weights (postgrad.parallel.sharding) lie on each rank as its shard in all phases, those of
experts that ranks share too: so expert parallelism makes only unsharded weights fewer. While the
role computes there are unsharded copies too: of all weights under zero1 and zero2; under zero3 of
two layers, and of the weights outside the layers. Frozen weights, also those under an adapter, are
sharded under zero3 alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from postgrad.models.matrices import MatrixGroup
from postgrad.models.settings import LoraSettings
from postgrad.models.shapes import OUTSIDE, ModelShape
from postgrad.plan.activations import FLOAT32
from postgrad.plan.adapters import (
    adapted_layers,
    adapted_stacks,
    alike,
    linear_layers,
    start_numbers,
    start_scratch,
)
from postgrad.plan.exchange import layer_weights, share, trained_share
from postgrad.plan.roles import PlannedRole
from postgrad.plan.sizes import Sharing

MemoryPhase = Literal["load", "rollout", "score", "update", "save"]
PHASES: tuple[MemoryPhase, ...] = get_args(MemoryPhase)

# learner.eight_bits.SMALLEST and ops.quantization.WIDE_BLOCK, which a test holds them to
SMALLEST, WIDE_BLOCK = 4096, 256
FOUR_BITS = 4.127 / 8  # bytes a weight, NF4 with double quantization (arXiv:2305.14314)


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """Bytes that a role takes on one device for one purpose."""

    role: str  # "policy", "engine", ...; "run": not of one role
    purpose: str  # "weights", "activations", "key-value cache"
    bytes: Mapping[MemoryPhase, int]  # a phase that is missing takes none


def awake(value: int) -> dict[MemoryPhase, int]:
    """Bytes that the engine takes while it samples, and from a publish until it sleeps."""
    return {"rollout": value, "save": value}


def always(value: int) -> dict[MemoryPhase, int]:
    """The same bytes in all phases."""
    return dict.fromkeys(PHASES, value)


def held(role: PlannedRole, b: int, sharing: Sharing, *, cpu: bool) -> Iterator[MemoryLine]:
    """Memory that the role takes in every phase. b: bytes of a number that the role computes in."""
    shards, trained_part = _shards(role, sharing), trained_share(role, sharing)
    offloaded = sharing.offloads and not cpu  # sharded state lies in the host's memory

    def line(purpose: str, size: float, shards: int) -> MemoryLine:
        count = 0 if offloaded and shards > 1 else int(size / shards)
        return MemoryLine(role.name, purpose, always(count))

    if role.on is None:
        width = FLOAT32 if _shards_masters(role, sharing) else b
        weights = line("weights", _weights(role, width) * share(role, sharing, shards), shards)
        if role.freed:
            weights = replace(weights, bytes={p: weights.bytes[p] for p in ("load", "score")})
        yield _offloaded(role, weights, divided=shards > 1) if role.offload and not cpu else weights
    if role.follows:  # sharded as the policy
        yield line(
            "average",
            FLOAT32 * role.parameters * share(role, sharing, sharing.divided),
            sharing.divided,
        )
    if role.learner is None:
        return
    trained = FLOAT32 * role.trained * trained_part
    if role.model.lora is not None:
        yield line("adapter", trained, sharing.divided)
        if role.model.lora.keeps_start:
            yield from _start(role)
        if role.copied:  # what computes, beside its float32 master, or where that is divided
            copies = role.copied * b if b != FLOAT32 and sharing.divided == 1 else 0
            yield line("trained copies", copies, 1)
    elif b != FLOAT32 and sharing.divided == 1:
        yield line("master weights", trained, 1)
    moments = line("optimizer", moment_bytes(role) * trained_part, sharing.divided)
    yield replace(moments, bytes={phase: moments.bytes[phase] for phase in PHASES[1:]})
    if role.learner.ema_decay:
        yield line("moving average", trained, sharing.divided)


def _start(role: PlannedRole) -> Iterator[MemoryLine]:
    """What an adapter of PiSSA began with, and what computing that takes; and for the backward
    pass, beside it, both A and both B of each layer as products read them, or of one layer where
    layers are computed again.
    """
    lora = role.model.lora
    assert lora is not None
    size = FLOAT32 * start_numbers(role.shape, lora)
    layers = role.shape.layers if role.model.gradient_checkpointing else 1
    taken = always(size)
    taken["update"] += 2 * size // layers
    taken["load"] += start_scratch(role.shape, lora)
    yield MemoryLine(role.name, "start of the adapter", taken)


def _offloaded(role: PlannedRole, weights: MemoryLine, *, divided: bool) -> MemoryLine:
    """The weights of an offloaded role: on the device when they are read and while it computes;
    where they are divided over ranks, gathered layers alone.
    """
    phases: tuple[MemoryPhase, ...] = ("load", "rollout" if role.judges else "score")
    shown = () if divided else phases
    return replace(weights, bytes={phase: weights.bytes[phase] for phase in shown})


def loading(role: PlannedRole, b: int, sharing: Sharing) -> int:
    """Bytes beside a role's shard while it is read: two of its largest tensors, in the dtype that
    it computes in, since a rank reads its part of one tensor after the other.
    """
    if _shards(role, sharing) == 1 or role.on is not None:
        return 0
    return 2 * role.shape.largest_parameters * b


def gathered(role: PlannedRole, b: int, sharing: Sharing) -> int:
    """Bytes of unsharded weights while the role computes; 0 where nothing is sharded."""
    if sharing.divided == 1:
        return 0
    adapter = role.model.lora is not None and role.learner is not None
    size = FLOAT32 * role.trained if adapter and not sharing.gathers else 0
    if _shards(role, sharing) > 1:
        layers = 2 if sharing.gathers else role.shape.layers
        copied = outside(role) + layers * layer_weights(role, sharing)
        size += copied * b
    return size


def arriving(role: PlannedRole, b: int, sharing: Sharing) -> int:
    """Bytes that FSDP2 gathers weights into before it copies them to where they compute: those
    outside the layers and the next layer's. Its stream has segments of its own on a GPU, which keep
    them for the next time.
    """
    if _shards(role, sharing) == 1:
        return 0
    return (outside(role) + layer_weights(role, sharing)) * b


def gradients(role: PlannedRole, b: int, sharing: Sharing, *, cpu: bool) -> int:
    """Bytes of the gradients of an update, in float32. They are unsharded until they are summed
    over ranks. Where every micro-batch sums them (ZeRO-2), only one layer's are unsharded at a
    time: as they are computed, in b bytes, and as they are sent.
    """
    divided = int(FLOAT32 * role.trained * trained_share(role, sharing))
    unsharded = int(FLOAT32 * role.trained * trained_share(role, replace(sharing, divided=1)))
    if sharing.divided == 1:
        return unsharded
    sharded = 0 if sharing.offloads and not cpu else divided // sharing.divided
    if not sharing.scatters:
        return unsharded + sharded
    trains = role.trained / role.parameters
    layer = layer_weights(role, sharing) * trains * (FLOAT32 + b)
    return sharded + int(layer)


def moment_bytes(role: PlannedRole) -> int:
    """Bytes that the optimizer keeps for all trained weights: two float32 numbers for each weight,
    or two of eight bits for each of a matrix; Muon one for each weight of the layers' matrices.
    """
    if role.learner is None:
        return 0
    both = 2 * FLOAT32 * role.trained
    if role.learner.optimizer_state == "8bit":
        return both - sum(g.count * _saved_bytes(g) for g in _trained_matrices(role))
    if role.learner.optimizer == "muon":
        return both - FLOAT32 * sum(g.count * g.size for g in _trained_matrices(role) if g.hidden)
    return both


def _trained_matrices(role: PlannedRole) -> Iterator[MatrixGroup]:
    shape, lora, hidden = role.shape, role.model.lora, role.shape.hidden_size
    if role.scores:
        yield MatrixGroup((1, hidden), 1, "", hidden=False)
    if lora is not None:
        yield from _adapter_matrices(shape, lora)
        copies = role.copied // shape.embedding_parameters  # embeddings, head, or both
        yield MatrixGroup((shape.vocab_size, hidden), copies, "", hidden=False)
        return
    head = (shape.vocab_size, hidden) if role.scores and shape.head_parameters else None
    for group in shape.matrix_groups:
        if group.shape == head and not group.hidden:
            yield replace(group, count=group.count - 1)
        elif group.part not in role.model.freeze:
            yield group


def _adapter_matrices(shape: ModelShape, lora: LoraSettings) -> Iterator[MatrixGroup]:
    """A and B of all matrices; those of experts are many in one."""
    for layer, count in alike(shape, lora).items():
        sizes = [(*size, layer != OUTSIDE) for size in adapted_layers(shape, lora, layer)]
        sizes += [(e * r, a, b, e == 1) for e, r, a, b in adapted_stacks(shape, lora, layer)]
        for rank, inputs, outputs, hidden in sizes:
            yield MatrixGroup((rank, inputs), count, "", hidden)
            yield MatrixGroup((outputs, rank), count, "", hidden)


def _saved_bytes(group: MatrixGroup) -> int:
    """Bytes by which both moments of a matrix are smaller in eight bits; a small one's stay
    float32, and so do those of convolutions over two dimensions and more.
    """
    if group.size < SMALLEST or len(group.shape) > 3:
        return 0
    scales = group.size // group.columns * -(-group.columns // WIDE_BLOCK)
    return 2 * (FLOAT32 * group.size - group.size - FLOAT32 * scales)


def expanded(role: PlannedRole, b: int, *, cpu: bool) -> int:
    """Bytes while a product expands the largest of the matrices in four bits; 0 without any. On a
    CPU it passes through float32.
    """
    if role.model.quantize == "none":
        return 0
    layers = [layer for layer in alike(role.shape, None) if layer != OUTSIDE]  # packed ones
    largest = max(m * k for n in layers for m, k in linear_layers(role.shape, n).values())
    return largest * (FLOAT32 + 2 if cpu else b)


def state_bytes(role: PlannedRole) -> int:
    """Bytes of the role in a checkpoint, of all ranks together."""
    if role.learner is None:
        return FLOAT32 * role.parameters if role.follows else 0
    weights = FLOAT32 * role.trained * (2 if role.learner.ema_decay else 1)
    return weights + moment_bytes(role)


def _shards_masters(role: PlannedRole, sharing: Sharing) -> bool:
    """Whether the shards are the float32 master weights themselves."""
    return role.learner is not None and role.model.lora is None and sharing.divided > 1


def _shards(role: PlannedRole, sharing: Sharing) -> int:
    """Into how many shards the role's weights are divided. Frozen weights, also those under an
    adapter, are sharded only where layers are gathered one by one (ZeRO-3); those under an adapter
    also where they are offloaded to the host.
    """
    under_adapter = role.learner is not None and role.model.lora is not None
    frozen = role.learner is None and not role.follows
    unsharded = frozen or (under_adapter and not sharing.offloads)
    return sharing.divided if sharing.gathers or not unsharded else 1


def outside(role: PlannedRole) -> int:
    """How many weights lie outside the layers: embeddings, the last norm, the head."""
    return role.parameters - role.shape.layers * role.shape.layer_parameters


def _weights(role: PlannedRole, b: int) -> int:
    """Bytes of the complete model, in numbers of b bytes or quantized."""
    if role.model.quantize == "4bit":
        packed = role.shape.packed_parameters
        return int(packed * FOUR_BITS + (role.parameters - packed) * b)
    return role.parameters * b
