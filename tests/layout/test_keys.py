"""Row keys: the same path of tokens, the same key, wherever it lies; another path, another key."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from postgrad.layout.layout import Layout, lay_out, row_keys

token_groups = st.lists(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


def keys_of(layout: Layout) -> np.ndarray:
    return row_keys(layout.token_ids, layout.positions, layout.segment_start, layout.parent)


def paths_and_keys(layout: Layout) -> dict[tuple[int, ...], int]:
    """Every prefix of every sequence and the key of its last row."""
    keys, paths = keys_of(layout), {}
    for segment in range(len(layout.parent)):
        rows = layout.path_rows(segment)
        path = layout.token_ids[rows].tolist()
        paths |= {tuple(path[: i + 1]): int(keys[row]) for i, row in enumerate(rows)}
    return paths


@given(groups=token_groups, min_shared=st.integers(1, 9))
def test_rows_have_one_key_exactly_where_they_have_one_path(make_sequences, groups, min_shared):
    sequences = make_sequences(groups)
    layout = lay_out(sequences, np.arange(len(sequences)), min_shared=min_shared)
    rows = np.arange(layout.n_tokens)
    key_of: dict[tuple[int, ...], int] = {}
    for row, key in enumerate(keys_of(layout).tolist()):
        on_path = rows[(rows <= row) & (row < layout.subtree_end)]
        path = tuple(layout.token_ids[on_path].tolist())
        assert key_of.setdefault(path, key) == key
    assert len(set(key_of.values())) == len(key_of)


@given(groups=token_groups, data=st.data())
def test_sharing_order_and_cut_change_no_key(make_sequences, groups, data):
    sequences = make_sequences(groups)
    together = lay_out(sequences, np.arange(len(sequences)), min_shared=1)
    expected = paths_and_keys(together)
    order = data.draw(st.permutations(range(len(sequences))))
    for cut in (order[: len(order) // 2], order[len(order) // 2 :], order[:1]):
        if not cut:
            continue
        alone = lay_out(sequences, np.array(cut), min_shared=100)
        assert paths_and_keys(alone).items() <= expected.items()


def test_keys_are_no_small_numbers_and_share_no_bits():
    """What masks are drawn from has to look random in every bit."""
    starts, parent = np.arange(0, 8001, 8), np.full(1000, -1)
    tokens = np.arange(8000)  # no two paths are one
    keys = row_keys(tokens, np.tile(np.arange(8), 1000), starts, parent)
    assert keys.dtype == np.int64
    assert len(np.unique(keys)) == 8000
    bits = (keys[:, None] >> np.arange(64)) & 1
    assert np.all(np.abs(bits.mean(0) - 0.5) < 5 * 0.5 / np.sqrt(8000))
