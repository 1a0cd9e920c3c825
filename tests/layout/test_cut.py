import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.layout.cut import cut
from postgrad.layout.layout import lay_out
from postgrad.layout.tree import NO_SHARING

token_groups = st.lists(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


@given(groups=token_groups, max_tokens=st.integers(20, 60), min_shared=st.integers(1, 9))
def test_every_sequence_is_in_one_run_and_every_run_fits(
    make_sequences, groups, max_tokens, min_shared
):
    sequences = make_sequences(groups)
    rows = np.arange(len(sequences))
    runs = cut(sequences, rows, max_tokens=max_tokens, min_shared=min_shared)
    assert np.concatenate(runs).tolist() == rows.tolist()
    for run in runs:
        assert lay_out(sequences, run, min_shared=min_shared).n_tokens <= max_tokens


@given(groups=token_groups, most=st.integers(1, 4))
def test_a_run_holds_at_most_the_named_number_of_sequences(make_sequences, groups, most):
    sequences = make_sequences(groups)
    runs = cut(sequences, np.arange(len(sequences)), max_sequences=most)
    assert max(len(run) for run in runs) <= most
    assert sum(len(run) for run in runs) == len(sequences)


def test_groups_stay_together_where_they_fit(make_sequences):
    prompt = list(range(10))
    groups = [[[*prompt, 1, 2], [*prompt, 3, 4]], [[*prompt, 5, 6], [*prompt, 7, 8]]]
    runs = cut(make_sequences(groups), np.arange(4), max_tokens=20)
    assert [run.tolist() for run in runs] == [[0, 1], [2, 3]]


def test_a_sequence_over_the_budget_is_named(make_sequences):
    with pytest.raises(ValueError, match="sequence 0 alone has 12 tokens"):
        cut(make_sequences([[list(range(12))]]), np.arange(1), max_tokens=11)


def test_a_pair_is_never_split(make_sequences):
    pair = [[list(range(8)), list(range(20, 28))]]
    with pytest.raises(ValueError, match="needs 16 tokens"):
        cut(make_sequences(pair), np.arange(2), max_tokens=15, whole_groups=True)
    runs = cut(make_sequences(pair), np.arange(2), max_tokens=16, whole_groups=True)
    assert [run.tolist() for run in runs] == [[0, 1]]


def test_without_sharing_a_prompt_counts_for_each_of_its_samples(make_sequences) -> None:
    sequences = make_sequences([[[1] * 10 + [2], [1] * 10 + [3]]])
    rows = np.arange(2)
    assert [len(run) for run in cut(sequences, rows, max_tokens=13)] == [2]
    assert [len(run) for run in cut(sequences, rows, max_tokens=13, min_shared=NO_SHARING)] == [
        1,
        1,
    ]
