"""What is logged of a step of RL, against numbers worked by hand."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest

from postgrad.algorithms.base import Credit
from postgrad.algorithms.grpo import GRPO
from postgrad.algorithms.remax import ReMax
from postgrad.core.cursor import Cursor
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Failure, Prompt, Rollout, ScoredGroup, Sequences, Turn
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.learner.learner import UpdateResult
from postgrad.learner.update import Update
from postgrad.recipe.recipe import RLRecipe
from postgrad.rollout.settings import RolloutSettings
from postgrad.rollout.source import Sampled
from postgrad.training.rl_metrics import (
    compared_logprobs,
    idle_shares,
    learner_logprobs,
    sizes_of,
    staleness,
    step_metrics,
)

SECONDS = {"sample": 2.0, "train": 5.0}
NOTHING = np.zeros(0, np.float32)
NAN = math.nan
RECIPE = RLRecipe.model_construct(algorithm=GRPO(), environment=None)


def rollout(ticket: int, sample: int, tokens: int, reason: Literal["stop", "length"]) -> Rollout:
    """So many tokens by the policy, of logprob -1. Sample 1 also has one of an environment."""
    turns = [Turn("policy", np.full(tokens, 7, np.int32), np.full(tokens, -1.0, np.float32))]
    if sample == 1:
        turns.append(Turn("environment", np.array([9], np.int32), np.zeros(1, np.float32)))
    return Rollout(ticket, sample, tuple(turns), reason, ((0, tokens),), "")


def group(ticket: int, lengths: tuple[int, int], total: tuple[float, float]) -> ScoredGroup:
    """Two samples of a prompt of two tokens; one without a total is dropped. The second of each
    group ran into the limit.
    """
    prompt = Prompt(ticket, np.array([1, 2], np.int32), "q", "a", "numbers", ticket)
    rewards = np.array(total)
    dropped = np.flatnonzero(np.isnan(rewards)).tolist()
    return ScoredGroup(
        prompt,
        (rollout(ticket, 0, lengths[0], "stop"), rollout(ticket, 1, lengths[1], "length")),
        {"r": rewards},
        rewards,
        ~np.isnan(rewards),
        tuple(Failure(sample, "r", "error", "no") for sample in dropped),
    )


@pytest.fixture
def groups() -> list[ScoredGroup]:
    """The policy wrote 2 and 3, and 1 and 4 tokens; the last sample is dropped."""
    return [group(0, (2, 3), (1.0, 0.0)), group(1, (1, 4), (0.5, NAN))]


def result(outputs: Any = NOTHING, **metrics: float) -> UpdateResult:
    """Of the policy where a name has no role: `loss`, `critic__loss`."""
    named = {name if "__" in name else f"policy__{name}": v for name, v in metrics.items()}
    return UpdateResult({name.replace("__", "/"): v for name, v in named.items()}, outputs)


def credit_of(batch: RolloutBatch, rows: Sequence[int], **metrics: float) -> Credit:
    """These samples of a batch are trained on."""
    kept = np.array(rows, np.int64)
    sequences = Sequences(
        batch.sequences.tokens.take(kept),
        batch.sequences.loss_mask.take(kept),
        batch.sequences.group[kept],
    )
    experience = Experience(sequences, {}, np.ones(len(kept), bool))
    return Credit(experience, kept, {}, metrics)


def metrics_of(
    groups: list[ScoredGroup], results: dict[str, list[UpdateResult]], **extra: Any
) -> dict[str, float]:
    batch = RolloutBatch.of(groups)
    sampled = Sampled(groups, Cursor(), metrics=extra.get("sampled", {}))
    credit = credit_of(batch, range(len(batch)), **extra.get("credit", {}))
    recipe = RECIPE.model_copy(update={"algorithm": extra.get("algorithm", GRPO())})
    return step_metrics(sampled, batch, credit, results, SECONDS, recipe)


def test_the_entropy_leaves_out_greedy_answers_where_the_algorithm_draws_them() -> None:
    """Sample 0 alone was kept: where it is greedy, nothing is left."""
    alone = [group(1, (1, 4), (0.5, NAN))]
    assert metrics_of(alone, {})["sampled_entropy"] == 1.0
    greedy = metrics_of(alone, {}, algorithm=ReMax())
    assert math.isnan(greedy["sampled_entropy"])


def test_samples_of_a_step_are_counted_with_those_that_were_dropped(
    groups: list[ScoredGroup],
) -> None:
    step_values = metrics_of(groups, {"policy": [], "critic": []})
    assert step_values["reward"] == pytest.approx((1.0 + 0.0 + 0.5) / 3)
    assert step_values["reward/r"] == pytest.approx((1.0 + 0.0 + 0.5) / 3)
    assert step_values["response_length"] == (2 + 4 + 1 + 5) / 4
    assert step_values["truncated_fraction"] == 2 / 4
    assert (step_values["samples"], step_values["dropped_samples"], step_values["failures"]) == (
        4,
        1,
        1,
    )
    assert step_values["response_tokens"] == 2 + 3 + 1 + 4  # the policy's own
    assert step_values["response_tokens_per_second"] == 10 / 2.0


def test_metrics_are_means_over_updates_counts_are_sums_and_the_rate_is_the_last(
    groups: list[ScoredGroup],
) -> None:
    policy = [
        result(loss=1.0, ratio=1.0, lr=0.1, computed_tokens=10, skipped_samples=1),
        result(loss=3.0, ratio=1.5, lr=0.2, computed_tokens=20, skipped_samples=0),
    ]
    critic = [
        result(critic__loss=5.0, critic__lr=0.5, critic__computed_tokens=9),
        result(critic__loss=6.0, critic__lr=0.4, critic__computed_tokens=11),
    ]
    policy[0].metrics["policy/bounded_exponents"] = 2.0  # type: ignore[index]
    policy[1].metrics["policy/bounded_exponents"] = 3.0  # type: ignore[index]
    step_values = metrics_of(groups, {"policy": policy, "critic": critic})
    assert (step_values["loss"], step_values["policy/loss"], step_values["critic/loss"]) == (
        2.0,
        2.0,
        5.5,
    )
    assert step_values["policy/ratio"] == 1.25
    assert (step_values["policy/lr"], step_values["critic/lr"]) == (0.2, 0.4)
    assert (step_values["policy/computed_tokens"], step_values["critic/computed_tokens"]) == (
        30,
        20,
    )
    assert step_values["policy/skipped_samples"] == 1
    assert step_values["policy/bounded_exponents"] == 5.0
    assert step_values["train_tokens_per_second"] == (30 + 20) / 5.0


def test_an_update_that_computed_nothing_is_no_part_of_the_means_of_others(
    groups: list[ScoredGroup],
) -> None:
    policy = [
        result(loss=4.0, ratio=1.5, lr=0.1, computed_tokens=10),
        result(loss=0.0, lr=0.1, computed_tokens=0),
    ]
    step_values = metrics_of(groups, {"policy": policy, "critic": []})
    assert step_values["policy/ratio"] == 1.5  # the second reports none
    assert step_values["loss"] == 2.0
    assert step_values["policy/computed_tokens"] == 10


def test_where_nothing_was_trained_the_loss_is_nan_and_no_token_was_trained_on(
    groups: list[ScoredGroup],
) -> None:
    step_values = metrics_of(groups, {"policy": [], "critic": []})
    assert math.isnan(step_values["loss"])
    assert "policy/loss" not in step_values
    assert step_values["train_tokens_per_second"] == 0.0
    warming = metrics_of(groups, {"policy": [], "critic": [result(critic__computed_tokens=25)]})
    assert math.isnan(warming["loss"])
    assert warming["train_tokens_per_second"] == 25 / 5.0


def test_where_no_sample_was_kept_the_reward_is_nan() -> None:
    step_values = metrics_of([group(0, (2, 3), (NAN, NAN))], {"policy": [], "critic": []})
    assert math.isnan(step_values["reward"])
    assert (step_values["samples"], step_values["dropped_samples"], step_values["failures"]) == (
        2,
        2,
        2,
    )


def test_groups_that_no_sample_is_left_of_are_dropped_ones_too() -> None:
    """Of three groups one has both samples, one a single sample, which its algorithm drops, and one
    none: two groups are dropped, and four of six samples are not trained on.
    """
    groups = [
        group(0, (2, 3), (1.0, 0.0)),
        group(1, (1, 4), (0.5, NAN)),
        group(2, (1, 1), (NAN, NAN)),
    ]
    batch = RolloutBatch.of(groups)
    credit = GRPO().credit(batch, None, None, None, {})
    sampled = Sampled(groups, Cursor())
    step_values = step_metrics(sampled, batch, credit, {"policy": []}, SECONDS, RECIPE)
    assert (step_values["groups/dropped"], step_values["dropped_samples"]) == (2.0, 4)


def test_idle_shares_are_of_the_step_and_of_the_rows() -> None:
    """A step of 10 s, of which 4 are trained: engines are at work for 9 and 3 s. Of 40 rows 30 had
    a sample.
    """
    spent = {"busy_seconds": 8.0, "decode_slots": 40.0, "response_tokens": 30.0}
    alone = idle_shares(10.0, 4.0, spent, {})
    assert alone == pytest.approx(
        {
            "idle/learner_time_fraction": 0.6,
            "idle/engines_time_fraction": 0.2,
            "idle/empty_rows_fraction": 0.25,
        }
    )
    engines = {
        "engine/0/busy_seconds": 9.0,
        "engine/1/busy_seconds": 3.0,
        "engine/1.0/busy_seconds": 1.0,  # inside of it
        "engine/1/busy_time_fraction": 0.5,
    }
    without_rows = spent | {"decode_slots": 0.0}
    assert idle_shares(10.0, 4.0, without_rows, engines) == pytest.approx(
        {"idle/learner_time_fraction": 0.6, "idle/engines_time_fraction": 0.4}
    )
    replayed = dict.fromkeys(spent, 0.0)
    assert idle_shares(10.0, 4.0, replayed, {"engine/0/busy_seconds": 0.0}) == {}


def test_metrics_of_source_and_credit_are_part_of_the_step(groups: list[ScoredGroup]) -> None:
    more = {"sampled": {"sampling/rounds": 2.0}, "credit": {"kl": 0.25}}
    step_values = metrics_of(groups, {"policy": [], "critic": []}, **more)
    assert (step_values["sampling/rounds"], step_values["kl"]) == (2.0, 0.25)


@pytest.fixture
def batch() -> RolloutBatch:
    """Two samples, each a prompt of two tokens and a response of two with logprobs -1."""
    return RolloutBatch.of([group(0, (2, 1), (1.0, 0.0))])


SAMPLING = RolloutSettings(max_new_tokens=6)
LEARNED = np.array([0.0, 0.0, -1.0, -2.0], np.float32)  # of the first sample
UPDATED = np.array([0.0, 0.0, -1.5, NAN], np.float32)  # in the first update; the last not computed
ON_POLICY = {"sentinel/on_policy": pytest.approx(1.0 - math.exp(-0.5))}
DIFFERENCES = {  # learner -1, -2; sampler -1, -1
    "sentinel/prob_difference": pytest.approx((0.0 + math.exp(-1) - math.exp(-2)) / 2),
    "sentinel/ratio_excess": pytest.approx((1.0 + math.e) / 2),
}


def old_of(batch: RolloutBatch) -> Ragged:
    """Old logprobs of both samples; those of the second are not trained on."""
    rest = np.full(len(batch.sequences.tokens.values) - len(LEARNED), -9.0, np.float32)
    return batch.sequences.tokens.like(np.concatenate([LEARNED, rest]))


@pytest.mark.parametrize(
    ("sampling", "dropout", "expected"),
    [
        ({}, False, ON_POLICY | DIFFERENCES),
        ({}, True, DIFFERENCES),
        ({"top_p": 0.9}, False, ON_POLICY),
        ({"top_k": 5}, False, ON_POLICY),
        ({"min_p": 0.1}, False, ON_POLICY),
        ({"regex": "a+"}, False, ON_POLICY),
        ({"top_p": 0.9}, True, {}),
    ],
    ids=["plain", "dropout", "top-p", "top-k", "min-p", "grammar", "top-p and dropout"],
)
def test_logprobs_are_compared_where_both_sides_mean_the_same_distribution(
    sampling: dict[str, Any], dropout: bool, expected: dict[str, float], batch: RolloutBatch
) -> None:
    credit, old = credit_of(batch, [0]), old_of(batch)
    results = [result(UPDATED), result(np.full(4, -7.0, np.float32))]  # later ones do not count
    learned = learner_logprobs(credit, old, results)
    assert learned.tolist() == LEARNED.tolist()
    settings = SAMPLING.model_copy(update=sampling)
    comparison = compared_logprobs(
        batch, credit, old, learned, results, settings, step=0, dropout=dropout
    )
    assert comparison == expected


def test_a_step_of_one_update_compares_its_own_logprobs_with_the_samplers(
    batch: RolloutBatch,
) -> None:
    credit, results = credit_of(batch, [0]), [result(UPDATED)]
    learned = learner_logprobs(credit, None, results)
    comparison = compared_logprobs(
        batch, credit, None, learned, results, SAMPLING, step=0, dropout=False
    )
    assert (
        comparison
        == {  # of the one token that was computed: -1.5 by the learner, -1 by the sampler
            "sentinel/prob_difference": pytest.approx(math.exp(-1) - math.exp(-1.5)),
            "sentinel/ratio_excess": pytest.approx(math.exp(0.5)),
        }
    )


def test_where_the_learner_computed_nothing_there_is_nothing_to_compare(
    batch: RolloutBatch,
) -> None:
    credit = credit_of(batch, [0])
    learned = learner_logprobs(credit, None, [])
    assert np.isnan(learned).all()
    assert len(learned) == len(LEARNED)
    assert (
        compared_logprobs(batch, credit, None, learned, [], SAMPLING, step=0, dropout=False) == {}
    )


def test_the_sizes_of_a_steps_updates_are_zeros_where_there_is_none() -> None:
    def update(rows: int) -> Update:
        return Update(None, np.arange(rows))  # type: ignore[arg-type]

    assert sizes_of([update(3), update(5), update(4)]) == {
        "updates/made": 3.0, "updates/smallest": 3.0, "updates/largest": 5.0,
    }  # fmt: skip
    assert set(sizes_of([]).values()) == {0.0}


def stale_batch() -> RolloutBatch:
    """Sample 0: 2 tokens of version 3 and 1 of version 5; sample 1: 3 of version 4; then 2 of 5."""
    prompt = Prompt(0, np.array([1], np.int32), "q", "a", "numbers", 0)

    def sample(number: int, *spans: tuple[int, int]) -> Rollout:
        tokens = sum(count for _, count in spans)
        logprobs = np.full(tokens, -1.0, np.float32)
        turn = Turn("policy", np.full(tokens, 7, np.int32), logprobs)
        return Rollout(0, number, (turn,), "stop", spans, "")

    rollouts = (sample(0, (3, 2), (5, 1)), sample(1, (4, 3)), sample(2, (5, 2)))
    rewards = np.array([0.0, 1.0, 0.5])
    return RolloutBatch.of(
        [ScoredGroup(prompt, rollouts, {"r": rewards}, rewards, np.ones(3, bool))]
    )


def test_staleness_counts_steps_between_the_weights_of_a_token_and_the_policys() -> None:
    batch = stale_batch()
    staleness_values = staleness(batch, credit_of(batch, [0, 1, 2]), 5, 2)
    assert staleness_values["staleness/mean"] == pytest.approx((2 + 2 + 0 + 1 + 1 + 1 + 0 + 0) / 8)
    assert staleness_values["staleness/max"] == 2.0
    assert staleness_values["staleness/mixed_samples"] == pytest.approx(1 / 3)
    shares = [staleness_values[f"staleness/age_{age}"] for age in range(3)]
    assert shares == [3 / 8, 3 / 8, 2 / 8]
    assert staleness(batch, credit_of(batch, [0, 1, 2]), 5, 0) == {}


def test_staleness_is_of_the_samples_that_are_trained_on() -> None:
    batch = stale_batch()
    staleness_values = staleness(batch, credit_of(batch, [1, 2]), 5, 2)
    assert staleness_values["staleness/mean"] == 3 / 5
    assert staleness_values["staleness/mixed_samples"] == 0.0
    assert staleness(batch, credit_of(batch, []), 5, 2) == {}


def test_the_mismatch_is_of_tokens_of_the_policys_own_weights_and_the_drift_of_the_others() -> None:
    batch = stale_batch()
    credit = credit_of(batch, [0, 1, 2])
    learned = np.full(len(batch.sequences.tokens.values), -1.0, np.float32)
    stale = (batch.versions.values >= 0) & (batch.versions.values < 5)  # type: ignore[union-attr]
    learned[stale] = -1.5
    comparison = compared_logprobs(
        batch, credit, None, learned, [], RolloutSettings(), step=5, dropout=False
    )
    assert comparison["sentinel/prob_difference"] == 0.0
    assert comparison["sentinel/ratio_excess"] == 1.0
    assert comparison["sentinel/drift"] == pytest.approx(math.exp(0.5))


def test_drift_is_told_by_age() -> None:
    batch = stale_batch()
    learned = np.full(len(batch.sequences.tokens.values), -1.0, np.float32)
    assert batch.versions is not None
    learned[batch.versions.values == 4] = -1.5
    learned[batch.versions.values == 3] = -3.0
    comparison = compared_logprobs(
        batch, credit_of(batch, [0, 1, 2]), None, learned, [], RolloutSettings(),
        step=5, dropout=False,
    )  # fmt: skip
    ages = {name: value for name, value in comparison.items() if name.startswith("staleness/")}
    assert ages == pytest.approx(
        {"staleness/drift_1": math.exp(0.5), "staleness/drift_2": math.exp(2.0)}
    )
