"""mask_truncated_completions: what the token limit cut off leaves the loss, and nothing moves."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from postgrad.algorithms.base import Credit
from postgrad.algorithms.grpo import GRPO
from postgrad.algorithms.policy_gradient import PolicyGradient
from postgrad.algorithms.ppo import PPO
from postgrad.algorithms.registry import algorithm_class
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.core.rollout_batch import RolloutBatch

LENGTHS = [2, 4, 3, 1, 2]
BY_GROUP = ["grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo", "opo"]


def truncated_at(batch: RolloutBatch, *rows: int) -> RolloutBatch:
    cut = np.zeros(len(batch), np.bool_)
    cut[list(rows)] = True
    return replace(batch, truncated=cut)


def credit_of(algorithm: PolicyGradient, batch: RolloutBatch, **columns: Ragged) -> Credit:
    arguments: dict[str, Any] = {"old": None, "ref": None, "values": None, **columns}
    return algorithm.credit(batch, **arguments, state={})


def of_samples(credit: Credit, batch: RolloutBatch) -> dict[int, float]:
    """The first advantage of each sample that is trained on, by its number."""
    advantages, mask = (
        credit.experience.columns["advantages"],
        credit.experience.sequences.loss_mask,
    )
    first = [row[on][0] for row, on in zip(advantages, mask, strict=True)]
    return dict(zip(batch.sample[credit.rows].tolist(), map(float, first), strict=True))


@pytest.mark.parametrize("aggregation", ["sequence", "token", "constant"])
def test_the_loss_is_that_of_the_finished_samples_alone_with_their_own_denominator(
    aggregation: str, make_batch: Any, make_inputs: Any
) -> None:
    """By hand: rewards 1, 0, 0 of a group and 0.5, 1 of another; the third sample is cut off."""
    batch = truncated_at(make_batch([0, 0, 0, 1, 1], [1.0, 0.0, 0.0, 0.5, 1.0], LENGTHS), 2)
    algorithm = GRPO(mask_truncated_completions=True, aggregation=aggregation, constant_length=8)
    credit = credit_of(algorithm, batch)
    assert credit.rows.tolist() == [0, 1, 3, 4]
    assert credit.metrics["masked_samples"] == 1.0

    mean, std = 1 / 3, np.sqrt((4 / 9 + 1 / 9 + 1 / 9) / 2)  # of all three
    other = np.sqrt(2 * 0.25**2)
    by_hand = {0: (1 - mean) / (std + 1e-6), 1: -mean / (std + 1e-6),
               3: -0.25 / (other + 1e-6), 4: 0.25 / (other + 1e-6)}  # fmt: skip
    assert of_samples(credit, batch) == pytest.approx(by_hand, rel=1e-6)

    tokens = [LENGTHS[row] for row in by_hand]
    each = {"sequence": [1 / (4 * n) for n in tokens], "token": [1 / 9] * 4,
            "constant": [1 / (4 * 8)] * 4}[aggregation]  # fmt: skip
    sequences, mask = credit.experience.sequences, credit.experience.sequences.loss_mask.values
    weights = algorithm.entry_weights(sequences, np.arange(4)).values[mask]
    np.testing.assert_allclose(weights, np.repeat(each, tokens), rtol=1e-7)

    rng = np.random.default_rng(0)
    logp, old = -rng.exponential(1.0, sum(tokens)), -rng.exponential(1.0, sum(tokens))
    advantages = np.repeat(list(by_hand.values()), tokens)
    ratio = np.exp(logp - old)
    wanted = (np.repeat(each, tokens) * -np.minimum(
        ratio * advantages, ratio.clip(0.8, 1.2) * advantages)).sum()  # fmt: skip
    inputs = make_inputs(
        torch.tensor(logp, dtype=torch.float64), weights,
        advantages=credit.experience.columns["advantages"].values[mask], old_logprobs=old,
    )  # fmt: skip
    assert float(algorithm.policy_loss(inputs).loss) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("name", BY_GROUP)
@given(data=st.data())
def test_every_finished_sample_keeps_its_own_advantage(name: str, data: st.DataObject) -> None:
    """Whichever samples fall out of whichever groups: nobody gets a neighbour's advantage, as
    happens where columns are cut and the groups of the rest are counted off anew.
    """
    sizes = data.draw(st.lists(st.integers(2, 4), min_size=1, max_size=4))
    group = [number for number, size in enumerate(sizes) for _ in range(size)]
    n = len(group)
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=n, max_size=n))
    cut = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    mask = Ragged.of([[False, True, True]] * n, np.bool_)
    batch = RolloutBatch(
        sequences=Sequences(
            mask.like(np.arange(3 * n, dtype=np.int32)), mask, np.array(group, np.int64)
        ),
        sampled_logprobs=mask.like(np.zeros(3 * n, np.float32)),
        turn_rewards=mask.like(np.zeros(3 * n)),
        rewards=np.array(rewards),
        ticket=np.array(group, np.int64),
        sample=np.arange(n),
        truncated=np.array(cut, np.bool_),
    )
    kind = algorithm_class(name)
    assert issubclass(kind, PolicyGradient)
    options = {"constant_length": 4}
    unmasked = of_samples(credit_of(kind(**options), batch), batch)
    masked = credit_of(kind(mask_truncated_completions=True, **options), batch)
    finished = [row for row in range(n) if not cut[row]]
    assert masked.rows.tolist() == finished
    assert of_samples(masked, batch) == {row: unmasked[row] for row in finished}
    sequences = masked.experience.sequences
    assert sequences.group.tolist() == [group[row] for row in finished]
    assert [row.tolist() for row in sequences.tokens] == [
        batch.sequences.tokens.row(row).tolist() for row in finished
    ]


def test_the_baseline_of_opo_weighs_a_response_that_was_cut_off_by_its_length(
    make_batch: Any,
) -> None:
    """By hand: 10 tokens earn 1, and 30 that were cut off nothing, so that the baseline is 0.25."""
    batch = truncated_at(make_batch([0, 0], [1.0, 0.0], [10, 30]), 1)
    credit = credit_of(algorithm_class("opo")(mask_truncated_completions=True), batch)
    assert of_samples(credit, batch) == {0: 0.75}


def test_the_mean_kl_is_that_of_the_tokens_that_bear_loss(
    make_batch: Any, over_responses: Any
) -> None:
    """By hand: the sample that is cut off, with a KL of 9 a token, is charged and moves no beta."""
    batch = truncated_at(make_batch([0, 0], [1.0, 0.0], [2, 1]), 1)
    old, ref = over_responses([[-1.0, -1.0], [-1.0]]), over_responses([[-1.5, -1.25], [-10.0]])
    algorithm = algorithm_class("rloo")(
        mask_truncated_completions=True, kl_coef=0.1, kl_target=0.375, constant_length=4
    )
    credit = credit_of(algorithm, batch, old=old, ref=ref)
    assert credit.metrics["kl/token_mean"] == 0.75 / 2
    assert credit.metrics["kl/sequence_mean"] == 0.75
    assert credit.state["kl_coef"] == 0.1
    assert of_samples(credit, batch) == pytest.approx({0: 1.0 - 0.1 * 0.75 + 0.1 * 9.0})


def test_a_step_without_a_token_that_bears_loss_leaves_the_kl_coefficient_alone(
    make_batch: Any, over_responses: Any
) -> None:
    batch = truncated_at(make_batch([0, 0], [1.0, 0.0], [1, 1]), 0, 1)
    column = over_responses([[-1.0], [-1.0]])
    algorithm = algorithm_class("rloo")(
        mask_truncated_completions=True, kl_coef=0.1, kl_target=0.05, constant_length=4
    )
    credit = credit_of(algorithm, batch, old=column, ref=column)
    assert credit.state.get("kl_coef", 0.1) == 0.1


def test_whitening_counts_the_tokens_of_finished_samples_alone(make_batch: Any) -> None:
    """REINFORCE++, by hand: rewards 1, 0 and 5, of which the last is cut off."""
    batch = truncated_at(make_batch([0, 1, 2], [1.0, 0.0, 5.0], [1, 3, 2]), 2)
    credit = credit_of(algorithm_class("reinforce_pp")(mask_truncated_completions=True), batch)
    mean = 1 / 4  # one token of 1, three of 0
    std = np.sqrt((0.75**2 + 3 * 0.25**2) / 4 + 1e-8)
    assert of_samples(credit, batch) == pytest.approx(
        {0: (1 - mean) / std, 1: -mean / std}, rel=1e-6
    )


def test_a_critic_does_not_learn_from_them_either(make_batch: Any, over_responses: Any) -> None:
    batch = truncated_at(make_batch([0, 1, 2], [1.0, 0.0, 5.0], [1, 2, 2]), 2)
    values = over_responses([[0.5], [0.25, 0.5], [9.0, 9.0]])
    algorithm = PPO(mask_truncated_completions=True, whiten=False, lam=1.0)
    credit = credit_of(algorithm, batch, values=values)
    columns, mask = credit.experience.columns, credit.experience.sequences.loss_mask.values
    assert credit.rows.tolist() == [0, 1]
    np.testing.assert_allclose(columns["returns"].values[mask], [1.0, 0.0, 0.0], atol=1e-7)
    np.testing.assert_allclose(columns["advantages"].values[mask], [0.5, -0.25, -0.5], atol=1e-7)
    weights = algorithm.score_weights(credit.experience.sequences, np.arange(2)).values
    assert weights.sum() == pytest.approx(1.0)


def test_a_group_of_which_one_sample_was_finished_still_has_its_baseline(make_batch: Any) -> None:
    batch = truncated_at(make_batch([0, 0, 0], [1.0, 0.0, 0.0]), 1, 2)
    credit = credit_of(algorithm_class("rloo")(mask_truncated_completions=True,
                                               constant_length=4), batch)  # fmt: skip
    assert of_samples(credit, batch) == {0: 1.0}
    assert credit.metrics["groups/dropped"] == 0.0


def test_left_out_it_trains_on_everything_and_all_cut_off_leaves_nothing(make_batch: Any) -> None:
    batch = truncated_at(make_batch([0, 0], [1.0, 0.0]), 0, 1)
    assert credit_of(GRPO(), batch).rows.tolist() == [0, 1]
    credit = credit_of(GRPO(mask_truncated_completions=True), batch)
    assert len(credit.experience) == 0
    assert credit.metrics["masked_samples"] == 2.0
