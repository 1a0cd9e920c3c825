"""Merges of the same tensor of several models: pure functions, in the dtype of the tensors.

All models have one shape, and were trained from one start. A delta is a model minus that start.

- Linear averages: Wortsman et al. 2022, "Model soups", arXiv:2203.05482; of reward models: Ramé et
  al. 2024, "WARM", arXiv:2401.12187.
- Spherical interpolation: Shoemake 1985, "Animating rotation with quaternion curves".
- Task arithmetic is a linear sum of deltas: Ilharco et al. 2023, arXiv:2212.04089.
- TIES: Yadav et al. 2023, arXiv:2306.01708.
- DARE: Yu et al. 2024, arXiv:2311.03099.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from postgrad.core.seeds import uniform

PARALLEL = 0.9995  # cosine above which an arc is as good as a straight line, and sin(angle) is lost
DRAWN = 2**22  # random numbers that are drawn at a time: each takes some 40 bytes on the way


def linear(tensors: Sequence[Tensor], weights: Sequence[float], *, normalize: bool) -> Tensor:
    """The weighted sum; normalize: over the sum of the weights."""
    total = _sum(tensors, weights)
    return total / sum(weights) if normalize else total


def slerp(first: Tensor, second: Tensor, t: float) -> Tensor:
    """The point at t on the arc from `first` (0) to `second` (1), both as one long vector; on the
    straight line where they are parallel or one of them is zero.
    """
    a, b = first.double(), second.double()
    lengths = float((a * a).sum().sqrt() * (b * b).sum().sqrt())
    dot = float((a * b).sum())
    cosine = min(1.0, max(-1.0, dot / lengths)) if lengths else 1.0
    if abs(cosine) > PARALLEL:
        return first + t * (second - first)
    angle = np.arccos(cosine)
    shares = np.sin((1 - t) * angle) / np.sin(angle), np.sin(t * angle) / np.sin(angle)
    return float(shares[0]) * first + float(shares[1]) * second


def trimmed(delta: Tensor, density: float) -> Tensor:
    """The share `density` of the numbers that are largest in magnitude; zero for the others."""
    kept = max(1, int(density * delta.numel()))
    if kept >= delta.numel():
        return delta
    flat = delta.flatten()
    places = flat.abs().topk(kept, sorted=False).indices
    return torch.zeros_like(flat).index_copy_(0, places, flat[places]).view_as(delta)


def dropped(delta: Tensor, density: float, seed: int, name: str, model: int) -> Tensor:
    """Each number is kept with probability `density` and divided by it, else zero.

    seed, name (of the tensor), model (its place in the list): which numbers are kept depends on
    them and on nothing else.
    """
    if density >= 1:
        return delta
    flat = delta.flatten().clone()
    tensor = zlib.crc32(name.encode())
    for start in range(0, flat.numel(), DRAWN):
        places = np.arange(start, min(start + DRAWN, flat.numel()), dtype=np.uint64)
        kept = torch.as_tensor(uniform(seed, "merge", model, tensor, places) < density)
        flat[start : start + DRAWN] *= kept.to(flat.dtype) / density
    return flat.view_as(delta)


def elected(deltas: Sequence[Tensor], weights: Sequence[float], *, normalize: bool) -> Tensor:
    """TIES's election: at each place the sign of the weighted sum wins, and deltas of that sign
    alone are summed. normalize: over the weights of those that are summed, which is a mean.
    """
    sign = _sum(deltas, weights).sign()
    total, share = torch.zeros_like(deltas[0]), torch.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        agrees = (weight * delta).sign() == sign
        agrees &= sign != 0
        total += weight * delta * agrees
        share += weight * agrees
    if not normalize:
        return total
    return torch.where(share != 0, total / torch.where(share != 0, share, 1.0), 0.0)


def _sum(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = torch.zeros_like(tensors[0])
    for tensor, weight in zip(tensors, weights, strict=True):
        total.add_(tensor, alpha=weight)
    return total
