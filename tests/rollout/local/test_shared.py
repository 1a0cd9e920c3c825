"""Which rows read which prompt."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from postgrad.rollout.local.budget import LANES, SharedPrompts


def test_rows_of_one_prompt_share_a_stretch_up_to_its_lanes():
    shared = SharedPrompts(8)
    stretches, opened = shared.join(name=0, length=5, rows=4)
    assert (stretches.tolist(), opened) == ([0] * 4, [0])
    stretches, opened = shared.join(name=1, length=9, rows=LANES + 2)
    assert (stretches.tolist(), opened) == ([1] * LANES + [2] * 2, [1, 2])
    stretches, opened = shared.join(name=0, length=5, rows=LANES)
    assert (stretches.tolist(), opened) == ([0] * (LANES - 4) + [3] * 4, [3])
    assert shared.length[:4].tolist() == [5, 9, 9, 5]


def test_a_stretch_that_no_row_reads_is_closed_by_the_last_one():
    shared = SharedPrompts(4)
    for name in range(3):
        shared.join(name, 10 + name, 2)
    reads = np.array([2, 1, 2])
    to, source = shared.keep(reads)
    assert (to.tolist(), source.tolist()) == ([0], [2])
    assert reads.tolist() == [0, 1, 0]
    assert shared.count == 2
    assert shared.length[:2].tolist() == [12, 11]
    stretches, opened = shared.join(name=2, length=12, rows=1)  # it is known under its new number
    assert (stretches.tolist(), opened) == ([0], [])


def test_no_rows_leave_no_stretches():
    shared = SharedPrompts(4)
    shared.join(0, 3, 2)
    to, _ = shared.keep(np.zeros(0, np.int64))
    assert (shared.count, len(to)) == (0, 0)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_every_row_has_a_lane_of_its_own_in_its_stretch(drawn):
    _, reads = np.unique(drawn, return_inverse=True)
    shared = SharedPrompts(8)
    for name in range(reads.max() + 1):
        shared.join(name, 3 + name, 1)
    lanes = shared.lanes(reads)
    assert lanes.used.tolist() == np.bincount(reads).tolist()
    assert lanes.width == lanes.used.max()
    assert lanes.lengths.tolist() == [3 + name for name in range(reads.max() + 1)]
    lane_of_row = lanes.lane_of_row
    assert len(set(lane_of_row.tolist())) == len(reads)
    assert (lane_of_row // lanes.width).tolist() == reads.tolist()
    assert (lane_of_row % lanes.width < lanes.used[reads]).all()
    assert lanes.row_of_lane[lane_of_row].tolist() == list(range(len(reads)))
    wide = shared.lanes(reads, 40)
    assert wide.row_of_lane[wide.lane_of_row].tolist() == list(range(len(reads)))
    assert (wide.lane_of_row // 40).tolist() == reads.tolist()
