"""A reference that follows the policy: refreshed every n steps, or its moving average."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from postgrad.core.errors import RunError
from postgrad.learner.average import MovingAverage
from postgrad.learner.backbone import Backbone
from postgrad.learner.protocols import PolicyRole
from postgrad.learner.role import Policy
from postgrad.parallel.sharding import TensorPiece, local, piece_of


class MovingReference(Policy):
    """A reference that follows the policy: it takes the policy's weights every `refresh_steps`
    steps, or, with `ema_decay` > 0, their moving average after every step. It starts with the
    weights of its backbone.
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
        """policy: float32 weights by hub name, with which the moving average starts."""
        super().__init__(backbone, temperature)
        self._refresh_steps = refresh_steps
        self._average = MovingAverage(policy, ema_decay) if ema_decay else None

    def after_step(self, step: int, policy: PolicyRole) -> None:
        """Follows the policy after step `step`; both have to be divided over ranks alike."""
        weights = policy.weights()
        if self._average is not None:
            self._average.update(weights)
            self._take(self._average.weights)
        elif step % self._refresh_steps == 0:
            self._take(weights)

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """For a checkpoint: the moving average in float32, or the weights in their dtype."""
        weights = self._parameters() if self._average is None else self._average.weights
        return {"reference.weights": weights}

    @property
    def pieces(self) -> dict[str, TensorPiece]:
        """Where this rank's parts of the weights lie in the whole tensors, by name."""
        ranks = self.backbone.ranks
        return {name: piece_of(name, p, ranks) for name, p in self.backbone.lm.named_parameters()}

    def state_bytes(self) -> int:
        """Bytes of `tensors`; of parts that several ranks hold, only on the first of them."""
        named, pieces = self.tensors()["reference.weights"], self.pieces
        return sum(tensor.nbytes for name, tensor in named.items() if pieces[name].first)

    def load(self, read: Callable[[str], Mapping[str, Tensor]]) -> None:
        """Takes over the weights of a checkpoint. RunError where they are of another model."""
        saved, pieces = read("reference.weights"), self.pieces
        if {n: tuple(t.shape) for n, t in saved.items()} != {n: p.shape for n, p in pieces.items()}:
            raise RunError("the checkpoint's reference is of another model")
        parts = {name: piece.of(saved[name]) for name, piece in pieces.items()}
        if self._average is not None:
            self._average.load(parts)
        self._take(parts)

    def _parameters(self) -> dict[str, Tensor]:
        return {name: local(p) for name, p in self.backbone.lm.named_parameters()}

    @torch.no_grad()
    def _take(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters().items():
            parameter.copy_(weights[name])
