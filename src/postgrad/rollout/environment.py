"""What stands between an engine and a source: it answers the policy, or ends the episode.

Questions with one answer are the trivial environment; agents and tools are others. Nothing else in
the loop knows the difference: an observation is a turn whose author is "environment".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from postgrad.core.records import Prompt
from postgrad.rollout.engine import Completion


@dataclass(frozen=True, slots=True)
class Observation:
    """What came back for a response: tokens to go on from, unless the episode is done.

    token_ids: [O] int32, the text that the policy reads next, template marks included. reward: for
    this turn alone. counts: what metrics should know of this turn, such as {"calls": 1}; they are
    summed over the episode.
    """

    token_ids: NDArray[np.int32]
    done: bool
    reward: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict[str, float])


class Episode(Protocol):
    """One sample's course. It must not look at the clock: the same responses, the same course."""

    def step(self, response: Completion) -> Observation:
        """What follows the policy's newest turn."""
        ...


class Environment(Protocol):
    """Starts episodes; one object serves all samples."""

    def reset(self, prompt: Prompt, sample: int) -> Episode:
        """A new episode for a sample of `prompt`."""
        ...


class SingleTurn:
    """The trivial environment: a question, one answer, done."""

    def reset(self, prompt: Prompt, sample: int) -> "SingleTurn":
        """Environment.reset: there is no state."""
        return self

    def step(self, response: Completion) -> Observation:
        """Episode.step: every answer is the last."""
        return Observation(np.zeros(0, np.int32), done=True)
