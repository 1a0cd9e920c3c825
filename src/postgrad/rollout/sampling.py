"""From prompts to scored groups: sampling, environments and verifiers overlap in time.

While environments are at work on some samples, the engine decodes others. When a sample's next turn
enters the engine decides what shares a batch with it, and so the last bits of its numbers. Where
the engine gives the same bits for the same requests (Engine.streams) and the environment is
deterministic, this never depends on how long a step of the environment takes: at most `concurrent`
samples wait beside the engine; where there are more, it stands still until the oldest of them have
their observations, and where none is left to decode, until all have. Elsewhere a turn enters as
soon as its observation is there.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, replace
from typing import Any, Protocol

from postgrad.core.cursor import AwaitedTickets
from postgrad.core.errors import RunError
from postgrad.core.records import Prompt, Rollout, ScoredGroup
from postgrad.rollout.engine import Completion, Engine, Request
from postgrad.rollout.environment import OpenSample, SamplingSpec, Step

TOLD = 3  # groups that are told of where nothing goes on


class Scoring(Protocol):
    """The part of rewards.scorer.Scorer that sampling needs."""

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        """Start scoring a group; returns at once."""
        ...

    def completed(self, wait: bool) -> list[ScoredGroup]:
        """Groups whose scoring has ended; with `wait`, at least one while any is under way."""
        ...

    def too_many_failed(self, groups: Iterable[ScoredGroup], samples: int) -> bool:
        """Whether `require_scored` is certain to refuse a step of so many samples, some of them in
        `groups` and the others not yet scored.
        """
        ...

    def require_scored(self, groups: Iterable[ScoredGroup]) -> None:
        """Raises RunError where too many samples of a step failed."""
        ...


class OpenGroup:
    """A prompt whose samples are in progress."""

    def __init__(self, prompt: Prompt, spec: SamplingSpec) -> None:
        self.prompt = prompt
        self.deterministic = spec.environments.of(prompt).deterministic
        self.samples = [OpenSample(prompt, i, spec) for i in range(spec.samples)]
        self.left = spec.samples  # samples that have not ended
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
        """What an engine has to do: a request for all samples that begin alike (two, where one of
        them is greedy), then one for each that goes on. Samples whose environment is to `begin`
        have none yet.
        """
        waiting = [sample.request for sample in self.samples if sample.request is not None]
        fresh: dict[tuple[Any, ...], list[Request]] = {}  # by what is read, and how it is drawn
        for request in waiting:
            if not request.turn and request.written is None:
                digests = [image.digest for image in request.images]
                greedy = request.sampling.temperature == 0.0
                fresh.setdefault((greedy, request.token_ids.tobytes(), *digests), []).append(
                    request
                )
        for alike in fresh.values():
            numbers = tuple(number for request in alike for number in request.sample_ids)
            yield replace(alike[0], sample_ids=numbers)
        yield from (request for request in waiting if request.turn or request.written is not None)


@dataclass(frozen=True, slots=True)
class _OpenStep:
    """A sample that waits for its environment."""

    ticket: int
    sample: int
    work: Step

    @property
    def ended(self) -> bool:
        return self.work.handle.done()


class Starved(RunError):
    """An engine has stopped while samples are awaited."""


class GroupSampler:
    """Groups that an engine samples side by side, each scored when it is asked for (`finish`).

    What is drawn depends on which groups are open and on the engine's steps, never on how long
    scoring takes: the engine stands still while scores are waited for. Environments: see above.
    """

    def __init__(
        self,
        engine: Engine,
        scorer: Scoring,
        spec: SamplingSpec,
        tokenizer: Any,
        on_done: Callable[[int], None] = lambda samples: None,
        *,
        beside: bool = True,
    ) -> None:
        """on_done: called with the number of samples that have just ended. beside: environments
        work while other samples are decoded; False: the engine gets nothing to do before they have
        answered, so that where it is recorded it can be repeated.
        """
        self._engine = engine
        self._scorer = scorer
        self._spec = spec
        self._tokenizer = tokenizer
        self._on_done = on_done
        self.groups: dict[int, OpenGroup] = {}  # by ticket, in the order in which they began
        self._asked: set[int] = set()  # of these, those that the scorer was given
        self._scored: dict[int, ScoredGroup] = {}  # of these, as far as their scores are there
        self._beside = beside
        self._exact = engine.streams > 0 and spec.environments.deterministic
        self._steps: list[_OpenStep] = []  # of environments, in the order in which they began

    @property
    def _streams(self) -> int:
        """Between how many batches of the engine tickets are dealt."""
        return max(1, self._engine.streams)

    def awaited(self) -> str:
        """What holds the first groups that have not come back, for people, from any thread."""
        held = [
            _held(group, ticket in self._asked)
            for ticket, group in list(self.groups.items())
            if ticket not in self._scored
        ]
        rest = f" and {len(held) - TOLD} more" if len(held) > TOLD else ""
        return ", ".join(held[:TOLD]) + rest

    def start(self, prompts: Sequence[Prompt]) -> None:
        """Samples these prompts too."""
        began = {prompt.ticket: OpenGroup(prompt, self._spec) for prompt in prompts}
        if len(began) != len(prompts):
            raise ValueError("two prompts have the same ticket")
        self.start_groups(began.values())

    def start_groups(self, groups: Iterable["OpenGroup"]) -> None:
        """Samples groups from where they are: new ones, or those of a `cut`."""
        for group in groups:
            self.groups[group.prompt.ticket] = group
            for request in group.requests():
                self._engine.submit(request)
            for number, sample in enumerate(group.samples):
                if sample.begins:
                    self._await(group, number, sample.begin())
        if not self._beside:
            self._observe(list(self._steps))

    def finish(
        self, tickets: Sequence[int], before: Collection[ScoredGroup] = ()
    ) -> list[ScoredGroup]:
        """As `fill`; the groups are no longer under way."""
        scored = self.fill(tickets, before)
        for group in scored:
            del self.groups[group.prompt.ticket], self._scored[group.prompt.ticket]
        self._asked.difference_update(tickets)
        return scored

    def fill(
        self, tickets: Sequence[int], before: Collection[ScoredGroup] = ()
    ) -> list[ScoredGroup]:
        """Samples until all of `tickets` have ended, and returns their scored groups, in their
        order. before: the other groups of their step.

        A group is scored once, as soon as its last sample has ended, while others are still
        decoding. Once so many samples have failed that the step is refused in any case, groups
        without scores are left out: a verifier that hangs would hang on each of their samples.
        Raises RunError where a group does not come back from the scorer.
        """
        self._submit(tickets)
        wanted = frozenset(tickets)
        for ended in self._decode(tickets):
            self._submit(ended & wanted)
            self._collect(wait=False)
        self._await_scores(tickets, before)
        return self._scored_of(tickets)

    def sample_on(self, tickets: Sequence[int]) -> None:
        """Samples all groups as far as the engine goes. Those of `tickets` that end are scored. No
        environment works beside the engine then.
        """
        assert not self._beside
        self._submit(tickets)
        wanted = frozenset(tickets)
        while completions := self._engine.completed():
            self._submit(self._answered(completions) & wanted)
            self._collect(wait=False)
        self._await_scores(tickets)

    def decode(self, tickets: Iterable[int]) -> None:
        """Samples until all of `tickets` have ended, and scores nothing."""
        for _ in self._decode(tickets):
            pass

    def _decode(self, tickets: Iterable[int]) -> Iterator[set[int]]:
        """Samples until all of `tickets` have ended. Gives the tickets of the turns that end, as
        they do.
        """
        streams = self._streams
        awaited = AwaitedTickets(self.groups, tickets, streams)
        while awaited.left:
            due = self._due(awaited)
            ready = [steps for steps in due if all(step.ended for step in steps)]
            if ready:
                observed = self._observe([step for steps in ready for step in steps])
                awaited.look_at(observed)
                yield observed
                continue
            held = {step.ticket % streams for steps in due for step in steps}
            asked = awaited.decoding_beside(held)
            if asked or not due:
                completions = self._engine.completed(asked)
                if not completions:
                    raise Starved("the engine has nothing to do, and samples are missing")
                ended = self._answered(completions)
                awaited.look_at({completion.ticket for completion in completions} | ended)
                if ended:
                    yield ended
                continue
            open_steps = [step.work.handle for steps in due for step in steps if not step.ended]
            wait(open_steps, return_when=FIRST_COMPLETED)

    def _answered(self, completions: Sequence[Completion]) -> set[int]:
        """Takes turns; where environments do not work beside the engine, waits for what they answer
        and returns the tickets.
        """
        self._take(completions)
        return set() if self._beside else self._observe(list(self._steps))

    def _due(self, awaited: AwaitedTickets) -> list[list["_OpenStep"]]:
        """The steps of environments whose observations enter the engine next: all of an inner list
        at once, before anything else is decoded in their stream.
        """
        if not self._exact:
            ended = [step for step in self._steps if step.ended]
            if ended or awaited.streams:
                return [ended] if ended else []
            return [[step] for step in self._steps]
        decodes, due = awaited.streams, list[list[_OpenStep]]()
        for stream in dict.fromkeys(step.ticket % self._streams for step in self._steps):
            steps = [step for step in self._steps if step.ticket % self._streams == stream]
            kept = self._spec.environments.concurrent if stream in decodes else 0
            if len(steps) > kept:
                due.append(steps[: len(steps) - kept])
        return due

    def _collect(self, *, wait: bool) -> int:
        """Keeps the groups whose scores are there. Returns how many came.

        Others share the scorer, and one that has stopped to wait, since its step is refused, leaves
        it groups of the same tickets: an evaluation that follows must not take them for its own.
        """
        groups = self._scorer.completed(wait=wait)
        for group in groups:
            sampled = self.groups.get(group.prompt.ticket)
            if sampled is not None and sampled.prompt is group.prompt:
                self._scored[group.prompt.ticket] = group
        return len(groups)

    def forget(self) -> None:
        """Forgets all groups and scores. The engine must have been cut, or be idle."""
        assert not self._steps
        self.groups.clear()
        self._asked.clear()
        self._scored.clear()

    def cut(self) -> None:
        """Stops the engine: `groups` have what was written so far, and can go on from there. Waits
        for environments that are at work.
        """
        requests = self._engine.cut()
        while completions := self._engine.completed():  # they ended before
            self._take(completions)
        self._observe(list(self._steps), submit=False)
        for request in requests:
            for number in request.sample_ids:
                sample = self.groups[request.ticket].samples[number]
                sample.request = replace(request, sample_ids=(number,))

    def _take(self, completions: Sequence[Completion]) -> None:
        """Hands turns to their samples, whose environments begin to work on them."""
        for completion in completions:
            group = self.groups[completion.ticket]
            work = group.samples[completion.sample].take(completion)
            self._await(group, completion.sample, work)

    def _await(self, group: OpenGroup, sample: int, work: Step) -> None:
        """Adds what an environment has begun."""
        group.stepping += 1
        self._steps.append(_OpenStep(group.prompt.ticket, sample, work))

    def _observe(self, steps: Sequence["_OpenStep"], *, submit: bool = True) -> set[int]:
        """Hands observations to their samples, whose next turns are asked for: submit. Returns the
        tickets.
        """
        samples = 0
        for step in steps:
            group = self.groups[step.ticket]
            next_request = group.samples[step.sample].observe(step.work.result())
            group.stepping -= 1
            if next_request is None:
                samples += 1
                group.left -= 1
            elif submit:
                self._engine.submit(next_request)
        taken = set(map(id, steps))
        self._steps = [step for step in self._steps if id(step) not in taken]
        self._on_done(samples)
        return {step.ticket for step in steps}

    def _submit(self, tickets: Iterable[int]) -> None:
        """Asks for the scores of the groups that have ended, once."""
        for ticket in tickets:
            group = self.groups[ticket]
            if group.ended and ticket not in self._asked:
                self._asked.add(ticket)
                rollouts = [sample.rollout(self._tokenizer) for sample in group.samples]
                self._scorer.submit(group.prompt, rollouts)

    def _scored_of(self, tickets: Iterable[int]) -> list[ScoredGroup]:
        return [self._scored[ticket] for ticket in tickets if ticket in self._scored]

    def _await_scores(self, tickets: Sequence[int], before: Collection[ScoredGroup] = ()) -> None:
        """Waits for all scores that were asked for, unless too many samples of a step, that of
        `tickets` and the groups `before`, have failed.
        """
        samples = (len(before) + len(tickets)) * self._spec.samples
        while missing := len(self._asked - self._scored.keys()):
            if self._scorer.too_many_failed([*before, *self._scored_of(tickets)], samples):
                return
            if not self._collect(wait=True):
                raise RunError(f"{missing} groups never came back from the scorer")


def _held(group: OpenGroup, asked: bool) -> str:
    counts = {"being written": group.decoding, "at the environment": group.stepping}
    parts = [f"{count} {place}" for place, count in counts.items() if count]
    state = f"samples {' and '.join(parts)}" if parts else "scores" if asked else "ended"
    return f"ticket {group.prompt.ticket} ({state})"


def sample_groups(
    engine: Engine,
    scorer: Scoring,
    prompts: Sequence[Prompt],
    spec: SamplingSpec,
    tokenizer: Any,
    on_done: Callable[[int], None] = lambda samples: None,
) -> list[ScoredGroup]:
    """The scored groups of `prompts`, in their order, by an engine that does nothing else; their
    tickets must differ. on_done, errors: as of GroupSampler. Raises ScoresMissing where too many
    samples failed.
    """
    sampler = GroupSampler(engine, scorer, spec, tokenizer, on_done)
    sampler.start(prompts)
    groups = sampler.finish([prompt.ticket for prompt in prompts])
    scorer.require_scored(groups)
    return groups
