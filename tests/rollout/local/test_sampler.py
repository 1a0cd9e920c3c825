"""Choosing tokens, against hand-worked numbers, float64 NumPy and transformers' own filters."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from helpers.dispatched import Recorded
from postgrad.core import seeds
from postgrad.rollout.local import sampler
from postgrad.rollout.local.sampler import (
    UNIT,
    Kind,
    Knobs,
    counted_sums,
    mask_bytes,
    masks_of,
    running_sums,
    uniform,
)


@pytest.fixture(params=["as on a CPU", "as on CUDA"], scope="module", autouse=True)
def _sums(request):
    """Every test runs with both kinds of running sums."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "as on CUDA":
            patch.setattr(sampler, "running_sums", counted_sums)
        yield


def knobs(n, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """As a request has them, in NumPy."""
    return (
        np.full(n, temperature, np.float32),
        np.full(n, top_k, np.int64),
        np.full(n, top_p, np.float32),
        np.full(n, min_p, np.float32),
    )


def sample(logits, settings, numbers, kind=None):
    """Tokens and logprobs in NumPy. settings: as `knobs` gives them."""
    wide = (
        torch.from_numpy(s.astype(np.int64 if i == 1 else float)) for i, s in enumerate(settings)
    )
    kind = kind or Kind.of(*settings)
    drawn = sampler.sample(logits, Knobs(*wide), torch.from_numpy(numbers), kind)
    return drawn[0].numpy(), drawn[1].numpy()


def masks(logits, settings, allowed=None):
    """The sampling masks as lists of ids. allowed: as in Knobs."""
    wide = (
        torch.from_numpy(s.astype(np.int64 if i == 1 else float)) for i, s in enumerate(settings)
    )
    kind = Kind.of(*settings)._replace(keeps=True, masked=allowed is not None)
    left = torch.full((len(logits), mask_bytes(logits.shape[1])), 255, dtype=torch.uint8)
    middle = torch.full((len(logits),), 0.5, dtype=torch.float64)
    sampler.sample(logits.clone(), Knobs(*wide, allowed), middle, kind, left)
    return [row.tolist() for row in masks_of(left.numpy())]


def logits_of(*probabilities):
    return torch.tensor([probabilities]).log()


@pytest.mark.parametrize(
    ("u", "token"), [(0.0, 0), (0.0999, 0), (0.1001, 1), (0.2999, 1), (0.61, 3), (1 - 2**-53, 3)]
)
def test_a_token_is_the_first_whose_running_probability_exceeds_the_number(u, token):
    tokens, logprobs = sample(logits_of(0.1, 0.2, 0.3, 0.4), knobs(1), np.array([u]))
    assert tokens.tolist() == [token]
    assert logprobs[0] == pytest.approx(np.log([0.1, 0.2, 0.3, 0.4][token]), abs=1e-6)


def test_temperature_two_takes_square_roots_of_probabilities():
    # sqrt(0.64) : sqrt(0.36) = 0.8 : 0.6, so 4/7 and 3/7
    tokens, logprobs = sample(
        logits_of(0.64, 0.36).repeat(2, 1), knobs(2, temperature=2.0), np.array([0.57, 0.572])
    )
    assert tokens.tolist() == [0, 1]
    np.testing.assert_allclose(logprobs, np.log([4 / 7, 3 / 7]), atol=1e-6)


def test_evenly_spread_numbers_give_every_token_its_share():
    p = np.array([0.05, 0.5, 0.15, 0.3])
    n = 1000
    tokens, _ = sample(
        torch.tensor(p, dtype=torch.float32).log().repeat(n, 1), knobs(n), (np.arange(n) + 0.5) / n
    )
    np.testing.assert_allclose(np.bincount(tokens, minlength=4), p * n, atol=1)


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        ({"top_k": 2}, [0.0, 0.0, 3 / 7, 4 / 7]),
        ({"top_p": 0.65}, [0.0, 0.0, 3 / 7, 4 / 7]),
        ({"top_p": 0.39}, [0.0, 0.0, 0.0, 1.0]),
        ({"min_p": 0.45}, [0.0, 2 / 9, 3 / 9, 4 / 9]),
        ({"top_k": 3, "top_p": 0.7}, [0.0, 0.0, 3 / 7, 4 / 7]),  # 4/9 + 3/9 > 0.7
        ({"top_k": 3, "top_p": 0.8, "min_p": 0.6}, [0.0, 0.0, 3 / 7, 4 / 7]),
    ],
)  # fmt: skip
def test_filters_leave_and_renormalise(setting, left):
    n = 700
    tokens, logprobs = sample(
        logits_of(0.1, 0.2, 0.3, 0.4).repeat(n, 1), knobs(n, **setting), (np.arange(n) + 0.5) / n
    )
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / n, left, atol=2 / n)
    np.testing.assert_allclose(logprobs, np.log(np.array(left)[tokens]), atol=1e-6)


