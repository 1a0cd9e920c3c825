"""The protocol of environments: one answers each turn of the policy, or ends the episode. And
samples in progress, which are what goes through an episode.

A question with one answer is the trivial environment; games and tools are others. Nothing else in
the loop knows the difference: an observation is a turn whose author is "environment".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from postgrad.core.process import Handle, done
from postgrad.core.ragged import Ragged
from postgrad.core.records import (
    Behind,
    EpisodeFailure,
    FinishReason,
    PlacedImage,
    Prompt,
    Rollout,
)
from postgrad.layout.tree import MIN_CONTINUED
from postgrad.rollout.engine import Completion, Request, Written, joined
from postgrad.rollout.settings import SamplingSettings
from postgrad.rollout.transcript import NextRead, Transcript


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
        """Nothing: the policy reads its prompt."""
        return at_once(Observation(np.zeros(0, np.int32), done=False))

    def step(self, response: Completion) -> Step:
        """An empty observation that ends the episode."""
        return _ENDED

    def close(self) -> None:
        """Does nothing: a question with one answer holds nothing open."""


_ENDED = at_once(Observation(np.zeros(0, np.int32), done=True))
_SINGLE_TURN = SingleTurn()


class Environments:
    """The environments of a run, by the name that prompts have. Other prompts take one answer."""

    def __init__(self, by_name: Mapping[str | None, Environment] | None = None) -> None:
        self._by_name = dict(by_name or {})

    def of(self, prompt: Prompt) -> Environment:
        """What answers the policy's turns after `prompt`."""
        return self._by_name.get(prompt.environment, _SINGLE_TURN)

    @property
    def deterministic(self) -> bool:
        """Whether all of them are."""
        return all(environment.deterministic for environment in self._by_name.values())

    @property
    def concurrent(self) -> int:
        """Steps of all of them that may be under way while the engine decodes others."""
        return max((environment.concurrent for environment in self._by_name.values()), default=0)


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How each prompt is sampled."""

    samples: int  # of each prompt
    sampling: SamplingSettings
    seed: int  # of the run
    environments: Environments = field(default_factory=Environments)
    # Tokens of prompt and all turns together, where what conversations begin with alike counts once
    max_len: int | None = None  # None: no bound
    min_shared: int = MIN_CONTINUED  # the least tokens that count once (models.attention)
    greedy: bool = False  # sample 0 of each prompt is drawn at temperature 0
    keeps_mask: bool = False  # turns have sampling masks (rollout.keep_sampling_mask)

    def turn_sampling(self, prompt: Prompt, turn: int, sample: int) -> SamplingSettings:
        """How turn number `turn` of a sample is drawn: with the environment's limit, if any."""
        changes: dict[str, float] = {}
        if limits := self.environments.of(prompt).turn_tokens:
            most = min(limits[min(turn, len(limits) - 1)], self.sampling.max_new_tokens)
            changes["max_new_tokens"] = most
        if self.greedy and sample == 0:
            changes["temperature"] = 0.0
        return self.sampling.model_copy(update=changes) if changes else self.sampling


