"""Dr. GRPO against numbers worked by hand."""

import numpy as np

from postgrad.algorithms.dr_grpo import DrGRPO


def test_a_sample_is_measured_against_the_group_mean_without_a_deviation(make_batch):
    batch = make_batch([0, 0, 0, 0], [1, 0, 0, 1])
    credit = DrGRPO().credit(batch, None, None, None, {})
    advantages = credit.experience.columns["advantages"]
    assert [row[-1] for row in advantages] == [0.5, -0.5, -0.5, 0.5]


def test_the_loss_is_divided_by_samples_times_the_longest_response_allowed(make_batch):
    batch = make_batch([0, 0], [1, 0], lengths=[1, 4])
    algorithm = DrGRPO().for_rollout(max_new_tokens=40)
    assert algorithm.constant_length == 40
    weights = algorithm.entry_weights(batch.sequences, np.arange(2))
    np.testing.assert_allclose(weights.values, batch.sequences.loss_mask.values / 80, rtol=1e-7)


def test_a_constant_length_that_the_recipe_states_is_kept():
    assert DrGRPO(constant_length=7).for_rollout(max_new_tokens=40).constant_length == 7
    assert DrGRPO(aggregation="token").for_rollout(max_new_tokens=40).constant_length is None
