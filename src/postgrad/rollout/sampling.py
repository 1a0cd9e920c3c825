"""From prompts to scored groups: sampling, environments and verifiers overlap in time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from postgrad.core.errors import RunError
from postgrad.core.records import FinishReason, Prompt, Rollout, ScoredGroup, Turn
from postgrad.rollout.engine import Completion, Engine, Request
from postgrad.rollout.environment import Environment, Episode, SingleTurn
from postgrad.rollout.settings import SamplingSettings


class Scoring(Protocol):
    """The part of rewards.scorer.Scorer that sampling needs."""

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        """Start scoring a group; returns at once."""
        ...

    def completed(self, wait: bool) -> list[ScoredGroup]:
        """Groups whose scoring has ended; with `wait`, at least one while any is under way."""
        ...


@dataclass(frozen=True, slots=True)
class Drawing:
    """How each prompt is sampled."""

    samples: int  # of each prompt
    sampling: SamplingSettings
    seed: int  # of the run
    environment: Environment = field(default_factory=SingleTurn)
    max_len: int | None = None  # tokens of prompt and all turns together; None: no bound


def sample_groups(
    engine: Engine,
    scorer: Scoring,
    prompts: Sequence[Prompt],
    drawing: Drawing,
    tokenizer: Any,
    on_done: Callable[[int], None] = lambda samples: None,
) -> list[ScoredGroup]:
    """The scored groups of `prompts`, in their order; their tickets must differ.

    A group is scored as soon as its last sample ends, while others are still decoding; the samples
    do not depend on how long scoring takes. on_done: called with the number of newly ended samples.
    Raises RunError where a group does not come back from the scorer.
    """
    open_samples = {
        prompt.ticket: [_Sample(prompt, i, drawing) for i in range(drawing.samples)]
        for prompt in prompts
    }
    if len(open_samples) != len(prompts):
        raise ValueError("two prompts have the same ticket")
    for prompt in prompts:
        samples = tuple(range(drawing.samples))
        drawn = (drawing.sampling, 0, drawing.seed)
        engine.submit(
            Request(prompt.ticket, samples, prompt.token_ids, *drawn, messages=prompt.messages)
        )
    samples_left = dict.fromkeys(open_samples, drawing.samples)
    scored: dict[int, ScoredGroup] = {}
    while completions := engine.completed():
        ended = 0
        for completion in completions:
            group = open_samples[completion.ticket]
            next_request = group[completion.sample].take(completion)
            if next_request is not None:
                engine.submit(next_request)
                continue
            ended += 1
            samples_left[completion.ticket] -= 1
            if not samples_left[completion.ticket]:
                rollouts = [sample.rollout(tokenizer) for sample in group]
                scorer.submit(group[0].prompt, rollouts)
        scored |= {group.prompt.ticket: group for group in scorer.completed(wait=False)}
        on_done(ended)
    while len(scored) < len(prompts):
        ended_groups = scorer.completed(wait=True)
        if not ended_groups:
            raise RunError(f"{len(prompts) - len(scored)} groups never came back from the scorer")
        scored |= {group.prompt.ticket: group for group in ended_groups}
    return [scored[prompt.ticket] for prompt in prompts]


def mean_counts(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The counts of environments as means over the samples, 0 where a sample lacks one."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.counts)
    return {
        name: float(np.mean([rollout.counts.get(name, 0.0) for rollout in rollouts]))
        for name in sorted(names)
    }


class _Sample:
    """A sample in progress: its turns so far and its episode."""

    def __init__(self, prompt: Prompt, number: int, drawing: Drawing) -> None:
        self.prompt = prompt
        self._number = number
        self._drawing = drawing
        self._episode: Episode = drawing.environment.reset(prompt, number)
        self._turns: list[Turn] = []
        self._texts: list[str] = []
        self._versions: list[tuple[int, int]] = []
        self._rewards: list[float] = []  # one a turn
        self._counts: dict[str, float] = {}
        self._finish: FinishReason = "stop"

    def take(self, completion: Completion) -> Request | None:
        """Add the policy's newest turn; the request for the next one, or None at the end."""
        self._turns.append(Turn("policy", completion.token_ids, completion.logprobs))
        self._texts.append(completion.text)
        self._finish = completion.finish_reason
        for version, tokens in completion.versions:
            if self._versions and self._versions[-1][0] == version:
                tokens += self._versions.pop()[1]
            self._versions.append((version, tokens))
        observation = self._episode.step(completion)
        self._rewards.append(observation.reward)
        for name, count in observation.counts.items():
            self._counts[name] = self._counts.get(name, 0.0) + count
        if observation.done:
            return None
        seen = np.asarray(observation.token_ids, np.int32)
        history = [self.prompt.token_ids, *(turn.token_ids for turn in self._turns), seen]
        prefix = np.concatenate(history).astype(np.int32)
        sampling = self._sampling_after(len(prefix))
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
            completion.turn + 1,
            self._drawing.seed,
        )

    def _sampling_after(self, tokens: int) -> SamplingSettings | None:
        sampling = self._drawing.sampling
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
            versions=tuple(self._versions),
            text=self._texts[0]
            if one_turn
            else tokenizer.decode(tokens.tolist(), skip_special_tokens=True),
            columns=columns,
            answer=None if one_turn else self._texts[-1],
            counts=self._counts,
        )
