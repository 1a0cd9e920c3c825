"""Weights and optimizer state that lie in the host's memory while nobody computes with them: those
of a learner while an engine samples on its GPU, those of a frozen role between its passes.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from postgrad.parallel.host import HostCopies, HostWeights

if TYPE_CHECKING:
    from postgrad.learner.role import Policy
    from postgrad.learner.score import ScoreRole

# What of a learner stays on its device: all; what a publish reads, so without moments and moving
# average; what a forward pass reads, so without master weights that only an update reads; nothing.
Stays = Literal["all", "weights", "computing weights", "nothing"]


def frees(device: torch.device) -> bool:
    """Whether leaving the device frees memory that an engine can use: a CPU's is the host's."""
    return device.type == "cuda"


class Resting:
    """Where a learner's tensors are: on its device, or in the host's memory until they are needed.

    asked: whether they are to leave; on a CPU they stay all the same. lm: the model that computes.
    masters: the weights that an optimizer moves, some of which may be those of `lm`. state: gives
    what only an update reads.
    """

    def __init__(
        self,
        asked: bool,
        lm: nn.Module,
        device: torch.device,
        masters: Iterable[Tensor],
        state: Callable[[], Iterable[Tensor]],
    ) -> None:
        self._leaves = asked and frees(device)
        self._lm = lm
        self._masters = list(masters)
        self._state = state
        self.copies = HostCopies(device)

    def leave(self, stays: Stays) -> None:
        """Frees the device memory of all but what `stays`."""
        if stays == "all" or not self._leaves:
            return
        self.copies.leave(self._state())
        if stays == "nothing":
            weights = list(self._lm.parameters())
            self.copies.leave(w for w in weights if w.requires_grad)
            self.copies.leave(self._lm.buffers())
            self.copies.leave((w for w in weights if not w.requires_grad), frozen=True)
            self.copies.leave(self._masters)
        elif stays == "computing weights":
            self.copies.leave(self._masters, beside=self._computing())

    def bring_computing(self) -> None:
        """What a forward pass reads is on the device."""
        self.copies.come_back(self._computing())

    def bring_weights(self) -> None:
        """Master weights too."""
        self.bring_computing()
        self.copies.come_back(self._masters)

    def bring_all(self) -> None:
        """All that an update reads."""
        self.copies.come_back()

    def _computing(self) -> Iterator[Tensor]:
        return chain(self._lm.parameters(), self._lm.buffers())


def rest_on_host(role: "Policy | ScoreRole") -> None:
    """From now on a frozen role's weights are on its device only while it computes."""
    weights, backbone = HostWeights(role.backbone.lm), role.backbone
    column = backbone.column

    def computed(*arguments: Any, **how: Any) -> Any:
        with weights:
            return column(*arguments, **how)

    backbone.column = computed
