"""What model.gradient_checkpointing = "offload" takes of the host (models.recompute.HostInputs):
memory for the inputs of layers, and the time in which a device waits for their copies.
"""

from collections.abc import Iterator, Sequence

from postgrad.plan.activations import in_host_memory
from postgrad.plan.costs import CostModel
from postgrad.plan.hardware import Device
from postgrad.plan.roles import PlannedRole
from postgrad.plan.sizes import Sizes, width


def pinned_bytes(roles: Sequence[PlannedRole], sizes: Sizes) -> int:
    """Bytes of the host's memory that a rank of GPUs pins. Roles compute one after the other, and
    use pieces of one size again; torch takes each piece as large as the next power of two. Ranks of
    a tensor group have a run each of the rows that a layer reads.
    """
    pieces: dict[int, int] = {}
    for role in roles:
        model = role.model
        if role.learner is None or not in_host_memory(model.gradient_checkpointing, cpu=False):
            continue
        rows = -(-sizes.micro_tokens // role.learner.tensor_parallel)
        each = rows * role.shape.hidden_size * width(model.dtype, cpu=False)
        piece = 1 << max(0, each - 1).bit_length()
        pieces[piece] = max(pieces.get(piece, 0), role.shape.layers)
    return sum(piece * count for piece, count in pieces.items())


def waited_seconds(
    role: PlannedRole, tokens: float, forward: float, backward: int, costs: CostModel
) -> float:
    """Seconds in which a rank waits for copies over `tokens` tokens of all ranks. They go on beside
    the layers, there in the forward pass and back in the backward pass: what takes longer than
    these is waited for. forward: seconds of a forward pass; backward: how many of these a backward
    pass takes.
    """
    if not in_host_memory(role.model.gradient_checkpointing, cpu=costs.device.is_cpu):
        return 0.0
    numbers = tokens / costs.sharing.ranks * role.shape.layers * role.shape.hidden_size
    copied = costs.copies(numbers * width(role.model.dtype, cpu=False))
    return max(0.0, copied - forward) + max(0.0, copied - backward * forward)


def host_input_notes(roles: Sequence[PlannedRole], sizes: Sizes, device: Device) -> Iterator[str]:
    """A sentence on that memory, where a run takes any."""
    offloads = any(
        role.learner and role.model.gradient_checkpointing == "offload" for role in roles
    )
    if device.is_cpu and offloads:
        yield (
            'model.gradient_checkpointing = "offload" saves nothing on a CPU, whose memory is the '
            "host's: true does the same without copies"
        )
    elif offloads:
        yield (
            'model.gradient_checkpointing = "offload": inputs of layers take '
            f"{pinned_bytes(roles, sizes) / 1e9:.3g} GB of the host's memory on each rank, which "
            "is pinned"
        )
