"""What a GPU holds beside tensors: workspaces of cuBLAS, what torch's allocator has reserved in
pages and in holes between tensors, buffers of NCCL, the share of a vLLM process.

torch maps memory page by page (expandable segments, parallel.device) and gives it back between
phases, so that a phase begins without holes. Within it a freed tensor leaves one, which the next
tensors fill as far as they fit.
"""

from collections.abc import Iterator, Sequence

from postgrad.plan.activations import FLOAT32
from postgrad.plan.hardware import Device
from postgrad.plan.held import PHASES, MemoryLine, MemoryPhase, always, arriving, outside
from postgrad.plan.passes import LOGITS
from postgrad.plan.roles import PlannedRole
from postgrad.plan.sizes import Sharing, width

NCCL = "buffers of NCCL"  # purposes of lines that torch's allocator does not see
VLLM = "share of vLLM"
OUTSIDE = frozenset((NCCL, VLLM))

# cuBLAS has a workspace for each thread that multiplies: the one of forward passes, and autograd's.
# ":4096:8" of parallel.device are 8 of 4096 KiB, which is also what a Hopper card has without it.
HANDLES, WORKSPACE = 2, 8 * 4096 * 2**10
# torch's allocator maps pages of 20 MiB for tensors from 1 MiB on, and of 2 MiB for smaller ones,
# for each stream of its own.
LARGE_PAGE, SMALL_PAGE = 20 * 2**20, 2 * 2**20
STREAMS, SHARDED_STREAMS = 1, 3  # FSDP2 has one more to gather into and one to reduce in
# Freed pieces that nothing fits into, of what a pass takes: 1 to 2.5%, measured (docs/planning.md).
# Beside a frozen output matrix, whose gradient would fill it, also the logits in bfloat16: a fifth
# of a chunk.
HOLES, CHUNK_HOLES = 0.015, 0.2
REDUCED_HOLES = 0.5  # of what FSDP2 reduces outside the layers, measured in four cases
# NCCL receives through 10 MiB in each channel of a communicator, with a ring and a tree. That is
# 0.67 GB over NVLink, where 0.69 GB were read on four A100 (github.com/NVIDIA/nccl/issues/964).
CHANNEL = 2 * 10 * 2**20
CHANNELS = {"nvlink": 32, "xgmi": 32, "pcie": 4, "none": 0}


def workspaces() -> Iterator[MemoryLine]:
    """Those of cuBLAS, from the first product on."""
    count = HANDLES * WORKSPACE
    yield MemoryLine("run", "workspaces of cuBLAS", dict.fromkeys(PHASES[1:], count))


def pages(sharing: Sharing) -> Iterator[MemoryLine]:
    """The last page of each segment, which is not full."""
    streams = SHARDED_STREAMS if sharing.divided > 1 else STREAMS
    yield MemoryLine("run", "pages", always(streams * (LARGE_PAGE + SMALL_PAGE)))


def communication(sharing: Sharing, device: Device) -> Iterator[MemoryLine]:
    """Buffers of NCCL's communicators, which stay from their first use on."""
    count = communicators(sharing) * CHANNELS[device.link] * CHANNEL
    yield MemoryLine("run", NCCL, dict.fromkeys(PHASES[1:], count))


def communicators(sharing: Sharing) -> int:
    """How many a rank takes part in (parallel.ranks.Groups): that of all ranks; those over which
    layers and other weights are sharded, which tensor parallelism keeps apart; between groups that
    hold all weights; of the ranks that share a sequence, matrices, or both; of those that share
    experts, and of those that have the same experts.
    """
    if sharing.ranks == 1:
        return 0
    tensor, context = sharing.tensor > 1, sharing.context > 1
    sharded = sharing.divided > 1
    groups = sharded and sharing.replicas * sharing.context > sharing.divided
    expert = sharing.expert > 1
    same = expert and sharing.ranks > sharing.expert
    each = (sharded, sharded and tensor, groups, tensor, context, tensor and context, expert, same)
    return 1 + sum(each)


def gathering(roles: Sequence[PlannedRole], sharing: Sharing) -> Iterator[MemoryLine]:
    """What gathered weights arrive in, of the largest role: kept from the first pass on. And what
    is left of the reduction outside the layers, which is the largest: the shard that it gives, in
    the memory of another stream, and a part of its input, into which later tensors are put.
    """
    count = max(arriving(role, width(role.model.dtype, cpu=False), sharing) for role in roles)
    yield MemoryLine("run", "weights as they arrive", {"score": count, "update": count})
    trained = [role for role in roles if role.learner is not None and role.model.lora is None]
    reduced = max((FLOAT32 * outside(role) for role in trained if count), default=0)
    left = int(reduced * (1 / sharing.divided + REDUCED_HOLES))
    yield MemoryLine("run", "gradients as they leave", {"update": left})


def holes(lines: Sequence[MemoryLine], roles: Sequence[PlannedRole]) -> Iterator[MemoryLine]:
    """Freed memory between tensors: a share of what the passes of a phase, `lines`, take."""
    adapted = {role.name for role in roles if role.model.lora is not None}
    chunks = [line for line in lines if line.role in adapted and line.purpose == LOGITS]

    def left(phase: MemoryPhase) -> int:
        """Of whole sums: the shares of single lines would round otherwise for an equal sum."""
        taken, of_chunks = (
            sum(line.bytes.get(phase, 0) for line in part) for part in (lines, chunks)
        )
        return int(HOLES * taken + CHUNK_HOLES * of_chunks)

    phases: dict[MemoryPhase, int] = {phase: left(phase) for phase in PHASES}
    yield MemoryLine("run", "holes between tensors", phases)
