"""How ranks are arranged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.errors import UsageError
from postgrad.parallel.ranks import UNDIVIDED, Grid


def test_alone_there_is_one_replica_of_one_rank() -> None:
    assert UNDIVIDED.sharers == 1
    UNDIVIDED.require_ranks(1)


@given(context=st.integers(1, 4), tensor=st.integers(1, 4), groups=st.integers(1, 3))
def test_ranks_are_a_multiple_of_what_a_group_needs(context: int, tensor: int, groups: int) -> None:
    grid = Grid(context, tensor, groups)
    each = context * tensor * groups
    grid.require_ranks(3 * each)
    if each > 1:
        with pytest.raises(UsageError, match=f"a multiple of {each}"):
            grid.require_ranks(3 * each + 1)
