"""What a role holds of its weights on one device: itself, its optimizer's, its gradients.

What is divided lies in rows in all phases, and in whole copies only while the role computes
(postgrad.parallel.sharding): all of it under zero1 and zero2, two layers and what lies outside the
layers under zero3. What is frozen, under an adapter too, is divided under zero3 alone.
"""

from collections.abc import Iterator
from dataclasses import replace

from postgrad.plan.activations import FLOAT32
from postgrad.plan.phases import PHASES, Line, always
from postgrad.plan.roles import PlannedRole
from postgrad.plan.sharing import Sharing

FOUR_BITS = 4.127 / 8  # bytes a weight, NF4 with double quantization (arXiv:2305.14314)


def held(role: PlannedRole, b: int, sharing: Sharing, *, cpu: bool) -> Iterator[Line]:
    """What is there in every phase. b: bytes of a number that the role computes in."""
    parts, own = _parts(role, sharing), _own(role, sharing)
    away = sharing.offloads and not cpu  # what is divided lies with the host

    def line(what: str, count: float, parts: int) -> Line:
        return Line(role.name, what, always(0 if away and parts > 1 else int(count / parts)))

    if role.on is None:
        width = FLOAT32 if _masters_divide(role, sharing) else b
        yield line("weights", _weights(role, width) * own, parts)
    if role.follows:  # divided row for row as the policy
        yield line("average", FLOAT32 * role.parameters * own, sharing.divided)
    if role.learner is None:
        return
    trained = FLOAT32 * role.trained * own
    if role.model.lora is not None:
        yield line("adapter", trained, sharing.divided)
    elif b != FLOAT32 and sharing.divided == 1:
        yield line("master weights", trained, 1)
    moments = line("optimizer", moment_bytes(role) * own, sharing.divided)
    yield replace(moments, bytes={phase: moments.bytes[phase] for phase in PHASES[1:]})
    if role.learner.ema_decay:
        yield line("moving average", trained, sharing.divided)


def loading(role: PlannedRole, b: int, sharing: Sharing) -> int:
    """What a role's weights take beside its parts while they are read: the whole model, on every
    device, in the dtype that it computes in. Float32 are only the parts (parallel/sharding.py).
    """
    return 0 if _parts(role, sharing) == 1 or role.on is not None else _weights(role, b)


def gathered(role: PlannedRole, b: int, sharing: Sharing) -> int:
    """Whole copies that are there while the role computes; 0 where nothing is divided."""
    if sharing.divided == 1:
        return 0
    adapter = role.model.lora is not None and role.learner is not None
    found = FLOAT32 * role.trained if adapter and not sharing.gathers else 0
    if _parts(role, sharing) > 1:
        layers = 2 if sharing.gathers else role.shape.layers
        copied = _outside(role) + layers * role.shape.layer_parameters // sharing.tensor
        found += copied * b
    return found


def gradients(role: PlannedRole, b: int, sharing: Sharing, *, cpu: bool) -> int:
    """Of an update, in float32: whole until they are added over ranks, then rows. Where every
    micro-batch adds them, a layer's are whole for a moment, as they are made and as they are sent.
    """
    whole, parts = int(FLOAT32 * role.trained * _own(role, sharing)), sharing.divided
    if parts == 1:
        return whole
    rows = 0 if sharing.offloads and not cpu else whole // parts
    if not sharing.scatters:
        return whole + rows
    share = role.trained / role.parameters
    one = int(role.shape.layer_parameters * share * (FLOAT32 + b)) // sharing.tensor
    return rows + one


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


def _masters_divide(role: PlannedRole, sharing: Sharing) -> bool:
    """Whether what is divided are the float32 master weights themselves."""
    return role.learner is not None and role.model.lora is None and sharing.divided > 1


def _parts(role: PlannedRole, sharing: Sharing) -> int:
    """Into how many its weights are divided. What is frozen under an adapter is whole, unless it is
    gathered layer by layer or lies with the host.
    """
    whole = role.learner is not None and role.model.lora is not None and not sharing.offloads
    frozen = role.learner is None and not role.follows
    return sharing.divided if sharing.gathers or not (whole or frozen) else 1


def _own(role: PlannedRole, sharing: Sharing) -> float:
    """The share of its weights that a rank has before they are divided by rows: tensor parallelism
    cuts the matrices of layers, not embeddings and head.
    """
    cut = role.shape.layers * role.shape.layer_parameters * (1 - 1 / sharing.tensor)
    return 1 - cut / role.parameters


def _outside(role: PlannedRole) -> int:
    """Weights outside the layers: embeddings, the last norm, the head."""
    return role.parameters - role.shape.layers * role.shape.layer_parameters


def _weights(role: PlannedRole, b: int) -> int:
    """Of the whole model."""
    if role.model.quantize == "4bit":
        inside = role.shape.layers * role.shape.layer_matrix_parameters
        return int(inside * FOUR_BITS + (role.parameters - inside) * b)
    return role.parameters * b
