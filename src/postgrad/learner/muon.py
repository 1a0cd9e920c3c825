"""Muon: steps along orthogonalised momentum, for the matrices of a decoder's layers."""

import math
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from postgrad.learner.settings import LearnerSettings
from postgrad.parallel.sharding import WHOLE, TensorPiece

Gather = Callable[[str, Tensor], tuple[Tensor, TensorPiece]]  # by name; see MasterOptimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al., 2024: the steepest slope at zero
SMALLEST = 1e-7  # least norm to divide by: zeros stay zeros
ADAMW_RMS = 0.2  # root mean square of AdamW's step, in learning rates (Liu et al., 2025, sec. 2.2)
_IN_A_LAYER = re.compile(r"(^|\.)layers\.\d+\.")


def is_hidden_matrix(name: str, weight: Tensor) -> bool:
    """True for the 2-D weights inside a decoder's layers, the A and B of an adapter among them.

    Embeddings, output and score heads lie outside the layers; norms and biases have one dimension.
    """
    return weight.ndim == 2 and _IN_A_LAYER.search(name) is not None


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """Approximately U V^T of a matrix [rows, columns] = U S V^T, in its dtype.

    Newton-Schulz iteration of a quintic after division by the Frobenius norm, so that the scale of
    `matrix` does not matter. Five steps bring singular values that are not tiny into about
    [0.7, 1.2]. More steps do not converge to 1, which does no harm (Jordan et al., 2024). A matrix
    of zeros stays one.
    """
    a, b, c = COEFFICIENTS
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = wide / wide.norm().clamp(min=SMALLEST)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.size(0) > matrix.size(1) else x


class Muon:
    """Momentum, orthogonalised (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/),
    with the decay and the step size of Liu et al., 2025 (Muon is Scalable, arXiv:2502.16982): a
    matrix moves by 0.2 * sqrt(max(rows, columns)) * rate times what `orthogonalised` gives. That is
    about as far as AdamW would move it, so that both use one learning rate.

    Not torch.optim.Muon, which iterates in bfloat16: a rounding of 1e-6 in the gradient changes its
    step by 1% (here by 2e-6), so that micro-batches and ranks would change the update.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        settings: LearnerSettings,
        gather: Gather | None = None,
    ) -> None:
        """gather: gives the whole matrix from this rank's part; None where nothing is divided."""
        self.weights = weights
        self._settings = settings
        self._gather = gather
        self.momentum: dict[str, Tensor] = {}  # by name; from the first step on

    @torch.no_grad()
    def step(self, rate: float, *, moving: bool = True) -> None:
        """One update at `rate`; every weight has a gradient.

        moving: False for an update without any gradient. Momentum and weights decay as always, but
        no step is taken: orthogonalised, even a momentum that has almost decayed gives a full step.
        """
        settings = self._settings
        for name, weight in self.weights.items():
            assert weight.grad is not None
            if name not in self.momentum:
                self.momentum[name] = torch.zeros_like(weight)
            momentum = self.momentum[name].lerp_(weight.grad, 1.0 - settings.muon_momentum)
            weight.mul_(1.0 - rate * settings.weight_decay)
            if moving:
                ahead = momentum
                if settings.muon_nesterov:
                    ahead = weight.grad.lerp(momentum, settings.muon_momentum)
                matrix, piece = self._gather(name, ahead) if self._gather else (ahead, WHOLE)
                size = ADAMW_RMS * math.sqrt(max(matrix.shape))
                direction = piece.of(orthogonalised(matrix, settings.muon_ns_steps))
                weight.add_(direction, alpha=-rate * size)
