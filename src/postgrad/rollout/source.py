"""Sources: where a step's scored groups come from, sampled live or replayed; which draws are
skipped (the curriculum); and which groups are sampled but not trained on (filters).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from postgrad.core.cursor import Cursor, Schedule
from postgrad.core.errors import RunError
from postgrad.core.records import Prompt, ScoredGroup
from postgrad.rollout.engine import Engine
from postgrad.rollout.environment import Environment, SingleTurn
from postgrad.rollout.pending import PendingArrays, begun_of, to_arrays, to_groups
from postgrad.rollout.sampling import Drawing, GroupSampler, Scoring
from postgrad.rollout.settings import TOTAL, CurriculumSettings, RolloutSettings

Reason = Literal["equal", "below", "above", "failed"]

BINS = 5

State = Mapping[str, Any]  # JSON values that a source keeps between steps
NOTHING: PendingArrays = {}  # no sample is under way


def judged_scores(group: ScoredGroup, component: str | None) -> NDArray[np.float64]:
    """The scores by which a group is judged: [kept samples], less those where scoring failed.

    component: a name of [[rewards]], or "total" for the shaped reward. None, or a component that
    does not apply to the prompt: the first that does, as in evaluation.
    """
    if component == TOTAL:
        return group.total[group.kept]
    named = None if component is None else group.rewards.get(component)
    scores = (next(iter(group.rewards.values())) if named is None else named)[group.kept]
    return scores[~np.isnan(scores)]


def reason_to_filter(
    group: ScoredGroup, settings: RolloutSettings, component: str | None
) -> Reason | None:
    """Why a group is filtered, or None where it is trained on; component: as of judged_scores.

    "failed": fewer than two samples were kept and scored. "equal": all scores are the same.
    "below": their mean is at most keep_above. "above": it is at least keep_below.
    """
    scores = judged_scores(group, component)
    if len(scores) < min(2, len(group.rollouts)):
        return "failed"
    mean = float(scores.mean())
    if settings.keep_above is not None and mean <= settings.keep_above:
        return "below"
    if settings.keep_below is not None and mean >= settings.keep_below:
        return "above"
    if len(scores) > 1 and scores.min() == scores.max():
        return "equal"
    return None


class Curriculum:
    """Decides which draws are skipped. Holds no state of its own: it goes in and comes out."""

    def __init__(self, settings: CurriculumSettings, component: str | None) -> None:
        """component: of the rewards, whose scores count, as judged_scores takes it."""
        self._settings = settings
        self._component = component

    @property
    def active(self) -> bool:
        """Whether the settings ever skip a row."""
        return self._settings.retire_at is not None or self._settings.postpone_at is not None

    def passes_over(self, prompt: Prompt, epoch: int, state: Mapping[str, Any]) -> bool:
        """Whether this draw of a row is settled without sampling."""
        seen = state.get("rows", {}).get(row_key(prompt))
        if seen is None:
            return False
        mean, visited = seen
        settings = self._settings
        if settings.retire_at is not None and mean >= settings.retire_at:
            return not settings.revisit_epochs or epoch - visited <= settings.revisit_epochs
        if settings.postpone_at is not None and mean <= settings.postpone_at:
            return epoch - visited <= settings.postpone_epochs
        return False

    def after(
        self, groups: Sequence[ScoredGroup], epoch_of: Mapping[int, int], state: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """The state after a step's groups: {"rows": {row_key: [mean score, epoch]}}.

        epoch_of: ticket -> epoch.
        """
        if not self.active:
            return state
        rows = dict(state.get("rows", {}))
        for group in groups:
            scores = judged_scores(group, self._component)
            if len(scores):
                ticket = group.prompt.ticket
                rows[row_key(group.prompt)] = [float(scores.mean()), epoch_of[ticket]]
        return {**state, "rows": rows}

    def metrics(self, state: Mapping[str, Any]) -> dict[str, float]:
        """How many rows are in each fifth of the range of mean scores so far; {} if inactive."""
        if not self.active:
            return {}
        means = [mean for mean, _ in state.get("rows", {}).values()]
        low, high = min(means, default=0.0), max(means, default=0.0)
        width = (high - low) / BINS or 1.0
        bins = [min(BINS - 1, int((mean - low) / width)) for mean in means]
        return {f"curriculum/bin_{i}": float(bins.count(i)) for i in range(BINS)}


def row_key(prompt: Prompt) -> str:
    """The row's key in the state, "gsm8k:17"."""
    return f"{prompt.dataset}:{prompt.row}"


@dataclass(frozen=True, slots=True)
class Sampled:
    """The samples of one step."""

    all: list[ScoredGroup]  # every group, in ticket order, filtered ones too
    cursor: Cursor  # after the step: with the tickets of all groups settled
    # Ticket -> why its group is filtered: it is settled without training.
    reasons: Mapping[int, Reason] = field(default_factory=dict[int, Reason])
    state: State = field(default_factory=dict[str, Any])  # the source's, after the step
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    pending: PendingArrays = field(
        default_factory=dict[str, NDArray[Any]]
    )  # samples that are under way

    @property
    def groups(self) -> list[ScoredGroup]:
        """The groups to train on: all that are not filtered."""
        return [group for group in self.all if group.prompt.ticket not in self.reasons]


