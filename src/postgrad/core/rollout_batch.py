"""The kept samples of a step as columns, without padding: a RolloutBatch (core/records.py has the
records before and behind it).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import RunError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Rollout, SamplingMask, ScoredGroup, Sequences, column_of


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The S kept samples of a step. Ragged columns are over whole sequences, prompt and response,
    like sequences.tokens.
    """

    sequences: Sequences
    sampled_logprobs: Ragged  # float32 [N] nats; zeros where loss_mask is False
    # float64 [N]: what the environment gave for a turn, weighted, at the last token that the policy
    # wrote in the turn, and what a process reward gave for a step at its last token; else zeros.
    turn_rewards: Ragged
    rewards: NDArray[np.float64]  # [S] the total of each sample, turn rewards included
    ticket: NDArray[np.int64]  # [S]
    sample: NDArray[np.int64]  # [S] number among the samples of its prompt
    truncated: NDArray[np.bool_]  # [S] True where finish_reason is not "stop"
    # int32 [N] the policy version that drew each token, -1 where loss_mask is False; None: unknown.
    versions: Ragged | None = None
    # [S] each, by component: what it gave before its weight; NaN where it does not apply or failed.
    components: Mapping[str, NDArray[np.float64]] = field(
        default_factory=dict[str, NDArray[np.float64]]
    )

    def __len__(self) -> int:
        return len(self.sequences)

    @classmethod
    def of(cls, groups: Sequence[ScoredGroup]) -> "RolloutBatch":
        """Samples that were kept and have a token to learn from, in the order of `groups`. Raises
        RunError where a sampled logprob is not finite, whoever sampled or recorded it.
        """
        rows = [
            (number, group, rollout, i)
            for number, group in enumerate(groups)
            for i, rollout in enumerate(group.rollouts)
            if group.kept[i] and rollout.policy_tokens
        ]
        rollouts = [rollout for _, _, rollout, _ in rows]
        prompts = [rollout.read_prompt(group.prompt) for _, group, rollout, _ in rows]
        columns = _TokenColumns.of(prompts, rollouts)
        pairs = list(zip(prompts, rollouts, strict=True))
        return cls(
            sequences=Sequences(
                tokens=columns.tokens,
                loss_mask=columns.loss_mask,
                group=np.array([number for number, *_ in rows], np.int64),
                experts=_experts(rollouts),
                images=column_of(r.images_behind(group.prompt) for _, group, r, _ in rows),
                openings=column_of(
                    tuple(len(prompt) + at for at in r.openings) for prompt, r in pairs
                ),
                sampling_mask=_sampling_mask(prompts, rollouts),
            ),
            sampled_logprobs=columns.sampled_logprobs(rollouts),
            turn_rewards=columns.turn_rewards([(group, r) for _, group, r, _ in rows]),
            rewards=np.array([group.total[i] for _, group, _, i in rows], np.float64),
            ticket=np.array([r.ticket for r in rollouts], np.int64),
            sample=np.array([r.sample for r in rollouts], np.int64),
            truncated=np.array([r.finish_reason != "stop" for r in rollouts], np.bool_),
            versions=columns.versions(rollouts),
            components={
                name: np.array([_component(group, name, i) for _, group, _, i in rows], np.float64)
                for name in dict.fromkeys(name for group in groups for name in group.rewards)
            },
        )


