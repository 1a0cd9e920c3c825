"""Which tokens bear the policy loss: worked by hand, and against loops over random steps."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.algorithms.registry import algorithm_class
from postgrad.algorithms.token_selection import covariances, highest, least
from postgrad.core.errors import UsageError

GRPO: Any = algorithm_class("grpo")


def test_only_the_tokens_of_the_highest_entropy_have_a_loss(
    make_batch: Any, over_responses: Any
) -> None:
    batch = make_batch([0, 0, 1, 1], [1.0, 0.0, 1.0, 1.0])
    entropy = over_responses([[3, 0.1, 2], [1, 0.2, 5], [9, 0, 0], [0, 0, 0]])
    algorithm = GRPO(top_entropy_fraction=0.34)  # 4 of 12 tokens
    credit = algorithm.credit(batch, None, None, None, {}, entropy)
    selected = [row[2:].tolist() for row in credit.experience.columns["selected"]]
    assert selected == [[1, 0, 1], [0, 0, 1], [1, 0, 0], [0, 0, 0]]
    assert credit.metrics["selection/least_entropy"] == 2.0
    assert algorithm.needs().old_entropy
    # The third response has a selected token, and an advantage of 0.
    assert credit.experience.has_gradient.tolist() == [True, True, False, False]


def test_a_token_that_is_not_selected_stays_in_the_denominator(make_inputs: Any) -> None:
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    inputs = make_inputs(logprobs, [0.5, 0.5], advantages=[2.0, 2.0], selected=[1.0, 0.0])
    output = GRPO(top_entropy_fraction=0.5).policy_loss(inputs)
    output.loss.backward()
    assert float(output.loss.detach()) == -1.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 0.0]


STEPS = st.lists(st.integers(1, 6), min_size=2, max_size=6)


@settings(max_examples=40, deadline=None)
@given(lengths=STEPS, seed=st.integers(0, 10**6), fraction=st.floats(0.01, 1.0))
def test_kl_cov_charges_the_tokens_of_the_largest_covariance(
    lengths: list[int], seed: int, fraction: float
) -> None:
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    mask = rng.random(n) < 0.7
    a, p = rng.normal(size=n).astype(np.float32), -rng.exponential(1.0, n).astype(np.float32)
    tokens = [t for t in range(n) if mask[t]]
    mean_a = math.fsum(float(a[t]) for t in tokens) / max(1, len(tokens))
    mean_p = math.fsum(float(p[t]) for t in tokens) / max(1, len(tokens))
    wanted = {t: (float(a[t]) - mean_a) * (float(p[t]) - mean_p) for t in tokens}
    products = covariances(a, p, mask)
    np.testing.assert_allclose(products[mask], list(wanted.values()), rtol=1e-9, atol=1e-12)
    assert not products[~mask].any()
    chosen = highest(products, mask, fraction)
    assert chosen.sum() == (max(1, int(round(fraction * len(tokens), 9))) if tokens else 0)
    assert not chosen[~mask].any()
    if chosen.any() and (mask & ~chosen).any():
        assert products[chosen].min() >= products[mask & ~chosen].max()


def credit_of(make_batch: Any, over_responses: Any, tickets: list[int], **knobs: Any) -> Any:
    batch = make_batch([0, 0, 1, 1], [1.0, 0.0, 1.0, 0.0])
    batch.ticket[:] = tickets
    old = over_responses([[-1, -1, -9], [-1, -9, -1], [-1, -1, -1], [-1, -1, -9]])
    algorithm = GRPO(std_norm=False, **knobs)
    assert algorithm.needs().old_logprobs
    return algorithm.credit(batch, old, None, None, {})


def test_clip_cov_takes_the_loss_of_tokens_between_its_bounds(
    make_batch: Any, over_responses: Any
) -> None:
    """Mean A 0, mean log p -3: products 1, -3 for a right token of -1 or -9; -1, 3 for a wrong."""
    knobs = {"covariance": "clip", "covariance_low": 0.5, "covariance_high": 2.0}
    every = credit_of(make_batch, over_responses, [5, 5, 6, 6], covariance_fraction=1.0, **knobs)
    selected = [row[2:].tolist() for row in every.experience.columns["selected"]]
    assert selected == [[0, 0, 1], [1, 1, 1], [0, 0, 0], [1, 1, 1]]
    assert every.metrics["selection/covariance_tokens"] == 5
    # The third response has no token left to learn from.
    assert every.experience.has_gradient.tolist() == [True, True, False, True]
    draws = [
        credit_of(
            make_batch, over_responses, [t, t, t + 1, t + 1], covariance_fraction=0.1, **knobs
        )
        for t in (5, 5, 7, 9, 11, 13)
    ]
    one_off = [draw.experience.columns["selected"].values.tolist() for draw in draws]
    assert all(values.count(0.0) == 4 * 2 + 1 for values in one_off)  # prompts, and one token
    assert one_off[0] == one_off[1]  # drawn from tickets, samples and places
    assert len({tuple(values) for values in one_off}) > 1


def test_kl_cov_s_penalty_is_the_distance_of_the_logprob_from_the_old_one(
    make_batch: Any, over_responses: Any, make_inputs: Any
) -> None:
    knobs = {"covariance": "kl", "covariance_fraction": 0.1, "covariance_kl_coef": 0.5}
    credit = credit_of(make_batch, over_responses, [5, 5, 6, 6], **knobs)
    penalised = credit.experience.columns["penalised"].values
    assert penalised.sum() == 1
    assert credit.experience.columns["selected"].values.sum() == 12
    logprobs = torch.tensor([-1.0, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    inputs = make_inputs(
        logprobs, [1.0] * 3, advantages=[0.0] * 3, old_logprobs=[-1.5, -1.5, -1.5],
        selected=[1.0] * 3, penalised=[1.0, 1.0, 0.0],
    )  # fmt: skip
    output = GRPO(**knobs).policy_loss(inputs)
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(0.5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.5, -0.5, 0.0]


def test_a_penalised_token_of_a_group_without_advantages_is_computed(
    make_batch: Any, over_responses: Any
) -> None:
    batch = make_batch([0, 0, 1, 1], [1.0, 0.0, 1.0, 1.0])
    old = over_responses([[-3, -3, -3]] * 4)
    old.values[2] = -9.0  # the only product that is not 0 is negative
    credit = GRPO(covariance="kl", covariance_fraction=1.0).credit(batch, old, None, None, {})
    assert credit.experience.has_gradient.all()


def test_settings_that_select_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="not below covariance_high"):
        GRPO(covariance="clip", covariance_low=5.0)
    with pytest.raises(UsageError, match="less than or equal to 1"):
        GRPO(top_entropy_fraction=1.5)
    assert GRPO(covariance="kl").needs().old_logprobs
    assert not GRPO(covariance="kl", old_logprobs="sampled").needs().old_logprobs


def test_the_entropy_coefficient_rises_below_the_target_and_falls_above_it(
    make_batch: Any, over_responses: Any
) -> None:
    algorithm = GRPO(
        entropy_target=0.5, entropy_coef=0.001, entropy_coef_step=0.001, entropy_coef_max=0.0025
    )
    batch = make_batch([0, 0], [1.0, 0.0], [1, 2])
    state: Any = {}
    used: list[float] = []
    after: list[float] = []
    for entropies in ([0.2, 0.2, 0.2], [0.2, 0.4, 0.3], [0.4, 0.4, 0.4], [0.9, 0.9, 0.9]):
        column = over_responses([entropies[:1], entropies[1:]])
        credit = algorithm.credit(batch, None, None, None, state, entropy=column)
        state = credit.state
        used.append(credit.metrics["entropy/coefficient"])
        after.append(state["entropy_coef"])
        at_loss = credit.experience.columns["entropy_coef"].values
        assert sorted(set(at_loss.tolist())) == pytest.approx(sorted({0.0, used[-1]}))
    assert used == pytest.approx([0.001, 0.002, 0.0025, 0.0])
    assert after == pytest.approx([0.002, 0.0025, 0.0025, 0.0015])
    assert credit.metrics["entropy/mean"] == pytest.approx(0.9)


def test_the_loss_takes_the_adapted_coefficient(make_inputs: Any) -> None:
    algorithm = GRPO(entropy_target=0.5)
    logprobs = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor([1.0, 3.0], dtype=torch.float64)
    columns = {"advantages": [0.0, 0.0], "entropy_coef": [0.25, 0.25]}
    output = algorithm.policy_loss(make_inputs(logprobs, [0.5, 0.5], entropy, **columns))
    assert output.loss.item() == -0.5
    assert algorithm.needs().entropy
    assert algorithm.needs().old_entropy
    with pytest.raises(UsageError, match="entropy_coef_max"):
        GRPO(entropy_target=0.5, entropy_coef=0.1)


def test_a_fraction_of_a_count_is_not_cut_by_the_rounding_of_floats() -> None:
    assert highest(np.arange(100.0), np.ones(100, np.bool_), 0.29).sum() == 29


def moved_credit(make_batch: Any, over_responses: Any, rows: Any, **knobs: Any) -> Any:
    """Of two groups with a right and a wrong response each, the first of equal rewards. rows: log w
    of the tokens; the sampler's logprobs are -1.
    """
    batch = make_batch([0, 0, 1, 1], [1.0, 1.0, 1.0, 0.0])
    old = over_responses([[w - 1.0 for w in row] for row in rows])
    algorithm = GRPO(std_norm=False, **knobs)
    assert algorithm.needs().old_logprobs
    return algorithm.credit(batch, old, None, None, {})


def test_the_furthest_tokens_lose_their_loss_until_the_second_moment_is_small_enough(
    make_batch: Any, over_responses: Any
) -> None:
    """Outward are 1 and 0.5 of the right response, -0.25 and -2 of the wrong one: squares 1, 1/4,
    1/16 and 4, whose mean is 85/64. Without 4 it is 7/16, without 1 too 5/32.
    """
    rows = [[9, -9, 9], [9, 9, 9], [1, 0.5, -3], [-0.25, 2, -2]]
    for most, selected in [
        (85 / 64, [[1, 1, 1], [1, 1, 1]]),
        (1.3, [[1, 1, 1], [1, 1, 0]]),
        (7 / 16, [[1, 1, 1], [1, 1, 0]]),
        (0.4, [[0, 1, 1], [1, 1, 0]]),
        (0.1, [[0, 0, 1], [1, 1, 0]]),
        (0.01, [[0, 0, 1], [0, 1, 0]]),
    ]:
        credit = moved_credit(make_batch, over_responses, rows, second_moment=most)
        left = [row[2:].tolist() for row in credit.experience.columns["selected"]]
        assert left == [[1, 1, 1], [1, 1, 1], *selected]
        assert credit.metrics["selection/second_moment"] == pytest.approx(85 / 64)
        dropped = 6 - sum(map(sum, selected))
        assert credit.metrics["selection/moved_fraction"] == pytest.approx(dropped / 12)


def test_the_second_moment_is_to_the_sampler_whatever_the_ratio_is_to(
    make_batch: Any, over_responses: Any
) -> None:
    rows = [[0, 0, 0], [0, 0, 0], [1, 0.5, -3], [-0.25, 2, -2]]
    for old_logprobs, column in [("policy", 0.0), ("sampled", -1.0)]:
        credit = moved_credit(
            make_batch, over_responses, rows, second_moment=0.4, old_logprobs=old_logprobs
        )
        columns = credit.experience.columns
        assert columns["selected"].row(2)[2:].tolist() == [0, 1, 1]
        assert columns["old_logprobs"].row(2)[2] == column
        # what is left bears a loss; a response without any is not computed
        assert credit.experience.has_gradient.tolist() == [False, False, True, True]


def test_a_step_on_its_own_samples_loses_no_token(make_batch: Any, over_responses: Any) -> None:
    credit = moved_credit(make_batch, over_responses, [[0, 0, 0]] * 4, second_moment=1e-9)
    assert credit.experience.columns["selected"].values.sum() == 12
    assert credit.metrics["selection/second_moment"] == 0.0


@settings(max_examples=60, deadline=None)
@given(
    squares=st.lists(st.sampled_from([0.0, 2**-6, 2**-4, 0.25, 1.0, 4.0]), max_size=12),
    most=st.sampled_from([2**-7, 2**-5, 0.05, 0.5, 5.0]),  # sums are exact
    seed=st.integers(0, 10**6),
)
def test_tokens_are_taken_away_as_in_the_papers_loop(
    squares: list[float], most: float, seed: int
) -> None:
    """Algorithm 1 of arXiv:2510.01161."""
    mask = np.random.default_rng(seed).random(len(squares)) < 0.7
    left = [t for t in range(len(squares)) if mask[t]]
    while left and math.fsum(squares[t] for t in left) / len(left) > most:
        left.remove(max(left, key=lambda t: squares[t]))
    chosen = least(np.array(squares), mask, most)
    assert np.flatnonzero(chosen).tolist() == left


def test_a_second_moment_of_zero_is_refused_and_of_distillation_too() -> None:
    with pytest.raises(UsageError, match="greater than 0"):
        GRPO(second_moment=0.0)
    with pytest.raises(UsageError, match="second_moment: OnPolicyDistillation does not read it"):
        algorithm_class("on_policy_distillation")(second_moment=0.04)
