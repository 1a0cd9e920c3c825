"""Where A and B of an adapter begin: A drawn and B zero, or by PiSSA (Meng et al. 2024,
arXiv:2404.02948) the part of W along its largest singular values.

The paper freezes what is left of W without that part, W - (alpha / rank) B A. Here W stays as it is
and the starting A and B are kept, as C and D: W + (alpha / rank) (B A - D C) is the same matrix,
and no residual is rounded to the dtype of W. So a reference with the adapter off is the base to the
bit, engines share the base's weights, and the change is an adapter of twice the rank on the base.

C and D are in no checkpoint, as all frozen weights: they follow from W. They are computed in
float64, so that another processor gets the same numbers but for the last bits of float32.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from postgrad.core import seeds
from postgrad.core.errors import UsageError
from postgrad.models.attention import to_device
from postgrad.models.stored import Box, StoredTensor, whole_box


class StartingFactors(nn.Module):
    """C [rank, in] and -D [out, rank] of one adapter of one layer, float32; buffers that no
    checkpoint holds and no rank divides.
    """

    c: Tensor
    minus_d: Tensor

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.register_buffer("c", a.clone(), persistent=False)
        self.register_buffer("minus_d", -b, persistent=False)

    def beside(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """A over C [2 rank, in], and B beside -D [out, 2 rank]: their product is B A - D C."""
        return torch.cat([a, self.c]), torch.cat([b, self.minus_d], 1)


@torch.no_grad()
def principal_factors(
    weight: Tensor, rank: int, scale: float, init: str, seed: int, layer: str, table: str
) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [out, rank] in float32, for which scale B A is the part of `weight` along
    its largest singular values: B is U S^1/2 and A is S^1/2 V^T, each over the root of the scale.

    init: "pissa"; of "pissa_niter_N" the part is one that N rounds of subspace iteration give
    (Halko et al. 2011, arXiv:0909.4061, algorithm 4.4) from vectors drawn by counters from the seed
    and the name of the layer. table: of the recipe, for messages. Raises UsageError where a matrix
    has no `rank` singular values.
    """
    if rank > min(weight.shape):
        raise UsageError(
            f'{table}.init = "{init}": {layer} is a matrix of {weight.shape[0]} x '
            f"{weight.shape[1]}, which has no {rank} singular values: use a smaller rank, or name "
            "a rank for it in rank_pattern"
        )
    wide = weight.double()
    rounds = init.rpartition("_niter_")[2]
    if rounds == init:
        u, s, v = _decomposed(wide)
    else:
        drawn = seeds.uniform(seed, f"pissa {layer}", np.arange(wide.shape[1] * rank))
        drawn = to_device(2.0 * drawn - 1.0, wide.device)
        basis = _orthonormal(wide @ drawn.view(-1, rank))
        for _ in range(int(rounds)):
            basis = _orthonormal(wide @ _orthonormal(wide.T @ basis))
        u, s, v = _decomposed(basis.T @ wide)
        u = basis @ u
    root = (s[:rank] / scale).sqrt()
    a, b = root[:, None] * v[:rank], u[:, :rank] * root
    return a.float().contiguous(), b.float().contiguous()  # LAPACK's columns would round otherwise


def _decomposed(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, S and V^T of a matrix; of a wide one by way of its transpose, for which LAPACK takes a
    third of the time.
    """
    if matrix.shape[0] >= matrix.shape[1]:
        return torch.linalg.svd(matrix, full_matrices=False)
    v, s, u = torch.linalg.svd(matrix.T, full_matrices=False)
    return u.T, s, v.T


def _orthonormal(columns: Tensor) -> Tensor:
    return torch.linalg.qr(columns)[0]


@dataclass(frozen=True, slots=True)
class FreshA:
    """Blocks of a fresh A [rank, width], whose numbers are drawn from counters."""

    seed: int
    stream: str
    width: int

    def __call__(self, box: Box) -> Tensor:
        (row, rows), (column, columns) = box
        places = np.arange(row, row + rows)[:, None] * self.width + np.arange(columns) + column
        drawn = seeds.uniform(self.seed, self.stream, places.ravel())
        a = torch.from_numpy((2.0 * drawn - 1.0) * self.width**-0.5).float()
        return a.view(rows, columns)


def fresh_factors(
    base: Tensor, shape_a: tuple[int, int], shape_b: tuple[int, int], draw_a: FreshA
) -> tuple[Tensor, Tensor]:
    """A drawn and B zero, in float32; where the weight that they change lies in its file, their
    blocks are made when they are read.
    """
    if isinstance(base, StoredTensor):
        a = StoredTensor(shape_a, torch.float32, base.device, draw_a)
        return a, StoredTensor(shape_b, torch.float32, base.device, _zeros)
    a = to_device(draw_a(whole_box(shape_a)).numpy(), base.device)
    return a, torch.zeros(shape_b, device=base.device)


def _zeros(box: Box) -> Tensor:
    return torch.zeros([count for _, count in box])
