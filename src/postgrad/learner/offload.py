"""Weights and optimizer state that lie in the host's memory while nobody computes with them: those
of a learner while an engine samples on its GPU, those of a frozen role between its passes.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from postgrad.learner.backbone import Backbone
from postgrad.learner.optimizer import MasterOptimizer
from postgrad.learner.settings import LearnerSettings
from postgrad.parallel.host import HostCopies, HostWeights

# What of a learner stays on its device: all; what a publish reads, so without moments and moving
# average; what a forward pass reads, so without master weights that only an update reads; nothing.
KeptOnDevice = Literal["all", "weights", "computing weights", "nothing"]


def frees_device_memory(device: torch.device) -> bool:
    """Whether leaving the device frees memory that an engine can use: a CPU's is the host's."""
    return device.type == "cuda"


class LearnerOffload:
    """Where a learner's tensors are: on its device, or in the host's memory until they are needed.

    average: its moving averages by name, which only an update reads, as the optimizer's state.
    """

    def __init__(
        self, backbone: Backbone, optimizer: MasterOptimizer, average: Mapping[str, Tensor]
    ) -> None:
        self._lm = backbone.lm
        self._optimizer = optimizer
        self._average = average
        self.copies = HostCopies(backbone.device)
        backbone.reload = self.reload_computing

    def offload(self, keep: KeptOnDevice) -> None:
        """Frees the device memory of all but what `keep` names."""
        if keep == "all":
            return
        self.copies.offload((*self._optimizer.held(), *self._average.values()))
        if keep == "nothing":
            weights = list(self._lm.parameters())
            trained = [weight for weight in weights if weight.requires_grad]
            masters = self._optimizer.master.values()
            self.copies.offload((*trained, *self._lm.buffers(), *masters))
            self.copies.offload((w for w in weights if not w.requires_grad), frozen=True)
        elif keep == "computing weights":
            self.copies.offload(self._optimizer.master.values(), beside=self._computing())

    def reload_computing(self) -> None:
        """What a forward pass reads is on the device."""
        self.copies.reload(self._computing())

    def reload_weights(self) -> None:
        """What a publish reads is on the device: master weights too."""
        self.reload_computing()
        self.copies.reload(self._optimizer.master.values())

    def reload_all(self) -> None:
        """All that an update reads."""
        self.copies.reload()

    def _computing(self) -> Iterator[Tensor]:
        return chain(self._lm.parameters(), self._lm.buffers())


def offload_of(
    settings: LearnerSettings,
    backbone: Backbone,
    optimizer: MasterOptimizer,
    average: Mapping[str, Tensor],
) -> LearnerOffload | None:
    """For a learner that is to leave its device while an engine samples; None where it stays."""
    if settings.offload != "sampling" or not frees_device_memory(backbone.device):
        return None
    return LearnerOffload(backbone, optimizer, average)


def offload_between_passes(backbone: Backbone) -> None:
    """From now on frozen weights are on their device only while a column is computed."""
    weights, column = HostWeights(backbone.lm), backbone.column

    def computed(*arguments: Any, **how: Any) -> Any:
        with weights:
            return column(*arguments, **how)

    backbone.column = computed
