import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from postgrad.layout.tree import common_prefix, grow


def arrays(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(row, np.int32) for row in rows]


def test_a_prompt_of_three_responses_stands_once():
    prompt = [7, 8, 9, 10]
    tree = grow(arrays([[*prompt, 1, 2], [*prompt, 3], [*prompt, 4, 5, 6]]), min_shared=2)
    assert tree.n_tokens == 4 + 2 + 1 + 3
    assert tree.segments[0].parent == -1
    assert [s.parent for s in tree.segments[1:]] == [0, 0, 0]


def test_branches_of_branches_share_their_history():
    tree = grow(arrays([[1, 1, 2, 2, 3], [1, 1, 2, 2, 4], [1, 1, 5]]), min_shared=2)
    assert tree.n_tokens == 2 + 2 + 1 + 1 + 1
    assert len(tree.paths[0]) == 3
    assert len(tree.paths[2]) == 2


def test_a_common_stretch_under_the_minimum_is_not_shared():
    tree = grow(arrays([[1, 2, 3], [1, 2, 4]]), min_shared=3)
    assert tree.n_tokens == 6


def test_equal_sequences_take_the_room_of_one():
    tree = grow(arrays([[1, 2, 3], [1, 2, 3]]), min_shared=1)
    assert tree.n_tokens == 3
    assert tree.paths[0] == tree.paths[1]


def test_a_sequence_may_end_where_another_goes_on():
    tree = grow(arrays([[1, 2], [1, 2, 3]]), min_shared=1)
    assert [tree.segments[s].end for s in tree.paths[0]] == [2]
    assert [tree.segments[s].end for s in tree.paths[1]] == [2, 3]


def test_common_prefix_counts_equal_leading_tokens():
    assert common_prefix(*arrays([[1, 2, 3], [1, 2, 4, 5]])) == 2
    assert common_prefix(*arrays([[1, 2], [1, 2, 4]])) == 2


rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=6)


@given(rows, st.integers(1, 9))
def test_every_path_spells_its_sequence(rows: list[list[int]], min_shared: int):
    sequences = arrays(rows)
    tree = grow(sequences, min_shared)
    for sequence, path in zip(sequences, tree.paths, strict=True):
        spelled = [
            token
            for s in path
            for segment in [tree.segments[s]]
            for token in sequences[segment.owner][segment.begin : segment.end].tolist()
        ]
        assert spelled == sequence.tolist()


@given(rows)
def test_with_a_minimum_of_one_the_tree_is_a_trie(rows: list[list[int]]):
    prefixes = {tuple(row[: i + 1]) for row in rows for i in range(len(row))}
    assert grow(arrays(rows), min_shared=1).n_tokens == len(prefixes)


@given(rows, st.integers(1, 9))
def test_parents_stand_before_children_and_subtrees_in_one_run(
    rows: list[list[int]], min_shared: int
):
    segments = grow(arrays(rows), min_shared).segments
    ancestors: list[int] = []
    for number, segment in enumerate(segments):
        while ancestors and ancestors[-1] != segment.parent:
            ancestors.pop()
        assert segment.parent == (ancestors[-1] if ancestors else -1)
        ancestors.append(number)
