"""The protocol of environments: one answers each turn of the policy, or ends the episode.

A question with one answer is the trivial environment; games and tools are others. Nothing else in
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
    """The environment's answer to one turn of the policy."""

    token_ids: NDArray[np.int32]  # [O] what the policy reads next, template marks included
    done: bool  # whether the episode ends here; then token_ids are not read
    reward: float = 0.0  # for this turn alone
    # For metrics, {"calls": 1.0}; summed over the episode.
    counts: Mapping[str, float] = field(default_factory=dict[str, float])


class Episode(Protocol):
    """One sample's way through an environment. It must be deterministic: the same responses give
    the same observations, so no clock and no random generator.
    """

    def step(self, response: Completion) -> Observation:
        """The observation that follows the policy's newest turn."""
        ...


class Environment(Protocol):
    """Starts episodes. One object serves all samples, so it keeps nothing of any of them."""

    def reset(self, prompt: Prompt, sample: int) -> Episode:
        """A new episode for sample number `sample` of `prompt`."""
        ...


class SingleTurn:
    """The trivial environment: the episode ends with the first answer."""

    def reset(self, prompt: Prompt, sample: int) -> "SingleTurn":
        """This object itself: there is no state."""
        return self

    def step(self, response: Completion) -> Observation:
        """An empty observation that ends the episode."""
        return Observation(np.zeros(0, np.int32), done=True)
