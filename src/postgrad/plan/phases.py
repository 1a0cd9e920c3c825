"""The moments of a run that a plan of memory looks at, and what it says of each.

Phases: load (weights are read), rollout (the engine samples), score (roles that do not learn here
read the samples), update (forward, backward and the optimizer's step), save (the state is copied).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal["load", "rollout", "score", "update", "save"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes on one device that a role takes for something, in each phase."""

    role: str
    what: str
    bytes: Mapping[Phase, int]


def awake(value: int) -> dict[Phase, int]:
    """What an engine has while it samples, and after weights were published until it rests."""
    return {"rollout": value, "save": value}


def always(value: int) -> dict[Phase, int]:
    """The same in all phases."""
    return dict.fromkeys(PHASES, value)
