"""What `rejection` drops, beside weights: held to float64 sums, however layouts are cut."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.algorithms.base import LossInputs
from postgrad.algorithms.registry import algorithm_class
from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.rollout_batch import RolloutBatch

GRPO: Any = algorithm_class("grpo")
RULES: dict[str, Any] = {
    "token": [0.8, 1.3],
    "any_token": [0.7, 1.5],
    "geometric_mean": [0.9, 1.1],
    "product": [0.6, 1.6],
    "mean_k2": 0.02,
    "mean_k3": 0.02,
    "sum_k2": 0.05,
    "sum_k3": 0.05,
    "mean_error": 1.2,
}
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def kept(statistic: str, bounds: Any, w: Sequence[float]) -> list[bool]:
    """Of each token of a response."""
    low, high = bounds if isinstance(bounds, list) else (-math.inf, bounds)
    if statistic == "token":
        return [low <= value <= high for value in w]
    if statistic == "any_token":
        return [all(low <= value <= high for value in w)] * len(w)
    each = {
        "k2": [math.log(value) ** 2 / 2 for value in w],
        "k3": [value - 1.0 - math.log(value) for value in w],
        "error": [max(value, 1.0 / value) for value in w],
        "mean": [math.log(value) for value in w],
        "product": [math.log(value) for value in w],
    }[statistic.rpartition("_")[2]]
    value = math.fsum(each) / (1 if statistic.startswith(("sum", "product")) else len(w))
    if statistic in ("geometric_mean", "product"):
        value = math.exp(value)
    return [low <= value <= high] * len(w)


def drawn(lengths: Sequence[int], seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Columns of responses of these lengths, and the weights of their tokens' losses."""
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    old = -rng.exponential(1.0, total)
    spread = np.repeat(rng.choice([0.02, 0.1, 0.4], len(lengths)), lengths)
    columns = {
        "advantages": rng.normal(size=total),
        "old_logprobs": old,
        "sampled_logprobs": old + spread * rng.normal(size=total),
    }
    return columns, rng.uniform(0.1, 1.0, total)


def inputs_of(
    lengths: Sequence[int],
    logprobs: torch.Tensor,
    columns: dict[str, np.ndarray],
    weight: np.ndarray,
    entropy: torch.Tensor | None = None,
) -> LossInputs:
    sequence = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    return LossInputs(
        logprobs, entropy, {name: torch.from_numpy(column) for name, column in columns.items()},
        sequence, len(lengths), torch.from_numpy(weight),
        torch.full((len(logprobs),), 1.0 / len(logprobs), dtype=torch.float64),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS,
    seed=st.integers(0, 10**6),
    names=st.lists(st.sampled_from(sorted(RULES)), min_size=1, max_size=3, unique=True),
    weighs=st.sampled_from(["off", "metrics", "tis", "icepop", "sequence_mask"]),
)
def test_a_token_counts_where_all_statistics_are_within_their_bounds(
    lengths: list[int], seed: int, names: list[str], weighs: str
) -> None:
    columns, weight = drawn(lengths, seed)
    w = np.exp(columns["old_logprobs"] - columns["sampled_logprobs"])
    alone = GRPO(correction=weighs)
    both = GRPO(correction=weighs, rejection={name: RULES[name] for name in names})
    inputs = inputs_of(lengths, torch.from_numpy(columns["old_logprobs"]), columns, weight)
    factor, metrics = both.correction_factor(inputs, inputs.columns["old_logprobs"])
    before, _ = alone.correction_factor(inputs, inputs.columns["old_logprobs"])
    parts = np.split(w, np.cumsum(lengths)[:-1])
    wanted = np.array([
        all(of) for part in parts
        for of in zip(*(kept(name, RULES[name], part.tolist()) for name in names), strict=True)
    ])  # fmt: skip
    np.testing.assert_allclose(factor.numpy(), before.numpy() * wanted, rtol=1e-12)
    share = float(metrics["correction/rejected_fraction"])
    assert share == pytest.approx(1.0 - wanted.mean(), abs=1e-12)
    f = factor.numpy()
    reported = both.report({name: float(value) for name, value in metrics.items()})
    effective = f.sum() ** 2 / (len(f) * (f * f).sum()) if f.any() else 0.0
    assert reported["correction/effective_fraction"] == pytest.approx(effective, rel=1e-9)
    assert "correction/factor_square" not in reported


