"""What a role holds of its weights on one device: itself, its optimizer's, its gradients.

What is divided lies in rows in all phases, and in whole copies only while the role computes
(postgrad.parallel.sharding): all of it under zero1 and zero2, two layers and what lies outside the
layers under zero3. What is frozen, under an adapter too, is divided under zero3 alone.
"""

from collections.abc import Iterator

from postgrad.plan.activations import FLOAT32
from postgrad.plan.phases import PHASES, Line, always
from postgrad.plan.roles import PlannedRole
from postgrad.plan.sharing import Sharing

FOUR_BITS = 4.127 / 8  # bytes a weight, NF4 with double quantization (arXiv:2305.14314)


def held(role: PlannedRole, b: int, sharing: Sharing) -> Iterator[Line]:
    """What is there in every phase. b: bytes of a number that the role computes in."""
    parts, tensor = _parts(role, sharing), sharing.tensor
    if role.on is None:
        width = FLOAT32 if _masters_divide(role, sharing) else b
        yield Line(role.name, "weights", always(_weights(role, width) // tensor // parts))
    if role.follows:  # divided row for row as the policy
        average = FLOAT32 * role.parameters // tensor // sharing.divided
        yield Line(role.name, "average", always(average))
    if role.learner is None:
        return
    trained = FLOAT32 * role.trained // tensor // sharing.divided
    if role.model.lora is not None:
        yield Line(role.name, "adapter", always(trained))
    elif b != FLOAT32 and sharing.divided == 1:
        yield Line(role.name, "master weights", always(trained))
    moments = moment_bytes(role) // tensor // sharing.divided
    yield Line(role.name, "optimizer", {phase: moments for phase in PHASES if phase != "load"})
    if role.learner.ema_decay:
        yield Line(role.name, "moving average", always(trained))


def loading(role: PlannedRole, b: int, sharing: Sharing) -> int:
    """What a role's weights take beside its parts while they are read: the whole model, on every
    device, as the masters that are divided next.
    """
    if _parts(role, sharing) == 1 or role.on is not None:
        return 0
    return _weights(role, FLOAT32 if _masters_divide(role, sharing) else b) // sharing.tensor


def gathered(role: PlannedRole, b: int, sharing: Sharing) -> int:
    """Whole copies that are there while the role computes; 0 where nothing is divided."""
    if sharing.divided == 1:
        return 0
    adapter = role.model.lora is not None and role.learner is not None
    found = FLOAT32 * role.trained if adapter and not sharing.gathers else 0
    if _parts(role, sharing) > 1:
        layers = 2 * role.shape.layer_parameters
        copied = _outside(role) + layers if sharing.gathers else role.parameters
        found += copied * b
    return found // sharing.tensor


def gradients(role: PlannedRole, b: int, sharing: Sharing) -> int:
    """Of an update, in float32: whole until they are added over ranks, then rows. Where every
    micro-batch adds them, a layer's are whole for a moment, as they are made and as they are sent.
    """
    whole, parts = FLOAT32 * role.trained // sharing.tensor, sharing.divided
    if parts == 1:
        return whole
    if not sharing.scatters:
        return whole + whole // parts
    share = role.trained / role.parameters
    one = int(role.shape.layer_parameters * share * (FLOAT32 + b)) // sharing.tensor
    return whole // parts + one


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
    """Into how many its weights are divided."""
    trained = role.learner is not None and role.model.lora is None
    return sharing.divided if sharing.gathers or trained or role.follows else 1


def _outside(role: PlannedRole) -> int:
    """Weights outside the layers: embeddings, the last norm, the head."""
    return role.parameters - role.shape.layers * role.shape.layer_parameters


def _weights(role: PlannedRole, b: int) -> int:
    """Of the whole model."""
    if role.model.quantize == "4bit":
        inside = role.shape.layers * role.shape.layer_matrix_parameters
        return int(inside * FOUR_BITS + (role.parameters - inside) * b)
    return role.parameters * b
