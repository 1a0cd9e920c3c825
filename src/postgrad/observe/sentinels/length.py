"""Responses that keep growing: often the reward favours length."""

from typing import Any, ClassVar

from pydantic import Field

from postgrad.checkpoint.schema import Strict
from postgrad.observe.sentinels.base import Look, Seen, Sentinel, SentinelMemory, mean, measured

KEY, REWARD = "response_length", "reward"
NOISE = 5  # steps over which lengths are averaged


class Lengths(Strict):
    """Mean response lengths, in tokens, and mean rewards of the steps of a window."""

    lengths: list[float] = []
    rewards: list[float] = []


class Length(Sentinel):
    """Speaks while the mean response length of the newest five steps is over `factor` times that of
    five steps `window` steps ago.
    """

    remembers: ClassVar[Any] = Lengths
    factor: float = Field(default=2.0, gt=1.0)
    window: int = Field(default=50, ge=2 * NOISE, le=512)

    def look(self, seen: Seen, before: SentinelMemory) -> Look | None:
        if not measured(seen, KEY, REWARD):
            return None
        lengths = [*before.get("lengths", ()), seen[KEY]][-self.window :]
        rewards = [*before.get("rewards", ()), seen[REWARD]][-self.window :]
        after = {"lengths": lengths, "rewards": rewards}
        if len(lengths) < 2 * NOISE:
            return Look(after)
        then, now = mean(lengths[:NOISE]), mean(lengths[-NOISE:])
        times = now / max(then, 1.0)
        if times <= self.factor:
            return Look(after, times)
        earned = f"{mean(rewards[:NOISE]):.3g} to {mean(rewards[-NOISE:]):.3g}"
        return Look(
            after,
            times,
            f"answers grow too long: {now:.0f} tokens, {times:.1f} times the {then:.0f} of "
            f"{len(lengths)} steps ago (limit {self.factor:g}), while the reward went from {earned}"
            ": read samples; if they are padding, add a length penalty, or use an aggregation that "
            "does not favour long answers",
        )
