import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from postgrad.layout.blocks import CALL, MAX_WASTE, QUERY_RUN, block_table, plan_blocks
from postgrad.layout.layout import lay_out

token_groups = st.lists(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


def visible(layout) -> np.ndarray:
    """[T, T] the definition of a layout: on my path and not after me."""
    q, k = np.arange(layout.n_tokens)[:, None], np.arange(layout.n_tokens)[None, :]
    return (k <= q) & (q < layout.subtree_end[None, :])


def seen_by_blocks(layout) -> np.ndarray:
    plan = plan_blocks(layout)
    seen = [np.zeros((0, layout.n_tokens), bool)]
    for block in plan.blocks:
        for queries, keys, at, places in zip(
            block.query_rows,
            block.key_rows,
            block.query_positions,
            block.key_positions,
            strict=True,
        ):
            mask = np.zeros((len(queries), layout.n_tokens), bool)
            for i in range(len(queries)):
                mask[i, keys[places <= at[i]]] = True
            seen.append(mask)
    return np.concatenate(seen)[plan.source_row]


@given(groups=token_groups, min_shared=st.integers(1, 9))
def test_blocks_show_every_token_exactly_its_path(make_sequences, groups, min_shared):
    sequences = make_sequences(groups)
    layout = lay_out(sequences, np.arange(len(sequences)), min_shared=min_shared)
    np.testing.assert_array_equal(seen_by_blocks(layout), visible(layout))


def test_long_segments_are_cut_so_that_late_keys_are_not_scored(make_sequences):
    length = 4 * QUERY_RUN
    layout = lay_out(make_sequences([[list(range(length))]]), np.arange(1))
    scores = sum(b.query_rows.shape[1] * b.key_rows.size for b in plan_blocks(layout).blocks)
    assert scores <= 1.3 * QUERY_RUN * QUERY_RUN * (1 + 2 + 3 + 4)  # 16 without the cut
    np.testing.assert_array_equal(seen_by_blocks(layout), visible(layout))


def test_many_short_answers_take_few_kernel_calls(make_sequences):
    rng = np.random.default_rng(0)
    groups = [
        [[*prompt, *rng.integers(0, 100, rng.integers(8, 14)).tolist()] for _ in range(8)]
        for prompt in rng.integers(0, 100, (64, 20)).tolist()
    ]
    layout = lay_out(make_sequences(groups), np.arange(512))
    assert len(plan_blocks(layout).blocks) <= 8


def test_padding_adds_at_most_a_tenth_and_what_another_call_would_cost(make_sequences):
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes = rng.integers(4, 400, rng.integers(1, 30))
        layout = lay_out(make_sequences([[[0] * n] for n in sizes.tolist()]), np.arange(len(sizes)))
        blocks = plan_blocks(layout).blocks
        computed = sum(block.query_rows.shape[1] * block.key_rows.size for block in blocks)
        runs = [
            min(start + QUERY_RUN, n) * (min(start + QUERY_RUN, n) - start)
            for n in sizes.tolist()
            for start in range(0, n, QUERY_RUN)
        ]
        assert sum(runs) <= computed <= MAX_WASTE * sum(runs) + CALL * len(blocks)


SIZE = 4  # of the squares: small trees have many of them then


def torchs_table(layout, window: int | None, size: int) -> list[np.ndarray]:
    """What torch counts, pair by pair."""
    positions, ends = torch.from_numpy(layout.positions), torch.from_numpy(layout.subtree_end)

    def sees(_batch, _head, q, k):
        on_path = (k <= q) & (q < ends[k])
        return on_path if window is None else on_path & (positions[k] > positions[q] - window)

    n = layout.n_tokens
    mask = create_block_mask(sees, None, None, n, n, device="cpu", BLOCK_SIZE=size)
    tensors = (
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices,
        mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices,
    )  # fmt: skip
    return [tensor[0, 0].numpy() for tensor in tensors]


@pytest.mark.slow
@settings(max_examples=1000)
@given(
    groups=token_groups,
    min_shared=st.integers(1, 9),
    window=st.none() | st.integers(1, 24),
    size=st.sampled_from([2, SIZE, 16]),
)
def test_the_table_of_squares_is_the_one_that_torch_counts(
    make_sequences, groups, min_shared, window, size
):
    sequences = make_sequences(groups)
    layout = lay_out(sequences, np.arange(len(sequences)), min_shared=min_shared)
    table = block_table(layout, window, size)
    for ours, torchs in zip(table.arrays, torchs_table(layout, window, size), strict=True):
        np.testing.assert_array_equal(ours, torchs)
        assert ours.dtype == torchs.dtype


@pytest.mark.parametrize("window", [None, 300, 700])
def test_the_table_is_torchs_for_squares_of_the_kernels_size(make_sequences, window):
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 50, 300).tolist()
    group = [[*prompt, *rng.integers(0, 50, size).tolist()] for size in (90, 400, 260, 1)]
    layout = lay_out(make_sequences([group, [[1, 2, 3]], group[:2]]), np.arange(7))
    table = block_table(layout, window, 128)
    assert table.full_key_counts.any()
    for ours, torchs in zip(table.arrays, torchs_table(layout, window, 128), strict=True):
        np.testing.assert_array_equal(ours, torchs)
