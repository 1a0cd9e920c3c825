"""A save that dies, or meets a bad disk, at every call that changes a file."""

import shutil
from pathlib import Path

import pytest

from helpers.faults import FOREVER, Ended, Fault, Kind, Machine
from helpers.saves import FAILED, UNTIDY, loads, save, store_in

pytestmark = pytest.mark.slow

SAVE = "helpers.saves:save"


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The checkpoints of steps 1, the best, and 2, and what a save that was killed left."""
    root = tmp_path / "begun"
    assert save(str(root), 1, best=1) == save(str(root), 2, best=1) == 0
    (root / ".saving-3-4711").mkdir()
    (root / ".saving-3-4711" / "policy.weights.safetensors").write_bytes(b"half")
    return root


@pytest.mark.parametrize("best", [1, 3], ids=["not the best", "the best"])
@pytest.mark.parametrize(
    "kind", [Kind.KILL, Kind.IO_ERROR, Kind.FULL], ids=lambda kind: kind.name.lower()
)
def test_at_any_call_the_newest_whole_one_and_the_best_are_found(
    kind: Kind, best: int, begun: Path, machine: Machine, tmp_path: Path
) -> None:
    def run(number: int, last: int) -> tuple[Path, Ended]:
        root = shutil.copytree(begun, tmp_path / str(number))
        return root, machine.call(SAVE, [str(root), 3, best], root, Fault(kind, number, last))

    root, unharmed = run(0, 0)
    assert loads(root, 3)
    assert set("OWSRUMD") <= set(unharmed.names)
    assert len(unharmed.names) > 30
    for number in range(1, len(unharmed.names) + 1):
        root, ended = run(number, FOREVER if kind == Kind.FULL else number)
        if kind == Kind.KILL:
            assert ended.status == -9
        elif ended.status != FAILED:
            assert loads(root, 3)
        assert (ended.status in (FAILED, UNTIDY)) == bool(ended.message)
        assert loads(root, 2) or loads(root, 3)
        best_now = best if loads(root, 3) else 1
        assert store_in(root).load("best").step == best_now
        assert save(str(root), 4, best=best_now) == 0  # goes on from what it found
        left = ["best", "latest", f"step-{best_now:06d}", "step-000004"]
        assert sorted(path.name for path in root.iterdir()) == left
        shutil.rmtree(root)


def test_a_kill_loses_none_of_the_steps_to_keep_and_the_next_save_removes_the_others(
    machine: Machine, tmp_path: Path
) -> None:
    """Steps 1, the best, to 4 with keep_steps = 2: the save of 5 removes 3 alone."""
    begun = tmp_path / "begun"
    for step in (1, 2, 3, 4):
        assert save(str(begun), step, best=1, keep_steps=2) == 0

    def run(number: int) -> tuple[Path, Ended]:
        root = shutil.copytree(begun, tmp_path / str(number))
        fault = Fault(Kind.KILL, number, number)
        return root, machine.call(SAVE, [str(root), 5, 1, 2], root, fault)

    root, unharmed = run(0)
    assert store_in(root).steps() == [1, 2, 4, 5]
    for number in range(1, len(unharmed.names) + 1):
        root, ended = run(number)
        assert ended.status == -9
        assert {1, 2, 4} <= set(store_in(root).steps())
        assert loads(root, 4) or loads(root, 5)
        assert save(str(root), 6, best=1, keep_steps=2) == 0
        left = ["best", "latest", *(f"step-00000{step}" for step in (1, 2, 4, 6))]
        assert sorted(path.name for path in root.iterdir()) == left
        shutil.rmtree(root)


@pytest.mark.parametrize("kind", [Kind.SHORT, Kind.SLOW], ids=["short writes", "slow disk"])
def test_short_writes_and_a_slow_disk_change_nothing(
    kind: Kind, begun: Path, machine: Machine
) -> None:
    ended = machine.call(SAVE, [str(begun), 3, 3], begun, Fault(kind, 1, FOREVER))
    assert (ended.status, ended.message) == (0, "")
    assert loads(begun, 3)
    assert sorted(path.name for path in begun.iterdir()) == ["best", "latest", "step-000003"]
