"""Reinforcement learning from verifiable rewards: sample, score, train, publish."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from postgrad.algorithms.base import Credit, RolloutAlgorithm, adapted
from postgrad.algorithms.critic import Critic
from postgrad.checkpoint.state import RunState
from postgrad.core.process import Handle
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Prompt
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.evaluation.answers import Evaluator
from postgrad.evaluation.results import Result
from postgrad.fleet.teachers import Graded, Teachers
from postgrad.learner.learner import UpdateResult
from postgrad.learner.protocols import (
    LogprobRole,
    MovingReferenceRole,
    PolicyRole,
    SavedRole,
    ScoringRole,
    TrainedRole,
)
from postgrad.learner.update import Update, replayed, updates
from postgrad.observe.samples import step_samples
from postgrad.recipe.recipe import RLRecipe
from postgrad.rewards.mixing import ENVIRONMENT
from postgrad.rewards.scorer import Scorer
from postgrad.rollout.engine import Engine
from postgrad.rollout.source import Paused, Sampled, Source
from postgrad.rollout.stats import EngineStats, named
from postgrad.training.publish import Publisher
from postgrad.training.rl_metrics import (
    compared_logprobs,
    idle_shares,
    learner_logprobs,
    sizes_of,
    staleness,
    step_metrics,
)
from postgrad.training.run import Run


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of an RL job."""

    policy: PolicyRole
    critic: ScoringRole | None  # None where the algorithm needs none
    reference: LogprobRole | None  # None where the algorithm needs none
    moving_reference: MovingReferenceRole | None  # `reference`, where it follows the policy
    teachers: Teachers | None = None  # None where the algorithm needs none

    def grader(self, by: Literal["policy", "reference"] | None) -> LogprobRole | None:
        """The role that grades samples in place of teachers; None: none does."""
        return {None: None, "policy": self.policy, "reference": self.reference}[by]

    @property
    def learners(self) -> list[TrainedRole]:
        """The roles that are trained."""
        return [role for role in (self.policy, self.critic) if role is not None]

    @property
    def saved(self) -> list[SavedRole]:
        """The roles whose state a checkpoint holds."""
        return [
            role for role in (self.policy, self.critic, self.moving_reference) if role is not None
        ]


@dataclass(frozen=True, slots=True)
class Parts:
    """The components of an RL job that its step calls."""

    roles: Roles
    algorithm: RolloutAlgorithm
    engine: Engine  # samples, for training and evaluation
    publish: Publisher  # sends the policy's weights to the engine
    source: Source  # draws prompts and returns the scored groups of a step
    scorer: Scorer
    evaluator: Evaluator | None  # None where nothing is evaluated
    tokenizer: Any
    recipe: RLRecipe


