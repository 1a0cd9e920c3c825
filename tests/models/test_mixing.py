"""Mixers that carry a state run over the segments of a layout, each on from the one above it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.layout import Layout, lay_out
from postgrad.layout.tree import NO_SHARING
from postgrad.models.mixing import SegmentMixing, TokenMixing
from postgrad.models.states import MixerState

CPU = torch.device("cpu")
DECAY = 0.5


def decaying_sum(hidden: Tensor, state: MixerState | None) -> Tensor:
    """s_t = s_(t - 1) / 2 + x_t over [B, L, 1]: a mixer as transformers' are."""
    before = None if state is None else state.get_recurrent_state(0)
    running = torch.zeros_like(hidden[:, 0]) if before is None else before
    sums: list[Tensor] = []
    for token in hidden.unbind(1):
        running = DECAY * running + token
        sums.append(running)
    if state is not None:
        state.update_recurrent_state(running, 0)
    return torch.stack(sums, 1)


def expected_sums(numbers: list[float]) -> list[float]:
    return [sum(DECAY ** (t - s) * numbers[s] for s in range(t + 1)) for t in range(len(numbers))]


def layout_of(rows: list[list[int]], min_shared: int) -> Layout:
    """All rows in one group, with no loss entries but the last tokens."""
    tokens = Ragged.of([np.array(row, np.int32) for row in rows], np.int32)
    mask = np.zeros(len(tokens.values), np.bool_)
    mask[tokens.offsets[1:] - 1] = True
    sequences = Sequences(tokens, tokens.like(mask), np.zeros(len(rows), np.int64))
    return lay_out(sequences, np.arange(len(rows)), reads="at", min_shared=min_shared)


# Few different tokens, so that rows have common beginnings, and some of them again.
token_rows = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=25), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(token_rows, st.sampled_from([2, 3, 5, NO_SHARING]))
def test_every_segment_goes_on_from_the_state_behind_the_one_above(
    rows: list[list[int]], min_shared: int
) -> None:
    """States are kept where nothing is shared, as the rollout engine's prompts are."""
    keep = min_shared == NO_SHARING
    layout = layout_of(rows, min_shared)
    mixing = SegmentMixing(layout, CPU, keep=keep)
    hidden = torch.from_numpy(layout.token_ids).double()[:, None].requires_grad_()
    mixed = mixing.mix(0, decaying_sum, hidden)
    for segment in range(len(layout.parent)):
        path = layout.path_rows(segment)
        sums = expected_sums(layout.token_ids[path].tolist())
        assert mixed[path, 0].tolist() == pytest.approx(sums, rel=1e-12)
        if keep:
            behind = mixing.states[0]["recurrent 0"][segment].item()
            assert behind == pytest.approx(sums[-1], rel=1e-12)
    mixed.sum().backward()
    assert hidden.grad is not None
    row, position = np.arange(layout.n_tokens), layout.positions
    seen_by = (row[:, None] <= row) & (row < layout.subtree_end[:, None])  # [token, row that reads]
    steps = np.where(seen_by, position - position[:, None], 0)
    expected = (seen_by * DECAY**steps).sum(1)
    assert hidden.grad[:, 0].tolist() == pytest.approx(expected.tolist(), rel=1e-12)


def test_a_prompt_is_computed_once_and_single_tokens_behind_it_two_at_a_time() -> None:
    """With one token types would take their way of decoding, which has no gradient."""
    shapes: list[tuple[int, ...]] = []

    def run(hidden: Tensor, state: MixerState | None) -> Tensor:
        shapes.append(tuple(hidden.shape))
        return decaying_sum(hidden, state)

    rows = [[1, 1, 1, 1, 2], [1, 1, 1, 1, 3], [1, 1, 1, 1, 4]]
    mixing = SegmentMixing(layout_of(rows, 2), CPU)
    mixed = mixing.mix(0, run, torch.ones(7, 1))
    assert shapes == [(1, 4, 1), (3, 2, 1)]
    assert mixed[:, 0].tolist() == [1.0, 1.5, 1.75, 1.875, 1.9375, 1.9375, 1.9375]


def test_a_shared_segment_of_one_token_below_another_is_refused() -> None:
    rows = [[1, 1, 1, 2, 1], [1, 1, 1, 2, 3], [1, 1, 1, 4]]
    with pytest.raises(ValueError, match="min_shared of at least 2"):
        SegmentMixing(layout_of(rows, 1), CPU)
    SegmentMixing(layout_of(rows, 2), CPU)


def test_a_new_token_goes_on_from_the_state_of_its_row_and_leaves_the_others() -> None:
    stored = {"recurrent 0": torch.tensor([[2.0], [4.0], [8.0]])}
    mixing = TokenMixing(lambda _: stored, torch.tensor([True, False]))
    out = mixing.mix(0, decaying_sum, torch.tensor([[1.0], [1.0]]))
    assert out[:, 0].tolist() == [2.0, 3.0]
    assert stored["recurrent 0"][:, 0].tolist() == [2.0, 4.0, 8.0]