class OpenSample:
    """A sample in progress: its turns so far and its episode."""

    def __init__(self, prompt: Prompt, number: int, spec: SamplingSpec) -> None:
        self.prompt = prompt
        self._number = number
        self._spec = spec
        self._environment = spec.environments.of(prompt)
        self._episode: Episode = self._environment.reset(prompt, number)
        self._transcript = Transcript(prompt)
        self.opening: Observation | None = None  # before the first turn, of one that `begins`
        self.completions: list[Completion] = []  # the policy's turns
        self.observations: list[Observation] = []  # what followed each of them
        self._rewards: list[float] = []  # one a turn
        self._counts: dict[str, float] = {}
        self._finish: FinishReason = "stop"
        self._failure: EpisodeFailure | None = None
        # What an engine has to do next; None: the sample has ended, or its environment begins.
        self.request = None if self.begins else self._behind_prompt()

    @property
    def begins(self) -> bool:
        """Whether the environment has to `begin`, before the policy's first turn."""
        return self._episode.begins and self.opening is None

    def begin(self) -> Step:
        """Returns the environment's work before the first turn, which is under way; `observe` takes
        what it gives.
        """
        return self._episode.begin()

    def take(self, completion: Completion) -> Step:
        """Adds the policy's newest turn. Returns the environment's work on it, which is under way;
        `observe` takes what it gives.
        """
        self.request = None
        self._add(completion)
        return self._episode.step(completion)

    def observe(self, observation: Observation) -> Request | None:
        """Adds the environment's answer. Returns the request for the next turn; None at the end."""
        after = self._after if self.completions else self._opened
        self.request = after(observation)
        return self.request

    def continue_turn(self, turn: Written) -> None:
        """The turn under way goes on behind what was written of it."""
        assert self.request is not None
        self.request = self.request.cut_after(self._number, turn)

    def recall(self, completion: Completion, observation: Observation) -> None:
        """As `take` and `observe`, without the environment: both are as recorded."""
        self._add(completion)
        self.observe(observation)

    def resume(self) -> bool:
        """After `recall`: whether the environment can go on from there. It was not stepped."""
        recorded = list(zip(self.completions, self.observations, strict=True))
        episode = self._environment.resume(self.prompt, self._number, self.opening, recorded)
        if episode is not None:
            self._episode = episode
        return episode is not None

    @property
    def written(self) -> Written | None:
        """What was written of the turn under way, with the experts that are not known yet."""
        if self.request is None or self.request.written is None:
            return None
        written = self.request.written
        tokens = len(self.request.prefix)
        return replace(written, experts=self._transcript.news(written.experts, tokens))

    def _add(self, completion: Completion) -> None:
        self.completions.append(self._transcript.write(completion))
        self._finish = completion.finish_reason

    def _behind_prompt(self) -> Request:
        prompt, spec = self.prompt, self._spec
        return Request(
            prompt.ticket, (self._number,), prompt.token_ids,
            spec.turn_sampling(prompt, 0, self._number), 0, spec.seed,
            messages=prompt.messages, images=prompt.images,
            keeps_mask=spec.keeps_mask, may_go_on=self._environment is not _SINGLE_TURN,
        )  # fmt: skip

    def _opened(self, observation: Observation) -> Request | None:
        self.opening = observation
        self._failure = observation.failure
        if observation.done:
            return None
        if observation.behind == "newest":
            return self._behind_prompt()
        request = self._next(observation)
        if request is None:
            message = (
                f"it begins with {len(observation.token_ids)} tokens, behind which data.max_len = "
                f"{self._spec.max_len} has no room for a turn"
            )
            self._failure = EpisodeFailure("error", message)
        return request

    def _after(self, observation: Observation) -> Request | None:
        self.observations.append(observation)
        self._failure = observation.failure
        self._rewards.append(observation.reward)
        for name, count in observation.counts.items():
            self._counts[name] = self._counts.get(name, 0.0) + count
        if observation.done:
            return None
        request = self._next(observation)
        if request is None:
            self._finish = "length"
        return request

    def _next(self, observation: Observation) -> Request | None:
        """What the policy reads of an observation; None where no turn has room behind it."""
        seen = np.asarray(observation.token_ids, np.int32)
        read = self._transcript.behind(observation.behind, seen, observation.images)
        turn = len(self.completions)
        sampling = self._sampling_after(turn, read)
        if sampling is None:
            self._episode.close()
            return None
        self._transcript.read(read)
        self._rewards.append(0.0)
        place, spec = (self.prompt.ticket, (self._number,)), self._spec
        return Request(
            *place, read.token_ids, sampling, turn, spec.seed,
            images=read.images, keeps_mask=spec.keeps_mask, may_go_on=True,
        )  # fmt: skip

    def _sampling_after(self, turn: int, read: NextRead) -> SamplingSettings | None:
        sampling = self._spec.turn_sampling(self.prompt, turn, self._number)
        if self._spec.max_len is None:
            return sampling
        tokens = self._transcript.tokens_with(read, self._spec.min_shared)
        room = self._spec.max_len - tokens
        if room < 1:
            return None
        return sampling.model_copy(update={"max_new_tokens": min(room, sampling.max_new_tokens)})

    def rollout(self, tokenizer: Any) -> Rollout:
        """The record of the ended sample. Where any turn has a reward, the column turn_rewards has
        it at the turn's last token, 0 elsewhere. Of a sample without any token it is one value.
        """
        prompt_experts, turns = self._transcript.with_experts()
        tokens = Ragged.of((turn.token_ids for turn in turns), np.int32).values
        columns: dict[str, Any] = {}
        if any(self._rewards):
            # A server's answer may have no tokens: before the first one a turn ends at it.
            ends = np.maximum(np.cumsum([len(turn.token_ids) for turn in turns]) - 1, 0)
            turn_rewards = np.zeros(max(1, len(tokens)), np.float32)
            # added: a reply without tokens ends where the turn before it does
            np.add.at(turn_rewards, ends, self._rewards)
            columns["turn_rewards"] = turn_rewards
        first = self.completions[0].text if self.completions else ""
        several = len(turns) > 1
        return Rollout(
            ticket=self.prompt.ticket,
            sample=self._number,
            turns=turns,
            finish_reason=self._finish,
            versions=joined((), [span for turn in self.completions for span in turn.versions]),
            text=tokenizer.decode(tokens.tolist(), skip_special_tokens=True) if several else first,
            columns=columns,
            answer=self.completions[-1].text if several else None,
            counts=self._counts,
            failure=self._failure,
            prompt_experts=prompt_experts,
        )
