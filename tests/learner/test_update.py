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


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 9), st.integers(1, 3))
def test_every_pass_trains_every_sample_once(sizes: list[int], batch: int, epochs: int):
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    made = list(updates(experience_of(groups), batch, epochs, seed=0, step=3))
    per_pass = -(-len(groups) // batch)
    assert len(made) == per_pass * epochs
    for epoch in range(epochs):
        rows = np.concatenate([u.rows for u in made[epoch * per_pass : (epoch + 1) * per_pass]])
        assert sorted(rows.tolist()) == list(range(len(groups)))


def test_groups_stay_together_when_shuffled():
    experience = experience_of([0, 0, 1, 1, 2, 2, 3, 3])
    made = list(updates(experience, 2, 1, seed=0, step=0))
    assert all(len(set(experience.sequences.group[u.rows].tolist())) == 1 for u in made)


def test_the_order_depends_on_seed_step_and_epoch_alone():
    experience = experience_of(list(range(16)))

    def order(seed: int, step: int) -> list[int]:
        return np.concatenate([u.rows for u in updates(experience, 4, 2, seed, step)]).tolist()

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0)[:16] != order(0, 0)[16:]


def test_one_update_a_pass_keeps_the_order():
    (only,) = updates(experience_of([0, 0, 1]), 3, 1, seed=0, step=0)
    assert only.rows.tolist() == [0, 1, 2]
    assert only.loss_tokens == 3