def warped(logits, top_k, top_p, min_p, nudge=1.0):
    """Logits [N, V] that transformers leaves; it multiplies both limits with `nudge`."""
    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    if top_k:
        logits = TopKLogitsWarper(top_k)(ids, logits)
    if top_p < 1.0:
        logits = TopPLogitsWarper(top_p * nudge)(ids, logits)
    if min_p:
        logits = MinPLogitsWarper(min_p * nudge)(ids, logits)
    return logits


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
)
def test_filters_are_those_of_transformers(seed, top_k, top_p, min_p, temperature):
    torch.manual_seed(seed)
    logits = torch.randn(8, 20) * 2
    uniform = np.random.default_rng(seed).random(8)
    exact = logits.double() / temperature
    left = warped(exact, top_k, top_p, min_p)
    # At a limit, or of two equal logits, rounding decides which tokens are left.
    assume(torch.equal(warped(exact, top_k, top_p, min_p, 1.0 - 1e-6), left))
    assume(torch.equal(warped(exact, top_k, top_p, min_p, 1.0 + 1e-6), left))
    assume(float(exact.sort(-1).values.diff().min()) > 1e-6)
    expected = torch.softmax(left, -1).numpy()
    tokens, logprobs = sample(logits, knobs(8, temperature, top_k, top_p, min_p), uniform)
    rows = np.arange(8)
    np.testing.assert_allclose(np.exp(logprobs), expected[rows, tokens], atol=1e-5)
    below = np.array([expected[row, :token].sum() for row, token in enumerate(tokens)])
    assert np.all(below <= uniform + 1e-5)
    assert np.all(uniform <= below + expected[rows, tokens] + 1e-5)


def test_greedy_rows_take_the_best_token_with_its_logprob_at_temperature_one():
    mixed = (
        np.array([0.0, 1.0], np.float32),
        np.array([2, 0]),
        np.array([0.5, 1.0], np.float32),
        np.zeros(2, np.float32),
    )
    tokens, logprobs = sample(logits_of(0.2, 0.5, 0.3).repeat(2, 1), mixed, np.array([0.99, 0.99]))
    assert tokens.tolist() == [1, 2]
    np.testing.assert_allclose(logprobs, np.log([0.5, 0.3]), atol=1e-6)


def test_a_token_of_no_probability_is_never_drawn():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]])
    tokens, _ = sample(logits, knobs(1), np.array([1 - 2**-53]))
    assert tokens.tolist() == [1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_a_nan_logprob_and_leaves_its_neighbours_alone(bad):
    logits = torch.tensor([[0.0, bad, 1.0], [0.0, 0.0, 0.0]])
    _, logprobs = sample(logits, knobs(2), np.array([0.5, 0.5]))
    assert np.isnan(logprobs[0])
    assert logprobs[1] == pytest.approx(-np.log(3))


def test_rows_processed_in_chunks_draw_the_same_tokens(monkeypatch):
    torch.manual_seed(0)
    logits, uniform = torch.randn(7, 11), np.random.default_rng(0).random(7)
    unchunked = sample(logits.clone(), knobs(7, top_p=0.8), uniform)
    monkeypatch.setattr(sampler, "CHUNK_VALUES", 22)
    parts = sample(logits.clone(), knobs(7, top_p=0.8), uniform)
    np.testing.assert_array_equal(unchunked[0], parts[0])
    np.testing.assert_array_equal(unchunked[1], parts[1])


@given(st.lists(st.floats(0.0, 2.0**-5, width=32), min_size=1, max_size=60))
def test_counted_sums_are_exact_sums_of_weights_rounded_up_to_whole_units(weights):
    units, total = [], 0
    for weight in weights:
        total += math.ceil(Fraction(weight) / Fraction(UNIT))
        units.append(total)
    sums = counted_sums(torch.tensor([weights]))[0]
    assert [Fraction(value) / Fraction(UNIT) for value in sums.tolist()] == units


def test_a_stretch_of_weights_below_a_unit_is_drawn_from_by_what_it_holds():
    # float32 holds 2**-60; of such a stretch only the token with a weight may be drawn.
    weights = torch.zeros(1, 128)
    weights[0, 70] = 2.0**-60
    token, _ = sampler._draw(weights, torch.tensor([[0.0]], dtype=torch.float64))
    assert token.tolist() == [[70]]


def test_no_running_sum_of_floats_is_made_on_other_devices_than_a_cpu():
    with Recorded() as ops:
        for dtype in (torch.float32, torch.float64):
            running_sums(torch.empty(3, 70, dtype=dtype, device="meta"))
    summed = [call for call in ops.calls if call.operation.startswith("aten.cumsum")]
    assert [call.reads for call in summed] == [(torch.int64,)]


@given(
    st.integers(0, 2**64 - 1),
    st.lists(st.tuples(*[st.integers(0, 2**63 - 1)] * 2), min_size=1, max_size=40),
)
def test_the_numbers_are_those_of_numpy_bit_for_bit(seed, counters):
    first, last = np.array(counters, np.int64).T
    expected = seeds.uniform(seed, "sample", first, last)
    key = torch.from_numpy(seeds.bits(seed, "sample", first).view(np.int64))
    assert uniform(key, torch.from_numpy(last.copy())).numpy().tobytes() == expected.tobytes()


def test_rows_that_do_not_need_what_others_need_get_the_same_bits():
    torch.manual_seed(0)
    logits, numbers = torch.randn(6, 300), np.random.default_rng(0).random(6)
    plain = sample(logits.clone(), knobs(6), numbers)
    everything = sample(logits.clone(), knobs(6), numbers, Kind(True, True, True))
    for plain_array, other in zip(plain, everything, strict=True):
        assert plain_array.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        ({}, (False, False, False)),
        ({"temperature": 0.5}, (True, False, False)),
        ({"temperature": 0.0, "top_k": 3}, (False, True, False)),
        ({"top_k": 3}, (False, False, True)),
        ({"top_p": 0.9}, (False, False, True)),
        ({"min_p": 0.1}, (False, False, True)),
    ],
)
def test_a_step_computes_what_some_row_needs(setting, kind):
    assert Kind.of(*knobs(2, **setting)) == Kind(*kind)


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        ({"top_k": 2}, [2, 3]),
        ({"top_p": 0.65}, [2, 3]),
        ({"top_p": 0.39}, [3]),
        ({"min_p": 0.45}, [1, 2, 3]),
        ({"top_k": 3, "top_p": 0.7}, [2, 3]),
        ({"top_k": 4}, []),  # nothing is taken away
        ({"top_p": 0.95}, []),
        ({}, []),
        ({"temperature": 0.0, "top_k": 2}, []),  # filters are off
    ],
)  # fmt: skip
def test_a_sampling_mask_has_what_the_filters_left_and_nothing_where_that_is_all(setting, left):
    assert masks(logits_of(0.1, 0.2, 0.3, 0.4), knobs(1, **setting)) == [left]


