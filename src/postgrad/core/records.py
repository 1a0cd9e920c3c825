"""The records of the data's way: one frozen record a stage, NumPy only, so that they travel.

    Prompt -> Rollout -> ScoredGroup -> RolloutBatch -> Experience -> layouts
    (data)    (rollout)  (rewards)      (columns)       (algorithm)   (learner)

A field that a stage does not have yet is not on its record.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from postgrad.core.ragged import Ragged

FinishReason = Literal["stop", "length"]
Author = Literal["policy", "environment"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One draw from the data, ready to be sampled from.

    `ticket` is the global number of the draw; `row` the row of `dataset` it came from. `question`
    is the last user text, without the words of data.template, `answer` the reference, `metadata`
    what else a verifier may want: all three are JSON values. `messages`: what the tokens say, as
    the row said it.
    """

    ticket: int
    token_ids: NDArray[np.int32]
    question: str
    answer: str | None
    dataset: str
    row: int
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    messages: Sequence[Mapping[str, str]] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """A run of tokens by one author. logprobs: one per token, as sampled; zeros if not sampled."""

    author: Author
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sample of a prompt, as the engine wrote it.

    `versions` says which policy version wrote how many tokens, in order: ((version, tokens), ...).
    `text` is the decoded text of all turns without special tokens. `columns` are named extra values
    per token, [response tokens] each. `answer` is what verifiers read where the policy took several
    turns: the text of its last one. `counts` are what an environment counted ("turns", "calls").
    """

    ticket: int
    sample: int
    turns: tuple[Turn, ...]
    finish_reason: FinishReason
    versions: tuple[tuple[int, int], ...]
    text: str
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    answer: str | None = None
    counts: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[response tokens] of all turns."""
        return np.concatenate([turn.token_ids for turn in self.turns])

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """[response tokens] as sampled; zeros at environment tokens."""
        return np.concatenate([turn.logprobs for turn in self.turns])

    @property
    def policy_mask(self) -> NDArray[np.bool_]:
        """[response tokens] True where the policy wrote the token."""
        return np.concatenate(
            [np.full(len(turn.token_ids), turn.author == "policy") for turn in self.turns]
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """A verifier that gave no score. `cause` is one word: error, cpu_time, wall_clock, crash."""

    sample: int
    component: str
    cause: str
    message: str


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The rollouts of one prompt with their rewards.

    rewards: component name -> [n] float64, NaN where that component failed; one that does not apply
    to the prompt is not there. total: [n] the reward, NaN where not kept. kept: [n] False for
    samples that the failure policy dropped. details: component name -> n JSON values that its
    verifier wants recorded. turn_weight: what the rollouts' column "turn_rewards" counts for in the
    total; 0 where it is not in it.
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: Mapping[str, NDArray[np.float64]]
    total: NDArray[np.float64]
    kept: NDArray[np.bool_]
    failures: tuple[Failure, ...] = ()
    details: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    turn_weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Sequences:
    """What a learner can train on: token ids, which of them bear loss, and who shares a prefix.

    tokens: int32; loss_mask: bool over the same tokens (the first token of a sequence never bears
    loss: nothing predicts it); group: [S] sequences with the same number may share a prefix and lie
    next to each other.
    """

    tokens: Ragged
    loss_mask: Ragged
    group: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tokens)

    def at_last(self) -> "Sequences":
        """The same with their last token alone marked: where a reward model is read."""
        mask = np.zeros(len(self.tokens.values), np.bool_)
        mask[self.tokens.offsets[1:] - 1] = True
        return Sequences(self.tokens, self.tokens.like(mask), self.group)


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The kept samples of a step as ragged columns over whole sequences (prompt and response).

    sampled_logprobs: float32, zeros where loss_mask is False. turn_rewards: float64, what the
    environment gave for each turn, weighed, on the last token that the policy wrote in it; zeros
    elsewhere. rewards: [S] float64, the total, turn rewards included. ticket, sample: [S].
    truncated: [S] True where finish_reason is "length".
    """

    sequences: Sequences
    sampled_logprobs: Ragged
    turn_rewards: Ragged
    rewards: NDArray[np.float64]
    ticket: NDArray[np.int64]
    sample: NDArray[np.int64]
    truncated: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.sequences)

    @classmethod
    def of(cls, groups: Sequence[ScoredGroup]) -> "RolloutBatch":
        """Samples that were kept and have a token to learn from, in the order of `groups`."""
        rows = [
            (number, group, rollout, float(group.total[i]))
            for number, group in enumerate(groups)
            for i, rollout in enumerate(group.rollouts)
            if group.kept[i] and rollout.policy_mask.any()
        ]
        before = [np.zeros(len(group.prompt.token_ids)) for _, group, _, _ in rows]
        rollouts = [rollout for _, _, rollout, _ in rows]

        def column(parts: list[NDArray[Any]], dtype: Any) -> Ragged:
            pairs = zip(before, parts, strict=True)
            return Ragged.of([np.concatenate([b.astype(dtype), p]) for b, p in pairs], dtype)

        tokens = Ragged.of(
            [np.concatenate([group.prompt.token_ids, r.token_ids]) for _, group, r, _ in rows],
            np.int32,
        )
        return cls(
            sequences=Sequences(
                tokens=tokens,
                loss_mask=column([r.policy_mask for r in rollouts], np.bool_),
                group=np.array([number for number, *_ in rows], np.int64),
            ),
            sampled_logprobs=column([r.logprobs for r in rollouts], np.float32),
            turn_rewards=column([_turn_rewards(group, r) for _, group, r, _ in rows], np.float64),
            rewards=np.array([reward for *_, reward in rows], np.float64),
            ticket=np.array([r.ticket for r in rollouts], np.int64),
            sample=np.array([r.sample for r in rollouts], np.int64),
            truncated=np.array([r.finish_reason == "length" for r in rollouts], np.bool_),
        )


def _turn_rewards(group: ScoredGroup, rollout: Rollout) -> NDArray[np.float64]:
    """[response tokens] as they count in the group's total."""
    earned = rollout.columns.get("turn_rewards") if group.turn_weight else None
    if earned is None:
        return np.zeros(len(rollout.token_ids))
    return group.turn_weight * earned.astype(np.float64)


@dataclass(frozen=True, slots=True)
class Experience:
    """What an algorithm made of a batch: columns that its losses read, all over the same tokens.

    `columns` holds only what the algorithm asked for: "sampled_logprobs", "old_logprobs",
    "ref_logprobs", "values", "advantages", "returns". has_gradient: [S] False for sequences that
    cannot move any weight: they are skipped in compute and stay in every denominator.
    """

    sequences: Sequences
    columns: Mapping[str, Ragged]
    has_gradient: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.sequences)
