"""A moving average of a role's weights, kept beside them in float32 (Polyak and Juditsky, 1992)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from postgrad.core.errors import RunError


class MovingAverage:
    """average = decay * average + (1 - decay) * weights, once an update; starts at the weights."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self.weights = {name: weight.detach().clone() for name, weight in weights.items()}

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Moves the average towards `weights`, which an update has just changed."""
        for name, average in self.weights.items():
            average.lerp_(weights[name], 1.0 - self.decay)

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Takes over the average of a checkpoint. Other names or shapes are a RunError."""
        if {n: w.shape for n, w in saved.items()} != {n: w.shape for n, w in self.weights.items()}:
            raise RunError("the checkpoint's moving average is of another model")
        for name, average in self.weights.items():
            average.copy_(saved[name])
