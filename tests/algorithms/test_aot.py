"""AOT and WPO against loops in float64 written from their papers."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.layouts import split, total, undivided
from postgrad.algorithms.registry import algorithm_class
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences

LENGTHS = [2, 3, 1, 4, 3, 1, 2, 2]  # of answers: chosen, rejected, ...


def drawn(seed: int, empty: bool = False) -> tuple[Sequences, np.ndarray, np.ndarray]:
    """Pairs, and logprobs of policy and reference over their tokens. empty: one has no loss."""
    rows = [[False] + [True] * n for n in LENGTHS]
    if empty:
        rows[3] = [False] * 5
    mask = Ragged.of(rows, np.bool_)
    rng = np.random.default_rng(seed)
    logprobs, ref = (-rng.exponential(1.0, len(mask.values)) for _ in range(2))
    tokens = mask.like(np.zeros(len(mask.values), np.int32))
    group = np.arange(len(LENGTHS)) // 2
    return Sequences(tokens, mask, group), logprobs, ref.astype(np.float32)


def prepare(
    name: str, sequences: Sequences, ref: np.ndarray, own_logprobs: list[np.ndarray], **knobs: Any
):
    algorithm: Any = algorithm_class(name)(**knobs)
    labels = np.arange(len(sequences)) % 2 == 0
    experience = algorithm.experience(sequences, labels, sequences.tokens.like(ref), None)
    assert len(own_logprobs) == len(algorithm.needs().own_temperatures)
    return algorithm, algorithm.with_own(
        experience, [sequences.tokens.like(o) for o in own_logprobs]
    )


def answer_sums(sequences: Sequences, values: np.ndarray) -> list[float]:
    column, mask = sequences.tokens.like(values), sequences.loss_mask
    return [math.fsum(column.row(i)[mask.row(i)].tolist()) for i in range(len(mask))]


def sorted_loss(policy: list[float], ref: list[float], *, paired: bool, beta: float) -> float:
    pairs = range(0, len(policy), 2)
    if paired:
        first = sorted(policy[i] - policy[i + 1] for i in pairs)
        second = sorted(ref[i] - ref[i + 1] for i in pairs)
    else:
        first = sorted(policy[i] - ref[i] for i in pairs)
        second = sorted(policy[i + 1] - ref[i + 1] for i in pairs)
    costs = [math.log1p(math.exp(-beta * (a - b))) for a, b in zip(first, second, strict=True)]
    return math.fsum(costs) / len(costs)


@given(st.booleans(), st.integers(0, 50))
def test_aot_compares_what_has_the_same_place_when_both_sides_are_sorted(paired: bool, seed: int):
    sequences, logprobs, ref = drawn(seed)
    algorithm, experience = prepare("aot", sequences, ref, [logprobs], paired=paired, beta=0.4)
    loss, gradient, _ = total(algorithm, experience, split(experience, seed, of=2), logprobs)

    def of(values: np.ndarray) -> float:
        sums = answer_sums(sequences, values), answer_sums(sequences, ref)
        return sorted_loss(*sums, paired=paired, beta=0.4)

    assert loss == pytest.approx(of(logprobs), rel=1e-5)
    for place in np.flatnonzero(sequences.loss_mask.values)[::3]:
        moved = [logprobs + d * (np.arange(len(logprobs)) == place) for d in (1e-6, -1e-6)]
        assert gradient[place] == pytest.approx((of(moved[0]) - of(moved[1])) / 2e-6, abs=2e-6)


def test_a_pair_without_loss_tokens_is_not_among_the_sorted_ones() -> None:
    sequences, logprobs, ref = drawn(0, empty=True)
    algorithm, experience = prepare("aot", sequences, ref, [logprobs])
    assert not experience.has_gradient[2:4].any()
    loss, _, _ = total(algorithm, experience, undivided(experience), logprobs)
    sums = [answer_sums(sequences, values) for values in (logprobs, ref)]
    without = [[each for i, each in enumerate(of) if i not in (2, 3)] for of in sums]
    assert loss == pytest.approx(sorted_loss(*without, paired=True, beta=0.1), rel=1e-5)


def test_wpo_weighs_pairs_by_p_over_the_sum_of_squares() -> None:
    sequences, _, ref = drawn(3)
    rng = np.random.default_rng(1)
    logits = rng.normal(0.0, 2.0, (len(ref), 7))
    token = rng.integers(0, 7, len(ref))
    at = np.arange(len(ref))
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    warm = log_p[at, token]
    sharp = (2 * logits - np.log(np.exp(2 * logits).sum(-1, keepdims=True)))[at, token]
    algorithm, experience = prepare("wpo", sequences, ref, [warm, sharp], beta=0.3)
    loss, _, _ = total(algorithm, experience, undivided(experience), warm)

    aligned = answer_sums(sequences, warm - np.log(np.square(np.exp(log_p)).sum(-1)))
    h = np.array(answer_sums(sequences, warm)) - np.array(answer_sums(sequences, ref))
    weights, costs = [], []
    for i in range(0, len(LENGTHS), 2):
        mean = aligned[i] / LENGTHS[i] + aligned[i + 1] / LENGTHS[i + 1]
        weights.append(min(1.0, math.exp(mean)))
        costs.append(weights[-1] * math.log1p(math.exp(-0.3 * (h[i] - h[i + 1]))))
    assert min(weights) < 0.9
    assert loss == pytest.approx(sum(costs) / len(costs), rel=1e-5)
