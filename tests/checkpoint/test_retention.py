"""Which checkpoints go."""

from hypothesis import given
from hypothesis import strategies as st

from postgrad.checkpoint.store import surplus

STEPS = st.sets(st.integers(0, 50))


@given(STEPS, st.integers(1, 10), st.sets(st.integers(0, 50), max_size=2))
def test_the_newest_and_the_named_stay_and_all_others_go(
    steps: set[int], keep: int, always: set[int]
) -> None:
    gone = set(surplus(steps, keep, always))
    left = steps - gone
    assert set(sorted(steps)[-keep:]) <= left
    assert always & steps <= left
    assert all(step < min(sorted(steps)[-keep:]) for step in gone)
    assert len(left) <= keep + len(always)


def test_an_old_best_one_does_not_take_the_place_of_a_new_one() -> None:
    assert surplus([1, 2, 3, 4], 2, {1}) == [2]
