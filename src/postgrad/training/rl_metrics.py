"""What is logged of a step of reinforcement learning."""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from postgrad.algorithms.base import Credit
from postgrad.core.ragged import Ragged
from postgrad.core.records import Logprobs
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.evaluation.answers import sample_metrics
from postgrad.learner.learner import UpdateResult
from postgrad.learner.update import Update
from postgrad.observe.sentinels.mismatch import DIFFERENCE, DRIFT, RATIO
from postgrad.observe.sentinels.on_policy import ratio_distance
from postgrad.observe.sentinels.watch import of_samples
from postgrad.recipe.recipe import RLRecipe
from postgrad.rollout.settings import FILTERS, RolloutSettings
from postgrad.rollout.source import Sampled

ENGINE_BUSY = re.compile(r"engine/\d+/busy_seconds")  # of a whole rollout worker
SUMMED = ("computed_tokens", "skipped_samples", "skipped_updates", "bounded_exponents")


def step_metrics(
    sampled: Sampled,
    batch: RolloutBatch,
    credit: Credit,
    results: Mapping[str, Sequence[UpdateResult]],
    seconds: Mapping[str, float],
    recipe: RLRecipe,
) -> dict[str, float]:
    """Rewards, lengths, dropped samples and the updates of a step. results: of each update, by
    role. seconds: of the phases "sample" and "train", and as "overlap/sample_seconds" those in
    which samples were drawn beside training.
    """
    groups = sampled.all
    totals = sample_metrics(groups, recipe.environment)
    update: dict[str, float] = {}
    for of_role in results.values():
        update |= _over_updates([result.metrics for result in of_role])
    samples = sum(len(group.rollouts) for group in groups)
    tokens = float(sum(r.policy_tokens for g in groups for r in g.rollouts))
    sampling = seconds["sample"] + seconds.get("overlap/sample_seconds", 0.0)
    trained = sum(update.get(f"{role}/computed_tokens", 0.0) for role in results)
    emptied = len(sampled.groups) - len(np.unique(batch.sequences.group))  # not in the batch
    return {
        "loss": update.get("policy/loss", math.nan),
        "reward": totals.pop("reward"),
        **totals,
        "samples": samples,
        "dropped_samples": samples - len(credit.rows),
        "failures": sum(len(group.failures) for group in groups),
        **of_samples(groups, batch, greedy=recipe.algorithm.needs().greedy),
        "response_tokens": tokens,
        **mask_sizes(batch),
        **sampled.metrics,
        **credit.metrics,
        "groups/dropped": credit.metrics.get("groups/dropped", 0.0) + emptied,
        **update,
        "response_tokens_per_second": tokens / sampling,
        "train_tokens_per_second": trained / seconds["train"],
    }


def mask_sizes(batch: RolloutBatch) -> dict[str, float]:
    """From how many of the sampled tokens' distributions filters took something away, and how many
    tokens they left of these on average; {} where sampling masks are not kept.
    """
    mask = batch.sequences.sampling_mask
    if mask is None:
        return {}
    touched = int(np.count_nonzero(mask.lengths))
    drawn = max(1, int(np.count_nonzero(batch.sequences.loss_mask.values)))
    shares = {"sampling/masked_fraction": touched / drawn}
    return shares | ({"sampling/mask_size": len(mask.values) / touched} if touched else {})


def compared_logprobs(
    batch: RolloutBatch,
    credit: Credit,
    before: Ragged | None,
    learned: NDArray[np.float32],
    results: Sequence[UpdateResult],
    sampling: RolloutSettings,
    *,
    step: int,
    dropout: bool,
) -> dict[str, float]:
    """For sentinels: the policy's first update against logprobs `before` it, computed apart, and
    the learner against the sampler, on the tokens that the learner computed: those of the policy's
    own weights apart from those of older ones, whose logprobs differ by right, together and by age.
    step: the number of steps before this one, which is the version of the policy's weights.

    With top-p, top-k, min-p or a grammar the sampler drew from another distribution, unless their
    sampling masks are kept, and `dropout` makes each update's policy another one: nothing to
    compare.
    """
    mask = credit.experience.sequences.loss_mask.values
    metrics: dict[str, float] = {}
    if before is not None and results and not dropout:
        metrics |= ratio_distance(learned, results[0].outputs, mask)
    filtered = sampling.model_dump(include=FILTERS, exclude_defaults=True)
    if filtered and not sampling.keep_sampling_mask:
        return metrics
    sampled = batch.sampled_logprobs.take(credit.rows).values
    mask = mask & ~np.isnan(learned)
    if batch.versions is None:
        return metrics | differences(learned, sampled, mask)
    ages = step - batch.versions.take(credit.rows).values.astype(np.int64)
    stale = mask & (ages > 0)
    metrics |= differences(learned, sampled, mask & ~stale)
    for age in np.unique(ages[stale]):
        of_age = drift(learned, sampled, mask & (ages == age))
        metrics[f"staleness/drift_{age}"] = of_age[DRIFT]
    return metrics | drift(learned, sampled, stale)