def test_the_effective_fraction_of_weights_1_1_and_2_is_8_ninths() -> None:
    """(1 + 1 + 2)^2 / (3 * (1 + 1 + 4)) = 16 / 18; without the token of weight 2 it is 4 / 6."""
    columns = {"sampled_logprobs": -np.log([1.0, 1.0, 2.0]), "old_logprobs": np.zeros(3)}
    inputs = inputs_of([3], torch.zeros(3, dtype=torch.float64), columns, np.ones(3))
    for rejection, wanted in (({}, 16 / 18), ({"token": [0.5, 1.5]}, 4 / 6)):
        grpo = GRPO(correction="tis", rejection=rejection)
        _, metrics = grpo.correction_factor(inputs, inputs.columns["old_logprobs"])
        reported = grpo.report({name: float(value) for name, value in metrics.items()})
        assert reported["correction/effective_fraction"] == pytest.approx(wanted, rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 10**6), cut=st.integers(0, 6))
def test_cutting_an_update_between_responses_changes_neither_loss_nor_metrics(
    lengths: list[int], seed: int, cut: int
) -> None:
    columns, weight = drawn(lengths, seed)
    grpo = GRPO(correction="tis", correction_level="sequence", rejection=RULES)
    old = columns["old_logprobs"]
    moved = old + 0.1 * np.random.default_rng(seed + 1).normal(size=len(old))

    def outcome(pieces: list[slice]) -> tuple[float, dict[str, float], np.ndarray]:
        leaf = torch.tensor(moved, requires_grad=True)
        loss, metrics = torch.zeros((), dtype=torch.float64), dict[str, float]()
        ends = np.cumsum([0, *lengths])
        for piece in pieces:
            if not (of := lengths[piece]):
                continue
            at = slice(ends[piece.start or 0], ends[(piece.start or 0) + len(of)])
            part = {name: column[at] for name, column in columns.items()}
            inputs = inputs_of(of, leaf[at], part, weight[at])
            share = torch.full((len(inputs.logprobs),), 1.0 / len(old), dtype=torch.float64)
            output = grpo.policy_loss(replace(inputs, token_weight=share))
            loss = loss + output.loss
            for name, value in output.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + float(value)
        loss.backward()
        assert leaf.grad is not None
        return float(loss.detach()), grpo.report(metrics), leaf.grad.numpy()

    undivided = outcome([slice(0, None)])
    parts = outcome([slice(0, cut), slice(cut, None)])
    assert parts[0] == pytest.approx(undivided[0], rel=1e-12, abs=1e-14)
    assert parts[1] == pytest.approx(undivided[1], rel=1e-12, abs=1e-14)
    np.testing.assert_allclose(parts[2], undivided[2], rtol=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    lengths=LENGTHS,
    seed=st.integers(0, 10**6),
    correction=st.sampled_from(["tis", "icepop"]),
    level=st.sampled_from(["token", "sequence"]),
)
def test_weights_are_divided_by_their_mean_over_the_step(
    lengths: list[int], seed: int, correction: str, level: str
) -> None:
    """Of its tokens, or of its responses, which count alike; prompts have no part in it."""
    columns, weight = drawn(lengths, seed)
    log_w = columns["old_logprobs"] - columns["sampled_logprobs"]
    parts = [part.tolist() for part in np.split(log_w, np.cumsum(lengths)[:-1])]
    each = [math.fsum(p) for p in parts] if level == "sequence" else [x for p in parts for x in p]
    w = [math.exp(x) for x in each]
    if correction == "tis":
        w = [min(value, 1.25) for value in w]
    else:
        w = [value if 0.5 <= value <= 1.25 else 0.0 for value in w]
    mean = math.fsum(w) / len(w) if any(w) else 1.0
    grpo = GRPO(
        correction=correction, correction_level=level, correction_high=1.25,
        correction_normalised=True,
    )  # fmt: skip
    mask = Ragged.of([[False, False] + [True] * n for n in lengths], np.bool_)
    old, sampled = (
        mask.like(np.ones(len(mask.values))) for _ in range(2)
    )  # at prompts there is anything
    old.values[mask.values] = columns["old_logprobs"]
    sampled.values[mask.values] = columns["sampled_logprobs"]
    scale = grpo.correction_scale(old, sampled, mask).values
    np.testing.assert_allclose(scale[mask.values], 1.0 / mean, rtol=1e-6)
    assert not scale[~mask.values].any()
    columns["correction_scale"] = np.full(len(log_w), 1.0 / mean)
    inputs = inputs_of(lengths, torch.from_numpy(columns["old_logprobs"]), columns, weight)
    factor, _ = grpo.correction_factor(inputs, inputs.columns["old_logprobs"])
    spread = np.repeat(w, lengths) if level == "sequence" else np.array(w)
    np.testing.assert_allclose(factor.numpy(), spread / mean, rtol=1e-12)