@dataclass(frozen=True, slots=True)
class _TokenColumns:
    """Columns over the tokens of all samples. A step may have ten thousand samples, for which a
    GPU waits: each column is filled at once, and not sample by sample.
    """

    tokens: Ragged  # int32 [N]
    loss_mask: Ragged  # bool [N]
    answered: NDArray[np.bool_]  # [N] False in prompts
    begins: NDArray[np.int64]  # [S] the first token of each response

    @classmethod
    def of(
        cls, prompts: Sequence[NDArray[np.int32]], rollouts: Sequence[Rollout]
    ) -> "_TokenColumns":
        """prompts: what was read before each sample's first turn."""
        pieces, policy, prompt = list[NDArray[np.int32]](), list[bool](), list[bool]()
        sizes = np.zeros(len(rollouts), np.int64)
        for i, (read, rollout) in enumerate(zip(prompts, rollouts, strict=True)):
            turns = rollout.turns
            pieces += [read, *(turn.token_ids for turn in turns)]
            policy += [False, *(turn.author == "policy" for turn in turns)]
            prompt += [True, *(False for _ in turns)]
            sizes[i] = len(read) + rollout.response_tokens
        parts = Ragged.of(pieces, np.int32)
        tokens = Ragged.of_sizes(parts.values, sizes)
        mask = np.repeat(np.array(policy, np.bool_), parts.lengths)
        answered = np.repeat(~np.array(prompt, np.bool_), parts.lengths)
        begins = tokens.offsets[:-1] + np.array([len(read) for read in prompts], np.int64)
        return cls(tokens, tokens.like(mask), answered, begins)

    def sampled_logprobs(self, rollouts: Sequence[Rollout]) -> Ragged:
        """The column `sampled_logprobs`. Raises RunError where a value is not finite."""
        values = np.zeros(len(self.answered), np.float32)
        turns = (turn.logprobs for rollout in rollouts for turn in rollout.turns)
        values[self.answered] = Ragged.of(turns, np.float32).values
        broken = np.flatnonzero(~np.isfinite(values))
        if len(broken):
            at = int(broken[0])
            i = int(np.searchsorted(self.tokens.offsets, at, "right")) - 1
            raise RunError(
                f"ticket {rollouts[i].ticket}, sample {rollouts[i].sample}: the sampled logprob "
                f"of token {at - self.begins[i]} is {values[at]}, which nothing can be learned "
                "from: where the engine sampled it, its weights have diverged; in a replay, "
                "samples.jsonl lacks it"
            )
        return self.tokens.like(values)

    def versions(self, rollouts: Sequence[Rollout]) -> Ragged | None:
        """The column `versions`; None where a rollout lacks some of its tokens'."""
        spans = [span for rollout in rollouts for span in rollout.versions]
        numbers, counts = np.array(spans, np.int64).reshape(-1, 2).T
        recorded = [sum(count for _, count in rollout.versions) for rollout in rollouts]
        if recorded != [rollout.policy_tokens for rollout in rollouts]:
            return None
        values = np.full(len(self.answered), -1, np.int32)
        values[self.loss_mask.values] = np.repeat(numbers, counts)
        return self.tokens.like(values)

    def turn_rewards(self, samples: Iterable[tuple[ScoredGroup, Rollout]]) -> Ragged:
        """The column `turn_rewards`: the environment's rewards of the turns, times their weight in
        the group's total, and the rewards of steps.
        """
        values = np.zeros(len(self.answered))
        for begin, end, (group, rollout) in zip(
            self.begins, self.tokens.offsets[1:], samples, strict=True
        ):
            for name, weight in (("turn_rewards", group.turn_weight), ("step_rewards", 1.0)):
                if weight and name in rollout.columns:
                    values[begin:end] += weight * rollout.columns[name].astype(np.float64)
        return self.tokens.like(values)


def _experts(rollouts: Sequence[Rollout]) -> Ragged | None:
    """The column `experts`; None where a rollout has none."""
    columns = [experts for rollout in rollouts if (experts := rollout.experts) is not None]
    return Ragged.of(columns, np.int16) if columns and len(columns) == len(rollouts) else None


def _sampling_mask(
    prompts: Sequence[NDArray[np.int32]], rollouts: Sequence[Rollout]
) -> SamplingMask | None:
    """The column `sampling_mask`; None where a rollout has none."""
    rows: list[Ragged] = []
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        if (of_response := rollout.sampling_mask) is None:
            return None
        rows += [Ragged.empty(len(prompt), np.int32), of_response]
    return Ragged.joined(rows, np.int32) if rows else None


def _component(group: ScoredGroup, name: str, place: int) -> float:
    """What a component gave the sample at `place`; NaN where it does not apply to the prompt."""
    return float(group.rewards[name][place]) if name in group.rewards else np.nan