class Source(Protocol):
    """Gives the loop the groups of each step."""

    def next(
        self, step: int, cursor: Cursor, state: State, pending: PendingArrays = NOTHING
    ) -> Sampled:
        """The groups of step `step`, from 1 on, from the first open tickets on. pending: of the
        step before.
        """
        ...


class Prompts(Protocol):
    """The part of data.mixture.Draws that a source needs."""

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
    computes while the policy learns or is evaluated, and a checkpoint has every token.

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
        environment: Environment | None = None,
        max_len: int | None = None,
        correctness: str | None = None,
        on_done: Callable[[int], None] = lambda samples: None,
    ) -> None:
        """max_len: tokens of prompt and all turns together. correctness: the component of
        [[rewards]] that judges groups where `filter_on` is left out. on_done: as of sample_groups.
        """
        self._prompts = prompts
        self._seed = seed
        self._prompts_per_step = prompts_per_step
        self._settings = sampling
        self._drains = not sampling.in_flight_updates  # weights come where nothing is under way
        self._judged_by = sampling.filter_on or correctness
        self._curriculum = Curriculum(sampling.curriculum, self._judged_by)
        self._drawing = Drawing(
            samples_per_prompt, sampling, seed, environment or SingleTurn(), max_len
        )
        self._tokenizer = tokenizer
        self._sampler = GroupSampler(engine, scorer, self._drawing, tokenizer, on_done)
        self._cut: PendingArrays = NOTHING  # what was pending after the last step of this process

    def next(
        self, step: int, cursor: Cursor, state: State, pending: PendingArrays = NOTHING
    ) -> Sampled:
        """The groups of a step. Raises RunError where the curriculum has skipped every prompt."""
        dynamic = self._settings.dynamic_sampling
        schedule = self._go_on(step, pending)
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
            for group in self._sampler.finish(awaited, all_end=self._drains):
                ticket = group.prompt.ticket
                scored[ticket] = group
                schedule.end(ticket)
                reason = self._reason(group)
                if reason is not None:
                    reasons[ticket] = reason
                    schedule.filter(ticket)
        if not rounds:
            raise RunError(
                "rollout.curriculum has passed over every prompt of two epochs, there is none left "
                "to learn from: end the run here, or change retire_at or revisit_epochs"
            )
        missing = self._prompts_per_step - len(schedule.take(short=dynamic))
        groups = [scored[ticket] for ticket in sorted(scored)]
        epochs = {ticket: self._epoch(ticket) for ticket in scored}
        next_state = self._curriculum.after(groups, epochs, state)
        metrics = self._metrics(rounds, len(groups), missing, reasons) if dynamic else {}
        if self._curriculum.active:
            metrics |= {"curriculum/passed_over": float(len(passed))}
            metrics |= self._curriculum.metrics(next_state)
        if self._settings.max_staleness:
            metrics |= self._stop(schedule)
        settled = cursor.settle([*scored, *passed])
        return Sampled(groups, settled, reasons, next_state, metrics, self._cut)

    def _go_on(self, step: int, pending: PendingArrays) -> Schedule:
        """The schedule at the beginning of a step, with all that is pending under way again, unless
        a resume has lowered max_staleness: what is too old now is drawn from its start.
        """
        settings, version = self._settings, step - 1
        begun = begun_of(pending) if pending else {}
        size = self._prompts_per_step
        schedule = Schedule(size, settings.max_staleness, version=version, begun=begun)
        groups = list(self._sampler.groups.values())
        self._sampler.groups.clear()
        if schedule.overdue:
            return Schedule(size, settings.max_staleness, version=version)
        if pending and pending is not self._cut:  # of another process, before a resume
            groups = to_groups(
                pending,
                lambda ticket: self._prompts.draw(ticket, self._seed),
                self._drawing,
                self._tokenizer,
            )
        self._sampler.go_on(groups)
        return schedule

    def _stop(self, schedule: Schedule) -> dict[str, float]:
        """Cuts the engine at the end of a step; returns what is under way as metrics."""
        self._sampler.cut()
        groups = self._sampler.groups
        self._cut = to_arrays(groups, schedule.open)
        written = int(self._cut["turns"][:, 3].sum()) if groups else 0
        return {
            "ahead/groups": float(len(groups)),
            "ahead/ended_groups": float(sum(group.ended for group in groups.values())),
            "ahead/open_samples": float(sum(group.left for group in groups.values())),
            "ahead/tokens": float(written),
        }

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
        begun = frozenset(schedule.open)
        for ticket in cursor.open_tickets():
            if ticket in begun:
                continue
            prompt = self._prompts.draw(ticket, self._seed)
            if self._curriculum.passes_over(prompt, self._epoch(ticket), state):
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
    def _metrics(
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