def staleness(batch: RolloutBatch, credit: Credit, step: int, bound: int) -> dict[str, float]:
    """How many steps older than the policy's weights, version `step`, those are that drew the
    tokens to train on, and how many of these samples several versions wrote; {} where `bound`, of
    rollout.max_staleness, is 0.
    """
    if not bound or batch.versions is None or not len(credit.rows):
        return {}
    versions = batch.versions.take(credit.rows)
    mask = credit.experience.sequences.loss_mask.values
    ages = step - versions.values[mask].astype(np.int64)
    rows = [row[row >= 0] for row in versions]
    mixed = [len(row) > 0 and int(row.min()) < int(row.max()) for row in rows]
    counts = np.bincount(np.clip(ages, 0, bound), minlength=bound + 1) / max(1, len(ages))
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/p95": float(np.quantile(ages, 0.95)),
        "staleness/max": float(ages.max()),
        "staleness/mixed_samples": float(np.mean(mixed)),
        **{f"staleness/age_{age}": float(share) for age, share in enumerate(counts)},
    }


def idle_shares(
    step: float, learning: float, spent: Mapping[str, float], engines: Mapping[str, float]
) -> dict[str, float]:
    """How much of a step learner and engines do not work; {} where no engine has sampled. The same
    three numbers of a simulated run: plan.simulate.Simulated.

    step, learning: elapsed seconds of the step, and those of its phase "train". spent: the engine's
    sums over the step (rollout.stats.SUMMED). engines: EngineStats.by_engine. The first two shares
    depend on the clock; empty rows are a count, of engines that count their rows.
    """
    busy = [value for name, value in engines.items() if ENGINE_BUSY.fullmatch(name)]
    busy = busy or [spent["busy_seconds"]]
    if not any(busy):
        return {}
    shares = {
        "idle/learner_time_fraction": 1.0 - learning / step,
        "idle/engines_time_fraction": max(0.0, 1.0 - sum(busy) / len(busy) / step),
    }
    if slots := spent["decode_slots"]:
        shares["idle/empty_rows_fraction"] = 1.0 - spent["response_tokens"] / slots
    return shares


def sizes_of(cut: Sequence[Update]) -> dict[str, float]:
    """How many updates a step makes, and their samples; zeros where nothing is left to train on."""
    sizes = [len(update.rows) for update in cut]
    return {
        "updates/made": float(len(cut)),
        "updates/smallest": float(min(sizes, default=0)),
        "updates/largest": float(max(sizes, default=0)),
    }


def learner_logprobs(
    credit: Credit, before: Ragged | None, results: Sequence[UpdateResult]
) -> NDArray[np.float32]:
    """The learner's logprobs from before the step over the experience's tokens, NaN if unknown.
    before: those that a pass computed, without dropout.
    """
    if before is not None:
        return before.take(credit.rows).values
    if results:  # the first update was computed before any weights moved
        return results[0].outputs
    return np.full(len(credit.experience.sequences.tokens.values), np.nan, np.float32)


def _over_updates(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over a step's updates; counts are summed, and the rate is the last one.

    An update without any gradient computes nothing and reports less than the others.
    """
    means: dict[str, float] = {}
    for name in dict.fromkeys(name for update in metrics for name in update):
        values = [update[name] for update in metrics if name in update]
        _, _, metric = name.partition("/")
        if metric == "lr":
            means[name] = values[-1]
        else:
            means[name] = sum(values) / (1 if metric in SUMMED else len(values))
    return means


def drift(learner: Logprobs, sampled: Logprobs, stale: NDArray[np.bool_]) -> dict[str, float]:
    """The distance of `differences` over the tokens [N] that older weights drew; {} where there
    are none.
    """
    measured = differences(learner, sampled, stale)
    return {DRIFT: measured[RATIO]} if measured else {}


def differences(learner: Logprobs, sampled: Logprobs, mask: NDArray[np.bool_]) -> dict[str, float]:
    """Mean |p - p'| and mean exp|log p - log p'| over the tokens [N] of `mask`, in float64; {}
    where there are none.
    """
    learner_kept, sampled_kept = learner[mask].astype(np.float64), sampled[mask].astype(np.float64)
    if not len(learner_kept):
        return {}
    return {
        DIFFERENCE: float(np.abs(np.exp(learner_kept) - np.exp(sampled_kept)).mean()),
        RATIO: float(np.exp(np.minimum(np.abs(learner_kept - sampled_kept), 20.0)).mean()),
    }