class RLJob:
    """Reinforcement learning; `step` reads like the algorithm on paper."""

    def __init__(self, run: Run, parts: Parts) -> None:
        self._run = run
        self._parts = parts
        self._scored_before = 0.0  # the scorer's seconds when the step began
        self._sums_before = EngineStats().row  # the engine's, likewise

    def step(self, state: RunState) -> tuple[RunState, dict[str, float]]:
        """Samples, scores, computes credit, updates and publishes once."""
        run, parts = self._run, self._parts
        sampled = self._sample(state)
        batch = RolloutBatch.of(sampled.groups)
        with run.phase("publish"):
            parts.publish.probe_with(batch.sequences)
        if state.step + 1 == run.steps or not parts.source.start_ahead():
            parts.engine.sleep()
        with run.phase("train", run.geometry.updates_per_step):
            with run.clock.timed("train/columns"):
                batch = replayed(batch, parts.recipe.rollout, parts.roles.policy, run.geometry)
                before, columns = self._columns(batch, [group.prompt for group in sampled.groups])
            with run.clock.timed("train/credit"):
                credit = parts.algorithm.credit(batch, state=state.algorithm, **columns)
            with run.clock.timed("train/update"):
                cut = self._cut(self._experience(credit, before), state.step)
                results = self._update(cut, state)
            run.trim()  # what the update took, before the engine takes its own
        number = state.step + 1
        learned = learner_logprobs(credit, before, results["policy"])
        compared = compared_logprobs(
            batch, credit, before, learned, results["policy"], parts.recipe.rollout,
            step=state.step, dropout=parts.roles.policy.has_dropout,
        )  # fmt: skip
        paused, spent = self._pause()
        if parts.roles.moving_reference is not None:  # before its weights may leave their GPU
            parts.roles.moving_reference.after_step(number, parts.roles.policy)
        with run.phase("publish"):
            published = parts.publish(number)
        with run.phase("log"):
            self._log_samples(sampled, number, batch, credit, learned)
        following = replace(
            state,
            step=number,
            update=state.update + sum(not result.skipped for result in results["policy"]),
            episodes=state.episodes + sum(len(group.rollouts) for group in sampled.all),
            cursor=sampled.cursor,
            algorithm=adapted(state.algorithm, credit.state, learned=bool(results["policy"])),
            source=sampled.state,
            pending=paused.pending,
        )
        seconds, recipe = run.clock.step | paused.metrics, parts.recipe
        metrics = step_metrics(sampled, batch, credit, results, seconds, recipe) | sizes_of(cut)
        stale = staleness(batch, credit, state.step, recipe.rollout.max_staleness)
        engines = parts.engine.stats.by_engine()
        engines |= idle_shares(run.clock.step_seconds, seconds["train"], spent, engines)
        return following, metrics | compared | published | stale | paused.metrics | engines

    def evaluate(self) -> list[Result]:
        """Evaluates with the engine, which has the newest weights already."""
        assert self._parts.evaluator is not None
        with self._run.phase("evaluate", self._parts.evaluator.total):
            return self._parts.evaluator(self._parts.engine, self._run.advance)

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        return dict(ChainMap(*(role.tensors() for role in self._parts.roles.saved)))

    def _sample(self, state: RunState) -> Sampled:
        """Samples and scores the groups of a step; records failed verifiers with their causes."""
        run, parts = self._run, self._parts
        self._scored_before, self._sums_before = parts.scorer.seconds, parts.engine.stats.row
        parts.engine.stats.by_engine()  # since the step before: evaluations are of no step
        with run.phase("sample", run.geometry.samples_per_step, parts.source.awaited):
            sampled = parts.source.next(state.step + 1, state.cursor, state.source, state.pending)
        missing = sampled.metrics.get("sampling/missing_groups", 0.0)
        if missing:
            run.logs.event(
                "groups_missing",
                f"{missing:.0f} groups of the step could not be replaced within rollout.max_rounds",
                step=state.step + 1,
            )
        for group in sampled.all:
            for failure in group.failures:
                of_environment = failure.component == ENVIRONMENT
                run.logs.event(
                    "environment_failed" if of_environment else "verifier_failed",
                    failure.message,
                    step=state.step + 1,
                    ticket=group.prompt.ticket,
                    sample=failure.sample,
                    component=failure.component,
                    cause=failure.cause,
                )
        parts.scorer.require_scored(sampled.all)  # after the causes are recorded
        return sampled

    def _pause(self) -> tuple[Paused, Mapping[str, float]]:
        """Waits for the samples that the next step needs, where they are drawn while the policy
        learns; times the parts of sampling. Also returns the engine's sums since the step began.
        """
        run, parts = self._run, self._parts
        with run.phase("sample", run.geometry.samples_per_step, parts.source.awaited):
            paused = parts.source.pause()
        if paused.schedule is not None:
            run.logs.schedule(paused.schedule)
        spent = named(np.subtract(parts.engine.stats.row, self._sums_before).tolist())
        run.clock.add("sample/score", parts.scorer.seconds - self._scored_before)
        for part in ("prefill", "decode"):
            run.clock.add(f"sample/{part}", spent[f"{part}_seconds"])
        return paused, spent

    def _log_samples(
        self,
        sampled: Sampled,
        step: int,
        batch: RolloutBatch,
        credit: Credit,
        learned: NDArray[np.float32],
    ) -> None:
        """Writes the step's lines of samples.jsonl. learned: learner_logprobs."""
        kept, decode = self._run.recipe.observe.samples, self._parts.tokenizer.decode
        groups, reasons = sampled.all, sampled.reasons
        lines = step_samples(groups, reasons, step, decode, batch, credit, learned, kept)
        self._run.logs.samples(lines)

    def _columns(
        self, batch: RolloutBatch, prompts: Sequence[Prompt]
    ) -> tuple[Ragged | None, dict[str, Any]]:
        """The policy's logprobs before the step, where a pass computes them; and by parameter of
        `credit` what it needs: these, logprobs of reference and teachers, the critic's values, and
        the policy's entropies. prompts: by group.

        With dropout there is always a pass: an update's logprobs differ from the sampler's by what
        it drops, too. Where credit needs none, the loss takes the update's own, so its ratio is 1.
        """
        roles, needs = self._parts.roles, self._parts.algorithm.needs()
        reads_old = needs.reads_old(self._run.geometry.updates_per_step)
        asked: dict[str, Handle[Ragged] | Graded] = {}  # all are asked before any is waited for
        if reads_old or roles.policy.has_dropout:
            asked["old"] = roles.policy.logprobs(batch.sequences)
        if roles.reference is not None and needs.reference:
            asked["ref"] = roles.reference.logprobs(batch.sequences)
        if roles.teachers is not None:
            asked["teacher"] = roles.teachers.grade(batch, prompts)
        if roles.critic is not None:
            asked["values"] = roles.critic.scores(batch.sequences.unmasked)
        if needs.old_entropy:
            asked["entropy"] = roles.policy.entropies(batch.sequences)
        of_all = dict.fromkeys(("old", "ref", "values"))  # parameters of every algorithm's credit
        columns: dict[str, Any] = {**of_all, **{n: handle.result() for n, handle in asked.items()}}
        before = columns["old"]
        return before, columns if reads_old else {**columns, "old": None}

    def _experience(self, credit: Credit, before: Ragged | None) -> Experience:
        """What a step trains on. before: the policy's logprobs before it, or None.

        In a step of one update with dropout a loss that compares policy and sampler reads them, as
        "undropped_logprobs": in those of the update the noise of its masks would count as distance.
        """
        experience, single = credit.experience, self._run.geometry.updates_per_step == 1
        compares = "sampled_logprobs" in experience.columns
        if before is None or not (single and compares and self._parts.roles.policy.has_dropout):
            return experience
        undropped = {"undropped_logprobs": before.take(credit.rows)}
        return replace(experience, columns={**experience.columns, **undropped})

    def _cut(self, experience: Experience, step: int) -> list[Update]:
        """Cuts the experience into the step's updates. Where samples were dropped, an event says
        how the others are spread over the updates.
        """
        run, geometry, algorithm = self._run, self._run.geometry, self._parts.algorithm
        per_pass = geometry.updates_per_step // geometry.epochs_per_rollout
        each = geometry.n_samples_per_prompt or 1
        size = algorithm.trained_samples(geometry.train_batch_size, each)
        cut = list(
            updates(
                experience,
                size,
                per_pass,
                geometry.epochs_per_rollout,
                run.recipe.seed,
                step,
                whole_groups=algorithm.level in ("group", "pair"),
            )
        )
        planned = algorithm.trained_samples(geometry.samples_per_step, each)
        n, sizes = len(experience), sizes_of(cut)
        if per_pass > 1 and n != planned:
            made_per_pass = len(cut) // geometry.epochs_per_rollout
            least, most = sizes["updates/smallest"], sizes["updates/largest"]
            run.logs.event(
                "samples_spread",
                f"{n} of {planned} samples are trained on: a pass is {made_per_pass} of {per_pass} "
                f"updates, with {least:.0f} to {most:.0f} samples in place of {size}",
                step=step + 1,
            )
        return cut

    def _update(self, cut: Sequence[Update], state: RunState) -> dict[str, list[UpdateResult]]:
        """Trains the critic on each update, and the policy too once the critic is warm. Returns the
        results by role.
        """
        run, roles, algorithm = self._run, self._parts.roles, self._parts.algorithm
        results: dict[str, list[UpdateResult]] = {"policy": [], "critic": []}
        warm = not isinstance(algorithm, Critic) or state.step >= algorithm.critic_warmup_steps
        run.stop.hold()  # from here on the weights are no longer those of the last boundary
        for update in cut:
            asked: dict[str, Handle[UpdateResult]] = {}  # both, before either is waited for
            if roles.critic is not None:
                assert isinstance(algorithm, Critic)
                asked["critic"] = roles.critic.update(update.unmasked, algorithm)
            if warm:
                asked["policy"] = roles.policy.update(update, algorithm)
            for role, handle in asked.items():
                results[role].append(handle.result())
            run.advance()
        every = (result.metrics for of_role in results.values() for result in of_role)
        run.tell_skipped(every, state.step + 1)
        return results
