"""The protocol of environments: one answers each turn of the policy, or ends the episode.

A question with one answer is the trivial environment; games and tools are others. Nothing else in
the loop knows the difference: an observation is a turn whose author is "environment".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from postgrad.core.process import Handle, done
from postgrad.core.records import (
    Behind,
    EpisodeFailure,
    PlacedImage,
    Prompt,
)
from postgrad.rollout.engine import Completion


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment's answer to one turn of the policy."""

    token_ids: NDArray[np.int32]  # [O] what the policy reads next, template marks included
    done: bool  # whether the episode ends here; then token_ids are not read
    reward: float = 0.0  # for this turn alone
    # For metrics, {"calls": 1.0}; summed over the episode.
    counts: Mapping[str, float] = field(default_factory=dict[str, float])
    failure: EpisodeFailure | None = None  # then the episode ends, and its sample has no reward
    images: tuple[PlacedImage, ...] = ()  # among token_ids, in order
    behind: Behind = "newest"  # what token_ids stand behind: another turn of the policy, or nothing
    # Of a conversation that begins here: schemas that it shows, if it has others than the rest.
    tools: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's work on one turn, which may go on beside the caller."""

    handle: Handle[Any]  # finished when the work has ended
    observe: Callable[[Any], Observation]  # what the handle gave -> the observation

    def result(self) -> Observation:
        """Waits for the observation. What the environment raised passes through."""
        return self.observe(self.handle.result())


def at_once(observation: Observation) -> Step:
    """A step that has ended."""
    return Step(done(observation), lambda ended: ended)


class Episode(Protocol):
    """One sample's way through an environment."""

    @property
    def begins(self) -> bool:
        """Whether the environment speaks before the policy's first turn."""
        ...

    def begin(self) -> Step:
        """Begins the observation that the policy's first turn follows, where the environment
        `begins`: behind "nothing" what it reads in place of its prompt, behind "newest" no tokens.
        """
        ...

    def step(self, response: Completion) -> Step:
        """Begins the observation that follows the policy's newest turn. No step of the same episode
        is under way.
        """
        ...

    def close(self) -> None:
        """Ends the episode, which the environment would go on with: no further turn follows."""
        ...


class Environment(Protocol):
    """Starts episodes. One object serves all samples, so it keeps nothing of any of them."""

    deterministic: bool  # the same prompt and the same turns always give the same observations
    concurrent: int  # steps that may be under way while the engine decodes others; 0: none
    turn_tokens: Sequence[int]  # most tokens of turn 1, 2, ...; the last one holds for all later

    def reset(self, prompt: Prompt, sample: int) -> Episode:
        """A new episode for sample number `sample` of `prompt`."""
        ...

    def resume(
        self,
        prompt: Prompt,
        sample: int,
        opening: Observation | None,
        recorded: Sequence[tuple[Completion, Observation]],
    ) -> Episode | None:
        """An episode behind turns that another process had, which are not stepped again; None where
        that cannot be done. It is asked only where the environment is not deterministic. opening:
        what it began with, if it did.
        """
        ...


class SingleTurn:
    """The trivial environment: the episode ends with the first answer."""

    deterministic = True
    concurrent = 0
    turn_tokens: Sequence[int] = ()
    begins = False

    def reset(self, prompt: Prompt, sample: int) -> "SingleTurn":
        """This object itself: there is no state."""
        return self

    def resume(
        self,
        prompt: Prompt,
        sample: int,
        opening: Observation | None,
        recorded: Sequence[tuple[Completion, Observation]],
    ) -> "SingleTurn":
        """This object itself: there is nothing to go on from."""
        return self

    def begin(self) -> Step:
        """Is never called: the policy begins."""
        raise NotImplementedError

    def step(self, response: Completion) -> Step:
        """An empty observation that ends the episode."""
        return _ENDED

    def close(self) -> None:
        """Does nothing: a question with one answer holds nothing open."""


_ENDED = at_once(Observation(np.zeros(0, np.int32), done=True))
SINGLE_TURN = SingleTurn()


class Environments:
    """The environments of a run, by the name that prompts have. Other prompts take one answer."""

    def __init__(self, by_name: Mapping[str | None, Environment] | None = None) -> None:
        self._by_name = dict(by_name or {})

    def of(self, prompt: Prompt) -> Environment:
        """What answers the policy's turns after `prompt`."""
        return self._by_name.get(prompt.environment, SINGLE_TURN)

    @property
    def deterministic(self) -> bool:
        """Whether all of them are."""
        return all(environment.deterministic for environment in self._by_name.values())

    @property
    def concurrent(self) -> int:
        """Steps of all of them that may be under way while the engine decodes others."""
        return max((environment.concurrent for environment in self._by_name.values()), default=0)
