"""What an algorithm is: settings that are the knobs, methods that are the math. No state, no I/O.

    credit       rollouts -> advantages and whatever else the loss reads        (controller, NumPy)
    policy_loss  loss entries of one layout -> a sum that is already divided    (learner, torch)

torch is named only in annotations, so that a recipe can be read without importing it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, RolloutBatch, Sequences
from postgrad.core.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

Level = Literal["token", "sequence", "pair", "group"]


@dataclass(frozen=True, slots=True)
class Needs:
    """What must be computed for an algorithm before or beside its loss.

    old_logprobs: credit reads the policy's own logprobs from before the step. Where it does not,
    they are computed only for steps of several updates.
    """

    reference: bool = False
    old_logprobs: bool = False
    entropy: bool = False
    critic: bool = False


@dataclass(frozen=True, slots=True)
class Credit:
    """A batch with its advantages. rows: [S] which samples of the batch are in the experience.

    state: JSON values that the next step's credit gets back, through checkpoints too.
    """

    experience: Experience
    rows: NDArray[np.int64]
    state: Mapping[str, Any]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The E loss entries of one layout.

    logprobs: [E] float32 with gradient, at the sampling temperature. entropy: [E] or None where it
    was not needed. columns: the experience's columns at these entries, [E] float32 each. sequence:
    [E] int64, number of the sequence within this layout, below `n_sequences`. weight: [E] float32
    from `entry_weights`. token_weight: [E] float32, 1 / loss tokens that the update computes:
    metrics are sums with it, so that adding them over layouts gives the update's mean.
    """

    logprobs: Tensor
    entropy: Tensor | None
    columns: Mapping[str, Tensor]
    sequence: Tensor
    n_sequences: int
    weight: Tensor
    token_weight: Tensor


@dataclass(frozen=True, slots=True)
class LossOutput:
    """loss: scalar with gradient, this layout's share of the update's loss: shares are added.

    metrics: detached scalars that are added over layouts in the same way.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


class Algorithm(Settings, ABC):
    """A loss over loss entries. `level` is what has to stay together in one forward pass."""

    level: ClassVar[Level] = "token"

    def needs(self) -> Needs:
        """Roles and columns beyond the policy's own logprobs."""
        return Needs()

    @abstractmethod
    def entry_weights(self, sequences: Sequences, rows: NDArray[np.int64]) -> Ragged:
        """Weight of every token in the loss of the update that trains on `rows`, float32.

        Over the same tokens as `sequences`, zero outside `rows` and without loss: ops/weights.py.
        """

    @abstractmethod
    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        """The loss of one layout's entries."""


class RolloutAlgorithm(Algorithm):
    """An algorithm that learns from scored rollouts: reinforcement learning."""

    min_group_size: ClassVar[int] = 1  # samples of a prompt, below which the group is dropped

    def for_rollout(self, max_new_tokens: int) -> Self:
        """These settings with what they leave to the rollout's settings filled in."""
        return self

    @abstractmethod
    def credit(
        self,
        batch: RolloutBatch,
        old: Ragged | None,
        ref: Ragged | None,
        values: Ragged | None,
        state: Mapping[str, Any],
    ) -> Credit:
        """What each token of the batch deserves.

        old, ref, values: logprobs of the policy before the step and of the reference, values of the
        critic, float32 over the batch's tokens; None where they were not needed. state: {} at the
        start of a run.
        """
