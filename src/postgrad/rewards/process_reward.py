"""A process reward model in this process as a component of [[rewards]]: a score for each step of a
sample, as one reward or credited step by step.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt, Rollout
from postgrad.ops.advantages import Floats
from postgrad.rewards.learned import AskedHere, Learned, asked
from postgrad.rewards.protocol import Outcome
from postgrad.rewards.settings import RewardSettings

Aggregate = Literal["min", "product", "mean", "last", "sum"]


class StepScores(AskedHere):
    """The probabilities that the steps of a sample are right, by the run's process reward model.

    The reward is their `aggregate`. With credit = "step" each step gets, at its last token, by how
    much it changes the aggregate of the steps so far (0 before the first one): these parts add up
    to the reward. Algorithms that credit tokens read them (PPO, REINFORCE++); for the others only
    the reward counts.
    """

    aggregate: Aggregate = "min"
    credit: Literal["sample", "step"] = "sample"
    separator: str | None = Field(default=None, min_length=1)  # None: that the model learned with

    def component(
        self, name: str, reward: RewardSettings, learned: Learned | None
    ) -> "StepComponent":
        model = asked(name, learned)
        if model.separator is None:
            raise UsageError(
                f"rewards: {name!r} needs a process reward model, and that of [reward_model] "
                'scores whole answers: train one with algorithm.type = "process_reward", or say '
                'type = "reward_model"'
            )
        if self.credit == "step" and (reward.gate or reward.multiply):
            raise UsageError(
                f'rewards: {name!r}: credit = "step" gives parts of a sum to steps: leave gate and '
                "multiply out"
            )
        return StepComponent(name, self, model, self.separator or model.separator)


def so_far(scores: Floats, aggregate: Aggregate) -> Floats:
    """[steps] the aggregate of the first 1, 2, ... steps, from the score of each."""
    if aggregate == "min":
        return np.minimum.accumulate(scores)
    if aggregate == "product":
        return np.multiply.accumulate(scores)
    if aggregate == "last":
        return scores
    sums: Floats = np.cumsum(scores, dtype=np.float64)
    if aggregate == "mean":
        sums /= np.arange(1, len(scores) + 1)
    return sums


class StepComponent:
    """A component whose steps the run's process reward model scores, group by group."""

    def __init__(self, name: str, settings: StepScores, learned: Learned, separator: str) -> None:
        self._name, self._settings = name, settings
        self._learned, self._separator = learned, separator

    def outcomes(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Outcome]:
        """An outcome for each rollout, whose key is the rollout's index. Its detail has the score
        of each step. Exceptions of the model pass through: they are no failure of a sample.
        """
        ends = [self._ends(rollout) for rollout in rollouts]
        read = [rollout.conversations(prompt) for rollout in rollouts]
        sequences = [tokens for parts in read for _, tokens, _ in parts]
        images = [shown for parts in read for _, _, shown in parts]
        masks: list[NDArray[np.bool_]] = []
        for rollout, parts, places in zip(rollouts, read, ends, strict=True):
            before = len(rollout.read_prompt(prompt))
            for begin, tokens, _ in parts:
                at = np.arange(begin, begin + len(tokens)) - before
                masks.append(np.isin(at, places))
        each = iter(self._learned.score_steps(sequences, masks, images))
        scores = [np.concatenate([next(each) for _ in parts]) for parts in read]
        samples = enumerate(zip(rollouts, ends, scores, strict=True))
        return [self._outcome(place, *sample) for place, sample in samples]

    def _ends(self, rollout: Rollout) -> NDArray[np.int64]:
        """[steps] the last token of each step in the response: steps are what the policy wrote, and
        end with its turn.
        """
        ends, start = [np.zeros(0, np.int64)], 0
        for turn in rollout.turns:
            if turn.author == "policy":
                ends.append(start + self._learned.step_ends(turn.token_ids, self._separator))
            start += len(turn.token_ids)
        return np.concatenate(ends)

    def _outcome(
        self, place: int, rollout: Rollout, ends: NDArray[np.int64], scores: Floats
    ) -> Outcome:
        if not len(scores) or not np.isfinite(scores).all():
            message = f"the process reward model returned {scores.tolist()}, which is no score"
            return Outcome(place, cause="error", message=message)
        aggregates = so_far(scores, self._settings.aggregate)
        parts = None
        if self._settings.credit == "step":
            parts = np.zeros(len(rollout.token_ids))
            parts[ends] = np.diff(aggregates, prepend=0.0)
        detail = {"steps": scores.tolist(), "ends": ends.tolist()}
        return Outcome(place, float(aggregates[-1]), detail, parts=parts)
