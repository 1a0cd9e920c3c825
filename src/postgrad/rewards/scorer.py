"""Rollouts in, scored groups out: components are weighted and summed, failures are recorded."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from postgrad.core.errors import ScoresMissing, UsageError
from postgrad.core.media import image_store
from postgrad.core.records import Prompt, Rollout, ScoredGroup
from postgrad.rewards import protocol
from postgrad.rewards.learned import AskedHere, Learned
from postgrad.rewards.mixing import ENVIRONMENT, Tally, describe, mix, with_turn_rewards
from postgrad.rewards.pool import Lane, Lanes, lane
from postgrad.rewards.protocol import JobEnd, Outcome, ScoreJob, VerifierTraits
from postgrad.rewards.registry import compares, component_names, controller_verifier
from postgrad.rewards.settings import EnvironmentRewards, RewardSettings, ScoringSettings
from postgrad.rewards.verifier import PromptView, RolloutView


@dataclass(slots=True)
class _Group:
    """A group that is being scored."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    names: list[str]  # of the components that apply to its prompt
    missing: int  # outcomes that have not arrived yet
    # (index in names, index in rollouts) -> outcome
    outcomes: dict[tuple[int, int], Outcome] = field(default_factory=dict)


# A verifier that has hung on all of its first jobs, of so many rows, hangs on all others too.
HUNG_JOBS, HUNG_ROWS = 8, 2
CHECKED = 4096  # rows whose reference answers are checked together; so many are in memory
# of a job: its group, the index of its component in it, the indices of its rollouts in it
_Place = tuple[_Group, int, Sequence[int]]
_Asked = tuple[str, str]  # a component, and what jobs ask it for: "score", "check", "right_answer"


