"""The step of Muon: a matrix without the lengths of its singular vectors."""

from typing import cast

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al., 2024: the steepest slope at zero
SMALLEST = 1e-7  # least norm to divide by: zeros stay zeros


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """Approximately U V^T of a matrix [rows, columns] = U S V^T, in its dtype.

    Newton-Schulz iteration of a quintic after division by the Frobenius norm, so that the scale of
    `matrix` does not matter. Five steps bring singular values that are not tiny into about
    [0.7, 1.2]. More steps do not converge to 1, which does no harm (Jordan et al., 2024). A matrix
    of zeros stays one.
    """
    a, b, c = COEFFICIENTS
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    length = cast(Tensor, wide.norm())  # pyright: ignore[reportUnknownMemberType]
    x = wide / length.clamp(min=SMALLEST)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.size(0) > matrix.size(1) else x
