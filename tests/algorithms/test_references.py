"""Every algorithm against float64 loops written from its paper, on random ragged batches.

The loops go sequence by sequence and token by token, and use nothing of ops/ or algorithms/.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.algorithms.base import LossInputs
from postgrad.algorithms.policy_gradient import PolicyGradient
from postgrad.algorithms.registry import ALGORITHMS, algorithm_class
from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.core.rollout_batch import RolloutBatch

RUNS = st.lists(  # groups of samples: reward, and a logprob shift for each token
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]),
            st.lists(st.floats(-3.0, 3.0), min_size=1, max_size=5),
        ),
        min_size=1,
        max_size=4,
    ),
    min_size=1,
    max_size=4,
)
PROMPT = 2


def batch_of(groups: Any) -> RolloutBatch:
    """Responses with an environment token in the middle of those of more than three tokens."""
    masks, rewards, group = [], [], []
    for number, samples in enumerate(groups):
        for reward, shifts in samples:
            mask = [1] * len(shifts)
            if len(mask) > 3:
                mask[1] = 0
            masks.append([0] * PROMPT + mask)
            rewards.append(reward)
            group.append(number)
    mask = Ragged.of(masks, np.bool_)
    rng = np.random.default_rng(len(rewards))
    return RolloutBatch(
        sequences=Sequences(
            mask.like(np.arange(len(mask.values), dtype=np.int32)), mask, np.array(group)
        ),
        sampled_logprobs=mask.like(
            np.where(mask.values, -rng.exponential(1.0, len(mask.values)), 0).astype(np.float32)
        ),
        turn_rewards=mask.like(np.zeros(len(mask.values))),
        rewards=np.array(rewards),
        ticket=np.array(group),
        sample=np.arange(len(rewards)),
        truncated=np.zeros(len(rewards), np.bool_),
    )


def column(batch: RolloutBatch, seed: int) -> Ragged:
    rng = np.random.default_rng(seed)
    mask = batch.sequences.loss_mask
    values = np.where(mask.values, -rng.exponential(1.0, len(mask.values)), 0.0)
    return mask.like(values.astype(np.float32))


def group_mean(rewards: list[float], group: list[int], i: int) -> float:
    group_rewards = [r for r, g in zip(rewards, group, strict=True) if g == group[i]]
    return (
        group_rewards[0]
        if len(set(group_rewards)) == 1
        else math.fsum(group_rewards) / len(group_rewards)
    )


def group_std(rewards: list[float], group: list[int], i: int) -> float:
    group_rewards = [r for r, g in zip(rewards, group, strict=True) if g == group[i]]
    mean = group_mean(rewards, group, i)
    return math.sqrt(math.fsum((r - mean) ** 2 for r in group_rewards) / (len(group_rewards) - 1))


def white(rows: list[list[float]], std_norm: bool) -> list[list[float]]:
    flat = [value for row in rows for value in row]
    if not flat or min(flat) == max(flat):
        return [[0.0] * len(row) for row in rows]
    mean = math.fsum(flat) / len(flat)
    var = math.fsum((value - mean) ** 2 for value in flat) / len(flat)
    scale = math.sqrt(var + 1e-8) if std_norm else 1.0
    return [[(value - mean) / scale for value in row] for row in rows]


def running(rewards: list[float], earlier: list[float], clip: float) -> list[float]:
    """Rewards by the mean and the sample deviation of the run so far, bounded at 0.5 and -clip."""
    every = [*earlier, *rewards]
    mean = math.fsum(every) / len(every)
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in every) / (len(every) - 1))
    return [min(max((r - mean) / deviation, -clip), 0.5) for r in rewards]


def of_sets(rewards: list[float], group: list[int], i: int, k: int) -> float:
    """The mean normalised reward of all sets of k samples of a group with sample i among them."""
    members = [j for j, g in enumerate(group) if g == group[i]]
    best = {
        chosen: float(any(rewards[j] > 0.5 for j in chosen))
        for chosen in itertools.combinations(members, k)
    }
    mean = math.fsum(best.values()) / len(best)
    deviation = math.sqrt(math.fsum((b - mean) ** 2 for b in best.values()) / len(best))
    if deviation == 0:
        return 0.0
    with_i = [(b - mean) / deviation for chosen, b in best.items() if i in chosen]
    return math.fsum(with_i) / len(with_i)


def against_group(name: str, rewards: list[float], group: list[int], n: list[int]) -> list[float]:
    """The advantages [S] of algorithms with a baseline of their own; n: tokens of each sample."""
    advantages: list[float] = []
    for i, reward in enumerate(rewards):
        members = [j for j, g in enumerate(group) if g == group[i]]
        mean = group_mean(rewards, group, i)
        equal = len({rewards[j] for j in members}) == 1
        if name == "opo":
            weighted = math.fsum(n[j] * rewards[j] for j in members) / sum(n[j] for j in members)
            advantages.append(0.0 if equal else reward - weighted)
        elif name == "maxrl":
            advantages.append((reward - mean) / mean if mean > 0 else 0.0)
        elif name == "pass_at_k":
            advantages.append(of_sets(rewards, group, i, 2))
        else:  # gpg
            valid = [
                g for g in group if len({rewards[j] for j, h in enumerate(group) if h == g}) > 1
            ]
            advantages.append((reward - mean) * len(group) / max(1, len(valid)))
    return advantages


def expected_advantages(
    name: str, rewards: list[float], group: list[int], charges: list[list[float]], std_norm: bool
) -> list[list[float]]:
    """One value a loss token of each kept sample."""
    n = [len(row) for row in charges]
    if name == "reinforce_pp":
        return white(
            [
                [reward - math.fsum(row[t:]) for t in range(len(row))]
                for reward, row in zip(rewards, charges, strict=True)
            ],
            std_norm,
        )
    rewards = [r - math.fsum(row) for r, row in zip(rewards, charges, strict=True)]
    centred = [r - group_mean(rewards, group, i) for i, r in enumerate(rewards)]
    if name in ("opo", "maxrl", "pass_at_k", "gpg"):
        each = against_group(name, rewards, group, n)
    elif name in ("grpo", "dapo", "gspo", "cispo", "sapo", "gmpo", "vespo") and std_norm:
        each = [c / (group_std(rewards, group, i) + 1e-6) for i, c in enumerate(centred)]
    elif name == "rloo":
        others = [
            [r for j, r in enumerate(rewards) if group[j] == group[i] and j != i]
            for i in range(len(rewards))
        ]
        each = [r - math.fsum(o) / len(o) for r, o in zip(rewards, others, strict=True)]
    else:
        each = centred
    rows = [[value] * length for value, length in zip(each, n, strict=True)]
    return white(rows, std_norm) if name == "reinforce_pp_baseline" else rows


NAMES = [name for name in ALGORITHMS if issubclass(algorithm_class(name), PolicyGradient)]


def unread(name: str) -> tuple[str, ...]:
    algorithm: Any = algorithm_class(name)
    return algorithm.unread


SHAPED = {"reward_scaling": "running", "reward_clip": [-0.75, 0.5]}
EARLIER = [0.25, -1.0, 3.0]  # rewards of the steps before
STATE = {"rewards": [3, 0.75, 8.375]}  # their mean; squares 0.25 + 3.0625 + 5.0625
KNOBS = {
    name: [
        knobs
        for knobs in ({}, {"kl_coef": 0.1}, SHAPED, {"kl_coef": 0.1, **SHAPED}, {"std_norm": False})
        if algorithm_class(name).model_fields.keys() >= knobs.keys()
        and not ({"reward_scaling", "kl_in"} & set(unread(name)) and knobs)
    ]
    for name in NAMES
    # These have tests of their own: test_gdpo.py, test_gigpo.py, test_remax.py, test_ppo.py and
    # test_on_policy_distillation.py.
    if name not in ("gdpo", "gigpo", "remax", "ppo", "on_policy_distillation")
}


@pytest.mark.parametrize("name", KNOBS)
@settings(max_examples=15, deadline=None)
@given(groups=RUNS)
def test_advantages_are_the_papers(name: str, groups: Any) -> None:
    for knobs in KNOBS[name]:
        compare_advantages(name, knobs, groups)


def compare_advantages(name: str, knobs: dict[str, Any], groups: Any) -> None:
    batch = batch_of(groups)
    kl_in = {} if "kl_in" in unread(name) else {"kl_in": "reward"}
    k = {"k": 2} if name == "pass_at_k" else {}
    algorithm: Any = algorithm_class(name)(kl_estimator="k1", **kl_in, **k, **knobs)
    kl_coef, shaped = algorithm.kl_coef, "reward_scaling" in knobs
    old, ref = column(batch, 1), column(batch, 2)
    credit = algorithm.credit(batch, old, ref, None, STATE if shaped else {})
    least = {"reinforce_pp": 1, "pass_at_k": 3}.get(name, 2)
    numbers = batch.sequences.group.tolist()
    kept = [i for i, g in enumerate(numbers) if numbers.count(g) >= least]
    assert credit.rows.tolist() == kept
    masks = [batch.sequences.loss_mask.row(i) for i in kept]
    charges = [
        [
            kl_coef * (float(old.row(i)[t]) - float(ref.row(i)[t]))
            for t in range(len(mask))
            if mask[t]
        ]
        for i, mask in zip(kept, masks, strict=True)
    ]
    rewards = [float(batch.rewards[i]) for i in kept]
    if shaped:
        rewards = running(rewards, EARLIER, 0.75)
    wanted = expected_advantages(
        name, rewards, [numbers[i] for i in kept], charges, knobs.get("std_norm", True)
    )
    advantages = credit.experience.columns["advantages"]
    for row, (mask, values) in enumerate(zip(masks, wanted, strict=True)):
        np.testing.assert_allclose(advantages.row(row)[mask], values, rtol=2e-5, atol=2e-6)
        assert not advantages.row(row)[~mask].any()
        assert credit.experience.has_gradient[row] == advantages.row(row).any()


def test_std_norm_is_a_knob_wherever_a_deviation_divides() -> None:
    undivided = {name for name in NAMES if "std_norm" not in algorithm_class(name).model_fields}
    assert undivided == {"dr_grpo", "rloo", "gpg", "opo", "maxrl", "pass_at_k", "remax"}


def inputs_of(
    lengths: list[int], logprobs: torch.Tensor, columns: dict[str, np.ndarray], weight: np.ndarray
) -> LossInputs:
    return LossInputs(
        logprobs=logprobs,
        entropy=None,
        columns={name: torch.from_numpy(values) for name, values in columns.items()},
        sequence=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        n_sequences=len(lengths),
        weight=torch.from_numpy(weight),
        token_weight=torch.full((len(logprobs),), 1.0 / len(logprobs), dtype=torch.float64),
    )


def weights(name: str, logp: list[float], old: list[float], adv: list[float]) -> list[float]:
    """What the logprob of each token of one sequence is weighted by, beside its advantage."""
    if name == "cispo":
        return [min(math.exp(p - o), 1.28) for p, o in zip(logp, old, strict=True)]
    w = math.exp(math.fsum(p - o for p, o in zip(logp, old, strict=True)))
    of_sign = [(2.0, 3.0) if a >= 0 else (3.0, 2.0) for a in adv]
    return [math.exp(rate) * w**k * math.exp(-rate * w) for k, rate in of_sign]


WEIGHTED = ("cispo", "vespo")  # their losses have another gradient than their value


def surrogate(name: str, logp: list[float], old: list[float], adv: list[float]) -> list[float]:
    """The loss of each token of one sequence."""
    if name in WEIGHTED:
        each = weights(name, logp, old, adv)
        return [-a * w * p for a, w, p in zip(adv, each, logp, strict=True)]
    if name == "gpg":
        return [-a * p for a, p in zip(adv, logp, strict=True)]
    ratios = [math.exp(p - o) for p, o in zip(logp, old, strict=True)]
    if name == "sapo":
        taus = [1.0 if a > 0 else 1.05 for a in adv]
        gates = [4 / t / (1 + math.exp(-t * (r - 1))) for t, r in zip(taus, ratios, strict=True)]
        return [-a * gate for a, gate in zip(adv, gates, strict=True)]
    if name == "gmpo":
        bounded = [
            min(p - o, 0.4) if a > 0 else max(p - o, -0.4)
            for p, o, a in zip(logp, old, adv, strict=True)
        ]
        mean = math.exp(math.fsum(bounded) / len(bounded))
        return [-a * mean for a in adv]
    low, high = {"gspo": (3e-4, 4e-4), "dapo": (0.2, 0.28)}.get(name, (0.2, 0.2))
    if name == "gspo":
        mean = math.fsum(p - o for p, o in zip(logp, old, strict=True)) / len(logp)
        ratios = [math.exp(mean)] * len(logp)
    return [
        -min(r * a, min(max(r, 1 - low), 1 + high) * a) for r, a in zip(ratios, adv, strict=True)
    ]


LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=5)
CORRECTIONS = ["off", "metrics", "tis", "icepop", "sequence_mask", "tis sequence",
               "icepop sequence"]  # fmt: skip


def correction_of(kind: str) -> dict[str, str]:
    correction, _, level = kind.partition(" ")
    return {"correction": correction, "correction_level": level or "token"}


def factor(kind: str, old: list[float], sampled: list[float]) -> list[float]:
    w = [math.exp(o - s) for o, s in zip(old, sampled, strict=True)]
    kind, _, level = kind.partition(" ")
    if level == "sequence":
        w = [math.prod(w)] * len(w)
    if kind == "tis":
        return [min(ratio, 2.0) for ratio in w]
    if kind == "icepop":
        return [ratio if 0.5 <= ratio <= 5.0 else 0.0 for ratio in w]
    if kind == "sequence_mask":
        mean = math.exp(math.fsum(math.log(ratio) for ratio in w) / len(w))
        return [float(0.99 <= mean <= 1.01)] * len(w)
    return [1.0] * len(w)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 10**6), spread=st.sampled_from([1e-4, 0.01, 0.5]))
def test_losses_and_gradients_are_the_papers(
    name: str, lengths: list[int], seed: int, spread: float
) -> None:
    for correction in CORRECTIONS:
        compare_with_paper(name, correction, lengths, seed, spread)


def compare_with_paper(
    name: str, correction: str, lengths: list[int], seed: int, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    logp = -rng.exponential(1.0, total)
    old = logp + rng.normal(0, spread, total)
    sampled = old + rng.normal(0, spread, total)
    adv, weight = rng.normal(size=total), rng.uniform(0.1, 1.0, total)
    columns = {"advantages": adv, "old_logprobs": old, "sampled_logprobs": sampled}
    algorithm: Any = algorithm_class(name)(**correction_of(correction))

    def wanted(values: np.ndarray) -> float:
        loss_sum, start = 0.0, 0
        for n in lengths:
            part = slice(start, start + n)
            losses = surrogate(name, list(values[part]), list(old[part]), list(adv[part]))
            factors = factor(correction, list(old[part]), list(sampled[part]))
            loss_sum += math.fsum(
                w * f * token_loss
                for w, f, token_loss in zip(weight[part], factors, losses, strict=True)
            )
            start += n
        return loss_sum

    leaf = torch.tensor(logp, requires_grad=True)
    output = algorithm.policy_loss(inputs_of(lengths, leaf, columns, weight))
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(wanted(logp), rel=1e-10, abs=1e-12)
    assert leaf.grad is not None
    if name in WEIGHTED:  # the weight is not learned from
        factors, each, start = [], [], 0
        for n in lengths:
            part = slice(start, start + n)
            factors += factor(correction, list(old[part]), list(sampled[part]))
            each += weights(name, list(logp[part]), list(old[part]), list(adv[part]))
            start += n
        slope = -weight * np.array(factors) * adv * np.array(each)
        np.testing.assert_allclose(leaf.grad, slope, rtol=1e-9)
        return
    step = 1e-7
    for t in range(total):
        up, down = logp.copy(), logp.copy()
        up[t] += step
        down[t] -= step
        slope = (wanted(up) - wanted(down)) / (2 * step)
        one_sided = (wanted(up) - wanted(logp)) / step, (wanted(logp) - wanted(down)) / step
        if abs(one_sided[0] - one_sided[1]) < 1e-5:  # not at a corner of the clip
            assert float(leaf.grad[t]) == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_the_correction_s_kl_is_that_of_the_sampler_from_the_learner(
    make_inputs: Callable[..., LossInputs],
) -> None:
    """Ten tokens exactly as a sampler of 0.8 and 0.2 draws them; the learner holds 0.5 and 0.5."""
    sampled = np.log([0.8] * 8 + [0.2] * 2)
    inputs = make_inputs(
        torch.from_numpy(np.log(np.full(10, 0.5))), [0.1] * 10,
        advantages=[1.0] * 10, sampled_logprobs=sampled,
    )  # fmt: skip
    grpo: Any = algorithm_class("grpo")
    metrics = grpo(correction="metrics").policy_loss(inputs).metrics
    of_sampler = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)  # 0.19274...
    assert float(metrics["correction/kl"]) == pytest.approx(of_sampler, rel=1e-12)
    assert float(metrics["correction/ratio"]) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize(
    ("correction", "bounds", "factors"),
    [
        # w of tokens 2, 1/2, 2 and 1/8, 1; their products 2 and 1/8
        ("tis", {"correction_high": 1.5}, [1.5, 1.5, 1.5, 0.125, 0.125]),
        ("tis", {"correction_low": 0.25, "correction_high": 3.0}, [2.0, 2.0, 2.0, 0.25, 0.25]),
        ("icepop", {"correction_low": 0.5, "correction_high": 3.0}, [2.0, 2.0, 2.0, 0.0, 0.0]),
        ("icepop", {"correction_low": 0.0, "correction_high": 1.0}, [0.0, 0.0, 0.0, 0.125, 0.125]),
    ],
)
def test_a_sequence_is_weighed_by_the_product_of_its_tokens_weights(
    make_inputs: Callable[..., LossInputs],
    correction: str,
    bounds: dict[str, float],
    factors: list[float],
) -> None:
    w = np.array([2.0, 0.5, 2.0, 0.125, 1.0])
    inputs = make_inputs(
        torch.zeros(5, dtype=torch.float64), [1.0] * 5, token_weight=1.0, advantages=[-1.0] * 5,
        old_logprobs=[0.0] * 5, sampled_logprobs=-np.log(w),
    )  # fmt: skip
    inputs = replace(inputs, sequence=torch.tensor([0, 0, 0, 1, 1]), n_sequences=2)
    grpo: Any = algorithm_class("grpo")
    algorithm = grpo(correction=correction, correction_level="sequence", **bounds)
    factor, metrics = algorithm.correction_factor(inputs, inputs.columns["old_logprobs"])
    assert factor.tolist() == pytest.approx(factors, rel=1e-12)
    assert float(metrics["correction/zeroed_fraction"]) == factors.count(0.0)
    by_token = grpo(correction=correction, **bounds)
    token_factors, _ = by_token.correction_factor(inputs, inputs.columns["old_logprobs"])
    assert token_factors.tolist() != pytest.approx(factors, rel=1e-3)


def test_kl_old_is_that_of_the_policy_before_the_step_from_the_one_that_learns(
    make_inputs: Callable[..., LossInputs],
) -> None:
    inputs = make_inputs(
        torch.from_numpy(np.log(np.full(10, 0.5))), [0.1] * 10,
        advantages=[1.0] * 10, old_logprobs=np.log([0.8] * 8 + [0.2] * 2),
    )  # fmt: skip
    grpo: Any = algorithm_class("grpo")
    kl_old = float(grpo().policy_loss(inputs).metrics["policy/kl_old"])
    assert kl_old == pytest.approx(0.8 * math.log(1.6) + 0.2 * math.log(0.4), rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_extreme_ratios_leave_loss_and_gradient_finite(
    name: str, make_inputs: Callable[..., LossInputs]
) -> None:
    logprobs = torch.tensor([0.0, -900.0, -1.0], dtype=torch.float64, requires_grad=True)
    inputs = make_inputs(
        logprobs, [1.0] * 3, advantages=[-1.0, 1.0, 1.0],
        old_logprobs=[-900.0, 0.0, -1.0], sampled_logprobs=[0.0, -900.0, 0.0],
    )  # fmt: skip
    for correction in CORRECTIONS:
        algorithm: Any = algorithm_class(name)(**correction_of(correction))
        output = algorithm.policy_loss(inputs)
        output.loss.backward()
        assert math.isfinite(float(output.loss.detach()))
        assert logprobs.grad is not None
        assert torch.isfinite(logprobs.grad).all()


def test_dual_clip_bounds_what_a_punished_token_can_push(
    make_inputs: Callable[..., LossInputs],
) -> None:
    grpo: Any = algorithm_class("grpo")
    logprobs = torch.tensor([2.0, 2.0], dtype=torch.float64, requires_grad=True)
    inputs = make_inputs(logprobs, [1.0, 1.0], advantages=[-1.0, -1.0], old_logprobs=[0.0, 1.9])
    assert float(grpo().policy_loss(inputs).loss.detach()) == pytest.approx(
        math.exp(2.0) + math.exp(0.1)
    )
    output = grpo(dual_clip=3.0).policy_loss(inputs)
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(3.0 + math.exp(0.1))
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, math.exp(0.1)])


@pytest.mark.parametrize(("low", "least"), [(1.0, 0.5), (0.2, 0.8)])
def test_a_lower_bound_of_cispo_is_of_the_weight_alone(low: float, least: float) -> None:
    """Ratios of 0.5 and 2, both signs of A: weights of `least` and 1.28, and no gradient lost."""
    ratios, advantages = np.array([0.5, 2.0, 0.5, 2.0]), np.array([1.0, 1.0, -1.0, -1.0])
    logprobs = torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True)
    columns = {"advantages": advantages, "old_logprobs": -1.0 - np.log(ratios)}
    inputs = inputs_of([4], logprobs, columns, np.ones(4))
    cispo: Any = algorithm_class("cispo")
    cispo(clip_low=low).policy_loss(inputs).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-least, -1.28, least, 1.28])


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("sapo", {"clip_high": 0.28}, "clip_high: SAPO does not read it"),
        ("gpg", {"dual_clip": 3.0}, "dual_clip: GPG does not read it"),
        *(
            (name, {"clip_by": "probability"}, "clip_by: .* does not read it")
            for name in ("gspo", "gmpo", "cispo", "sapo", "vespo", "gpg")
        ),
        ("pass_at_k", {"reward_scaling": "running"}, "PassAtK does not read it"),
        ("grpo", {"kl_corrected": True}, "of a KL in the loss"),
        ("cispo", {"clip_low": 1.2}, "less than or equal to 1"),
        ("cispo", {"dual_clip": 3.0}, "nothing for dual_clip to do, leave it out"),
        ("grpo", {"dual_clip": 1.0}, "greater than 1"),
        ("grpo", {"correction_high": 2.0}, r"correction = .off. has none"),
        (
            "grpo",
            {"correction": "tis", "correction_low": 2.5},
            "correction_low = 2.5 is not below correction_high = 2: .* raise the second",
        ),
        (
            "grpo",
            {"correction": "sequence_mask", "correction_level": "sequence"},
            "is of correction",
        ),
        ("grpo", {"correction_level": "sequence"}, "is of correction"),
        ("grpo", {"correction": "icepop", "correction_low": 9.0}, "not below correction_high"),
    ],
)
def test_knobs_that_would_do_nothing_are_refused(
    name: str, knobs: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        algorithm_class(name)(**knobs)


@pytest.mark.parametrize("level", [0.3, 1.0])
def test_gspo_by_token_has_the_gradient_of_gspo_where_advantages_are_equal(level: float) -> None:
    """And, where they are not, that of each token's own logprob times the response's ratio."""
    logp, old = np.array([-1.0, -2.0, -0.5]), np.array([-1.2, -1.9, -0.6])
    gspo: Any = algorithm_class("gspo")
    ratio = math.exp((0.2 - 0.1 + 0.1) / 3)

    def gradient(by_token: bool, adv: list[float]) -> list[float]:
        leaf = torch.tensor(logp, requires_grad=True)
        columns = {"advantages": np.array(adv), "old_logprobs": old}
        inputs = inputs_of([3], leaf, columns, np.full(3, 1 / 3))
        gspo(by_token=by_token, clip_high=0.5).policy_loss(inputs).loss.backward()
        assert leaf.grad is not None
        return leaf.grad.tolist()

    assert gradient(True, [level] * 3) == pytest.approx(gradient(False, [level] * 3), rel=1e-12)
    wanted = [-a * ratio / 3 for a in (level, 0.0, -level)]
    assert gradient(True, [level, 0.0, -level]) == pytest.approx(wanted, rel=1e-12)


def test_a_corrected_kl_has_the_gradient_of_the_kl_wherever_samples_come_from() -> None:
    """Two tokens, p = (x, 1 - x), sampled as often as the old policy draws them: the mean gradient
    is that of KL(policy || reference), which without the correction it is not.
    """
    old, ref = np.array([0.8, 0.2]), np.array([0.5, 0.5])
    logit = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    p = torch.stack([logit.sigmoid(), (-logit).sigmoid()])
    (exact,) = torch.autograd.grad((p * (p.log() - torch.tensor(ref).log())).sum(), logit)
    grpo: Any = algorithm_class("grpo")

    def gradient(corrected: bool) -> float:
        columns = {
            "advantages": [0.0, 0.0],
            "old_logprobs": np.log(old),
            "ref_logprobs": np.log(ref),
        }
        logprobs = torch.stack([logit.sigmoid(), (-logit).sigmoid()]).log()
        inputs = inputs_of([1, 1], logprobs, {n: np.array(c) for n, c in columns.items()}, old)
        loss = grpo(kl_coef=1.0, kl_corrected=corrected).policy_loss(inputs).loss
        return float(torch.autograd.grad(loss, logit)[0])

    assert gradient(True) == pytest.approx(float(exact), rel=1e-9)
    assert gradient(False) != pytest.approx(float(exact), rel=0.05)


@pytest.mark.parametrize("corrected", [False, True])
def test_a_token_whose_kl_is_at_its_bound_has_no_gradient_of_it(corrected: bool) -> None:
    """d = -3, -1, 1: k3 is 16.1, e - 2 and 1 / e; with the correction times the ratios e, 1 and 1,
    and of the ratio's gradient too.
    """
    logp = torch.tensor([-4.0, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    old, ref = np.array([-5.0, -2.0, -1.0]), np.array([-1.0, -1.0, -2.0])
    columns = {"advantages": np.zeros(3), "old_logprobs": old, "ref_logprobs": ref}
    grpo: Any = algorithm_class("grpo")
    algorithm = grpo(kl_coef=1.0, kl_max=10.0, kl_corrected=corrected, aggregation="token")
    output = algorithm.policy_loss(inputs_of([1, 1, 1], logp, columns, np.ones(3)))
    (gradient,) = torch.autograd.grad(output.loss, logp)
    inner = [math.e - 2, 1 / math.e]
    expected = [0.0, 1 - math.e + corrected * inner[0], 1 - 1 / math.e + corrected * inner[1]]
    np.testing.assert_allclose(gradient, np.array(expected), rtol=1e-12)
    assert float(output.loss.detach()) == pytest.approx(10 + sum(inner))
    assert float(output.metrics["policy/kl_bounded"]) == pytest.approx(1 / 3, rel=1e-6)


def test_bad_responses_that_the_policy_has_left_are_dropped() -> None:
    """Sampled at -1 and now at -1.6 or -1.2 nats a token; the threshold is 0.5."""
    logp = torch.tensor([-1.6, -1.6, -1.6, -1.2, -1.2], dtype=torch.float64, requires_grad=True)
    adv = np.array([1.0, -1.0, -1.0, -1.0, -1.0])
    columns = {"advantages": adv, "sampled_logprobs": np.full(5, -1.0)}
    grpo: Any = algorithm_class("grpo")
    output = grpo(off_policy_threshold=0.5).policy_loss(
        inputs_of([1, 2, 2], logp, columns, np.ones(5))
    )
    output.loss.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [-1.0, 0.0, 0.0, 1.0, 1.0]
    assert float(output.metrics["correction/zeroed_fraction"]) == pytest.approx(0.4)
