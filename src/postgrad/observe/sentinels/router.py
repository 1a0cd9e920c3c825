"""Router collapse: a mixture sends its tokens to fewer and fewer of its experts."""

from typing import Any, ClassVar

from pydantic import Field

from postgrad.checkpoint.schema import Count, Strict
from postgrad.observe.sentinels.base import Look, Seen, Sentinel, SentinelMemory, in_a_row, mean

SUFFIX = "/router_unused"


class Unused(Strict):
    """The largest shares of unused experts in the run's first steps, and the steps over the limit
    in a row.
    """

    first: list[float] = []
    row: Count = 0


class Router(Sentinel):
    """Speaks while the share of experts without a token has been more than `rise` above that of the
    run's first `steps` steps, for `steps` steps in a row. Of several roles the one with most
    counts.

    A rise, and no level: an update of few tokens leaves experts of a large mixture unused anyway.
    """

    remembers: ClassVar[Any] = Unused
    rise: float = Field(default=0.2, gt=0.0, lt=1.0)
    steps: int = Field(default=5, ge=1, le=256)

    def look(self, seen: Seen, before: SentinelMemory) -> Look | None:
        shares = [value for name, value in seen.items() if name.endswith(SUFFIX)]
        if not shares:
            return None
        first, now = list(before.get("first", ())), max(shares)
        if len(first) < self.steps:
            return Look({"first": [*first, now], "row": 0})
        start = mean(first)
        row = in_a_row(before, not now - start <= self.rise, self.steps)
        after, message = {"first": first, "row": row}, None
        if row == self.steps:
            message = (
                f"routers collapse: {now:.0%} of the experts get no token, {start:.0%} in the "
                f"first steps (limit {self.rise:.0%} more): raise model.router_aux_loss_coef, set "
                "model.router_z_loss_coef, or lower learner.lr"
            )
        return Look(after, now - start, message)
