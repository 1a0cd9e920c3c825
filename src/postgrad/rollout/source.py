"""Sources: where a step's scored groups come from, sampled live or replayed."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from numpy.typing import NDArray

from postgrad.core.cursor import Cursor, Schedule
from postgrad.core.errors import RunError
from postgrad.core.records import Prompt, ScoredGroup
from postgrad.layout.tree import MIN_CONTINUED
from postgrad.rollout.curriculum import Curriculum, Reason, reason_to_filter
from postgrad.rollout.engine import Engine
from postgrad.rollout.environment import Environments, SamplingSpec
from postgrad.rollout.pending import PendingArrays, begun_of, to_arrays, to_groups
from postgrad.rollout.sampling import GroupSampler, OpenGroup, Scoring
from postgrad.rollout.settings import RolloutSettings

State = Mapping[str, Any]  # JSON values that a source keeps between steps
NO_SAMPLES: PendingArrays = {}  # no sample is under way


@dataclass(frozen=True, slots=True)
class Sampled:
    """The samples of one step."""

    all: list[ScoredGroup]  # every group, in ticket order, filtered ones too
    cursor: Cursor  # after the step: with the tickets of all groups settled
    # Ticket -> why its group is filtered: it is settled without training.
    reasons: Mapping[int, Reason] = field(default_factory=dict[int, Reason])
    state: State = field(default_factory=dict[str, Any])  # the source's, after the step
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def groups(self) -> list[ScoredGroup]:
        """The groups to train on: all that are not filtered."""
        return [group for group in self.all if group.prompt.ticket not in self.reasons]


@dataclass(frozen=True, slots=True)
class Paused:
    """What is under way between two steps, while the engine is empty."""

    pending: PendingArrays = field(default_factory=dict[str, NDArray[Any]])
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    schedule: Mapping[str, Any] | None = None  # the step's line of schedule.jsonl: rollout/free.py


class Source(Protocol):
    """Gives the loop the groups of each step."""

    def next(
        self, step: int, cursor: Cursor, state: State, pending: PendingArrays = NO_SAMPLES
    ) -> Sampled:
        """The groups of step `step`, from 1 on, from the first open tickets on. pending: of the
        step before.
        """
        ...

    def awaited(self) -> str:
        """What a step waits for, by ticket, for people; "" where it waits for nothing."""
        ...

    def start_ahead(self) -> bool:
        """After `next`: starts to sample for the next step, until `pause`, beside whatever its
        caller does. False: it does not, and the engine is empty.
        """
        ...

    def pause(self) -> Paused:
        """What is under way after the step, in an empty engine: to be called before the next
        weights are published.
        """
        ...


class Prompts(Protocol):
    """The part of data.draws.Draws that a source needs."""

    def __len__(self) -> int:
        """How many draws one epoch has."""
        ...

    def draw(self, ticket: int, seed: int) -> Prompt:
        """The prompt of a ticket in the order that `seed` decides."""
        ...


class LiveSource:
    """Samples the first open tickets of every step, and waits for them.

    With `max_staleness` the tickets of as many steps ahead are under way beside them, and fill the
    engine while a step's last samples end (core.cursor.Schedule). At the end of a step the engine
    is cut: what is under way waits as `pending`, and goes on with the next weights. So nothing
    computes while the policy learns or is evaluated, and a checkpoint has every token. Where the
    engine may sample while the policy learns, rollout.ahead drives the parts of a step: `take`,
    `sample_ahead`, `cut`.

    With `dynamic_sampling` every filtered group is replaced by a new prompt: a group is judged when
    it is among the step's first, so what is drawn does not depend on when scores arrive. Nothing
    decides about the next step but its cursor, state and pending samples, the data, the weights and
    the settings, so a resumed run draws the same groups.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        scorer: Scoring,
        *,
        seed: int,
        prompts_per_step: int,
        samples_per_prompt: int,
        sampling: RolloutSettings,
        tokenizer: Any,
        environments: Environments | None = None,
        max_len: int | None = None,
        min_shared: int = MIN_CONTINUED,
        correctness: str | None = None,
        scores_ahead: bool = True,
        greedy: bool = False,
        on_done: Callable[[int], None] = lambda samples: None,
    ) -> None:
        """max_len, min_shared, greedy: as of SamplingSpec. correctness: the component of
        [[rewards]] that judges groups where `filter_on` is left out. scores_ahead: scores may be
        asked for while the policy learns. on_done: as of sample_groups.
        """
        self._prompts = prompts
        self._seed = seed
        self._prompts_per_step = prompts_per_step
        self._settings = sampling
        self._judged_by = sampling.filter_on or correctness
        curriculum = Curriculum(sampling.curriculum, self._judged_by)
        self._curriculum = curriculum if curriculum.active else None
        environments = environments or Environments()
        self._spec = SamplingSpec(
            samples_per_prompt, sampling, seed, environments, max_len, min_shared, greedy,
            keeps_mask=sampling.keep_sampling_mask,
        )  # fmt: skip
        self._tokenizer = tokenizer
        self._scores_ahead = scores_ahead
        beside = sampling.schedule == "fixed"
        self._sampler = GroupSampler(engine, scorer, self._spec, tokenizer, on_done, beside=beside)
        self._schedule = Schedule(prompts_per_step, sampling.max_staleness)  # of the last step
        self._paused = Paused()  # after the last step of this process
        self._redrawn = 0  # samples that a resume has drawn from their start

    def next(
        self, step: int, cursor: Cursor, state: State, pending: PendingArrays = NO_SAMPLES
    ) -> Sampled:
        """Source.next: `take`, then `cut`."""
        sampled = self.take(step, cursor, state, pending)
        self.cut()
        return sampled

    def awaited(self) -> str:
        """Source.awaited: the groups that have begun."""
        return self._sampler.awaited()

    def start_ahead(self) -> bool:
        """Source.start_ahead: the engine was cut by `next`."""
        return False

    def pause(self) -> Paused:
        """Source.pause: what `next` has cut."""
        return self._paused

    def take(
        self, step: int, cursor: Cursor, state: State, pending: PendingArrays = NO_SAMPLES
    ) -> Sampled:
        """The groups of a step, or those that were scored before too many of them had failed. The
        engine keeps the samples of later steps. Raises RunError where no prompt is left.
        """
        dynamic = self._settings.dynamic_sampling
        schedule = self._schedule = self._resumed(step, pending)
        passed: list[int] = []
        tickets = self._tickets(cursor, state, schedule, passed)
        scored: dict[int, ScoredGroup] = {}
        reasons: dict[int, Reason] = {}
        rounds, most = 0, self._settings.max_rounds if dynamic else 1
        while rounds < most:
            prompts = list(islice(tickets, schedule.room))
            for prompt in prompts:
                schedule.start(prompt.ticket)
            if not (awaited := [ticket for ticket in schedule.front if ticket not in scored]):
                break
            rounds += 1
            self._sampler.start(prompts)
            for group in self._sampler.finish(awaited, scored.values()):
                ticket = group.prompt.ticket
                scored[ticket] = group
                schedule.end(ticket)
                if (reason := self._reason(group)) is not None:
                    reasons[ticket] = reason
                    schedule.filter(ticket)
            if not scored.keys() >= set(awaited):
                return Sampled([scored[t] for t in sorted(scored)], cursor, reasons, state)
        if not rounds:
            raise RunError(
                "rollout.curriculum skipped every prompt for two epochs, none is left: end the run "
                "or change retire_at or revisit_epochs (--allow-change rollout.curriculum)"
            )
        missing = self._prompts_per_step - len(schedule.take(short=dynamic))
        groups = [scored[ticket] for ticket in sorted(scored)]
        metrics = self._sampling_metrics(rounds, len(groups), missing, reasons) if dynamic else {}
        if not self._spec.environments.deterministic and self._settings.max_staleness:
            metrics |= {"ahead/redrawn_samples": float(self._redrawn)}
            self._redrawn = 0
        next_state = state
        if self._curriculum is not None:
            epochs = {ticket: self._epoch(ticket) for ticket in scored}
            next_state = self._curriculum.after(groups, epochs, state)
            metrics |= {"curriculum/passed_over": float(len(passed))}
            metrics |= self._curriculum.metrics(next_state)
        settled = cursor.settle([*scored, *passed])
        return Sampled(groups, settled, reasons, next_state, metrics)

    def sample_ahead(self) -> None:
        """After `take`: samples and scores until the groups that the next step will train on have
        ended, as far as they have begun. No ticket begins, none is filtered: that is the next
        step's, also after a resume.
        """
        schedule, dynamic = self._schedule, self._settings.dynamic_sampling
        awaited = schedule.front
        for _ in range(self._settings.max_rounds if dynamic else 1):
            if not self._scores_ahead:
                self._sampler.decode(awaited)
                break
            groups = self._sampler.fill(awaited)
            filtered = sum(self._reason(group) is not None for group in groups)
            wider = tuple(islice(schedule.open, self._prompts_per_step + filtered))
            if wider == awaited:
                break
            awaited = wider
        self._drain()

    def sample_on(self) -> None:
        """As `sample_ahead`, where the engine decides how far: samples of all tickets that have
        begun. The next step's are scored.
        """
        self._sampler.sample_on(self._schedule.front if self._scores_ahead else ())

    def cut(self) -> Paused:
        """Empties the engine at the end of a step. What is under way goes on in the next one."""
        if self._settings.max_staleness:
            self._drain()
            self._sampler.cut()
            groups = self._sampler.groups
            pending = to_arrays(groups, self._schedule.open)
            self._paused = Paused(pending, _ahead_metrics(groups, pending))
        return self._paused

    def _drain(self) -> None:
        """Ends all samples where new weights may not come into any."""
        if not self._settings.in_flight_updates:
            self._sampler.decode(self._sampler.groups)

    def _resumed(self, step: int, pending: PendingArrays) -> Schedule:
        """The schedule at the beginning of a step, with all that is pending under way again, unless
        a resume has lowered max_staleness: what is too old now is drawn from its start.
        """
        settings, version = self._settings, step - 1
        begun = begun_of(pending) if pending else {}
        size = self._prompts_per_step
        schedule = Schedule(size, settings.max_staleness, version=version, begun=begun)
        if schedule.overdue:
            self._sampler.forget()
            return Schedule(size, settings.max_staleness, version=version)
        groups = list(self._sampler.groups.values())
        if pending is not self._paused.pending:  # of another process, before a resume
            self._sampler.forget()
            groups, self._redrawn = to_groups(
                pending,
                lambda ticket: self._prompts.draw(ticket, self._seed),
                self._spec,
                self._tokenizer,
            )
        self._sampler.start_groups(groups)
        return schedule

    def _reason(self, group: ScoredGroup) -> Reason | None:
        if not self._settings.dynamic_sampling:
            return None
        return reason_to_filter(group, self._settings, self._judged_by)

    def _tickets(
        self, cursor: Cursor, state: State, schedule: Schedule, passed: list[int]
    ) -> Iterator[Prompt]:
        """The prompts of open tickets that have not begun. Those that the curriculum skips are
        added to `passed`; ends where it skips two whole epochs in a row.
        """
        in_a_row = 0
        begun, curriculum = frozenset(schedule.open), self._curriculum
        for ticket in cursor.open_tickets():
            if ticket in begun:
                continue
            prompt = self._prompts.draw(ticket, self._seed)
            if curriculum and curriculum.passes_over(prompt, self._epoch(ticket), state):
                passed.append(ticket)
                in_a_row += 1
                if in_a_row >= 2 * len(self._prompts):
                    return
            else:
                in_a_row = 0
                yield prompt

    def _epoch(self, ticket: int) -> int:
        return ticket // len(self._prompts)

    @staticmethod
    def _sampling_metrics(
        rounds: int, groups: int, missing: int, reasons: Mapping[int, Reason]
    ) -> dict[str, float]:
        counts = {
            "sampling/rounds": rounds,
            "sampling/groups": groups,
            "sampling/filtered_groups": len(reasons),
            "sampling/missing_groups": missing,
        }
        for reason in ("equal", "below", "above", "failed"):
            counts[f"sampling/filtered_{reason}"] = list(reasons.values()).count(reason)
        return {name: float(value) for name, value in counts.items()}


def _ahead_metrics(groups: Mapping[int, OpenGroup], pending: PendingArrays) -> dict[str, float]:
    """Metrics of what is under way."""
    return {
        "ahead/groups": float(len(groups)),
        "ahead/ended_groups": float(sum(group.ended for group in groups.values())),
        "ahead/open_samples": float(sum(group.left for group in groups.values())),
        "ahead/tokens": float(pending["turns"][:, 3].sum()) if groups else 0.0,
    }
