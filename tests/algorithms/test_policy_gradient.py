"""What GRPO, Dr. GRPO and RLOO share, against float64 NumPy written apart from it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from postgrad.algorithms.dr_grpo import DrGRPO
from postgrad.algorithms.grpo import GRPO
from postgrad.algorithms.registry import algorithm_class
from postgrad.algorithms.rloo import RLOO
from postgrad.core.errors import UsageError
from postgrad.core.records import PlacedImage

ALL = [GRPO, DrGRPO, RLOO]


def drawn(n=200, seed=0):
    """logprobs, old, reference, advantages, weights, entropy of n tokens."""
    rng = np.random.default_rng(seed)
    logp, old, ref = (-rng.exponential(1.0, n) for _ in range(3))
    return logp, old, ref, rng.normal(size=n), rng.uniform(0.1, 1.0, n) / n, rng.uniform(0, 2, n)


def leaf(values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_loss_and_gradient_agree_with_numpy_in_float64(make_inputs, estimator):
    logp, old, ref, adv, weight, entropy = drawn()
    algorithm = GRPO(
        clip_low=0.2, clip_high=0.3, kl_coef=0.05, kl_in="loss",
        kl_estimator=estimator, entropy_coef=0.01,
    )  # fmt: skip
    logprobs, entropies = leaf(logp), leaf(entropy)
    output = algorithm.policy_loss(
        make_inputs(logprobs, weight, entropies, advantages=adv, old_logprobs=old, ref_logprobs=ref)
    )
    output.loss.backward()

    r, d = np.exp(logp - old), logp - ref
    token_kl, kl_slope = {
        "k1": (d, np.ones_like(d)),
        "k2": (d**2 / 2, d),
        "k3": (np.exp(-d) - 1 + d, 1 - np.exp(-d)),
    }[estimator]
    surrogate = np.where(adv > 0, np.minimum(r, 1.3) * adv, np.maximum(r, 0.8) * adv)
    free = np.where(adv > 0, r < 1.3, r > 0.8)
    loss = (weight * (-surrogate + 0.05 * token_kl - 0.01 * entropy)).sum()
    slope = weight * (np.where(free, -r * adv, 0) + 0.05 * kl_slope)
    assert float(output.loss.detach()) == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(logprobs.grad, slope, rtol=1e-11, atol=1e-15)
    np.testing.assert_allclose(entropies.grad, -0.01 * weight, rtol=1e-12)
    wanted = {
        "policy/logprob": logp.mean(),
        "policy/ratio": r.mean(),
        "policy/kl_old": (r - 1 - np.log(r)).mean(),
        "policy/clip_fraction": (~free).mean(),
        "policy/clip_fraction_low": (~free & (adv < 0)).mean(),
        "policy/clip_fraction_high": (~free & (adv > 0)).mean(),
        "policy/kl": token_kl.mean(),
        "policy/entropy": entropy.mean(),
        "policy/bounded_exponents": 0.0,
    }
    assert {k: float(v) for k, v in output.metrics.items()} == pytest.approx(wanted, rel=1e-11)


def test_bounds_of_the_probability_drop_tokens_that_have_moved_too_far_and_a_drift_pulls_all_back(
    make_inputs,
):
    logp, old, _, adv, weight, _ = drawn()
    logprobs = leaf(logp)
    algorithm = GRPO(clip_by="probability", clip_low=0.1, clip_high=0.2, drift_coef=0.05)
    inputs = make_inputs(logprobs, weight, advantages=adv, old_logprobs=old)
    output = algorithm.policy_loss(inputs)
    output.loss.backward()

    r, moved = np.exp(logp - old), np.exp(logp) - np.exp(old)
    low, high = (adv < 0) & (moved < -0.1), (adv > 0) & (moved > 0.2)
    free = ~(low | high)
    assert min(low.sum(), high.sum()) > 10
    loss = (weight * (np.where(free, -r * adv, 0) + 0.05 * (logp - old) ** 2)).sum()
    slope = weight * (np.where(free, -r * adv, 0) + 0.1 * (logp - old))
    assert float(output.loss.detach()) == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(logprobs.grad, slope, rtol=1e-11, atol=1e-15)
    fractions = [float(output.metrics[f"policy/clip_fraction_{side}"]) for side in ("low", "high")]
    assert fractions == pytest.approx([low.mean(), high.mean()])


def test_a_rare_token_is_bounded_by_its_ratio_and_a_likely_one_by_its_probability(make_inputs):
    """0.001 to 0.002 has a ratio of 2; 0.7 to 0.95 one of 1.36."""
    for knobs, gradients in (
        ({"clip_high": 0.4}, [0.0, -0.95 / 0.7]),
        ({"clip_by": "probability"}, [-2.0, 0.0]),
    ):
        logprobs = leaf(np.log([0.002, 0.95]))
        inputs = make_inputs(
            logprobs, [1.0, 1.0], advantages=[1.0, 1.0], old_logprobs=np.log([0.001, 0.7])
        )
        GRPO(**knobs).policy_loss(inputs).loss.backward()
        assert logprobs.grad.tolist() == pytest.approx(gradients)


def test_losses_and_metrics_of_layouts_add_up_to_those_of_the_update(make_inputs):
    logp, old, ref, adv, weight, _ = drawn(60)
    algorithm = GRPO(kl_coef=0.05)

    def part(rows):
        inputs = make_inputs(
            leaf(logp[rows]), weight[rows], token_weight=1 / 60,
            advantages=adv[rows], old_logprobs=old[rows], ref_logprobs=ref[rows],
        )  # fmt: skip
        return algorithm.policy_loss(inputs)

    undivided = part(slice(None))
    cuts = [slice(0, 7), slice(7, 7), slice(7, 50), slice(50, 60)]
    parts = [part(cut) for cut in cuts]
    assert sum(float(p.loss.detach()) for p in parts) == pytest.approx(
        float(undivided.loss.detach())
    )
    for name, value in undivided.metrics.items():
        assert sum(float(p.metrics[name]) for p in parts) == pytest.approx(float(value)), name


@pytest.mark.parametrize("kind", ALL)
def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_reinforce(make_inputs, kind):
    logp, _, _, adv, weight, _ = drawn(20)
    logprobs = leaf(logp)
    output = kind().policy_loss(make_inputs(logprobs, weight, advantages=adv))
    output.loss.backward()
    np.testing.assert_allclose(logprobs.grad, -weight * adv, rtol=1e-14)
    assert float(output.metrics["policy/ratio"]) == pytest.approx(1.0, abs=1e-14)
    assert float(output.metrics["policy/clip_fraction"]) == 0.0


def test_exponents_that_overflow_are_counted_and_the_loss_stays_finite(make_inputs):
    logprobs = leaf([0.0, -500.0, -1.0])
    inputs = make_inputs(
        logprobs, [1.0] * 3, advantages=[-1.0, 1.0, 1.0],
        old_logprobs=[-500.0, 0.0, -1.0], ref_logprobs=[-1.0, -1.0, -1.0],
    )  # fmt: skip
    output = GRPO(kl_coef=0.1).policy_loss(inputs)
    output.loss.backward()
    assert float(output.metrics["policy/bounded_exponents"]) == 3.0  # two ratios and one k3
    assert math.isfinite(float(output.loss.detach()))
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_bounded_exponents_of_importance_weights_are_counted_too(make_inputs):
    inputs = make_inputs(
        leaf([-1.0, -1.0, -30.0]), [1.0] * 3, advantages=[1.0, 1.0, 1.0],
        old_logprobs=[-1.0, -1.0, -1.0], sampled_logprobs=[-25.0, -2.0, -1.0],
    )  # fmt: skip
    output = GRPO(correction="metrics").policy_loss(inputs)
    assert float(output.metrics["policy/bounded_exponents"]) == 2.0  # one weight and one ratio


@pytest.mark.parametrize("kind", ALL)
def test_groups_with_fewer_than_two_survivors_are_dropped(make_batch, kind):
    batch = make_batch([4, 9, 9, 11, 12, 12], [5, 1, 0, 7, 2, 2], lengths=[1, 2, 3, 1, 2, 1])
    credit = kind().credit(batch, None, None, None, {})
    assert credit.rows.tolist() == [1, 2, 4, 5]
    kept = credit.experience.sequences
    assert kept.group.tolist() == [9, 9, 12, 12]
    for row, original in enumerate(credit.rows):
        assert kept.tokens.row(row).tolist() == batch.sequences.tokens.row(original).tolist()
    assert credit.metrics["groups/dropped"] == 2.0
    assert credit.metrics["groups/equal_fraction"] == 0.5
    weights = kind(aggregation="token").entry_weights(kept, np.arange(len(kept)))
    assert weights.values.max() == pytest.approx(1 / 8)  # dropped samples are in no denominator


@pytest.mark.parametrize("kind", ALL)
def test_a_step_whose_groups_are_all_dropped_gives_an_empty_experience(make_batch, kind):
    credit = kind().credit(make_batch([0, 1], [1, 0]), None, None, None, {})
    assert len(credit.experience) == 0
    assert credit.metrics == {"groups/dropped": 2.0}


@pytest.mark.parametrize("kind", ALL)
def test_an_empty_step_gives_an_empty_experience(make_batch, kind):
    assert len(kind().credit(make_batch([], []), None, None, None, {}).experience) == 0


@pytest.mark.parametrize("kind", ALL)
def test_equal_rewards_have_no_gradient_unless_kl_or_entropy_gives_one(
    make_batch, over_responses, kind
):
    batch = make_batch([0, 0, 0, 1, 1, 1], [0.1] * 3 + [0.0, 1.0, 0.5])
    plain = kind().credit(batch, None, None, None, {})
    assert plain.experience.has_gradient.tolist() == [False] * 3 + [True, True, False]
    assert not plain.experience.columns["advantages"].take([0, 1, 2, 5]).values.any()
    with_entropy = kind(entropy_coef=0.01).credit(batch, None, None, None, {})
    assert with_entropy.experience.has_gradient.all()
    with_drift = kind(drift_coef=0.01).credit(batch, None, None, None, {})
    assert with_drift.experience.has_gradient.all()
    ref = over_responses([[-1.0] * 3] * 6)
    with_kl = kind(kl_coef=0.1, kl_in="loss").credit(batch, None, ref, None, {})
    assert with_kl.experience.has_gradient.all()
    assert "ref_logprobs" in with_kl.experience.columns


def test_columns_follow_their_sequences_when_a_group_is_dropped(make_batch, over_responses):
    batch = make_batch([0, 1, 1], [1, 1, 0], lengths=[1, 2, 1])
    old = over_responses([[-9.0], [-1.0, -2.0], [-3.0]])
    ref = over_responses([[-8.0], [-1.5, -2.5], [-3.5]])
    columns = GRPO(kl_coef=0.1).credit(batch, old, ref, None, {}).experience.columns
    assert columns["old_logprobs"].row(0).tolist() == [0, 0, -1.0, -2.0]
    assert columns["ref_logprobs"].row(1).tolist() == [0, 0, -3.5]


def test_kl_in_the_reward_enters_the_group_statistics_of_grpo(make_batch, over_responses):
    batch = make_batch([0, 0], [1.0, 1.0], lengths=[1, 1])
    old, ref = over_responses([[-1.0], [-1.0]]), over_responses([[-1.0], [-3.0]])
    algorithm = GRPO(kl_coef=0.5, kl_in="reward", kl_estimator="k2")
    credit = algorithm.credit(batch, old, ref, None, {})
    # rewards 1 and 1 - 0.5 * 2**2 / 2 = 0: half a unit from the mean, sample deviation sqrt(1/2)
    expected = 0.5 / (0.5**0.5 + 1e-6)
    advantages = credit.experience.columns["advantages"].values
    np.testing.assert_allclose(advantages[[2, 5]], [expected, -expected], rtol=1e-6)
    assert credit.metrics["kl/token_mean"] == 1.0  # always k1
    assert credit.metrics["groups/equal_fraction"] == 1.0  # of the task's rewards
    assert "ref_logprobs" not in credit.experience.columns


def test_kl_is_charged_only_for_tokens_that_bear_loss(make_batch, over_responses):
    batch = make_batch([0, 0], [1.0, 0.0], lengths=[1, 1])
    old, ref = over_responses([[-1.0], [-1.0]]), over_responses([[-1.0], [-3.0]])
    old.values[[0, 3]] = [5.0, -7.0]  # at prompt tokens
    credit = RLOO(kl_coef=0.5).credit(batch, old, ref, None, {})
    advantages = credit.experience.columns["advantages"].values
    assert advantages[[2, 5]].tolist() == [2.0, -2.0]  # rewards 1 and 0 - 0.5 * 2
    assert credit.metrics["kl/token_mean"] == 1.0


def test_a_bound_of_the_kl_holds_for_each_token_of_a_reward(make_batch, over_responses):
    batch = make_batch([0, 0], [1.0, 0.0], lengths=[1, 3])
    old = over_responses([[-1.0], [-1.0, -1.0, -9.0]])
    ref = over_responses([[-1.0], [-5.0, -1.5, -1.0]])
    credit = RLOO(kl_coef=0.5, kl_max=2.0).credit(batch, old, ref, None, {})
    advantages = credit.experience.columns["advantages"]
    # 4, 1/2 and -8 are 2, 1/2 and -2
    assert [float(row[-1]) for row in advantages] == [1.25, -1.25]
    assert credit.metrics["kl/bounded_fraction"] == 2 / 4
    assert credit.metrics["kl/token_mean"] == -3.5 / 4  # of what is not bounded


def test_the_kl_of_a_response_is_the_sum_over_its_tokens(make_batch, over_responses):
    batch = make_batch([0, 0], [1.0, 0.0], lengths=[1, 3])
    old = over_responses([[-1.0], [-1.0, -1.0, -1.0]])
    ref = over_responses([[-1.0], [-2.0, -2.0, -1.5]])
    credit = RLOO(kl_coef=0.5).credit(batch, old, ref, None, {})
    assert credit.metrics["kl/token_mean"] == 2.5 / 4
    assert credit.metrics["kl/sequence_mean"] == 2.5 / 2


def test_an_adaptive_coefficient_is_state_that_the_next_step_uses(make_batch, over_responses):
    batch = make_batch([0, 0], [1.0, 0.0], lengths=[1, 1])
    old, ref = over_responses([[-1.0], [-1.0]]), over_responses([[-1.0], [-1.2]])
    algorithm = RLOO(kl_coef=0.1, kl_target=0.05, kl_horizon=100)
    first = algorithm.credit(batch, old, ref, None, {})
    assert first.state["kl_coef"] == pytest.approx(0.1 * (1 + 0.2 * 2 / 100))  # kl 0.1: capped
    second = algorithm.credit(batch, old, ref, None, first.state)
    assert second.metrics["kl/coefficient"] == first.state["kl_coef"]
    advantage = second.experience.columns["advantages"].values[2]
    assert advantage == pytest.approx(1.0 + first.state["kl_coef"] * 0.2, rel=1e-6)


def test_a_constant_coefficient_leaves_the_state_alone(make_batch, over_responses):
    column = over_responses([[-1.0] * 3] * 2)
    batch = make_batch([0, 0], [1.0, 0.0])
    assert RLOO(kl_coef=0.1).credit(batch, column, column, None, {}).state == {}


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, (False, False, False)),
        ({"kl_coef": 0.1, "kl_in": "loss"}, (True, False, False)),
        ({"kl_coef": 0.1, "kl_in": "reward"}, (True, True, False)),
        ({"entropy_coef": 0.1}, (False, False, True)),
    ],
)
def test_only_what_the_loss_reads_is_needed(settings, needed):
    needs = GRPO(**settings).needs()
    assert (needs.reference, needs.old_logprobs, needs.entropy) == needed
    assert not needs.critic


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp", "ppo"])
def test_a_kl_in_the_loss_is_k3_unless_set(name):
    kind = algorithm_class(name)
    assert kind(kl_in="loss").kl_estimator == "k3"
    assert kind(kl_in="loss", kl_estimator="k1").kl_estimator == "k1"
    assert kind().kl_estimator == ("k3" if name == "grpo" else "k1")


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_an_error(make_batch, reward):
    with pytest.raises(ValueError, match="not finite"):
        GRPO().credit(make_batch([0, 0], [1.0, reward]), None, None, None, {})


@pytest.mark.parametrize(("kl_in", "missing"), [("loss", "ref"), ("reward", "old")])
def test_a_missing_column_is_an_error_that_names_it(make_batch, kl_in, missing):
    with pytest.raises(ValueError, match=f"needs '{missing}' logprobs"):
        GRPO(kl_coef=0.1, kl_in=kl_in).credit(make_batch([0, 0], [1, 0]), None, None, None, {})


def test_a_kl_target_without_a_kl_in_the_reward_is_an_error():
    for settings in ({"kl_coef": 0.1}, {"kl_in": "reward"}):
        with pytest.raises(UsageError, match="kl_target adapts a KL in the reward"):
            GRPO(kl_target=0.1, **settings)


@pytest.mark.parametrize("name", ["maxrl", "pass_at_k", "gdpo", "on_policy_distillation"])
def test_without_a_kl_in_the_reward_a_kl_target_is_left_out(name):
    message = f"kl_target: {algorithm_class(name).__name__} does not read it, leave it out"
    with pytest.raises(ValidationError, match=message):
        algorithm_class(name).model_validate({"kl_target": 0.1, "kl_coef": 0.1})


def test_settings_are_frozen_and_unknown_ones_are_refused():
    with pytest.raises(ValidationError, match="frozen"):
        GRPO().kl_coef = 1.0
    with pytest.raises(UsageError, match="unknown key 'clip_lower': did you mean 'clip_low'"):
        GRPO(clip_lower=0.2)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "dapo", "rloo"])
def test_old_logprobs_of_the_sampler_take_the_place_of_the_policys(
    make_batch, over_responses, name
):
    algorithm = algorithm_class(name)(old_logprobs="sampled")
    assert algorithm.needs().sampled_is_old
    batch = make_batch([0, 0, 1, 1], [0.0, 1.0, 1.0, 0.0])
    before = over_responses([[-9.0] * 3] * 4)
    old = algorithm.credit(batch, before, before, None, {}).experience.columns["old_logprobs"]
    assert old.values.tolist() == batch.sampled_logprobs.values.tolist()
    policys = algorithm_class(name)()
    assert not policys.needs().sampled_is_old
    old = policys.credit(batch, before, before, None, {}).experience.columns["old_logprobs"]
    assert old.values.tolist() == before.values.tolist()


def test_the_clip_around_the_sampler_stops_tokens_that_the_policy_has_left(make_inputs):
    """In a single update too, where the ratio to the policy before the step is 1."""
    logp, sampled, _, adv, weight, _ = drawn()
    algorithm = GRPO(clip_low=0.2, clip_high=0.3, old_logprobs="sampled")
    logprobs = leaf(logp)
    inputs = make_inputs(logprobs, weight, advantages=adv, old_logprobs=sampled)
    output = algorithm.policy_loss(inputs)
    output.loss.backward()
    r = np.exp(logp - sampled)
    free = np.where(adv > 0, r < 1.3, r > 0.8)
    assert 0 < free.sum() < len(free)
    np.testing.assert_allclose(
        logprobs.grad, weight * np.where(free, -r * adv, 0), rtol=1e-11, atol=1e-15
    )


def test_replies_are_what_stands_between_the_turns_of_the_policy_without_images(make_batch):
    """By hand: a prompt of two tokens, a turn, a reply of three with an image, a turn, a reply."""
    batch = make_batch([0, 0, 1], [1.0, 1.0, 0.0], lengths=[8, 2, 4])
    mask = batch.sequences.loss_mask.like(np.ones(20, np.bool_))
    written = "0011000110 0011 001001"
    mask = mask.like(np.array([letter == "1" for letter in written.replace(" ", "")]))
    image = PlacedImage("a", np.array([5]))
    sequences = replace(batch.sequences, loss_mask=mask, images=((image,), (), ()))
    batch = replace(batch, sequences=sequences)
    credit = GRPO(observation_coef=0.5).credit(batch, None, None, None, {})
    experience = credit.experience
    assert credit.rows.tolist() == [0, 1]  # a group of one is dropped
    assert experience.replies is not None
    assert experience.replies.row(0).tolist() == [0, 0, 0, 0, 0.5, 0, 0.5, 0, 0, 0.5]
    assert not experience.replies.row(1).any()
    assert experience.has_gradient.tolist() == [True, False]  # rewards are equal
    assert GRPO().credit(batch, None, None, None, {}).experience.replies is None
