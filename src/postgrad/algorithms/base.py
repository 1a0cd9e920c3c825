"""What an algorithm is: settings that are the knobs, methods that are the math. No state, no I/O.

    credit       rollouts -> advantages and whatever else the losses read       (controller, NumPy)
    experience   pairs or labelled answers -> the columns that a loss reads     (controller, NumPy)
    policy_loss  logprobs of one layout's entries -> a sum, already divided     (learner, torch)
    score_loss   the same of a head's scores: a critic's or a reward model's    (learner, torch)

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

    from postgrad.ops.preferences import AnswerSums

Level = Literal["token", "sequence", "pair", "group"]


@dataclass(frozen=True, slots=True)
class Needs:
    """What must be computed for an algorithm before or beside its loss.

    old_logprobs: credit reads the policy's own logprobs from before the step. Where it does not,
    they are computed only for steps of several updates. mismatched: the policy and the reference
    read each prompt with the answer of another sample too (KTO).
    """

    reference: bool = False
    old_logprobs: bool = False
    entropy: bool = False
    critic: bool = False
    mismatched: bool = False


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
class ScoreInputs:
    """The E loss entries of one layout, as a linear head reads them.

    scores: [E] float32 with gradient: a critic's value of the state before each loss token, or a
    reward model's score at the last token of each sequence. The rest is as in `LossInputs`, with
    `weight` from `score_weights`.
    """

    scores: Tensor
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
    """A loss over loss entries. `level` is what has to stay together in one forward pass.

    With "pair" the sequences of an experience come in twos, the preferred one first, both in one
    group. A layout holds whole pairs in order: 2k is the chosen one there and 2k + 1 the rejected.
    """

    level: ClassVar[Level] = "token"

    def needs(self) -> Needs:
        """Roles and columns beyond the policy's own logprobs."""
        return Needs()

    @abstractmethod
    def entry_weights(self, sequences: Sequences, rows: NDArray[np.int64]) -> Ragged:
        """Weight of every token in the loss of the update that trains on `rows`, float32.

        Over the same tokens as `sequences`, zero outside `rows` and without loss: ops/weights.py.
        """

    def report(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """An update's metrics from their sums over all its layouts: what is no sum is made here."""
        return dict(metrics)


class PolicyAlgorithm(Algorithm):
    """An algorithm whose loss reads a policy's logprobs. Its metrics start with "policy/"."""

    @abstractmethod
    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        """The loss of one layout's entries."""


class ScoreAlgorithm(Algorithm):
    """An algorithm whose loss reads the scores of a linear head.

    Its metrics start with "critic/" where the head is a critic's, else with "reward_model/".
    """

    def score_weights(self, sequences: Sequences, rows: NDArray[np.int64]) -> Ragged:
        """`entry_weights` of the score loss, where they are not the policy loss's."""
        return self.entry_weights(sequences, rows)

    @abstractmethod
    def score_loss(self, inputs: ScoreInputs) -> LossOutput:
        """The loss of one layout's entries."""


class RolloutAlgorithm(PolicyAlgorithm):
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


class PreferenceAlgorithm(PolicyAlgorithm):
    """An algorithm that learns which answers people prefer, without a reward model."""

    @abstractmethod
    def reward(self, answers: AnswerSums) -> Tensor:
        """[n] the implicit reward of each answer, with gradient where `answers` has one."""

    @abstractmethod
    def experience(
        self,
        sequences: Sequences,
        preferred: NDArray[np.bool_],
        ref: Ragged | None,
        mismatched: NDArray[np.float64] | None,
    ) -> Experience:
        """The answers of one update with the columns that the loss reads.

        preferred: [S] chosen or desirable; with level "pair" True, False, True, False, ... ref: the
        reference's logprobs, float32 over the tokens; None where needs().reference is False.
        mismatched: [S] sum(logp - logp_ref) of each sample's prompt with another sample's answer;
        None where needs().mismatched is False. A missing or wrong column is a ValueError.
        """


class RewardAlgorithm(ScoreAlgorithm):
    """An algorithm that learns a reward model from pairs."""

    @abstractmethod
    def experience(self, sequences: Sequences, margins: NDArray[np.float64]) -> Experience:
        """The pairs of one update, with loss at the last token of each sequence alone.

        margins: [S / 2] by how much each chosen answer is better, in the data's units; zeros where
        the data does not say. Sequences that are no pairs are a ValueError.
        """