class Scorer:
    """Scores groups in worker processes, and with this process's reward models. Close it, or use
    `with`.

    A group's scores depend on the group and the settings, not on the number of workers, the order
    of submission, or timing (except for a wall-clock overrun, which is tried twice). `seconds` is
    for how long callers have waited in its methods so far.
    """

    def __init__(
        self,
        rewards: Sequence[RewardSettings],
        scoring: ScoringSettings,
        environments: Mapping[str | None, EnvironmentRewards] | None = None,
        learned: Mapping[str, Learned] | None = None,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        """Starts the workers.

        environments: by the name that prompts have; their rewards are one more component. learned:
        the models of components that ask one, by component name. decode: the text of tokens,
        special ones included, if any component has special_tokens.

        Raises UsageError where names, keys or values are wrong, RunError where no server of a
        remote reward answers. Third-party code is imported by the workers only: its errors are
        raised by the first call that needs a worker.
        """
        self._environments = dict(environments or {})
        rewarding = any(played.weight is not None for played in self._environments.values())
        reward_names = component_names(rewards) if rewards or not rewarding else []
        self.names = [*reward_names, ENVIRONMENT] if rewarding else reward_names
        self._max_failed = scoring.max_failed_fraction
        verifiers = dict(zip(reward_names, map(controller_verifier, rewards), strict=True))
        self._components = {
            name: reward.model_copy(update=dict(verifiers[name].at_start()))
            for name, reward in zip(reward_names, rewards, strict=True)
        }
        self._learned = {
            name: verifier.component(name, self._components[name], (learned or {}).get(name))
            for name, verifier in verifiers.items()
            if isinstance(verifier, AskedHere)
        }
        self._worked = {n: r for n, r in self._components.items() if n not in self._learned}
        self._decode = decode or _no_tokenizer(self._worked)
        self._place_of = {name: place for place, name in enumerate(self._worked)}
        self._wall_seconds = {
            name: reward.wall_seconds or verifiers[name].default_wall_seconds
            for name, reward in self._worked.items()
        }
        lanes: list[Lane] = [lane(reward, verifiers[name]) for name, reward in self._worked.items()]
        self._pool = Lanes(list(self._worked.values()), lanes, scoring)
        self._known_traits: dict[str, VerifierTraits] | None = None
        self._heard = set[_Asked]()  # has answered once, or failed otherwise than by its time
        self._hung: dict[_Asked, list[Prompt]] = {}  # else the prompt of each job so far
        self._next_key = 0
        self._place: dict[int, _Place] = {}  # of each job under way, by its key
        self._ready: list[ScoredGroup] = []
        self.seconds = 0.0

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill and reap the workers; groups that are under way are forgotten."""
        self._pool.close()

    @property
    def comparing(self) -> list[str]:
        """The names of components to which a lone sample says nothing (Verifier.compares)."""
        return [name for name, reward in self._components.items() if compares(reward)]

    def halt(self) -> None:
        """From another thread, before `close`: whoever waits for scores gets a RunError."""
        self._pool.halt()

    def check(self, prompts: Iterable[Prompt]) -> list[tuple[Prompt, str]]:
        """The prompts whose reference answer a verifier cannot read, with the reason, in order.

        Raises UsageError that names the row where no component applies to a prompt.
        """
        checking = [name for name, traits in self._traits().items() if traits.checks_answers]
        unreadable: list[tuple[Prompt, str]] = []
        rows = iter(prompts)
        while some := list(islice(rows, CHECKED)):
            for (place, name), end in self._asked(some, checking, None).items():
                reason = end.message if end.cause else end.returned.text
                if reason is not None:
                    unreadable.append((some[place], f"{name}: {reason}"))
        return unreadable

    def right_answers(self, prompts: Sequence[Prompt]) -> list[dict[str, str]]:
        """For each prompt, by component, a sample that has to score 1 (Verifier.right_answer);
        components that do not apply to it or name none are left out.

        Raises UsageError where a verifier fails, and as `check` does.
        """
        answers: list[dict[str, str]] = [{} for _ in prompts]
        for (place, name), end in self._asked(prompts, self._worked, ()).items():
            text = end.returned.text
            if end.cause is not None or not isinstance(text, str | None):
                problem = end.message or f"it is no text, but {text!r}"
                raise UsageError(
                    f"rewards: right_answer of {name!r} failed on row {prompts[place].row} of "
                    f"{prompts[place].dataset}: {problem}"
                )
            if text is not None:
                answers[place][name] = text
        return answers

    def _asked(
        self, prompts: Sequence[Prompt], names: Collection[str], rollouts: tuple[()] | None
    ) -> dict[tuple[int, str], JobEnd]:
        """The ends of one job for each prompt and each of `names` that applies to it, by the
        prompt's place and the name, in order. rollouts: what is asked (ScoreJob).
        """
        method = "check" if rollouts is None else "right_answer"
        open_jobs: dict[int, tuple[int, str]] = {}
        jobs: list[ScoreJob] = []
        for place, prompt in enumerate(prompts):
            view = _prompt_text(prompt)
            for name in self._applying(prompt):
                if name in names:
                    jobs.append(self._job(name, view, rollouts))
                    open_jobs[jobs[-1].key] = (place, name)
        ends = dict[tuple[int, str], JobEnd]()
        self._pool.submit(jobs)
        while open_jobs:
            for end in self._pool.poll(wait=True):
                if end.key in open_jobs:
                    place, name = open_jobs.pop(end.key)
                    ends[place, name] = end
                    self._notice(prompts[place], (name, method), end)
                else:
                    self._settle(end)
        in_order = sorted(ends, key=lambda asked: (asked[0], self.names.index(asked[1])))
        return {asked: ends[asked] for asked in in_order}

    def of_groups(self) -> list[str]:
        """The names of the components whose verifiers score the samples of a prompt together."""
        return [name for name, traits in self._traits().items() if traits.scores_groups]

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        """Start scoring a group of at least one rollout. Blocks only while the reward models of
        this process score it, and at first until workers are ready; exceptions of a reward model
        pass through.
        """
        if not rollouts:
            raise ValueError(f"ticket {prompt.ticket}: a group without rollouts")
        began = time.perf_counter()
        names = self._applying(prompt)
        unbroken = [place for place, rollout in enumerate(rollouts) if rollout.failure is None]
        group = _Group(prompt, tuple(rollouts), names, len(unbroken) * len(names))
        self._pool.submit(self._jobs(group, unbroken))  # workers score while the models here do
        for number, name in enumerate(names):
            if name in self._learned:
                scored = [rollouts[place] for place in unbroken]
                for outcome in self._learned[name].outcomes(prompt, scored) if scored else ():
                    group.outcomes[number, unbroken[outcome.key]] = outcome
                    group.missing -= 1
        if not group.missing:
            self._finish(group)
        self.seconds += time.perf_counter() - began

    def completed(self, wait: bool) -> list[ScoredGroup]:
        """Groups whose scoring has ended; with `wait`, at least one while any is under way.

        Raises ScoresMissing where a failed component's policy is to stop the run, or a verifier
        has done nothing but hang.
        """
        began = time.perf_counter()
        while True:
            pending = bool(self._place) and not self._ready
            for end in self._pool.poll(wait=wait and pending):
                self._settle(end)
            if self._ready or not wait or not self._place:
                ready, self._ready = self._ready, []
                self.seconds += time.perf_counter() - began
                return ready

    def score(self, pairs: Sequence[tuple[Prompt, Sequence[Rollout]]]) -> list[ScoredGroup]:
        """The scored groups of `pairs`, in their order; their tickets must differ."""
        if len({prompt.ticket for prompt, _ in pairs}) != len(pairs):
            raise ValueError("two prompts have the same ticket")
        if self._place or self._ready:
            raise ValueError("other groups are under way")
        for prompt, rollouts in pairs:
            self.submit(prompt, rollouts)
        done: dict[int, ScoredGroup] = {}
        while len(done) < len(pairs):
            done |= {group.prompt.ticket: group for group in self.completed(wait=True)}
        return [done[prompt.ticket] for prompt, _ in pairs]

    def require_scored(self, groups: Iterable[ScoredGroup]) -> None:
        """ScoresMissing where too many samples of a step's groups failed."""
        Tally(groups).require_scored(self._max_failed)

    def too_many_failed(self, groups: Iterable[ScoredGroup], samples: int) -> bool:
        """Whether `require_scored` is certain to refuse a step of so many samples, whatever becomes
        of those that are not in `groups`.
        """
        return Tally(groups).failed > self._max_failed * samples

    def _applying(self, prompt: Prompt) -> list[str]:
        names = [
            name
            for name, reward in self._components.items()
            if reward.applies(prompt.dataset, prompt.metadata)
        ]
        weighed = [name for name in names if not self._components[name].multiply]
        if not weighed and self._played(prompt).weight is None:
            raise UsageError(
                f"row {prompt.row} of {prompt.dataset}: no reward applies to it, so that it would "
                f"silently score 0; change `datasets` or `when` of [[rewards]], or leave the row "
                f"out (its other columns: {', '.join(prompt.metadata) or 'none'})"
            )
        return names

    def _played(self, prompt: Prompt) -> EnvironmentRewards:
        return self._environments.get(prompt.environment, EnvironmentRewards(None))

    def _traits(self) -> Mapping[str, VerifierTraits]:
        """Of the components that workers score; waits for workers the first time."""
        if self._known_traits is None:
            self._known_traits = dict(zip(self._worked, self._pool.traits(), strict=True))
        return self._known_traits

    def _jobs(self, group: _Group, unbroken: Sequence[int]) -> list[ScoreJob]:
        """What workers do for the group: for each component a job for each of the rollouts
        `unbroken`, or one for all of them.
        """
        traits, prompt = self._traits(), _prompt_text(group.prompt)
        texts: dict[bool, list[str]] = {}  # by special_tokens, of each of `unbroken`
        jobs: list[ScoreJob] = []
        for number, name in enumerate(group.names):
            if name not in traits or not unbroken:
                continue
            special = self._components[name].special_tokens
            if special not in texts:
                rollouts = (group.rollouts[place] for place in unbroken)
                views = (self._rollout_view(rollout, special) for rollout in rollouts)
                texts[special] = [protocol.rollout_text(view) for view in views]
            every = range(len(unbroken))
            for numbers in [every] if traits[name].scores_groups else [[n] for n in every]:
                jobs.append(self._job(name, prompt, [texts[special][n] for n in numbers]))
                self._place[jobs[-1].key] = (group, number, [unbroken[n] for n in numbers])
        return jobs

    def _job(self, name: str, prompt: str, rollouts: Sequence[str] | None) -> ScoreJob:
        self._next_key += 1
        cpu, wall = self._components[name].cpu_seconds, self._wall_seconds[name]
        return ScoreJob(self._next_key, self._place_of[name], prompt, rollouts, cpu, wall)

    def _rollout_view(self, rollout: Rollout, special_tokens: bool) -> RolloutView:
        policy = [turn.token_ids for turn in rollout.turns if turn.author == "policy"]
        turns = tuple(len(ids) for ids in policy)
        text = rollout.text if rollout.answer is None else rollout.answer
        if special_tokens:
            ids = rollout.token_ids if rollout.answer is None else policy[-1]
            text = self._decode(ids.tolist())
        return RolloutView(text, rollout.finish_reason, sum(turns), rollout.sample, turns)

    def _settle(self, end: JobEnd) -> None:
        group, number, places = self._place.pop(end.key)
        self._notice(group.prompt, (group.names[number], "score"), end)
        for place, outcome in zip(places, end.outcomes(len(places)), strict=True):
            group.outcomes[number, place] = outcome
        group.missing -= len(places)
        if not group.missing:
            self._finish(group)

    def _notice(self, prompt: Prompt, asked: _Asked, end: JobEnd) -> None:
        """Raises ScoresMissing where a component has exceeded a limit of time on all of its first
        jobs: a large step would go on for hours until a fraction of its samples has failed.
        """
        if end.cause not in ("cpu_time", "wall_clock"):
            self._heard.add(asked)
        if asked in self._heard or self._max_failed == 1.0:
            return
        hung = self._hung.setdefault(asked, [])
        hung.append(prompt)
        if len(hung) >= HUNG_JOBS and len({(row.dataset, row.row) for row in hung}) >= HUNG_ROWS:
            waited = end.cause == "wall_clock"
            twice, key = (", twice", "wall_seconds") if waited else ("", "cpu_seconds")
            raise ScoresMissing(
                f"rewards: {asked[1]} of {asked[0]!r} has answered none of its first {len(hung)} "
                f"calls: the last one {end.message}{twice}; one is for row {prompt.row} of "
                f"{prompt.dataset}. "
                "It hangs, or waits for what does not answer: call it on that row outside of a run,"
                f" or raise its {key} if it is only slow"
            )

    def _finish(self, group: _Group) -> None:
        components = {name: self._components[name] for name in group.names}
        weight, broken = self._played(group.prompt)
        scored = mix(
            group.prompt, group.rollouts, components, group.outcomes, broken, weight or 0.0
        )
        if weight is not None:
            scored = with_turn_rewards(scored, weight)
        self._stop_if_asked(scored)
        self._ready.append(scored)

    def _stop_if_asked(self, group: ScoredGroup) -> None:
        for failure in group.failures:
            component = self._components.get(failure.component)  # None: the environment
            broken = self._played(group.prompt).on_failure
            policy = broken if component is None else component.on_failure
            if policy == "stop_run":
                raise ScoresMissing(
                    f"rewards: on_failure of {failure.component!r} is stop_run, and it failed on "
                    f"{describe(group.prompt, failure)}"
                )


def _no_tokenizer(rewards: Mapping[str, RewardSettings]) -> Callable[[list[int]], str]:
    """Stands for the decoder where none of the rewards needs one; else UsageError."""
    for name, reward in rewards.items():
        if reward.special_tokens:
            raise UsageError(
                f"rewards: {name!r} has special_tokens = true, and this scorer has no tokenizer"
            )
    return str


def _prompt_text(prompt: Prompt) -> str:
    files = [str(image_store().path(image.digest).absolute()) for image in prompt.images]
    view = PromptView(
        prompt.question, prompt.answer, prompt.metadata, prompt.dataset, prompt.row, files
    )
    try:
        return protocol.prompt_text(view)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"row {prompt.row} of {prompt.dataset}: a verifier is sent JSON, and the row's "
            f"metadata is none: {error}"
        ) from error
