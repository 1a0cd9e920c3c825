"""The kept samples of a step as columns, without padding: a RolloutBatch (core/records.py has the
records before and behind it).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
            if group.kept[i] and rollout.policy_mask.any()
        ]
        prompts = [rollout.read_prompt(group.prompt) for _, group, rollout, _ in rows]
        at_prompt = [np.zeros(len(prompt)) for prompt in prompts]
        rollouts = [rollout for _, _, rollout, _ in rows]
        for rollout in rollouts:
            _require_finite(rollout)

        def column(responses: list[NDArray[Any]], dtype: Any) -> Ragged:
            """Values [R] of each response behind zeros for its prompt."""
            pairs = zip(at_prompt, responses, strict=True)
            return Ragged.of([np.concatenate([b.astype(dtype), p]) for b, p in pairs], dtype)

        pairs = list(zip(prompts, rollouts, strict=True))
        tokens = [np.concatenate([prompt, r.token_ids]) for prompt, r in pairs]
        return cls(
            sequences=Sequences(
                tokens=Ragged.of(tokens, np.int32),
                loss_mask=column([r.policy_mask for r in rollouts], np.bool_),
                group=np.array([number for number, *_ in rows], np.int64),
                experts=_experts(rollouts),
                images=column_of(r.images_behind(group.prompt) for _, group, r, _ in rows),
                openings=column_of(
                    tuple(len(prompt) + at for at in r.openings) for prompt, r in pairs
                ),
                sampling_mask=_sampling_mask(prompts, rollouts),
            ),
            sampled_logprobs=column([r.logprobs for r in rollouts], np.float32),
            turn_rewards=column([_turn_rewards(group, r) for _, group, r, _ in rows], np.float64),
            rewards=np.array([group.total[i] for _, group, _, i in rows], np.float64),
            ticket=np.array([r.ticket for r in rollouts], np.int64),
            sample=np.array([r.sample for r in rollouts], np.int64),
            truncated=np.array([r.finish_reason != "stop" for r in rollouts], np.bool_),
            versions=_versions(rollouts, at_prompt),
            components={
                name: np.array([_component(group, name, i) for _, group, _, i in rows], np.float64)
                for name in dict.fromkeys(name for group in groups for name in group.rewards)
            },
        )


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


def _require_finite(rollout: Rollout) -> None:
    broken = np.flatnonzero(~np.isfinite(rollout.logprobs))
    if len(broken):
        raise RunError(
            f"ticket {rollout.ticket}, sample {rollout.sample}: the sampled logprob of token "
            f"{broken[0]} is {rollout.logprobs[broken[0]]}, which nothing can be learned from: "
            "where the engine sampled it, its weights have diverged; in a replay, samples.jsonl "
            "lacks it"
        )


def _versions(rollouts: Sequence[Rollout], at_prompt: Sequence[NDArray[Any]]) -> Ragged | None:
    """The column `versions`. at_prompt: an array as long as each prompt."""
    columns: list[NDArray[np.int32]] = []
    for rollout, prompt in zip(rollouts, at_prompt, strict=True):
        spans = np.array(rollout.versions, np.int64).reshape(-1, 2)
        mask = rollout.policy_mask
        if spans[:, 1].sum() != mask.sum():
            return None
        column = np.full(len(prompt) + len(mask), -1, np.int32)
        column[len(prompt) :][mask] = np.repeat(spans[:, 0], spans[:, 1])
        columns.append(column)
    return Ragged.of(columns, np.int32)


def _turn_rewards(group: ScoredGroup, rollout: Rollout) -> NDArray[np.float64]:
    """[R] the environment's rewards of the turns, times their weight in the group's total, and the
    rewards of steps.
    """
    rewards = np.zeros(len(rollout.token_ids))
    for name, weight in (("turn_rewards", group.turn_weight), ("step_rewards", 1.0)):
        if weight and name in rollout.columns:
            rewards += weight * rollout.columns[name].astype(np.float64)
    return rewards
