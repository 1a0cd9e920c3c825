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
SMALLEST = 1e-7  # a norm below it is taken for this one: zeros stay zeros
ADAMW_RMS = 0.2  # of an AdamW step, in learning rates (Liu et al., 2025, section 2.2)
_IN_A_LAYER = re.compile(r"(^|\.)layers\.\d+\.")


def is_hidden_matrix(name: str, weight: Tensor) -> bool:
    """True for the 2-D weights inside a decoder's layers, the A and B of an adapter among them.

    Embeddings, output and score heads lie outside the layers; norms and biases have one dimension.
    """
    return weight.ndim == 2 and _IN_A_LAYER.search(name) is not None


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """About U V^T of a matrix [rows, columns] = U S V^T: singular values near 1, in its own dtype.

    Newton-Schulz iteration of a quintic after division by the Frobenius norm, so that the scale of
    `matrix` does not matter. Five steps bring what is not tiny into about [0.7, 1.2]; more do not
    converge, which harms nobody (Jordan et al., 2024). A matrix of zeros stays one.
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
    matrix moves by 0.2 * sqrt(max(rows, columns)) * rate times what `orthogonalised` gives, about
    as far as AdamW moves it, so that both go by one learning rate.

    Own code, because torch.optim.Muon iterates in bfloat16, which makes 1 % of the step out of a
    rounding of 1e-6 in the gradient (here 2e-6): micro-batches and ranks would change the update.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        settings: LearnerSettings,
        gather: Gather | None = None,
    ) -> None:
        """gather: the whole matrix from this rank's part; None where parts are whole."""
        self.weights = weights
        self._settings = settings
        self._gather = gather
        self.momentum: dict[str, Tensor] = {}  # by name; from the first step on

    @torch.no_grad()
    def step(self, rate: float, *, moving: bool = True) -> None:
        """One update at `rate`; every weight has a gradient.

        moving: False for an update without any gradient. Momentum and weights decay as ever, but
        what is left of the momentum is not followed: it would be a whole step, however old it is.
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
