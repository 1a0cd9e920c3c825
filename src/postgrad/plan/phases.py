"""The phases of a run whose memory is planned, and the lines of that plan.

Phases: load (weights are read), rollout (the engine samples), score (roles compute logprobs and
values of the samples without learning), update (forward, backward and the optimizer's step), save
(the state is copied).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal["load", "rollout", "score", "update", "save"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """Bytes that a role takes on one device for one purpose."""

    role: str  # "policy", "engine", ...; "run": not of one role
    purpose: str  # "weights", "activations", "key-value cache"
    bytes: Mapping[Phase, int]  # a phase that is missing takes none


def awake(value: int) -> dict[Phase, int]:
    """Bytes that the engine takes while it samples, and from a publish until it rests."""
    return {"rollout": value, "save": value}


def always(value: int) -> dict[Phase, int]:
    """The same bytes in all phases."""
    return dict.fromkeys(PHASES, value)
