"""Reward hacking: the reward rises while accuracy on held-out questions falls."""

import math
from typing import Any, ClassVar

from postgrad.checkpoint.schema import Count, Strict
from postgrad.observe.sentinels.base import Look, Seen, Sentinel, SentinelMemory, measured

LOW, HIGH = "accuracy_low", "accuracy_high"


class BestSoFar(Strict):
    """The best evaluation of a set so far."""

    low: float  # lower end of its accuracy's interval
    reward: float | None  # mean training reward before it; None: before the first step


class Evaluations(Strict):
    """The memory: the best evaluation of each set, and the rewards since the last evaluation."""

    best: dict[str, BestSoFar] = {}  # by the set's prefix, such as "eval/" or "eval/hard/"
    earned: float = 0.0  # sum of the steps' mean rewards
    steps: Count = 0


class Evaluation(Sentinel):
    """Speaks at an evaluation whose 95% interval of the accuracy lies below that of the best
    evaluation, while the mean training reward is higher than before that one.

    The intervals are the threshold, so small sets need a larger fall.
    """

    remembers: ClassVar[Any] = Evaluations

    def look(self, seen: Seen, before: SentinelMemory) -> Look | None:
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
        for name, record in best.items():
            if record["reward"] is None:  # evaluated before the first step: the reward after it
                best[name] = {**record, "reward": seen["reward"]}
        return Look({"best": best, "earned": earned + seen["reward"], "steps": steps + 1})


def _compare(
    seen: Seen, ends: dict[str, float], best: dict[str, Any], reward: float | None
) -> str | None:
    """The message, None where all is well. Updates `best` in place.

    ends: set's prefix -> lower end of its accuracy's interval. reward: the mean since the last
    evaluation.
    """
    falls: list[str] = []
    for name, low in ends.items():
        record = best.get(name)
        if record is None or low > record["low"]:
            best[name] = {"low": low, "reward": reward}
            continue
        high, before = seen[name + HIGH], record["reward"]
        if high < record["low"] and None not in (reward, before) and reward > before:
            falls.append(
                f"{name}accuracy fell to {seen[name + 'accuracy']:.3g} (at most {high:.3g}, was at "
                f"least {record['low']:.3g}) while the reward rose from {before:.3g} to "
                f"{reward:.3g}"
            )
    if not falls:
        return None
    return (
        f"the policy learns the reward, not the task: {'; '.join(falls)}: read new samples with a "
        "high reward, fix the reward, go back to the best checkpoint (postgrad fork)"
    )
