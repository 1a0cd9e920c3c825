"""A save of four ranks in which one dies, or all, or the process that commits it, at every call
that changes a file: whoever makes the call is the one that dies.

In CI every call meets one of the four kinds of faults; `make test-faults` has each meet all.
"""

import shutil
from pathlib import Path

import pytest

from helpers.faults import FOREVER, Ended, Fault, Kind, Machine
from helpers.saves import FAILED, UNTIDY, loads, store_in
from helpers.sharded_saves import RANK_DIED, save

pytestmark = pytest.mark.slow

SAVE = "helpers.sharded_saves:save"
RANKS = 4


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The checkpoints of steps 1, the best, and 2, and what a save that was killed left."""
    root = tmp_path / "begun"
    assert save(str(root), 1, best=1, ranks=RANKS) == save(str(root), 2, best=1, ranks=2) == 0
    half = root / ".saving-3-4711" / "policy.weights.rank-0000-of-0004.safetensors"
    half.parent.mkdir()
    half.write_bytes(b"half")
    return root


KINDS = (Kind.KILL, Kind.KILL_ALL, Kind.IO_ERROR, Kind.FULL)


@pytest.mark.parametrize(
    "kind", KINDS, ids=["one is killed", "all are killed", "bad sector", "full disk"]
)
def test_at_any_call_of_any_rank_a_whole_checkpoint_is_found(
    kind: Kind, begun: Path, machine: Machine, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def run(number: int, last: int) -> tuple[Path, Ended]:
        root = shutil.copytree(begun, tmp_path / str(number))
        arguments = [str(root), 3, 3, RANKS]
        return root, machine.call(SAVE, arguments, root, Fault(kind, number, last))

    root, unharmed = run(0, 0)
    assert (unharmed.status, unharmed.message) == (0, "")
    assert loads(root, 3)
    assert unharmed.names.count("W") >= 2 * RANKS  # every rank writes both files
    statuses: set[int] = set()
    calls = range(1, len(unharmed.names) + 1)
    if len(calls) > int(str(request.config.getoption("--fault-points"))):
        calls = calls[KINDS.index(kind) :: 3 * len(KINDS)]
    for number in calls:
        root, ended = run(number, FOREVER if kind == Kind.FULL else number)
        statuses.add(ended.status)
        if ended.status == RANK_DIED:  # nothing was committed: the step before stands
            assert loads(root, 2)
        assert loads(root, 2) or loads(root, 3)
        best = 3 if loads(root, 3) else 1
        assert store_in(root).load("best").step == best
        assert save(str(root), 4, best=best, ranks=2) == 0  # goes on from what it found
        left = ["best", "latest", f"step-{best:06d}", "step-000004"]
        assert sorted(path.name for path in root.iterdir()) == left
        shutil.rmtree(root)
    expected = {
        Kind.KILL: {-9, RANK_DIED},  # the one that commits, or a rank
        Kind.KILL_ALL: {-9},
        Kind.IO_ERROR: {FAILED, UNTIDY},
        Kind.FULL: {FAILED, UNTIDY},
    }
    assert statuses & expected[kind]
    if len(calls) == len(unharmed.names):
        assert expected[kind] <= statuses


@pytest.mark.parametrize("kind", [Kind.SHORT, Kind.SLOW], ids=["short writes", "slow disk"])
def test_short_writes_and_a_slow_disk_change_nothing(
    kind: Kind, begun: Path, machine: Machine
) -> None:
    arguments = [str(begun), 3, 3, RANKS]
    ended = machine.call(SAVE, arguments, begun, Fault(kind, 1, FOREVER))
    assert (ended.status, ended.message) == (0, "")
    assert loads(begun, 3)
    assert sorted(path.name for path in begun.iterdir()) == ["best", "latest", "step-000003"]