def test_of_equal_logits_a_sampling_mask_has_those_that_the_draw_was_made_from():
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 1.0]])
    assert masks(logits, knobs(1, top_k=3)) == [[0, 1, 2]]
    p = torch.softmax(logits, -1)[0].double()
    half = float(p[1] + 1.5 * p[0])  # in the middle of the second of the equal ones
    assert masks(logits, knobs(1, top_p=half)) == [[0, 1, 2]]
    assert masks(torch.zeros(1, 5), knobs(1, min_p=0.5)) == [[]]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.sampled_from([5, 64, 130]),
    levels=st.sampled_from([2.0, 0.25, 0.0]),  # logits are multiples of it: many are equal
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
    temperature=st.sampled_from([0.05, 0.7, 1.0]),
)
def test_each_token_of_a_sampling_mask_can_be_drawn_and_no_other(
    seed, vocabulary, levels, top_k, top_p, min_p, temperature
):
    torch.manual_seed(seed)
    logits = 3 * torch.randn(1, vocabulary)
    if levels:
        logits = (logits / levels).round() * levels
    setting = (temperature, top_k, top_p, min_p)
    (left,) = masks(logits, knobs(1, *setting))
    weights = torch.softmax(logits / temperature, -1)[0].double().numpy()
    left = left or np.flatnonzero(weights).tolist()
    kept = weights[left]
    # a number in the middle of each token's share of what is left draws this token
    shares = (np.cumsum(kept) - kept / 2) / kept.sum()
    sure = kept / kept.sum() > 1e-9  # of others the share is lost in rounding
    tokens, logprobs = sample(logits.repeat(len(left), 1), knobs(len(left), *setting), shares)
    np.testing.assert_array_equal(tokens[sure], np.array(left)[sure])
    np.testing.assert_allclose(logprobs[sure], np.log(kept / kept.sum())[sure], atol=1e-6)
    even, _ = sample(logits.repeat(200, 1), knobs(200, *setting), (np.arange(200) + 0.5) / 200)
    assert set(even.tolist()) <= set(left)


def test_a_sampling_mask_is_of_what_a_grammar_allows_too():
    allowed = torch.tensor([[0b1011], [-1]], dtype=torch.int32)
    logits = logits_of(0.1, 0.2, 0.3, 0.4).repeat(2, 1)
    assert masks(logits, knobs(2, top_k=2), allowed) == [[1, 3], [2, 3]]
    assert masks(logits, knobs(2, top_k=4), allowed) == [[0, 1, 3], []]


def test_sampling_masks_of_rows_in_chunks_are_the_same(monkeypatch):
    torch.manual_seed(0)
    logits = torch.randn(7, 70)
    unchunked = masks(logits, knobs(7, top_p=0.8))
    monkeypatch.setattr(sampler, "CHUNK_VALUES", 140)
    assert masks(logits, knobs(7, top_p=0.8)) == unchunked


def test_filters_leave_most_of_an_even_distribution() -> None:
    """What docs/rollout.md says of masks that top_k does not bound."""
    (left,) = masks(torch.zeros(1, 151_936), knobs(1, top_p=0.95))
    assert (len(left), 4 + 4 * len(left)) == (144_340, 577_364)
