"""How a module's weights, gradients and optimizer state are divided over ranks, stage by stage.

FSDP2 has one mechanism and no stages; each stage is a setting of its flags. Master weights are
float32 and divided by rows (dimension 0) in every stage but "none".

    stage    whole weights after forward   after backward         gradients are added over ranks
    zero3    freed                         freed                  in every micro-batch
    zero2    kept                          freed after the last   in every micro-batch
    zero1    kept                          freed after the last   after the last micro-batch
    none     whole on every rank, without FSDP2; the learner adds gradients before its step

So with zero1 and zero2 a rank holds a whole copy of the weights from the first forward of an update
to its last backward, and with zero1 whole float32 gradients too (docs/distributed.md). Weights that
are frozen under an adapter are not divided there: a part would only add to the whole copy. Weights
that a narrow model keeps in float32 are divided in no stage, and stay on the device.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from postgrad.core.settings import ShardingStage
from postgrad.parallel.ranks import Ranks

BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_INPUTS = ("o_proj", "down_proj")
MANAGED = "_is_fsdp_managed_module"  # by which torch's compiler knows a module of FSDP2
# Of a decoder: a tower's are behind encoder.layers, where they have such names.
_MATRIX = re.compile(
    r"(?:^|(?<!encoder)\.)layers\.\d+\.(?:self_attn|mlp)\.(\w+_proj)\.(?:base_layer\.)?(lora_[AB])?.*(weight|bias)$"
)
# A weight of all experts of a layer [experts, ...], as transformers' mixtures have it.
_EXPERTS = re.compile(r"(?:^|\.)layers\.\d+\.(?:\w+\.)*experts\.\w+$")


def cut_dim(name: str) -> int | None:
    """The dimension along which the parameter `name` (the hub's, PEFT's or a module's) is cut; None
    where every rank has all of it.
    """
    match = _MATRIX.search(name)
    if match is None:
        return None
    matrix, adapter, kind = match.groups()
    if matrix in BY_OUTPUTS:
        return None if adapter == "lora_A" else 0
    if matrix in BY_INPUTS:
        return None if adapter == "lora_B" or kind == "bias" else 1
    return None


def is_of_experts(name: str) -> bool:
    """Whether the parameter `name` is one weight of all experts of a layer [experts, ...]."""
    return _EXPERTS.search(name) is not None


@dataclass(frozen=True, slots=True)
class Cut:
    """How ranks divide a parameter before FSDP2 does: in equal parts along a dimension."""

    dim: int
    part: int  # number of this rank's part
    parts: int
    among: Any  # the process group of the ranks that have its parts
    alike: Any  # that of all ranks with this rank's part; None: no other has it


def cut_of(name: str, ranks: Ranks) -> Cut | None:
    """How tensor or expert parallelism cuts the parameter `name`; None where neither does."""
    grid, groups = ranks.grid, ranks.groups
    dim = cut_dim(name) if grid.tensor > 1 else None
    if dim is not None:
        return Cut(dim, ranks.tensor_rank, grid.tensor, groups.tensor, groups.data)
    if grid.expert > 1 and is_of_experts(name):
        return Cut(0, ranks.expert_rank, grid.expert, groups.expert, groups.expert_data)
    return None


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """This rank's part of a tensor that may be divided over ranks."""

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...] = ()  # where the part begins, by dimension; (): the part is the whole
    sizes: tuple[int, ...] = ()  # the part's shape
    sharded: bool = False  # FSDP2 divides it
    cut: Cut | None = None  # how tensor or expert parallelism divides it; None: neither does
    rows: Any = None  # the process group over which FSDP2 divides dimension 0
    copies: int = 1  # number of ranks that hold this same part
    first: bool = True  # this rank is the first of them
    lacks: Any = None  # the process group over which its gradient is still to be added; None: none

    @property
    def divided(self) -> bool:
        """True where other ranks hold other parts."""
        return self.sharded or self.cut is not None

    def of(self, full: Tensor) -> Tensor:
        """This part of the whole tensor: a view."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            full = full.narrow(dim, offset, size)
        return full


WHOLE = TensorPiece(())  # stands for a tensor that is not divided


class Sharding:
    """Divides the weights of a module over ranks. Created once, before an optimizer takes them.

    root: the module that is called. layers: parts of it, each gathered at once when it runs. alone:
    parts that compute in float32 whatever the rest does. compute: the dtype of the rest. offload:
    divided weights lie in the host's memory and are copied to the device to compute. experts: parts
    of layers that hold only experts which expert parallelism has cut. undivided: weights that every
    rank has whole, beside those that are in no stage divided.

    Layers, whose matrices tensor parallelism may have cut, are divided over the ranks with the same
    cut, experts over those with the same experts, other weights over all ranks. All of them only
    within a group of the grid.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: Iterable[nn.Module],
        alone: Iterable[nn.Module],
        stage: ShardingStage,
        ranks: Ranks,
        compute: torch.dtype,
        *,
        offload: bool = False,
        experts: Iterable[nn.Module] = (),
        undivided: Iterable[nn.Parameter] = (),
    ) -> None:
        self.stage: ShardingStage = stage
        self._modules: list[FSDPModule] = []
        self._grouped = ranks.grid.groups > 1
        if stage == "none" or ranks.size == 1:
            return
        plain = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        alone, layers, experts = [*alone], [*layers], [*experts]
        how: dict[str, Any] = {"reshard_after_forward": stage == "zero3"}
        how["ignored_params"] = _wide_beside_narrow(root, alone, [*experts, *layers])
        how["ignored_params"] |= {*undivided}
        if offload:  # of what is divided: frozen weights too then, which are most of an adapter's
            how["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        elif stage != "zero3":
            how["ignored_params"] |= _frozen_beside_trained(root)
        mesh, data_mesh = ranks.groups.mesh, ranks.groups.data_mesh
        for module in alone:
            _shard(module, mesh=mesh, mp_policy=plain, **how)
        for module in experts:
            policy = replace(_policy(module, compute), cast_forward_inputs=False)  # as in a layer
            _shard(module, mesh=ranks.groups.expert_mesh, mp_policy=policy, **how)
        for module in layers:
            _shard(module, mesh=data_mesh, mp_policy=_policy(module, compute), **how)
        _shard(root, mesh=mesh, mp_policy=_policy(root, compute), **how)
        self._modules = [module for module in root.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)  # sums, never means
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it adds
        # In modules with FSDP2's mark torch's compiler takes numbers, as the width of a head, for
        # such that change from call to call, and flex attention has no kernel for these.
        for module in root.modules():
            if hasattr(module, MANAGED):
                setattr(module, MANAGED, False)

    @property
    def divides(self) -> bool:
        """Whether FSDP2 has any weight: not in one process, and not in stage "none"."""
        return bool(self._modules)

    def before_micro_batch(self, last: bool) -> None:
        """To be called before every micro-batch. last: it is the update's last one."""
        for module in self._modules:
            if self.stage == "zero1":
                module.set_requires_gradient_sync(last, recurse=False)
            if self.stage in ("zero1", "zero2"):
                module.set_reshard_after_backward(last, recurse=False)
            if self._grouped:  # within a group as the stage says, between groups once
                module.set_requires_all_reduce(last, recurse=False)

    def gather_root(self) -> None:
        """Gathers the weights outside of layers, such as the output head, to be read after the
        module's forward pass: until its next one, or `free_gathered`.
        """
        if self._modules:
            self._modules[0].unshard()

    def free_gathered(self) -> None:
        """Frees whole copies of the weights: after an update, when they are stale, or before a long
        pause.
        """
        for module in self._modules:
            module.reshard()


def _policy(module: nn.Module, compute: torch.dtype) -> MixedPrecisionPolicy:
    """Trained weights in a narrow dtype compute in it; an adapter's are float32, and stay so, also
    where a copy of the output head trains beside it.
    """
    half = compute != torch.float32 and any(map(_narrow, module.parameters()))
    return MixedPrecisionPolicy(param_dtype=compute if half else None, reduce_dtype=torch.float32)


def _shard(module: nn.Module, **how: Any) -> None:
    """Divides a module's weights. Trained ones in a narrow dtype become float32 (FSDP2 rounds the
    copies to compute with); frozen ones stay. They are converted after the division, so that no
    rank ever holds a whole layer in float32, which would also leave holes in the heap.
    """
    narrow = any(map(_narrow, module.parameters()))
    sharded: Any = fully_shard(module, **how)
    if narrow:
        sharded._apply(lambda t: t.float() if _narrow(t) else t)  # FSDP2 updates its own records


def _narrow(weight: Tensor) -> bool:
    """Whether a weight is trained and not float32."""
    return weight.requires_grad and weight.dtype != torch.float32


def _frozen_beside_trained(root: nn.Module) -> set[nn.Parameter]:
    """The frozen weights under an adapter; empty where all of a module is frozen."""
    parameters = list(root.parameters())
    trained = any(p.requires_grad for p in parameters)
    return {p for p in parameters if trained and not p.requires_grad}


def _wide_beside_narrow(
    root: nn.Module, alone: list[nn.Module], units: list[nn.Module]
) -> set[nn.Parameter]:
    """The trained float32 weights of what computes in a narrow dtype, such as the dt_bias of a
    delta rule, which transformers keeps in float32. FSDP2 would round them: it has one dtype for
    all weights that it gathers together. So every rank has them whole.

    alone: parts that compute in float32. units: others that are gathered by themselves, inner ones
    first; the root is one more.
    """
    seen = {weight for part in alone for weight in part.parameters()}
    wide: set[nn.Parameter] = set()
    for unit in (*units, root):
        weights = {weight for weight in unit.parameters() if weight not in seen}
        seen |= weights
        if any(map(_narrow, weights)):
            wide |= {weight for weight in weights if weight.requires_grad and not _narrow(weight)}
    return wide


def piece_of(name: str, parameter: Tensor, ranks: Ranks) -> TensorPiece:
    """Where this rank's part of a parameter lies; its `name` decides how it is cut."""
    shape, offsets = list(parameter.shape), [0] * parameter.ndim
    cut = cut_of(name, ranks)
    if cut is not None:
        offsets[cut.dim] = cut.part * shape[cut.dim]
        shape[cut.dim] *= cut.parts
    part_shape = local(parameter).shape
    if not isinstance(parameter, DTensor):
        parts = 1 if cut is None else cut.parts
        return TensorPiece(
            tuple(shape),
            tuple(offsets),
            tuple(part_shape),
            cut=cut,
            copies=ranks.size // parts,
            first=ranks.rank < parts,
            lacks=dist.group.WORLD if cut is None else cut.alike,
        )
    mesh = parameter.device_mesh
    every = -(-parameter.shape[0] // mesh.size(-1))  # equal chunks, the last ones short or empty
    at = min(parameter.shape[0], mesh.get_local_rank(mesh.ndim - 1) * every)
    assert part_shape[0] == min(every, parameter.shape[0] - at), f"{name} is not divided by rows"
    offsets[0] += at
    everywhere = mesh.size() == ranks.size  # also over ranks that share matrices
    alike = 1 if everywhere or cut is not None else ranks.grid.tensor
    return TensorPiece(
        tuple(shape),
        tuple(offsets),
        tuple(part_shape),
        sharded=True,
        cut=cut,
        rows=mesh.get_group(mesh.ndim - 1),
        copies=ranks.grid.groups * alike,
        first=ranks.shard_group == 0 and (alike == 1 or ranks.tensor_rank == 0),
        lacks=ranks.groups.tensor if alike > 1 else None,
    )


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory, without gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensor(part: Tensor, piece: TensorPiece) -> Tensor:
    """The whole tensor from the parts of all ranks, on every rank. All ranks have to call it."""
    if piece.sharded:
        parts = 1 if piece.cut is None or piece.cut.dim else piece.cut.parts  # of the rows
        length = piece.shape[0] // parts
        every = -(-length // dist.get_world_size(piece.rows))
        padded = part.new_zeros(every, *part.shape[1:])
        padded[: len(part)] = part
        part = torch.cat(_gathered(padded, piece.rows))[:length]
    return _joined(part, piece.cut)


def assembled(name: str, tensor: Tensor, ranks: Ranks) -> Tensor:
    """A weight `name` of the hub, or one merged from it and its adapter, whole on every rank. All
    ranks have to call it.
    """
    part = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return _joined(part, cut_of(name, ranks))


def _joined(part: Tensor, cut: Cut | None) -> Tensor:
    """A weight from the parts of the ranks that divide it, concatenated as it was cut."""
    return part if cut is None else torch.cat(_gathered(part, cut.among), cut.dim)


def _gathered(part: Tensor, group: Any) -> list[Tensor]:
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part, group=group)
    return parts
