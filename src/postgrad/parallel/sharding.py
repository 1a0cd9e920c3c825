"""How a module's weights, gradients and optimizer state are divided over ranks, stage by stage.

FSDP2 has one mechanism and no stages; each stage is a setting of its flags. Master weights are
float32 and divided by rows (dimension 0) in every stage but "none".

    stage    after forward    after backward         gradients are added over ranks
    zero3    let go           let go                 in every micro-batch
    zero2    kept             let go after the last  in every micro-batch
    zero1    kept             let go after the last  after the last micro-batch
    none     whole on every rank, without FSDP2; the learner adds gradients before its step

So with zero1 and zero2 a rank holds a whole copy of the weights from the first forward of an update
to its last backward, and with zero1 whole float32 gradients too (docs/distributed.md). What is
frozen under an adapter they leave whole on every rank: a part of it would lie beside a whole copy.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from postgrad.parallel.ranks import Ranks

Stage = Literal["none", "zero1", "zero2", "zero3"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a rank's part of a tensor of `shape` lies: rows [start, start + rows) where it is
    `divided`, else everything, on every rank.
    """

    shape: tuple[int, ...]
    start: int = 0
    rows: int = 0
    divided: bool = False

    def of(self, whole: Tensor) -> Tensor:
        """This part of the whole tensor: a view."""
        return whole.narrow(0, self.start, self.rows) if self.divided else whole


WHOLE = Piece(())  # of a tensor that nobody divided


class Sharding:
    """The weights of a module, divided. Made once, before optimizers look at the parameters.

    root: what is run; layers: parts of it whose weights are gathered together, in turn; alone:
    parts that compute in float32 whatever the rest does. compute: what the rest computes in.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: Iterable[nn.Module],
        alone: Iterable[nn.Module],
        stage: Stage,
        ranks: Ranks,
        compute: torch.dtype,
    ) -> None:
        self.stage: Stage = stage
        self._modules: list[FSDPModule] = []
        if stage == "none" or ranks.size == 1:
            return
        half = _narrow(root, compute)
        policy = MixedPrecisionPolicy(
            param_dtype=compute if half else None, reduce_dtype=torch.float32
        )
        plain = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        reshard = stage == "zero3"
        whole = set() if reshard else _frozen_beside_trained(root)
        for module in alone:
            fully_shard(
                module, mesh=ranks.mesh, reshard_after_forward=reshard, mp_policy=plain,
                ignored_params=whole,
            )  # fmt: skip
        for module in (*layers, root):
            fully_shard(
                module, mesh=ranks.mesh, reshard_after_forward=reshard, mp_policy=policy,
                ignored_params=whole,
            )  # fmt: skip
        self._modules = [module for module in root.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)  # sums, never means
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it adds

    def before_micro_batch(self, last: bool) -> None:
        """Says whether the update's last micro-batch comes now."""
        for module in self._modules:
            if self.stage == "zero1":
                module.set_requires_gradient_sync(last, recurse=False)
            if self.stage in ("zero1", "zero2"):
                module.set_reshard_after_backward(last, recurse=False)

    def let_go(self) -> None:
        """Once weights have moved, or nothing will run for a while: whole copies are stale."""
        for module in self._modules:
            module.reshard()


def _narrow(root: nn.Module, compute: torch.dtype) -> bool:
    """Trained weights in a narrow format become float32, from which FSDP2 rounds copies to compute
    with; what is frozen stays as it is. True where there are such.
    """
    trained = [p for p in root.parameters() if p.requires_grad and p.dtype != torch.float32]
    for parameter in trained:
        parameter.data = parameter.data.float()
    return bool(trained) and compute != torch.float32


def _frozen_beside_trained(root: nn.Module) -> set[nn.Parameter]:
    """Weights under an adapter; none of a module that is frozen as a whole."""
    parameters = list(root.parameters())
    trained = any(p.requires_grad for p in parameters)
    return {p for p in parameters if trained and not p.requires_grad}


def piece_of(parameter: Tensor, ranks: Ranks) -> Piece:
    """Where this rank's part of a parameter lies."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Piece(shape)
    each = -(-shape[0] // ranks.size)  # FSDP2 cuts into equal chunks, the last ones short or empty
    start = min(shape[0], ranks.rank * each)
    rows = len(local(parameter))
    assert rows == min(each, shape[0] - start), f"{shape} is not divided by rows"
    return Piece(shape, start, rows, divided=True)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, in the same memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(part: Tensor, piece: Piece, ranks: Ranks) -> Tensor:
    """The whole tensor from the parts of all ranks, on every rank. All ranks have to ask."""
    if not piece.divided:
        return part
    each = -(-piece.shape[0] // ranks.size)
    padded = part.new_zeros(each, *piece.shape[1:])
    padded[: piece.rows] = part
    parts = [torch.empty_like(padded) for _ in range(ranks.size)]
    torch.distributed.all_gather(parts, padded)
    return torch.cat(parts)[: piece.shape[0]]


def assembled(tensor: Tensor) -> Tensor:
    """A tensor that FSDP2 divided, or one that was computed from such, whole. All ranks ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