def test_normalised_weights_ask_for_the_logprobs_before_the_step(
    make_batch: Callable[..., RolloutBatch], over_responses: Callable[..., Ragged]
) -> None:
    """w is 2 and 1/2, bounded to 1.5 and 1/2: their mean is 1."""
    grpo = GRPO(correction="tis", correction_high=1.5, correction_normalised=True)
    assert grpo.needs().old_logprobs
    assert not GRPO(correction="tis").needs().old_logprobs
    batch = make_batch([0, 0], [1.0, 0.0], lengths=[1, 1])
    old = over_responses([[-1.0 + math.log(2.0)], [-1.0 - math.log(2.0)]])
    columns = grpo.credit(batch, old, None, None, {}).experience.columns
    scale = columns["correction_scale"].values[[2, 5]]
    assert scale.tolist() == pytest.approx([1.0, 1.0], rel=1e-6)
    with pytest.raises(
        UsageError, match=r'correction_normalised divides .*: use one of them in place of "'
    ):
        GRPO(correction="sequence_mask", correction_normalised=True)


def test_what_is_rejected_keeps_its_kl_and_its_entropy(
    make_inputs: Callable[..., LossInputs],
) -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    entropy = torch.tensor([0.3, 0.7], dtype=torch.float64)
    inputs = make_inputs(
        logprobs, [0.5, 0.5], entropy, advantages=[1.0, 1.0], old_logprobs=[-1.0, -2.0],
        sampled_logprobs=[-1.0, -4.0], ref_logprobs=[-1.5, -2.5],
    )  # fmt: skip
    grpo = GRPO(
        rejection={"any_token": [0.5, 2.0]}, kl_coef=0.1, kl_estimator="k2", entropy_coef=0.2
    )
    output = grpo.policy_loss(inputs)
    assert float(output.loss) == pytest.approx(0.1 * 0.5**2 / 2 - 0.2 * 0.5, rel=1e-12)
    assert float(output.metrics["correction/rejected_fraction"]) == 1.0


def test_around_the_sampler_the_policy_in_the_update_is_compared_with_it(
    make_inputs: Callable[..., LossInputs],
) -> None:
    """Its clip needs no policy before the step: w is the ratio that the update has reached."""
    sampled = np.array([-1.0, -1.0, -1.0])
    now = torch.tensor(sampled + np.log([1.0, 1.5, 0.4]), requires_grad=True)
    inputs = make_inputs(
        now, [1.0] * 3, advantages=[1.0] * 3, old_logprobs=sampled, sampled_logprobs=sampled
    )
    grpo = GRPO(old_logprobs="sampled", rejection={"token": [0.5, 2.0]}, clip_high=9.0)
    output = grpo.policy_loss(inputs)
    assert float(output.loss.detach()) == pytest.approx(-1.0 - 1.5, rel=1e-12)
    output.loss.backward()
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-1.0, -1.5, 0.0], rel=1e-12)
    assert float(output.metrics["correction/ratio"]) == pytest.approx(2.9 / 3, rel=1e-12)


@pytest.mark.parametrize(
    ("rejection", "message"),
    [
        ({"token": 0.5}, r"rejection.token = 0.5: give \[low, high\]"),
        ({"mean_k3": [0.1, 0.2]}, "rejection.mean_k3 = .*: give an upper bound, one number"),
        (
            {"product": [2.0, 1.0]},
            r"rejection.product = .*: nothing would be kept .* 0 <= low < high",
        ),
        ({"mean_k2": 0.0}, "rejection.mean_k2 = 0.0: nothing would be kept"),
        (
            {"mean_error": 0.9},
            "rejection.mean_error = 0.9: nothing would be kept .* a bound above 1",
        ),
        ({"mean_k1": 0.1}, "should be 'token', 'any_token'"),
    ],
)
def test_bounds_that_are_none_are_refused(rejection: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GRPO(rejection=rejection)
