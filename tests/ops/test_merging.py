"""Merges of tensors, against numbers worked by hand and PEFT's functions for adapters."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils import merge_utils
from torch import Tensor

from postgrad.ops.merging import dropped, elected, linear, slerp, trimmed


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_linear_merge_is_a_weighted_sum_or_mean() -> None:
    first, second = f64(1, 2), f64(5, -2)
    assert linear([first, second], [1, 3], normalize=True).tolist() == [4.0, -1.0]
    assert linear([first, second], [1, 3], normalize=False).tolist() == [16.0, -4.0]


def test_a_spherical_merge_walks_on_the_arc() -> None:
    first, second = f64(2, 0), f64(0, 2)
    half = slerp(first, second, 0.5)
    torch.testing.assert_close(half, f64(math.sqrt(2), math.sqrt(2)))
    third = slerp(first, second, 1 / 3)
    torch.testing.assert_close(third, f64(2 * math.cos(math.pi / 6), 2 * math.sin(math.pi / 6)))
    torch.testing.assert_close(slerp(first, second, 0.0), first)
    torch.testing.assert_close(slerp(first, second, 1.0), second)


@pytest.mark.parametrize(
    ("first", "second"), [((1, 2), (2, 4)), ((0, 0), (2, 4)), ((1, 1), (-1, -1))]
)
def test_parallel_vectors_and_zero_are_merged_on_a_straight_line(
    first: tuple[float, ...], second: tuple[float, ...]
) -> None:
    merged = slerp(f64(*first), f64(*second), 0.25)
    torch.testing.assert_close(merged, 0.75 * f64(*first) + 0.25 * f64(*second))


def test_trimming_keeps_the_largest_changes() -> None:
    delta = f64(0.5, -3, 0.1, 2).view(2, 2)
    assert trimmed(delta, 0.5).tolist() == [[0, -3], [0, 2]]
    assert trimmed(delta, 0.01).tolist() == [[0, -3], [0, 0]]  # one at least
    assert trimmed(delta, 1.0) is delta


def test_the_sign_of_the_larger_sum_wins_and_the_others_are_left_out() -> None:
    first, second, third = f64(1, -4, 0, 2), f64(3, 1, 0, -2), f64(-2, 1, 5, 0)
    weights = [1.0, 1.0, 1.0]
    # sums 2, -2, 5, 0: means of (1, 3), of (-4), of (5), of nothing
    assert elected([first, second, third], weights, normalize=True).tolist() == [2, -4, 5, 0]
    assert elected([first, second, third], weights, normalize=False).tolist() == [4, -4, 5, 0]
    # with weights 1, 1, 4: sums -4, 1, 20, 0
    assert elected([first, second, third], [1, 1, 4], normalize=True).tolist() == [-2, 1, 5, 0]


@given(st.integers(0, 10**6), st.integers(2, 4), st.sampled_from([0.2, 0.5, 0.8]))
@settings(max_examples=25, deadline=None)
def test_without_weights_the_election_is_pefts(seed: int, models: int, density: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    deltas = [torch.randn(6, 5, generator=generator, dtype=torch.float64) for _ in range(models)]
    ours = elected([trimmed(d, density) for d in deltas], [1.0] * models, normalize=True)
    theirs = merge_utils.ties(deltas, torch.ones(models, dtype=torch.float64), density)
    torch.testing.assert_close(ours, theirs)


def test_dropping_keeps_a_share_and_the_mean() -> None:
    delta = torch.ones(200, 500, dtype=torch.float64)
    kept = dropped(delta, 0.3, seed=1, name="a", model=0)
    assert set(np.unique(kept.numpy()).tolist()) == {0.0, 1 / 0.3}
    error = math.sqrt(0.3 * 0.7 / delta.numel())
    assert abs(float((kept != 0).double().mean()) - 0.3) < 4 * error
    assert dropped(delta, 1.0, seed=1, name="a", model=0) is delta


def test_what_is_dropped_depends_on_seed_name_and_model_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delta = torch.randn(40, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first = dropped(delta, 0.5, seed=1, name="a", model=0)
    others = [(2, "a", 0), (1, "b", 0), (1, "a", 1)]
    assert not any(torch.equal(dropped(delta, 0.5, *other), first) for other in others)
    monkeypatch.setattr("postgrad.ops.merging.DRAWN", 33)
    assert torch.equal(dropped(delta, 0.5, seed=1, name="a", model=0), first)
