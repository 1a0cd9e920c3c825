"""From prompts to scored groups: sampling, environments and verifiers overlap in time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from postgrad.core.errors import RunError
from postgrad.core.records import FinishReason, Prompt, Rollout, ScoredGroup, Turn
from postgrad.rollout.engine import Completion, Engine, Request, Written, joined
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


class Starved(RunError):
    """An engine has stopped while samples are awaited."""


class GroupSampler:
    """Groups that an engine samples side by side, each scored when it is asked for (`finish`).

    What is drawn depends on which groups are open and on the engine's steps, never on how long
    scoring takes: the engine stands still while scores are waited for.
    """

    def __init__(
        self,
        engine: Engine,
        scorer: Scoring,
        drawing: Drawing,
        tokenizer: Any,
        on_done: Callable[[int], None] = lambda samples: None,
    ) -> None:
        """on_done: called with the number of samples that have just ended."""
        self._engine = engine
        self._scorer = scorer
        self._drawing = drawing
        self._tokenizer = tokenizer
        self._on_done = on_done
        self.groups: dict[int, OpenGroup] = {}  # by ticket, in the order in which they began
        self._asked: set[int] = set()  # of these, those that the scorer was given
        self._scored: dict[int, ScoredGroup] = {}  # of these, as far as their scores are there

    def start(self, prompts: Sequence[Prompt]) -> None:
        """Samples these prompts too."""
        began = {prompt.ticket: OpenGroup(prompt, self._drawing) for prompt in prompts}
        if len(began) != len(prompts):
            raise ValueError("two prompts have the same ticket")
        self.go_on(began.values())

    def go_on(self, groups: Iterable["OpenGroup"]) -> None:
        """Samples groups from where they are: new ones, or those of a `cut`."""
        for group in groups:
            self.groups[group.prompt.ticket] = group
            for request in group.requests():
                self._engine.submit(request)

    def finish(self, tickets: Sequence[int]) -> list[ScoredGroup]:
        """As `fill`; the groups are no longer under way."""
        scored = self.fill(tickets)
        for ticket in tickets:
            del self.groups[ticket], self._scored[ticket]
        self._asked.difference_update(tickets)
        return scored

    def fill(self, tickets: Sequence[int]) -> list[ScoredGroup]:
        """Samples until all of `tickets` have ended, and returns their scored groups, in their
        order.

        A group is scored once, as soon as its last sample has ended, while others are still
        decoding. Raises RunError where a group does not come back from the scorer.
        """
        self._submit(tickets)
        wanted = frozenset(tickets)
        for ended in self._decode(tickets):
            self._submit(ended & wanted)
            self._collect(wait=False)
        self._await_scores()
        return [self._scored[ticket] for ticket in tickets]

    def sample_on(self, tickets: Sequence[int]) -> None:
        """Samples all groups as far as the engine goes. Those of `tickets` that end are scored."""
        self._submit(tickets)
        wanted = frozenset(tickets)
        while completions := self._engine.completed():
            self._submit(self._count(completions) & wanted)
            self._collect(wait=False)
        self._await_scores()

    def decode(self, tickets: Iterable[int]) -> None:
        """Samples until all of `tickets` have ended, and scores nothing."""
        for _ in self._decode(tickets):
            pass

    def _decode(self, tickets: Iterable[int]) -> Iterator[set[int]]:
        """Samples until all of `tickets` have ended. Gives the tickets of the turns that end, as
        they do.
        """
        while awaited := {ticket for ticket in tickets if not self.groups[ticket].ended}:
            completions = self._engine.completed(awaited)
            if not completions:
                raise Starved("the engine has nothing to do, and samples are missing")
            yield self._count(completions)

    def _count(self, completions: Sequence[Completion]) -> set[int]:
        """Hands turns to their samples, and counts the samples that end. Returns the tickets."""
        self._take(completions)
        samples = [self.groups[done.ticket].samples[done.sample] for done in completions]
        self._on_done(sum(sample.request is None for sample in samples))
        return {completion.ticket for completion in completions}

    def _collect(self, *, wait: bool) -> int:
        """Keeps the groups whose scores are there. Returns how many came."""
        groups = self._scorer.completed(wait=wait)
        self._scored |= {group.prompt.ticket: group for group in groups}
        return len(groups)

    def forget(self) -> None:
        """Forgets all groups and scores. The engine must have been cut, or be idle."""
        self.groups.clear()
        self._asked.clear()
        self._scored.clear()

    def cut(self) -> None:
        """Stops the engine: `groups` have what was written so far, and can go on from there."""
        requests = self._engine.cut()
        while completions := self._engine.completed():  # they ended before
            self._take(completions, submit=False)
        for request in requests:
            for number in request.sample_ids:
                sample = self.groups[request.ticket].samples[number]
                sample.request = replace(request, sample_ids=(number,))

    def _take(self, completions: Sequence[Completion], *, submit: bool = True) -> None:
        """Hands turns to their samples, whose next ones are asked for: submit."""
        for completion in completions:
            group = self.groups[completion.ticket]
            next_request = group.samples[completion.sample].take(completion)
            if next_request is None:
                group.left -= 1
            elif submit:
                self._engine.submit(next_request)

    def _submit(self, tickets: Iterable[int]) -> None:
        """Asks for the scores of the groups that have ended, once."""
        for ticket in tickets:
            group = self.groups[ticket]
            if group.ended and ticket not in self._asked:
                self._asked.add(ticket)
                rollouts = [sample.rollout(self._tokenizer) for sample in group.samples]
                self._scorer.submit(group.prompt, rollouts)

    def _await_scores(self) -> None:
        """Waits for all scores that were asked for."""
        while missing := len(self._asked - self._scored.keys()):
            if not self._collect(wait=True):
                raise RunError(f"{missing} groups never came back from the scorer")


def sample_groups(
    engine: Engine,
    scorer: Scoring,
    prompts: Sequence[Prompt],
    drawing: Drawing,
    tokenizer: Any,
    on_done: Callable[[int], None] = lambda samples: None,
) -> list[ScoredGroup]:
    """The scored groups of `prompts`, in their order, by an engine that does nothing else; their
    tickets must differ. on_done, errors: as of GroupSampler.
    """
    sampler = GroupSampler(engine, scorer, drawing, tokenizer, on_done)
    sampler.start(prompts)
    return sampler.finish([prompt.ticket for prompt in prompts])


class OpenGroup:
    """A prompt whose samples are in progress."""

    def __init__(self, prompt: Prompt, drawing: Drawing) -> None:
        self.prompt = prompt
        self.samples = [OpenSample(prompt, i, drawing) for i in range(drawing.samples)]
        self.left = drawing.samples  # samples that have not ended

    @property
    def ended(self) -> bool:
        """Whether all samples have ended."""
        return not self.left

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
        self._rewards: list[float] = []  # one a turn
        self._counts: dict[str, float] = {}
        self._finish: FinishReason = "stop"
        # What an engine has to do next; None: the sample has ended.
        self.request: Request | None = Request(
            prompt.ticket, (number,), prompt.token_ids, drawing.sampling, 0, drawing.seed,
            messages=prompt.messages,
        )  # fmt: skip

    def take(self, completion: Completion) -> Request | None:
        """Add the policy's newest turn; the request for the next one, or None at the end."""
        self.request = self._after(completion)
        return self.request

    def go_on(self, turn: Written) -> None:
        """Sets what was written of the turn under way."""
        assert self.request is not None
        self.request = self.request.cut_after(self._number, turn)

    def _after(self, completion: Completion) -> Request | None:
        self._turns.append(Turn("policy", completion.token_ids, completion.logprobs))
        self.completions.append(completion)
        self._finish = completion.finish_reason
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
            versions=joined((), [span for turn in self.completions for span in turn.versions]),
            text=self.completions[0].text
            if one_turn
            else tokenizer.decode(tokens.tolist(), skip_special_tokens=True),
            columns=columns,
            answer=None if one_turn else self.completions[-1].text,
            counts=self._counts,
        )
