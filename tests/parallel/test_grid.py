"""How ranks are arranged."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.errors import UsageError
from postgrad.parallel import ranks
from postgrad.parallel.ranks import UNDIVIDED, Grid, Groups


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


def test_experts_are_shared_within_a_group_whatever_else_ranks_share() -> None:
    Grid(context=2, groups=2, expert=4).require_ranks(8)
    Grid(tensor=2, expert=4).require_ranks(8)
    Grid(tensor=4, groups=2, expert=2).require_ranks(8)
    with pytest.raises(UsageError, match=r"expert_parallel.*a multiple of 8"):
        Grid(groups=2, expert=4).require_ranks(12)


def test_every_group_of_a_rank_has_the_ranks_that_docs_gpus_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight ranks, of which two share matrices and two share rows."""
    monkeypatch.setattr(ranks.dist, "new_group", lambda members, timeout: members)
    page = Path(__file__).parent.parent.parent / "docs" / "gpus.md"
    rows = re.findall(r"^\| (\w+) \| ([0-7, ]+) \|", page.read_text("utf-8"), re.M)
    documented = {name: [int(rank) for rank in members.split(", ")] for name, members in rows}
    assert documented.keys() == {"tensor", "context", "replica", "data", "expert", "expert_data"}
    groups = Groups(0, 8, Grid(context=2, tensor=2), "cuda")
    sharing_experts = Groups(0, 8, Grid(expert=4), "cuda")
    assert {
        name: getattr(groups, name) or getattr(sharing_experts, name) for name in documented
    } == documented
    last = Groups(7, 8, Grid(context=2, tensor=2), "cuda")
    groups_of_last = [last.tensor, last.context, last.replica, last.data]
    assert groups_of_last == [[6, 7], [5, 7], [4, 5, 6, 7], [1, 3, 5, 7]]
