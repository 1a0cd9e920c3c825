"""Gradient spikes: a gradient norm far above those of the steps before."""

from statistics import median
from typing import Any, ClassVar

from pydantic import Field

from postgrad.checkpoint.schema import Positive
from postgrad.observe.sentinels.base import Look, Seen, Sentinel, SentinelMemory

SUFFIX = "/grad_norm"


class Gradient(Sentinel):
    """Speaks where a role's gradient norm is over `factor` times the median of its last `window`
    steps; the first `after` of them are only remembered. Steps without any gradient do not count.
    """

    remembers: ClassVar[Any] = dict[str, list[Positive]]
    factor: float = Field(default=20.0, gt=1.0)
    window: int = Field(default=32, ge=4, le=256)
    after: int = Field(default=16, ge=2)

    def look(self, seen: Seen, before: SentinelMemory) -> Look | None:
        norms = {
            name.removesuffix(SUFFIX): value
            for name, value in seen.items()
            if name.endswith(SUFFIX) and value > 0
        }
        if not norms:
            return None
        history: dict[str, list[float]] = dict(before)
        most, message = 0.0, None
        for role, norm in norms.items():
            past = history.get(role, [])
            if len(past) >= min(self.after, self.window):
                times = norm / median(past)
                most = max(most, times)
                message = self._tell(role, norm, times) if times > self.factor else message
            history[role] = [*past, norm][-self.window :]
        after: dict[str, Any] = history
        return Look(after, most or None, message)

    def _tell(self, role: str, norm: float, times: float) -> str:
        return (
            f"the gradient norm of the {role} is {norm:.3g}, {times:.3g} times the median of its "
            f"last {self.window} steps (limit {self.factor:g}): look at this step's samples; a "
            "learner.max_grad_norm above 0 bounds such a step; lower learner.lr if they go on"
        )
