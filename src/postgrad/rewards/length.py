"""Rewards that shape the length of responses, from the number of tokens and the finish reason.

With several turns `max_new_tokens` limits each turn. `overlong` compares the longest turn with it,
`stop_properly` reads how the last turn ended, since a truncated turn is the last; `target_length`
and `relative_length` count the tokens of all turns.
"""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field, model_validator

from postgrad.core.errors import UsageError
from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier


class Overlong(Verifier):
    """The soft punishment of DAPO (Yu et al., 2025), from 0 down to -factor.

    -clip(tokens - (max_new_tokens - buffer), 0, buffer) / buffer * factor, with the tokens of the
    longest turn: nothing until `buffer` tokens before a turn's limit, then down in a line to
    -factor at the limit.
    """

    highest: ClassVar[float | None] = 0.0

    buffer: int = Field(ge=1)  # tokens before the limit over which the penalty grows
    factor: float = Field(default=1.0, gt=0.0)  # the penalty at the limit
    max_new_tokens: int | None = Field(default=None, ge=1)  # None: that of the rollout

    @model_validator(mode="after")
    def _buffer_fits(self) -> "Overlong":
        if self.max_new_tokens is not None and self.buffer > self.max_new_tokens:
            raise ValueError(
                f"buffer = {self.buffer} is more than max_new_tokens = {self.max_new_tokens}"
            )
        return self

    def prepare(self) -> None:
        self._limit()

    def score(self, prompt: PromptView, rollout: RolloutView) -> float:
        over = rollout.longest_turn - (self._limit() - self.buffer)
        return 0.0 - min(max(over, 0), self.buffer) / self.buffer * self.factor

    def _limit(self) -> int:
        if self.max_new_tokens is None:
            raise UsageError("rewards: 'overlong' does not know max_new_tokens: set it")
        return self.max_new_tokens


class StopProperly(Verifier):
    """`penalty` where it did not end by itself (finish_reason other than "stop"), else `stopped`.

    With the defaults it is added to the other rewards; with stopped = 1, a penalty in [0, 1] and
    multiply = true it scales them.
    """

    penalty: float = -1.0
    stopped: float = 0.0

    @property
    def highest(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return max(self.stopped, self.penalty)

    def score(self, prompt: PromptView, rollout: RolloutView) -> Score:
        reason = rollout.finish_reason
        return Score(self.stopped if reason == "stop" else self.penalty, {"finish_reason": reason})


class TargetLength(Verifier):
    """0 within `tolerance` tokens of the target; beyond that it falls with the distance.

    max(least, -per_token * max(0, |tokens - target| - tolerance)), as in L1 (Aggarwal and Welleck,
    2025), with the tokens of all turns.
    """

    highest: ClassVar[float | None] = 0.0

    target: int = Field(ge=1)  # tokens
    tolerance: int = Field(default=0, ge=0)  # tokens
    per_token: float = Field(default=0.001, gt=0.0)
    least: float = Field(default=-1.0, lt=0.0)  # the lowest reward

    def score(self, prompt: PromptView, rollout: RolloutView) -> float:
        away = max(0, abs(rollout.tokens - self.target) - self.tolerance)
        return max(self.least, 0.0 - self.per_token * away)


class RelativeLength(Verifier):
    """From 0.5 for the shortest sample of a prompt down to -0.5 for the longest one, in a line.

    0.5 - (tokens - shortest) / (longest - shortest), as in Kimi k1.5 (arXiv:2501.12599), with
    the tokens of all turns; 0 for each sample where all are equally long. The paper's
    bound of 0 for wrong answers is not part of it, since a verifier knows no other component's
    score: a `gate` on correctness leaves the length of wrong answers out.
    """

    highest: ClassVar[float | None] = 0.5
    compares: ClassVar[bool] = True

    def score_group(self, prompt: PromptView, rollouts: Sequence[RolloutView]) -> list[float]:
        tokens = [rollout.tokens for rollout in rollouts]
        shortest, longest = min(tokens), max(tokens)
        if shortest == longest:
            return [0.0] * len(tokens)
        return [0.5 - (n - shortest) / (longest - shortest) for n in tokens]
