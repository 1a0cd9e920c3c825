"""Samples in progress: the turns of policy and environment so far, and what an engine does next."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from postgrad.core.records import EpisodeFailure, FinishReason, Prompt, Rollout, Turn
from postgrad.rollout.engine import Completion, Request, Written, joined
from postgrad.rollout.environment import Environment, Episode, Observation, SingleTurn, Step
from postgrad.rollout.settings import SamplingSettings


@dataclass(frozen=True, slots=True)
class Drawing:
    """How each prompt is sampled."""

    samples: int  # of each prompt
    sampling: SamplingSettings
    seed: int  # of the run
    environment: Environment = field(default_factory=SingleTurn)
    max_len: int | None = None  # tokens of prompt and all turns together; None: no bound

    def turn_sampling(self, turn: int) -> SamplingSettings:
        """How turn number `turn` of the policy is sampled: with the environment's limit, if any."""
        limits = self.environment.turn_tokens
        if not limits:
            return self.sampling
        most = min(limits[min(turn, len(limits) - 1)], self.sampling.max_new_tokens)
        return self.sampling.model_copy(update={"max_new_tokens": most})


class OpenGroup:
    """A prompt whose samples are in progress."""

    def __init__(self, prompt: Prompt, drawing: Drawing) -> None:
        self.prompt = prompt
        self.samples = [OpenSample(prompt, i, drawing) for i in range(drawing.samples)]
        self.left = drawing.samples  # samples that have not ended
        self.stepping = 0  # of these, those that wait for their environment

    @property
    def ended(self) -> bool:
        """Whether all samples have ended."""
        return not self.left

    @property
    def decoding(self) -> int:
        """Samples that an engine has."""
        return self.left - self.stepping

    def requests(self) -> Iterator[Request]:
        """What an engine has to do: a request for all samples that have not begun, then one for
        each that goes on.
        """
        waiting = [sample.request for sample in self.samples if sample.request is not None]
        fresh = [r for r in waiting if not r.turn and r.written is None]
        if fresh:
            numbers = tuple(number for request in fresh for number in request.sample_ids)
            yield replace(fresh[0], sample_ids=numbers)
        yield from (request for request in waiting if request.turn or request.written is not None)


def mean_counts(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The counts of environments as means over the samples, 0 where a sample lacks one."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.counts)
    return {
        name: float(np.mean([rollout.counts.get(name, 0.0) for rollout in rollouts]))
        for name in sorted(names)
    }


class OpenSample:
    """A sample in progress: its turns so far and its episode."""

    def __init__(self, prompt: Prompt, number: int, drawing: Drawing) -> None:
        self.prompt = prompt
        self._number = number
        self._drawing = drawing
        self._episode: Episode = drawing.environment.reset(prompt, number)
        self._turns: list[Turn] = []
        self.completions: list[Completion] = []  # the policy's turns
        self.observations: list[Observation] = []  # what followed each of them
        self._rewards: list[float] = []  # one a turn
        self._counts: dict[str, float] = {}
        self._finish: FinishReason = "stop"
        self._failure: EpisodeFailure | None = None
        # What an engine has to do next; None: the sample has ended.
        self.request: Request | None = Request(
            prompt.ticket, (number,), prompt.token_ids, drawing.turn_sampling(0), 0, drawing.seed,
            messages=prompt.messages,
        )  # fmt: skip

    def take(self, completion: Completion) -> Step:
        """Adds the policy's newest turn. Returns the environment's work on it, which is under way;
        `observe` takes what it gives.
        """
        self.request = None
        self._add(completion)
        return self._episode.step(completion)

    def observe(self, observation: Observation) -> Request | None:
        """Adds the environment's answer. Returns the request for the next turn; None at the end."""
        self.request = self._after(observation)
        return self.request

    def go_on(self, turn: Written) -> None:
        """Sets what was written of the turn under way."""
        assert self.request is not None
        self.request = self.request.cut_after(self._number, turn)

    def recall(self, completion: Completion, observation: Observation) -> None:
        """As `take` and `observe`, without the environment: both are as recorded."""
        self._add(completion)
        self.observe(observation)

    def resume(self) -> bool:
        """After `recall`: whether the environment can go on from there. It was not stepped."""
        recorded = list(zip(self.completions, self.observations, strict=True))
        episode = self._drawing.environment.resume(self.prompt, self._number, recorded)
        if episode is not None:
            self._episode = episode
        return episode is not None

    def _add(self, completion: Completion) -> None:
        self._turns.append(Turn("policy", completion.token_ids, completion.logprobs))
        self.completions.append(completion)
        self._finish = completion.finish_reason

    def _after(self, observation: Observation) -> Request | None:
        self.observations.append(observation)
        self._failure = observation.failure
        self._rewards.append(observation.reward)
        for name, count in observation.counts.items():
            self._counts[name] = self._counts.get(name, 0.0) + count
        if observation.done:
            return None
        seen = np.asarray(observation.token_ids, np.int32)
        history = [self.prompt.token_ids, *(turn.token_ids for turn in self._turns), seen]
        prefix = np.concatenate(history).astype(np.int32)
        turn = len(self.completions)
        sampling = self._sampling_after(turn, len(prefix))
        if sampling is None:
            self._finish = "length"
            return None
        self._turns.append(Turn("environment", seen, np.zeros(len(seen), np.float32)))
        self._rewards.append(0.0)
        return Request(
            self.prompt.ticket,
            (self._number,),
            prefix,
            sampling,
            turn,
            self._drawing.seed,
        )

    def _sampling_after(self, turn: int, tokens: int) -> SamplingSettings | None:
        sampling = self._drawing.turn_sampling(turn)
        if self._drawing.max_len is None:
            return sampling
        room = self._drawing.max_len - tokens
        if room < 1:
            return None
        return sampling.model_copy(update={"max_new_tokens": min(room, sampling.max_new_tokens)})

    def rollout(self, tokenizer: Any) -> Rollout:
        """The record of the ended sample. Where any turn has a reward, the column turn_rewards has
        it at the turn's last token, 0 elsewhere.
        """
        tokens = np.concatenate([turn.token_ids for turn in self._turns])
        columns: dict[str, Any] = {}
        if any(self._rewards):
            ends = np.cumsum([len(turn.token_ids) for turn in self._turns]) - 1
            turn_rewards = np.zeros(len(tokens), np.float32)
            turn_rewards[ends] = self._rewards
            columns["turn_rewards"] = turn_rewards
        one_turn = len(self._turns) == 1
        return Rollout(
            ticket=self.prompt.ticket,
            sample=self._number,
            turns=tuple(self._turns),
            finish_reason=self._finish,
            versions=joined((), [span for turn in self.completions for span in turn.versions]),
            text=self.completions[0].text
            if one_turn
            else tokenizer.decode(tokens.tolist(), skip_special_tokens=True),
            columns=columns,
            answer=None if one_turn else self.completions[-1].text,
            counts=self._counts,
            failure=self._failure,
        )
