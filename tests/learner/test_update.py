import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.learner.update import updates


def experience_of(groups: list[int]) -> Experience:
    n = len(groups)
    tokens = Ragged.of([[1, 2]] * n, np.int32)
    sequences = Sequences(tokens, Ragged.of([[False, True]] * n), np.array(groups))
    return Experience(sequences, {}, np.ones(n, bool))


def cut(
    experience: Experience, batch: int, per_pass: int, epochs: int = 1, seed: int = 0, step: int = 0
) -> list[np.ndarray]:
    all_updates = updates(experience, batch, per_pass, epochs, seed, step)
    return [update.rows for update in all_updates]


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=8),
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(1, 3),
)
def test_every_kept_sample_is_in_one_update_of_each_pass_and_none_of_them_is_a_remainder(
    sizes: list[int], batch: int, per_pass: int, epochs: int
):
    """Whatever fell away: at most the planned updates, as even as can be, none under half of what
    was planned unless it is the only one.
    """
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    n = min(len(groups), batch * per_pass)  # a step never has more
    cut_rows = cut(experience_of(groups[:n]), batch, per_pass, epochs)
    each = len(cut_rows) // epochs
    assert len(cut_rows) == each * epochs
    assert 1 <= each <= per_pass
    for epoch in range(epochs):
        rows = cut_rows[epoch * each : (epoch + 1) * each]
        assert sorted(np.concatenate(rows).tolist()) == list(range(n))
        lengths = [len(rows_of_update) for rows_of_update in rows]
        assert max(lengths) - min(lengths) <= 1
        assert each == 1 or min(lengths) >= batch / 2
        assert each == per_pass or n / (each + 1) < -(-batch // 2)  # no more would have done


@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.integers(1, 9), st.integers(1, 6))
def test_whole_groups_are_divided_over_updates_without_a_cut_through_one(
    sizes: list[int], batch: int, per_pass: int
):
    groups = np.array([g for g, size in enumerate(sizes) for _ in range(size)])
    all_updates = list(
        updates(experience_of(groups.tolist()), batch, per_pass, 1, 0, 0, whole_groups=True)
    )
    rows = [update.rows for update in all_updates]
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(groups)))
    assert len(rows) <= per_pass
    held = [set(groups[rows_of_update].tolist()) for rows_of_update in rows]
    assert sum(map(len, held)) == len(set.union(*held))
    lengths = [len(rows_of_update) for rows_of_update in rows]
    assert all(abs(length - len(groups) / len(rows)) <= max(sizes) for length in lengths)
    assert len(rows) == 1 or min(lengths) >= batch / 2


def test_what_is_left_of_a_step_is_spread_over_the_updates_that_were_planned():
    """By hand: 64 samples were planned as four updates of 16."""

    def lengths(n: int) -> list[int]:
        return [len(rows_of_update) for rows_of_update in cut(experience_of(list(range(n))), 16, 4)]

    assert lengths(64) == [16, 16, 16, 16]
    assert lengths(50) == [12, 13, 12, 13]  # cut at 12.5, 25, 37.5; not 16, 16, 16 and 2
    assert lengths(32) == [8, 8, 8, 8]
    assert lengths(31) == [10, 11, 10]
    assert lengths(17) == [8, 9]
    assert lengths(15) == [15]
    assert lengths(1) == [1]


def test_nothing_left_is_no_update():
    assert cut(experience_of([]), 16, 4) == []


def test_groups_lie_together_when_shuffled():
    experience = experience_of([0, 0, 1, 1, 2, 2, 3, 3])
    rows = cut(experience, 2, 4)
    assert all(
        len(set(experience.sequences.group[rows_of_update].tolist())) == 1
        for rows_of_update in rows
    )


def test_the_order_depends_on_seed_step_and_epoch_alone():
    experience = experience_of(list(range(16)))

    def order(seed: int, step: int) -> list[int]:
        return np.concatenate(cut(experience, 4, 4, 2, seed, step)).tolist()

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0)[:16] != order(0, 0)[16:]


def test_one_update_a_pass_keeps_the_order_and_takes_every_sample():
    (only,) = updates(experience_of([0, 0, 1]), 3, 1, 1, 0, 0)
    assert only.rows.tolist() == [0, 1, 2]
    assert only.loss_tokens == 3
    (larger,) = cut(experience_of([0, 0, 1, 1]), 3, 1)  # a replay of a run with larger steps
    assert larger.tolist() == [0, 1, 2, 3]
