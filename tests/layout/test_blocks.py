import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from postgrad.layout.blocks import QUERY_RUN, plan_blocks
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
