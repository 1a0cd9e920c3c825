"""What all policy gradients share: groups, PPO's clip, KL, entropy, behaviour correction."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from postgrad.algorithms.base import (
    Credit,
    CreditInputs,
    LossInputs,
    LossOutput,
    Needs,
    masked_columns,
    one_each,
    required,
    without_loss,
)
from postgrad.algorithms.behaviour_correction import BehaviourCorrection
from postgrad.algorithms.kl_penalty import KLPenalty
from postgrad.algorithms.reward_scaling import Bounds, RewardScaling
from postgrad.algorithms.token_selection import EntropyBonus
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.ops import kl, losses
from postgrad.ops.advantages import equal_groups, group_sizes, group_stds
from postgrad.ops.losses import Aggregation, entry_weights

if TYPE_CHECKING:
    from torch import Tensor


class PolicyGradient(RewardScaling, EntropyBonus, KLPenalty, BehaviourCorrection):
    """Subclasses define a sample's advantage. Groups of fewer than `min_group_size` are dropped.

    mask_truncated_completions: samples that did not end by themselves (finish_reason "length" or
    "dead_end") are removed from numerators, denominators and whitening, also in a critic's loss. A
    group's mean and deviation still count them (DAPO's overlong filtering, arXiv:2503.14476):
    without them the baseline of the finished samples would be too high.
    """

    min_group_size: ClassVar[int] = 2

    clip_low: float = Field(0.2, ge=0.0, le=1.0)
    clip_high: float = Field(0.2, ge=0.0)
    # What they bound: the ratio of a token's probability to the old one (PPO), or its difference
    # (DPPO, arXiv:2602.04879), which lets rare tokens move.
    clip_by: Literal["ratio", "probability"] = "ratio"
    # Of (logp - logp_old)^2 in a token's loss (Kimi K2.5, arXiv:2602.02276); 0: off.
    drift_coef: float = Field(0.0, ge=0.0)
    dual_clip: float | None = Field(None, gt=1.0)  # None: off
    aggregation: Aggregation = "sequence"
    constant_length: int | None = Field(None, ge=1)  # tokens; rollout.max_new_tokens if left out
    # Of the mean cross-entropy of environments' replies, which the policy learns to predict beside
    # its reward (ECHO, arXiv:2605.24517); 0: off.
    observation_coef: float = Field(0.0, ge=0.0)
    # [low, high] of a token's advantage, or one number: +- it; None: off.
    advantage_clip: Bounds | None = None
    # Do not train on samples that the token limit cut off; their rewards stay in the baseline.
    mask_truncated_completions: bool = False

    @model_validator(mode="after")
    def _bounds_hold_zero(self) -> Self:
        low, high = self.advantage_clip or (-1.0, 1.0)
        if not (low <= 0.0 <= high and low < high):
            raise ValueError(
                f"advantage_clip = [{low:g}, {high:g}]: 0 has to lie within, and low below high; "
                "one number above 0 is both bounds"
            )
        return self

    @abstractmethod
    def advantages(
        self, rewards: NDArray[np.float64], group: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """The advantages [S] of samples, from their rewards [S] and group numbers [S]."""

    def token_advantages(self, inputs: CreditInputs) -> NDArray[np.float64]:
        """The advantages [N] of tokens. By default those of their sample, from its reward minus the
        sum of its charges.
        """
        sequences, name = inputs.sequences, f"{type(self).__name__}.advantages"
        each = self.advantages(inputs.rewards - inputs.charges.sums(), sequences.group)
        each = one_each(each, len(sequences), "samples", name)
        return sequences.loss_mask.spread(each).values

    def token_credit(
        self, inputs: CreditInputs, state: Mapping[str, Any]
    ) -> tuple[dict[str, NDArray[np.float64]], Mapping[str, Any], dict[str, float]]:
        """(columns [N] of the losses, with "advantages"; the next state; metrics)."""
        return {"advantages": self.token_advantages(inputs)}, state, {}

    @property
    def _kl_in_loss(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def _kl_in_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def _reads_sampled(self) -> bool:
        stated = self.correction != "off" or self.off_policy_threshold is not None
        return stated or bool(self.rejection)

    @property
    def _selects(self) -> bool:
        moment = self.second_moment is not None
        return moment or self.covariance != "off" or self.top_entropy_fraction < 1.0

    def needs(self) -> Needs:
        sampled_is_old = self.old_logprobs == "sampled"
        return Needs(
            reference=self.kl_coef > 0,
            old_logprobs=self._kl_in_reward
            or self.correction_normalised
            or self.second_moment is not None
            or (self.covariance != "off" and not sampled_is_old),
            sampled_is_old=sampled_is_old,
            entropy=self.entropy_coef > 0 or self.entropy_target is not None,
            old_entropy=self.top_entropy_fraction < 1.0 or self.entropy_target is not None,
        )

    def for_rollout(
        self, max_new_tokens: int, reward_weights: Mapping[str, float] | None = None
    ) -> Self:
        if self.aggregation != "constant" or self.constant_length is not None:
            return self
        return self.model_copy(update={"constant_length": max_new_tokens})

    def entry_weights(self, sequences: Sequences, rows: NDArray[np.int64]) -> Ragged:
        return entry_weights(sequences.loss_mask, rows, self.aggregation, self.constant_length)

    def credit(
        self,
        batch: RolloutBatch,
        old: Ragged | None,
        ref: Ragged | None,
        values: Ragged | None,
        state: Mapping[str, Any],
        entropy: Ragged | None = None,
    ) -> Credit:
        """The advantages of a step. Raises ValueError for rewards that are not finite and for
        missing columns.

        State: {"kl_coef": beta} where `kl_target` is set, and that of `shaped_rewards`.
        """
        rows, greedy = self._complete(batch)
        sequences = batch.sequences.take(rows)
        metrics = self._group_metrics(batch, rows)
        old, ref, values = (column and column.take(rows) for column in (old, ref, values))
        cut = batch.truncated[rows]
        masked = cut & ~greedy & self.mask_truncated_completions
        written, sequences = sequences.loss_mask, without_loss(sequences, masked | greedy)
        kl = sequences.tokens.like(np.zeros(len(sequences.tokens.values)))
        if self._kl_in_reward:
            kl, state, more = self.kl_charges(written, sequences.loss_mask, old, ref, state)
            metrics |= more
        rewards, turns, state, taken, shaping = self.shaped_rewards(
            batch.rewards[rows], batch.turn_rewards.take(rows), sequences, written, state
        )
        parts = {name: column[rows] for name, column in batch.components.items()}
        inputs = CreditInputs(sequences, rewards, turns, kl, cut, values, greedy, parts, written)
        token_columns, state, more = self.token_credit(inputs, state)
        columns = masked_columns(token_columns, sequences.loss_mask, type(self).__name__)
        metrics |= self._bound(columns)
        sampled = batch.sampled_logprobs.take(rows)
        columns |= self._logprob_columns(sampled, old, ref, sequences.loss_mask)
        if self._selects:
            metrics |= self._select(columns, sequences.loss_mask, batch, rows, entropy, old)
        if self.entropy_target is not None:
            bonus, state, adapted = self.entropy_bonus(sequences.loss_mask, entropy, rows, state)
            columns["entropy_coef"], metrics = bonus, metrics | adapted
        if self.mask_truncated_completions:
            metrics["masked_samples"] = float(masked.sum())
        if (kept := np.flatnonzero(~(masked | greedy))).size < len(rows):
            sequences, written, rows = sequences.take(kept), written.take(kept), rows[kept]
            columns = {name: column.take(kept) for name, column in columns.items()}
        replies = self._replies(sequences, written)
        experience = Experience(sequences, columns, self._has_gradient(columns, replies), replies)
        taken = None if taken is None else taken[kept]
        return Credit(experience, rows, state, metrics | shaping | more, taken)

    def _bound(self, columns: dict[str, Ragged]) -> dict[str, float]:
        """Clips the advantages among `columns`. Returns the metrics of that."""
        if self.advantage_clip is None:
            return {}
        free = columns["advantages"]
        columns["advantages"] = free.like(free.values.clip(*self.advantage_clip))
        clipped, moving = free.values != columns["advantages"].values, free.values != 0
        return {"advantages/clipped_fraction": float(clipped.sum() / max(1, moving.sum()))}

    def _replies(self, sequences: Sequences, written: Ragged) -> Ragged | None:
        """float32 [N] `observation_coef` at the tokens of environments, images apart; None without
        it. written: bool [N] tokens of the policy; what stands before its first in a conversation
        is a prompt.
        """
        if not self.observation_coef:
            return None
        weights: list[NDArray[np.float32]] = []
        for row, of_policy in enumerate(written):
            read = np.zeros(len(of_policy), np.bool_)
            for begin, end in sequences.conversations(row):
                part = of_policy[begin:end]
                read[begin:end] = np.logical_or.accumulate(part) & ~part
            for image in sequences.images_of(row):
                read[image.at] = False
            weights.append(self.observation_coef * read.astype(np.float32))
        return Ragged.of(weights, np.float32)

    def _complete(self, batch: RolloutBatch) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The rows of complete groups, and which of these are greedy baselines."""
        if not np.isfinite(batch.rewards).all():
            raise ValueError("a kept sample has a reward that is not finite")
        group, greedy = batch.sequences.group, (batch.sample == 0) & self.needs().greedy
        complete = group_sizes(group) >= self.min_group_size
        if self.needs().greedy:  # a group without its baseline compares nothing
            complete &= np.isin(group, group[greedy])
        rows = np.flatnonzero(complete)
        return rows, greedy[rows]

    def _select(
        self,
        columns: dict[str, Ragged],
        mask: Ragged,
        batch: RolloutBatch,
        rows: NDArray[np.int64],
        entropy: Ragged | None,
        old: Ragged | None,
    ) -> dict[str, float]:
        """Adds the columns of `selection`, and returns its metrics. rows: of the batch, [S]; old:
        logprobs of the policy at these.
        """
        log_weights = None
        if self.second_moment is not None:
            before, sampled = required(old, "'old' logprobs"), batch.sampled_logprobs.take(rows)
            log_weights = before.values.astype(np.float64) - sampled.values
        selected, metrics = self.selection(
            mask,
            columns["advantages"],
            columns.get("old_logprobs"),
            entropy and entropy.take(rows),
            (batch.ticket[rows], batch.sample[rows]),
            log_weights,
        )
        columns |= selected
        return metrics

    def _logprob_columns(
        self, sampled: Ragged, old: Ragged | None, ref: Ragged | None, mask: Ragged
    ) -> dict[str, Ragged]:
        """The columns that ratio, correction and KL read. sampled, old, ref: logprobs of the
        sampler, the policy and the reference.
        """
        columns: dict[str, Ragged] = {}
        if (before := sampled if self.old_logprobs == "sampled" else old) is not None:
            columns["old_logprobs"] = before
        if self._reads_sampled:
            columns["sampled_logprobs"] = sampled
        if self.correction_normalised:
            before = required(old, "'old' logprobs")
            columns["correction_scale"] = self.correction_scale(before, sampled, mask)
        if self._kl_in_loss:
            columns["ref_logprobs"] = required(ref, "'ref' logprobs")
        return columns

    def _has_gradient(
        self, columns: Mapping[str, Ragged], replies: Ragged | None
    ) -> NDArray[np.bool_]:
        """[S] False for samples without gradient; none where all have a term of the loss."""
        bonus = self.entropy_coef > 0
        if "entropy_coef" in columns:
            bonus = columns["entropy_coef"].values.any()
        everywhere = self._kl_in_loss or self.drift_coef > 0 or bonus or self.needs().critic
        advantages = columns["advantages"]
        pushed = advantages.values != 0
        if "selected" in columns:
            pushed = pushed & (columns["selected"].values > 0)
        if "penalised" in columns:
            pushed = pushed | (columns["penalised"].values > 0)
        if replies is not None:
            pushed = pushed | (replies.values > 0)
        return (advantages.like(pushed).sums() > 0) | np.bool_(everywhere)

    def _group_metrics(self, batch: RolloutBatch, rows: NDArray[np.int64]) -> dict[str, float]:
        """Metrics of groups, from the batch's rewards before scaling and KL."""
        group, rewards = batch.sequences.group[rows], batch.rewards[rows]
        _, first = np.unique(group, return_index=True)  # one sample of each group
        before = len(np.unique(batch.sequences.group))
        metrics = {"groups/dropped": float(before - len(first))}
        if len(first):
            metrics["groups/equal_fraction"] = float(equal_groups(rewards, group)[first].mean())
            metrics["groups/reward_std"] = float(group_stds(rewards, group)[first].mean())
        return metrics

    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        """surrogate * correction + drift + kl_coef * KL - entropy_coef * entropy. Without the
        column "old_logprobs" the current logprobs, detached, take its place.
        """
        logprobs = inputs.logprobs
        old = inputs.columns.get("old_logprobs", logprobs.detach())
        ratio = self.ratio(inputs, old)
        token_loss = self.surrogate(inputs, ratio)
        metrics = self._ratio_metrics(inputs, ratio.detach(), old)
        if self._reads_sampled:
            factor, more = self.correction_factor(inputs, old)
            token_loss = factor * token_loss
            more["policy/bounded_exponents"] += metrics["policy/bounded_exponents"]
            metrics |= more
        if self._selects:
            token_loss = token_loss * inputs.columns["selected"]
        if self.covariance == "kl":
            token_loss = token_loss + self.penalty(inputs, old)
        if self.drift_coef:
            token_loss = token_loss + self.drift_coef * (logprobs - old).square()
        if self._kl_in_loss:
            d = logprobs - inputs.columns["ref_logprobs"]
            token_kl = kl.estimate(self.kl_estimator, d)
            if self.kl_corrected:
                token_kl = token_kl * losses.bounded_ratio(logprobs, old)
            if self.kl_max is not None:
                token_kl, bounded = kl.bounded(token_kl, self.kl_max)
                metrics["policy/kl_bounded"] = (inputs.token_weight * bounded).sum()
            token_loss = token_loss + self.kl_coef * token_kl
            metrics["policy/kl"] = (inputs.token_weight * token_kl.detach()).sum()
            metrics["policy/bounded_exponents"] += kl.overflows(self.kl_estimator, d).sum()
        if inputs.entropy is not None:
            coefficient = inputs.columns.get("entropy_coef", self.entropy_coef)
            token_loss = token_loss - coefficient * inputs.entropy
            metrics["policy/entropy"] = (inputs.token_weight * inputs.entropy.detach()).sum()
        return LossOutput((inputs.weight * token_loss).sum(), metrics)

    def report(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """With Kish's effective sample size of the correction's factors f, as a share of them:
        (sum f)^2 / (n * sum f^2).
        """
        reported = super().report(metrics)
        if (square := reported.pop("correction/factor_square", None)) is not None:
            mean = reported["correction/factor"]
            reported["correction/effective_fraction"] = mean * mean / square if square else 0.0
        return reported

    def ratio(self, inputs: LossInputs, old: Tensor) -> Tensor:
        """[E] probability of each token divided by that of the old logprobs."""
        return losses.bounded_ratio(inputs.logprobs, old)

    def surrogate(self, inputs: LossInputs, ratio: Tensor) -> Tensor:
        """[E] PPO's clipped loss, or DPPO's."""
        advantages = inputs.columns["advantages"]
        if self.clip_by == "ratio":
            loss = losses.ppo_clip(ratio, advantages, self.clip_low, self.clip_high)
        else:
            now = inputs.logprobs.detach()
            moved = losses.moved(now, inputs.columns.get("old_logprobs", now))
            loss = losses.dppo(ratio, moved, advantages, self.clip_low, self.clip_high)
        return (
            loss if self.dual_clip is None else losses.dual_clip(loss, advantages, self.dual_clip)
        )

    def clipped(
        self, inputs: LossInputs, ratio: Tensor, old: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """True [E] where the lower and where the upper bound stop a token's gradient; None without
        bounds. old: the logprobs before.
        """
        if "clip_high" in self.unread:
            return None
        if self.clip_by == "probability":
            ratio = losses.moved(inputs.logprobs.detach(), old)
        advantages = inputs.columns["advantages"]
        return (
            losses.clipped_low(ratio, advantages, self.clip_low),
            losses.clipped_high(ratio, advantages, self.clip_high),
        )

    def _ratio_metrics(self, inputs: LossInputs, ratio: Tensor, old: Tensor) -> dict[str, Tensor]:
        """Means per token; "policy/bounded_exponents" is a count."""
        weight, logprobs = inputs.token_weight, inputs.logprobs.detach()
        change = logprobs - old
        metrics = {
            "policy/logprob": (weight * logprobs).sum(),
            "policy/ratio": (weight * ratio).sum(),
            "policy/kl_old": (weight * kl.estimate("k3", -change)).sum(),
            "policy/bounded_exponents": (change.abs() > kl.MAX_EXPONENT).sum().to(weight.dtype),
        }
        if (sides := self.clipped(inputs, ratio, old)) is not None:
            low, high = ((weight * side).sum() for side in sides)
            metrics["policy/clip_fraction"] = low + high
            metrics["policy/clip_fraction_low"] = low
            metrics["policy/clip_fraction_high"] = high
        return metrics
