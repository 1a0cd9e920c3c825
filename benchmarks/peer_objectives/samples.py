"""One step's samples with awkward numbers, padded for a peer and packed for us.

Groups of four with answers of one token, a group of equal rewards, answers that the limit cut off,
tokens that an environment wrote, ratios beyond every clip, and a reference far away at some tokens.
All logprobs are float64, so that a difference is one of formulas.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.core.rollout_batch import RolloutBatch

PROMPT = 2  # tokens before each response
LONGEST = 12  # max_new_tokens
Rows = list[NDArray[np.float64]]


@dataclass(frozen=True)
class Samples:
    """S samples; `Rows` are [R] over each one's response."""

    group: NDArray[np.int64]  # [S]
    rewards: NDArray[np.float64]  # [S]
    mask: list[NDArray[np.bool_]]  # True where the policy wrote the token
    logprobs: Rows  # of the policy in the update
    old: Rows  # of the policy before the step
    sampled: Rows
    ref: Rows
    entropy: Rows
    values: Rows  # of the critic in the update
    old_values: Rows
    cut: NDArray[np.bool_]  # [S] by the limit
    components: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rewards)

    def padded(self, rows: Rows) -> Tensor:
        """[S, LONGEST], zeros behind each row."""
        padded_rows = np.zeros((len(rows), LONGEST))
        for i, row in enumerate(rows):
            padded_rows[i, : len(row)] = row
        return torch.from_numpy(padded_rows)

    @property
    def padded_mask(self) -> Tensor:
        """[S, LONGEST] float64, 1 where the policy wrote the token."""
        return self.padded([row.astype(np.float64) for row in self.mask])

    @property
    def token_rewards(self) -> Tensor:
        """[S, LONGEST] each sample's reward at the last token of its response."""
        token_rewards = torch.zeros(len(self), LONGEST, dtype=torch.float64)
        for i, row in enumerate(self.mask):
            token_rewards[i, int(np.flatnonzero(row)[-1])] = self.rewards[i]
        return token_rewards

    def column(self, rows: Rows, dtype: type = np.float64) -> Ragged:
        """Over prompts and responses, zeros at prompts."""
        return Ragged.of([np.concatenate([np.zeros(PROMPT), row]) for row in rows], dtype)

    def batch(self) -> RolloutBatch:
        """As the controller has them."""
        mask = Ragged.of([[False] * PROMPT + row.tolist() for row in self.mask], np.bool_)
        tokens = mask.like(np.arange(len(mask.values), dtype=np.int32))
        _, sample = np.unique(self.group, return_index=True)
        return RolloutBatch(
            sequences=Sequences(tokens, mask, self.group),
            sampled_logprobs=self.column(self.sampled),
            turn_rewards=mask.like(np.zeros(len(mask.values))),
            rewards=self.rewards,
            ticket=self.group,
            sample=np.arange(len(self)) - sample[self.group],
            truncated=self.cut,
            components=self.components,
        )


def drawn(seed: int, groups: int = 5, each: int = 4, environment: bool = True) -> Samples:
    """Samples by chance. environment False: the policy wrote every token of a response."""
    chance = np.random.default_rng(seed)
    count = groups * each
    group = np.repeat(np.arange(groups), each)
    lengths = chance.integers(2, LONGEST + 1, count)
    lengths[:3] = 1, LONGEST, 1
    parts = chance.choice([0.0, 0.25, 1.0], count), 0.125 * chance.integers(0, 3, count)
    rewards = np.asarray(parts[0] + parts[1], np.float64)
    rewards[each : 2 * each] = 0.75  # a group of equal rewards
    rewards[-each:] = 0.0
    rewards[-1] = 1.0
    mask = [np.ones(n, np.bool_) for n in lengths]
    if environment:
        for i in np.flatnonzero(lengths > 4)[::2]:
            mask[i][2:4] = False
    old = [-np.abs(chance.normal(1.0, 0.8, n)) for n in lengths]

    def moved(by: float) -> Rows:
        return [row + by * chance.standard_normal(len(row)) for row in old]

    logprobs, ref = moved(0.25), moved(0.6)
    for i in (1, 5, 9, 13):  # beyond every clip, dual clip and bound of a KL
        at = chance.integers(0, lengths[i])
        logprobs[i][at] = old[i][at] + (1.6 if i % 8 == 1 else -1.6)
        ref[i][at] = logprobs[i][at] + 3.4
    where = [row.astype(np.float64) for row in mask]

    def visible(rows: Rows) -> Rows:
        return [row * seen for row, seen in zip(rows, where, strict=True)]

    return Samples(
        group, rewards, mask, *map(visible, (logprobs, old, moved(0.15), ref)),
        *(visible([np.abs(chance.normal(1.0, 0.3, n)) for n in lengths]) for _ in range(3)),
        cut=lengths == LONGEST,
        components={"first": chance.choice([0.0, 1.0], count), "second": chance.random(count)},
    )  # fmt: skip
