"""Sequences dealt to replicas: nothing lost, balanced, the same everywhere."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.cut import deal, share
from postgrad.layout.tree import grow

groups = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 20), min_size=1, max_size=5)), max_size=8
)


def sequences_of(sizes: list[tuple[int, list[int]]]) -> Sequences:
    """Groups with a prompt of so many tokens and answers of so many each."""
    rng = np.random.default_rng(0)
    rows, masks, group = [], [], []
    for number, (prompt, answers) in enumerate(sizes):
        opening = rng.integers(0, 50, prompt)
        for length in answers:
            rows.append(np.concatenate([opening, rng.integers(0, 50, length)]))
            masks.append(np.arange(prompt + length) >= prompt)
            group.append(number)
    tokens, loss = Ragged.of(rows, np.int32), Ragged.of(masks, np.bool_)
    return Sequences(tokens, loss, np.array(group, np.int64))


@given(groups, st.integers(1, 6), st.booleans(), st.randoms(use_true_random=False))
def test_every_row_is_in_one_share_in_its_old_order(sizes, parts, whole_groups, random) -> None:
    sequences = sequences_of(sizes)
    rows = np.array(random.sample(range(len(sequences)), len(sequences)), np.int64)
    shares = share(sequences, rows, parts, whole_groups=whole_groups)
    assert len(shares) == parts
    assert sorted(np.concatenate(shares).tolist()) == sorted(rows.tolist())
    place = {row: number for number, row in enumerate(rows.tolist())}
    for rows_of_share in shares:
        assert (np.diff([place[row] for row in rows_of_share.tolist()]) > 0).all()
    again = share(sequences, rows, parts, whole_groups=whole_groups)
    assert all(np.array_equal(a, b) for a, b in zip(shares, again, strict=True))


@given(groups, st.integers(2, 6))
def test_whole_groups_are_not_cut(sizes, parts) -> None:
    sequences = sequences_of(sizes)
    shares = share(sequences, np.arange(len(sequences)), parts, whole_groups=True)
    groups_of_shares = [set(sequences.group[rows_of_share].tolist()) for rows_of_share in shares]
    assert sum(map(len, groups_of_shares)) == len(set().union(*groups_of_shares))


@given(groups, st.integers(2, 6))
def test_no_share_has_more_than_a_fair_one_and_its_largest_group(sizes, parts) -> None:
    sequences = sequences_of(sizes)
    shares = share(sequences, np.arange(len(sequences)), parts, whole_groups=True)

    def cost(rows) -> int:
        by_group = [rows[sequences.group[rows] == g] for g in np.unique(sequences.group[rows])]
        return sum(grow([sequences.tokens.row(r) for r in g]).n_tokens for g in by_group)

    loads = [cost(rows_of_share) for rows_of_share in shares]
    everything = np.arange(len(sequences))
    largest = max((cost(everything[sequences.group == g]) for g in set(sequences.group)), default=0)
    assert max(loads) - min(loads) <= largest


def test_a_group_larger_than_a_fair_share_is_cut_between_its_sequences() -> None:
    sequences = sequences_of([(10, [5, 5, 5, 5])])
    assert [rows_of_share.tolist() for rows_of_share in share(sequences, np.arange(4), 2)] == [
        [0, 1],
        [2, 3],
    ]
    shares = share(sequences, np.arange(4), 2, whole_groups=True)
    assert [rows_of_share.tolist() for rows_of_share in shares] == [[0, 1, 2, 3], []]


def test_the_largest_goes_where_there_is_least() -> None:
    assert deal([3, 9, 4, 5], 2) == [[1, 0], [3, 2]]
    assert deal([], 2) == [[], []]


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_sums_differ_by_at_most_the_largest_cost(costs, parts) -> None:
    dealt = deal(costs, parts)
    assert sorted(i for rows_of_share in dealt for i in rows_of_share) == list(range(len(costs)))
    sums = [sum(costs[i] for i in rows_of_share) for rows_of_share in dealt]
    assert max(sums) - min(sums) <= max(costs, default=0)
