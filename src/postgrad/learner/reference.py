"""A reference that follows the policy: refreshed every n steps, or its moving average."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from postgrad.core.errors import RunError
from postgrad.learner.average import MovingAverage
from postgrad.learner.backbone import Backbone
from postgrad.learner.role import Policy


class MovingReference(Policy):
    """A role whose weights are the policy's of some steps ago (`refresh_steps` > 0), or their
    moving average, one step at a time (`ema_decay` > 0). Starts with the weights of its backbone.
    """

    def __init__(
        self,
        backbone: Backbone,
        temperature: float,
        *,
        refresh_steps: int,
        ema_decay: float,
        policy: Mapping[str, Tensor],
    ) -> None:
        """policy: the float32 weights by hub name, from which a moving average starts."""
        super().__init__(backbone, temperature)
        self._refresh_steps = refresh_steps
        self._average = MovingAverage(policy, ema_decay) if ema_decay else None

    def after_step(self, step: int, policy: Mapping[str, Tensor]) -> None:
        """Once step `step` has moved the policy's weights."""
        if self._average is not None:
            self._average.update(policy)
            self._take(self._average.weights)
        elif step % self._refresh_steps == 0:
            self._take(policy)

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """What a checkpoint has to hold: the average in float32, or the weights as used."""
        own = self._parameters() if self._average is None else self._average.weights
        return {"reference.weights": own}

    def state_bytes(self) -> int:
        """Of `tensors`."""
        return sum(tensor.nbytes for tensor in self.tensors()["reference.weights"].values())

    def load(self, read: Callable[[str], Mapping[str, Tensor]]) -> None:
        """Go on from a checkpoint. RunError where its weights are of another model."""
        saved = read("reference.weights")
        if self._average is not None:
            self._average.load(saved)
        own = self._parameters()
        if {n: t.shape for n, t in saved.items()} != {n: t.shape for n, t in own.items()}:
            raise RunError("the checkpoint's reference is of another model")
        self._take(saved)

    def _parameters(self) -> dict[str, Tensor]:
        return dict(self.backbone.lm.named_parameters())

    @torch.no_grad()
    def _take(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters().items():
            parameter.copy_(weights[name])
