"""Aggregation weights against numbers worked by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.ragged import Ragged
from postgrad.ops.losses import entry_weights

MASK = Ragged.of([[0, 1, 1], [0, 0, 1, 1, 1, 1], [0, 1]], np.bool_)
ALL = np.arange(3)


def test_by_token_every_loss_token_of_the_update_counts_the_same():
    weights = entry_weights(MASK, ALL, "token")
    np.testing.assert_allclose(weights.values, MASK.values / 7, rtol=1e-7)
    assert weights.values.dtype == np.float32


def test_by_sequence_every_sequence_counts_the_same():
    weights = entry_weights(MASK, ALL, "sequence")
    np.testing.assert_allclose(weights.row(0), [0, 1 / 6, 1 / 6], rtol=1e-7)
    np.testing.assert_allclose(weights.row(1), [0, 0, *[1 / 12] * 4], rtol=1e-7)
    np.testing.assert_allclose(weights.row(2), [0, 1 / 3], rtol=1e-7)


def test_by_constant_a_token_counts_the_same_however_long_the_responses_are():
    weights = entry_weights(MASK, ALL, "constant", 50)
    np.testing.assert_allclose(weights.values, MASK.values / (3 * 50), rtol=1e-7)


def test_sequences_outside_the_update_weigh_nothing_and_are_in_no_denominator():
    weights = entry_weights(MASK, np.array([2, 0]), "token")
    np.testing.assert_allclose(weights.row(0), [0, 1 / 3, 1 / 3], rtol=1e-7)
    np.testing.assert_allclose(weights.row(2), [0, 1 / 3], rtol=1e-7)
    assert not weights.row(1).any()


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_a_sequence_without_loss_tokens_is_never_a_division_by_zero(aggregation):
    mask = Ragged.of([[0, 1, 1], [0, 0]], np.bool_)
    alone = entry_weights(Ragged.of([[0, 1, 1]], np.bool_), np.arange(1), aggregation, 4)
    both = entry_weights(mask, np.arange(2), aggregation, 4)
    np.testing.assert_array_equal(both.row(0), alone.row(0))
    assert both.row(1).tolist() == [0.0, 0.0]
    assert entry_weights(mask, np.array([1]), aggregation, 4).values.tolist() == [0.0] * 5


def test_constant_without_a_length_is_an_error():
    with pytest.raises(ValueError, match="needs constant_length"):
        entry_weights(MASK, ALL, "constant")


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    aggregation=st.sampled_from(["token", "sequence"]),
)
def test_the_weights_of_an_update_sum_to_one(lengths, aggregation):
    mask = Ragged.of([[0] + [1] * n for n in lengths], np.bool_)
    weights = entry_weights(mask, np.arange(len(lengths)), aggregation)
    assert weights.values.sum(dtype=np.float64) == pytest.approx(1.0, abs=1e-6)


def test_a_token_of_weight_2_counts_as_two_tokens():
    """By hand: 0.5 + 2 + 1 + 1 + 1 + 1 + 4 = 10.5."""
    token_weights = MASK.like(np.array([0, 0.5, 2, 0, 0, 1, 1, 1, 1, 0, 4], np.float32))
    weights = entry_weights(MASK, ALL, "token", token_weights=token_weights)
    np.testing.assert_allclose(weights.values, token_weights.values / 10.5, rtol=1e-7)
    by_sequence = entry_weights(MASK, ALL, "sequence", token_weights=token_weights)
    np.testing.assert_allclose(by_sequence.row(0), [0, 0.2 / 3, 0.8 / 3], rtol=1e-7)
    np.testing.assert_allclose(by_sequence.row(2), [0, 1 / 3], rtol=1e-7)
    part = entry_weights(MASK, np.array([0]), "token", token_weights=token_weights)
    np.testing.assert_allclose(part.row(0), [0, 0.2, 0.8], rtol=1e-7)


ROWS = st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=6)
BY_WEIGHT = st.sampled_from(["token", "sequence"])


@given(rows=ROWS, aggregation=BY_WEIGHT)
def test_weights_of_0_and_1_are_the_mask_bit_for_bit(rows, aggregation):
    mask = Ragged.of(rows, np.bool_)
    every = np.arange(len(rows))
    unit_weights = mask.like(mask.values.astype(np.float32))
    weighted = entry_weights(mask, every, aggregation, token_weights=unit_weights)
    np.testing.assert_array_equal(weighted.values, entry_weights(mask, every, aggregation).values)


@given(
    rows=ROWS, aggregation=BY_WEIGHT, seed=st.integers(0, 99), constant=st.floats(1e-3, 1e3),
    power=st.integers(-6, 6),
)  # fmt: skip
def test_a_constant_times_all_weights_changes_nothing(rows, aggregation, seed, constant, power):
    """Beyond rounding to float32; a power of two changes no bit."""
    mask = Ragged.of(rows, np.bool_)
    drawn_weights = np.random.default_rng(seed).uniform(0.1, 3, len(mask.values)).astype(np.float32)

    def weights(times):
        scaled = mask.like((drawn_weights * mask.values * np.float32(times)).astype(np.float32))
        every = np.arange(len(rows))
        return entry_weights(mask, every, aggregation, token_weights=scaled).values

    np.testing.assert_allclose(weights(constant), weights(1), rtol=1e-6)
    np.testing.assert_array_equal(weights(2.0**power), weights(1))
    if mask.values.any():
        assert weights(1).sum(dtype=np.float64) == pytest.approx(1.0, abs=1e-6)


PAIRS = Ragged.of([[0, 1, 1], [0, 0, 1, 1, 1, 1], [0, 1], [0, 0], [1], [1, 1]], np.bool_)


def test_by_pair_each_side_sums_to_one_over_the_pairs():
    weights = entry_weights(PAIRS, np.arange(6), "pair")
    np.testing.assert_allclose(weights.row(0), [0, 1 / 4, 1 / 4], rtol=1e-7)
    np.testing.assert_allclose(weights.row(1), [0, 0, *[1 / 8] * 4], rtol=1e-7)
    assert not weights.row(2).any()  # its partner has nothing to learn from: no pair
    np.testing.assert_allclose(weights.sums(), [1 / 2, 1 / 2, 0, 0, 1 / 2, 1 / 2], rtol=1e-7)


def test_pairs_outside_the_update_are_in_no_denominator():
    weights = entry_weights(PAIRS, np.array([5, 4]), "pair")
    np.testing.assert_allclose(weights.sums(), [0, 0, 0, 0, 1, 1], rtol=1e-7)


def test_half_a_pair_is_refused():
    with pytest.raises(ValueError, match="both of a pair in `rows`"):
        entry_weights(PAIRS, np.array([0, 1, 2]), "pair")
    with pytest.raises(ValueError, match="in twos"):
        entry_weights(MASK, ALL, "pair")
