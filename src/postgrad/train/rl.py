"""Reinforcement learning from verifiable rewards: sample, score, train, publish."""

import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from postgrad.algorithms.base import Credit, RolloutAlgorithm
from postgrad.algorithms.critic import Critic
from postgrad.checkpoint.state import RunState
from postgrad.core.process import trim_heap
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, RolloutBatch
from postgrad.evaluate.answers import Evaluator, sample_metrics
from postgrad.evaluate.results import Result
from postgrad.learner.protocols import (
    Changes,
    Follows,
    Learns,
    LogprobRole,
    PolicyRole,
    ScoringRole,
)
from postgrad.learner.role import UpdateResult
from postgrad.learner.update import Update, updates
from postgrad.observe.samples import step_samples
from postgrad.observe.sentinels.mismatch import differences
from postgrad.observe.sentinels.on_policy import ratio_distance
from postgrad.observe.sentinels.watch import of_samples
from postgrad.rewards.scorer import Scorer
from postgrad.rollout.engine import Engine
from postgrad.rollout.settings import RolloutSettings
from postgrad.rollout.source import Sampled, Source
from postgrad.train.publish import Publisher
from postgrad.train.run import Run

SUMMED = ("computed_tokens", "skipped_samples", "bounded_exponents")


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of an RL job."""

    policy: PolicyRole
    critic: ScoringRole | None  # None where the algorithm needs none
    reference: LogprobRole | None  # None where the algorithm needs none
    follows: Follows | None  # the reference, where it follows the policy

    @property
    def learners(self) -> list[Learns]:
        """The roles that are trained."""
        return [role for role in (self.policy, self.critic) if role is not None]

    @property
    def changing(self) -> list[Changes]:
        """The roles whose state a checkpoint holds."""
        return [role for role in (self.policy, self.critic, self.follows) if role is not None]


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
    sampling: RolloutSettings


class RLJob:
    """Reinforcement learning; `step` reads like the algorithm on paper."""

    def __init__(self, run: Run, parts: Parts) -> None:
        self._run = run
        self._parts = parts

    def step(self, state: RunState) -> tuple[RunState, dict[str, float]]:
        """Samples, scores, computes credit, updates and publishes once."""
        run, parts = self._run, self._parts
        sampled = self._sample(state)
        batch = RolloutBatch.of(sampled.groups)
        with run.phase("publish"):
            parts.publish.show(batch.sequences)
        parts.engine.rest()
        with run.phase("train", run.geometry.updates_per_step):
            with run.clock.timed("train/columns"):
                old, ref, values = self._columns(batch)
            with run.clock.timed("train/credit"):
                credit = parts.algorithm.credit(batch, old, ref, values, state.algorithm)
            with run.clock.timed("train/update"):
                cut = self._cut(credit.experience, state.step)
                results = self._update(cut, state)
            trim_heap()  # what the update took, before the engine takes its own
        learned = _learner_logprobs(credit, old, results["policy"])
        compared = self._compare(batch, credit, old, learned, results["policy"])
        with run.phase("publish"):
            published = parts.publish()
        number = state.step + 1
        if parts.roles.follows is not None:
            parts.roles.follows.after_step(number, parts.roles.policy)
        with run.phase("log"):
            decode = parts.tokenizer.decode
            run.logs.samples(
                step_samples(sampled.all, sampled.reasons, number, decode, batch, credit, learned)
            )
        following = replace(
            state,
            step=number,
            update=state.update + len(results["policy"]),
            episodes=state.episodes + sum(len(group.rollouts) for group in sampled.all),
            cursor=sampled.cursor,
            algorithm=credit.state,
            source=sampled.state,
        )
        metrics = self._metrics(sampled, batch, credit, results) | sizes_of(cut)
        return following, metrics | compared | published

    def evaluate(self) -> list[Result]:
        """Evaluates with the engine, which has the newest weights already."""
        assert self._parts.evaluator is not None
        with self._run.phase("evaluate", self._parts.evaluator.total):
            return self._parts.evaluator(self._parts.engine, self._run.advance)

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        return dict(ChainMap(*(role.tensors() for role in self._parts.roles.changing)))

    def _sample(self, state: RunState) -> Sampled:
        """Samples and scores the groups of a step; records failed verifiers with their causes."""
        run, parts = self._run, self._parts
        with run.phase("sample", run.geometry.samples_per_step), parts.scorer.step():
            stats, waited = replace(parts.engine.stats), parts.scorer.seconds
            sampled = parts.source.next(state.step + 1, state.cursor, state.source)
            run.clock.add("sample/score", parts.scorer.seconds - waited)
            for part in ("prefill", "decode"):
                name = f"{part}_seconds"
                spent = getattr(parts.engine.stats, name) - getattr(stats, name)
                run.clock.add(f"sample/{part}", spent)
        missing = sampled.metrics.get("sampling/missing_groups", 0.0)
        if missing:
            run.logs.event(
                "groups_missing",
                f"{missing:.0f} groups of the step could not be replaced within rollout.max_rounds",
                step=state.step + 1,
            )
        for group in sampled.all:
            for failure in group.failures:
                run.logs.event(
                    "verifier_failed",
                    failure.message,
                    step=state.step + 1,
                    ticket=group.prompt.ticket,
                    sample=failure.sample,
                    component=failure.component,
                    cause=failure.cause,
                )
        return sampled

    def _columns(self, batch: RolloutBatch) -> tuple[Ragged | None, Ragged | None, Ragged | None]:
        """Logprobs of the policy before the step, logprobs of the reference, and the critic's
        values; None for what the algorithm does not need.

        A step of one update is exactly on-policy: its old logprobs are the current ones.
        """
        roles, needs = self._parts.roles, self._parts.algorithm.needs()
        several = self._run.geometry.updates_per_step > 1
        old = ref = values = None
        if needs.old_logprobs or several:
            old = roles.policy.logprobs(batch.sequences).result()
        if needs.reference:
            assert roles.reference is not None
            ref = roles.reference.logprobs(batch.sequences).result()
        if needs.critic:
            assert roles.critic is not None
            values = roles.critic.scores(batch.sequences).result()
        return old, ref, values

    def _cut(self, experience: Experience, step: int) -> list[Update]:
        """Cuts the experience into the step's updates. Where samples were dropped, an event says
        how the others are spread over the updates.
        """
        run, geometry = self._run, self._run.geometry
        per_pass = geometry.updates_per_step // geometry.epochs_per_rollout
        cut = list(
            updates(
                experience,
                geometry.train_batch_size,
                per_pass,
                geometry.epochs_per_rollout,
                run.recipe.seed,
                step,
                whole_groups=self._parts.algorithm.level in ("group", "pair"),
            )
        )
        n, planned, sizes = len(experience), geometry.samples_per_step, sizes_of(cut)
        if per_pass > 1 and n != planned:
            made_per_pass = len(cut) // geometry.epochs_per_rollout
            least, most = sizes["updates/smallest"], sizes["updates/largest"]
            run.logs.event(
                "samples_spread",
                f"{n} of {planned} samples are trained on: a pass is {made_per_pass} of {per_pass} "
                f"updates, with {least:.0f} to {most:.0f} samples in place of "
                f"{geometry.train_batch_size}",
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
            if roles.critic is not None:
                assert isinstance(algorithm, Critic)
                results["critic"].append(roles.critic.update(update, algorithm).result())
            if warm:
                results["policy"].append(roles.policy.update(update, algorithm).result())
            run.advance()
        return results

    def _compare(
        self,
        batch: RolloutBatch,
        credit: Credit,
        old: Ragged | None,
        learned: NDArray[np.float32],
        results: Sequence[UpdateResult],
    ) -> dict[str, float]:
        """Metrics for sentinels: logprobs of the first update against old ones that were computed
        separately, and the learner's against the sampler's on the tokens that it computed.

        There is nothing to compare where top-p, top-k or min-p let the sampler draw from another
        distribution, or where dropout makes each update's policy another one.
        """
        mask = credit.experience.sequences.loss_mask.values
        compared: dict[str, float] = {}
        if old is not None and results and not self._parts.roles.policy.drops:
            compared |= ratio_distance(learned, results[0].outputs, mask)
        sampling = self._parts.sampling
        if sampling.top_p < 1.0 or sampling.top_k or sampling.min_p:
            return compared
        sampled = batch.sampled_logprobs.take(credit.rows).values
        return compared | differences(learned, sampled, mask & ~np.isnan(learned))

    def _metrics(
        self,
        sampled: Sampled,
        batch: RolloutBatch,
        credit: Credit,
        results: Mapping[str, Sequence[UpdateResult]],
    ) -> dict[str, float]:
        groups = sampled.all
        clock = self._run.clock.step
        totals = sample_metrics(groups)
        update: dict[str, float] = {}
        for several in results.values():
            update |= _over_updates([result.metrics for result in several])
        samples = sum(len(group.rollouts) for group in groups)
        tokens = float(sum(r.policy_mask.sum() for g in groups for r in g.rollouts))
        trained = sum(update.get(f"{role}/computed_tokens", 0.0) for role in results)
        return {
            "loss": update.get("policy/loss", math.nan),
            "reward": totals.pop("reward"),
            **totals,
            "samples": samples,
            "dropped_samples": samples - len(batch),
            "failures": sum(len(group.failures) for group in groups),
            **of_samples(groups, batch),
            "response_tokens": tokens,
            **sampled.metrics,
            **credit.metrics,
            **update,
            "response_tokens_per_second": tokens / clock["sample"],
            "train_tokens_per_second": trained / clock["train"],
        }


def sizes_of(cut: Sequence[Update]) -> dict[str, float]:
    """Metrics: the number of updates of a step, and the samples of the smallest and the largest;
    zeros where nothing is left to train on.
    """
    sizes = [len(update.rows) for update in cut]
    return {
        "updates/made": float(len(cut)),
        "updates/smallest": float(min(sizes, default=0)),
        "updates/largest": float(max(sizes, default=0)),
    }


def _learner_logprobs(
    credit: Credit, old: Ragged | None, results: Sequence[UpdateResult]
) -> NDArray[np.float32]:
    """[T] the learner's logprobs of the experience's tokens before the step; NaN where unknown."""
    if old is not None:
        return old.take(credit.rows).values
    if results:  # without `old` the step is one update, computed before its weights moved
        return results[0].outputs
    return np.full(len(credit.experience.sequences.tokens.values), np.nan, np.float32)


def _over_updates(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its updates: means, sums of the counts in `SUMMED`, and the
    last learning rate. An update without any gradient reports fewer metrics than the others.
    """
    means: dict[str, float] = {}
    for name in dict.fromkeys(name for update_metrics in metrics for name in update_metrics):
        values = [update_metrics[name] for update_metrics in metrics if name in update_metrics]
        _, _, quantity = name.partition("/")
        if quantity == "lr":
            means[name] = values[-1]
        else:
            means[name] = sum(values) / (1 if quantity in SUMMED else len(values))
    return means
