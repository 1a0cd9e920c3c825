"""From the outcomes of verifiers to the rewards of a group; counts of a step's failures. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from postgrad.core.errors import ScoresMissing
from postgrad.core.records import Failure, Prompt, Rollout, ScoredGroup
from postgrad.rewards.protocol import Outcome
from postgrad.rewards.settings import FailurePolicy, RewardSettings

ENVIRONMENT = "environment"  # the component of turn rewards
STEP_REWARDS = "step_rewards"  # a rollout's column: see RolloutBatch.turn_rewards


def mix(
    prompt: Prompt,
    rollouts: Sequence[Rollout],
    components: Mapping[str, RewardSettings],
    outcomes: Mapping[tuple[int, int], Outcome],
    broken: FailurePolicy = "drop_sample",
    turn_weight: float = 0.0,
) -> ScoredGroup:
    """The scored group of n rollouts.

    components: by name, those that apply to the prompt. outcomes: (index of the component, index of
    the rollout) -> outcome, for every pair of a rollout whose environment did not fail. A failed
    component is NaN in `rewards`. With on_failure = "score" its failure_score enters the total
    instead; with "drop_group" no sample of the group is kept; otherwise its own sample is not kept.
    A rollout whose environment failed has no rewards; `broken` is the policy for it. turn_weight:
    of the environment's rewards in the sum; see `with_turn_rewards`.
    """
    n = len(rollouts)
    kept, totals = np.ones(n, np.bool_), np.full(n, math.nan)
    rewards = {name: np.full(n, math.nan) for name in components}
    details: dict[str, list[Any]] = {name: [None] * n for name in components}
    failures: list[Failure] = []
    for place, rollout in enumerate(rollouts):
        if rollout.failure is not None:
            cause, message = rollout.failure.cause, rollout.failure.message
            failures.append(Failure(rollout.sample, ENVIRONMENT, cause, message))
            kept[slice(None) if broken == "drop_group" else place] = False
            continue
        scores: list[float] = []
        for c, (name, reward) in enumerate(components.items()):
            outcome = outcomes[c, place]
            if outcome.cause is None and outcome.value is not None:
                rewards[name][place] = outcome.value
                details[name][place] = outcome.detail
                scores.append(outcome.value)
                continue
            failures.append(Failure(rollout.sample, name, outcome.cause or "", outcome.message))
            if reward.on_failure == "score":
                scores.append(reward.failure_score)
            elif reward.on_failure == "drop_group":
                kept[:] = False
            else:
                kept[place] = False
        if len(scores) == len(components):
            totals[place] = total([*components.values()], scores, turn_weight * _earned(rollout))
    totals[~kept] = math.nan
    noted = {name: (*d,) for name, d in details.items() if any(x is not None for x in d)}
    with_steps = _with_step_rewards(rollouts, list(components.values()), outcomes)
    return ScoredGroup(prompt, with_steps, rewards, totals, kept, tuple(failures), noted)


def _with_step_rewards(
    rollouts: Sequence[Rollout],
    components: Sequence[RewardSettings],
    outcomes: Mapping[tuple[int, int], Outcome],
) -> tuple[Rollout, ...]:
    """The rollouts, with the weighted parts of their rewards by token as a column where there are
    any. A recorded sample may have such a column of other rewards, which goes.
    """
    credited: list[Rollout] = []
    for place, rollout in enumerate(rollouts):
        columns = {name: c for name, c in rollout.columns.items() if name != STEP_REWARDS}
        weighted = [
            reward.weight * outcome.parts
            for c, reward in enumerate(components)
            if (outcome := outcomes.get((c, place))) and outcome.parts is not None
        ]
        if weighted:
            columns[STEP_REWARDS] = np.sum(weighted, axis=0).astype(np.float32)
        changed = weighted or STEP_REWARDS in rollout.columns
        credited.append(replace(rollout, columns=columns) if changed else rollout)
    return tuple(credited)


def total(rewards: Sequence[RewardSettings], scores: Sequence[float], turns: float = 0.0) -> float:
    """The total reward of a sample from the scores of its components.

    The gate_value of the first gate whose score is below gate_at; without one the weighted sum,
    times the scores of the components with multiply = true. turns: the environment's part of that
    sum.
    """
    summed, factor = 0.0, 1.0
    for reward, score in zip(rewards, scores, strict=True):
        if reward.gate and score < reward.gate_at:
            return reward.gate_value
        if reward.multiply:
            factor *= score
        else:
            summed += reward.weight * score
    return (summed + turns) * factor


def _earned(rollout: Rollout) -> float:
    """What the environment gave for all turns of an episode; NaN where it failed. Equal rewards
    have an equal sum, whichever tokens they stand at: sums of float32 would round by place.
    """
    if rollout.failure is not None:
        return math.nan
    earned = rollout.columns.get("turn_rewards", np.zeros(0))
    return math.fsum(earned[earned != 0].tolist())


def with_turn_rewards(group: ScoredGroup, weight: float) -> ScoredGroup:
    """The group with its environment's rewards, summed over each episode, as one more component,
    which its total has already.

    The rewards by turn stay in the rollouts' column "turn_rewards", and `turn_weight` of the group
    is their weight: some algorithms credit a turn only with the rewards that came after it.
    """
    earned = np.array([_earned(rollout) for rollout in group.rollouts], np.float64)
    rewards = {**group.rewards, ENVIRONMENT: earned}
    return replace(group, rewards=rewards, turn_weight=weight)


class Tally:
    """Counts the samples of a step, and those on which a verifier failed."""

    def __init__(self, groups: Iterable[ScoredGroup]) -> None:
        self.samples = 0
        self.failed = 0
        self._causes: Counter[str] = Counter()
        self._examples: dict[int, str] = {}  # by ticket, so that the first one is named
        for group in groups:
            self.samples += len(group.rollouts)
            if group.failures:
                self.failed += len({failure.sample for failure in group.failures})
                self._causes.update(f"{f.component}: {f.cause}" for f in group.failures)
                self._examples[group.prompt.ticket] = describe(group.prompt, group.failures[0])

    def require_scored(self, max_failed_fraction: float) -> None:
        """ScoresMissing where more than this fraction of the samples failed."""
        if self.failed <= max_failed_fraction * self.samples:
            return
        causes = ", ".join(f"{cause} x{n}" for cause, n in sorted(self._causes.items()))
        raise ScoresMissing(
            f"verifiers or the environment failed on {self.failed} of {self.samples} scored "
            f"samples ({causes}), more than scoring.max_failed_fraction = "
            f"{max_failed_fraction:g}: correct what failed, or allow more there (1: any number); "
            f"the first is {self._examples[min(self._examples)]}"
        )


def describe(prompt: Prompt, failure: Failure) -> str:
    """One line: the sample and row of a failure, its component, cause and message."""
    return (
        f"sample {failure.sample} of ticket {prompt.ticket} (row {prompt.row} of "
        f"{prompt.dataset}): {failure.component}: {failure.cause}: {failure.message}"
    )
