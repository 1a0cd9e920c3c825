"""The reward rises while held-out questions are answered worse: what is learned is the reward."""

import math
from typing import Any, ClassVar

from postgrad.checkpoint.schema import Count, Strict
from postgrad.observe.sentinels.base import Look, Memory, Seen, Sentinel, measured

LOW, HIGH = "accuracy_low", "accuracy_high"


class BestSoFar(Strict):
    """The best lower end of an accuracy, and the mean reward before it."""

    low: float
    reward: float | None


class Evaluations(Strict):
    """The best of each set; the rewards of the steps since."""

    best: dict[str, BestSoFar] = {}
    earned: float = 0.0
    steps: Count = 0


class Evaluation(Sentinel):
    """Speaks at an evaluation whose accuracy lies under the best one's by more than both 95%
    intervals allow, while the mean training reward since the last evaluation is higher than it was
    then. The intervals are the threshold: small sets are slow to speak, and rightly.
    """

    remembers: ClassVar[Any] = Evaluations

    def look(self, seen: Seen, before: Memory) -> Look | None:
        best: dict[str, Any] = dict(before.get("best", {}))
        earned, steps = before.get("earned", 0.0), before.get("steps", 0)
        ends = {
            name.removesuffix(LOW): value
            for name, value in seen.items()
            if name.endswith(LOW) and math.isfinite(value)
        }
        if ends:
            message = _compare(seen, ends, best, earned / steps if steps else None)
            return Look({"best": best}, message=message)
        if not measured(seen, "reward", "samples"):
            return None
        for name, one in best.items():  # an evaluation before the first step: the reward after it
            if one["reward"] is None:
                best[name] = {**one, "reward": seen["reward"]}
        return Look({"best": best, "earned": earned + seen["reward"], "steps": steps + 1})


def _compare(
    seen: Seen, ends: dict[str, float], best: dict[str, Any], reward: float | None
) -> str | None:
    """What is wrong, if anything; updates the best. reward: the mean since the last evaluation."""
    found: list[str] = []
    for name, low in ends.items():
        known = best.get(name)
        if known is None or low > known["low"]:
            best[name] = {"low": low, "reward": reward}
            continue
        high, before = seen[name + HIGH], known["reward"]
        if high < known["low"] and None not in (reward, before) and reward > before:
            found.append(
                f"{name}accuracy fell to {seen[name + 'accuracy']:.3g} (at most {high:.3g}, was at "
                f"least {known['low']:.3g}) while the reward rose from {before:.3g} to {reward:.3g}"
            )
    if not found:
        return None
    return (
        f"the reward is learned, not the task: {'; '.join(found)}: read new samples with a high "
        "reward, mend the reward, go back to the best checkpoint"
    )
