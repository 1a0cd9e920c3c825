"""The store: whatever happens, the newest whole checkpoint is found."""

import errno
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from postgrad.checkpoint import store as module
from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.store import CheckpointStore, size_of
from postgrad.core.errors import RunError

MakeState = Callable[..., Any]
MakeTensors = Callable[[int], Any]


class Killed(BaseException):
    """The process ended here: nothing catches it."""


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", CheckpointSettings(max_ckpt_num=2))


def steps(store: CheckpointStore) -> list[int]:
    return [info.step for info in store.infos()]


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(
        one[name].dtype == two[name].dtype and torch.equal(one[name], two[name]) for name in one
    )


def test_what_was_saved_is_loaded_bit_for_bit(
    store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    state, tensors = make_state(10), make_tensors(0)
    path = store.save(state, tensors)
    assert path.name == "step-000010"
    loaded = store.load()
    assert loaded.state == state
    assert loaded.skipped == ()
    for stem in tensors:
        assert same(loaded.tensors(stem), tensors[stem])


def test_the_newest_the_best_and_the_latest_are_kept(
    store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    for step in range(1, 6):
        store.save(make_state(step), make_tensors(step), best=step == 2)
    assert steps(store) == [2, 4, 5]
    assert store.load("latest").step == 5
    assert store.load("best").step == 2
    assert store.load(4).step == 4
    assert [(one.latest, one.best) for one in store.infos()] == [
        (False, True),
        (False, False),
        (True, False),
    ]


def test_what_we_did_not_write_is_never_deleted(
    store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    store.root.mkdir()
    (store.root / "notes.txt").write_text("mine", "utf-8")
    foreign = store.root / "step-000000"
    foreign.mkdir()
    (foreign / "manifest.json").write_text("{}", "utf-8")
    for step in range(1, 6):
        store.save(make_state(step), make_tensors(step))
    assert (store.root / "notes.txt").read_text("utf-8") == "mine"
    assert foreign.exists()
    assert steps(store) == [0, 4, 5]


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-2]),
        lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
        lambda path: path.unlink(),
    ],
    ids=["cut short", "one bit changed", "missing"],
)
@pytest.mark.parametrize("file", ["policy.weights.safetensors", "state.json", "manifest.json"])
def test_a_damaged_newest_one_is_named_and_passed_over(
    harm: Callable[[Path], None],
    file: str,
    store: CheckpointStore,
    make_state: MakeState,
    make_tensors: MakeTensors,
) -> None:
    store.save(make_state(1), make_tensors(1))
    broken = store.save(make_state(2), make_tensors(2))
    harm(broken / file)
    loaded = store.load()
    assert loaded.step == 1
    assert len(loaded.skipped) == 1
    assert str(broken / file) in loaded.skipped[0]
    with pytest.raises(RunError, match="the checkpoint of step 2 is damaged"):
        store.load(2)
    assert [one.complete for one in store.infos()] == [True, False]


def test_none_at_all_is_told_with_every_reason(
    store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    assert not store.has_any()
    with pytest.raises(RunError, match="none was ever saved"):
        store.load()
    path = store.save(make_state(1), make_tensors(1))
    (path / "state.json").unlink()
    with pytest.raises(RunError, match=r"state\.json is missing"):
        store.load()
    with pytest.raises(RunError, match="has no best checkpoint"):
        store.load("best")
    with pytest.raises(RunError, match="has no checkpoint of step 7; there are: 1"):
        store.load(7)


def test_a_checkpoint_that_lies_behind_a_link_is_read_and_its_files_are_never_removed(
    store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors, tmp_path: Path
) -> None:
    """As when an old one was moved to another disk."""
    moved = store.save(make_state(1), make_tensors(1)).rename(tmp_path / "other disk")
    (store.root / "step-000001").symlink_to(moved)
    assert store.load(1).step == 1
    for step in (2, 3, 4):
        store.save(make_state(step), make_tensors(step))
    assert steps(store) == [3, 4]
    assert (moved / "policy.weights.safetensors").exists()


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Every call that changes the disk is counted; the process ends before call `number`.

    Nothing of it runs after that, its `finally` blocks neither.
    """
    made: list[str] = []

    def watch(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            if len(made) >= number:
                raise Killed
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    watch(module, "save_file")
    for name in ("mkdir", "rename", "replace", "unlink"):
        watch(Path, name)
    for name in ("fsync", "rmdir", "unlink"):  # rmtree removes a folder entry by entry
        watch(os, name)
    return made


def save_killed_at(number: int, save: Callable[[], Any]) -> bool:
    """False where the save ended before call `number` was made."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        kill_at(monkeypatch, number)
        try:
            save()
        except Killed:
            return True
    return False


def test_killed_before_any_change_of_the_disk_the_newest_whole_one_is_found(
    tmp_path: Path, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    begun = CheckpointStore(tmp_path / "begun", CheckpointSettings(max_ckpt_num=2))
    for step in (1, 2, 3):
        begun.save(make_state(step), make_tensors(step), best=step == 2)
    for number in range(1, 100):
        root = shutil.copytree(begun.root, tmp_path / str(number))
        store = CheckpointStore(root, CheckpointSettings(max_ckpt_num=2))
        killed = save_killed_at(
            number,
            lambda store=store: store.save(make_state(4), make_tensors(4), best=True),
        )
        loaded = store.load()
        assert loaded.step in (3, 4)
        assert loaded.skipped == ()
        assert same(loaded.tensors("policy.weights"), make_tensors(loaded.step)["policy.weights"])
        assert store.load("best").step in (2, 4)
        store.save(make_state(5), make_tensors(5))
        assert store.load().step == 5
        left = sorted(path.name for path in store.root.iterdir())
        names = {f"step-{step:06d}" for step in (store.load("best").step, 4, 5)}
        assert set(left) - names <= {"best", "latest", "step-000003"}
        assert all(info.complete for info in store.infos())
        if not killed:
            break
    assert 30 < number < 99  # every call was tried, and there were many


def test_killed_while_the_only_one_is_replaced_one_of_both_is_found(
    tmp_path: Path, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    for number in range(1, 100):
        store = CheckpointStore(tmp_path / str(number), CheckpointSettings())
        store.save(make_state(1), make_tensors(1), best=True)
        killed = save_killed_at(
            number, lambda store=store: store.save(make_state(1, episodes=99), make_tensors(2))
        )
        assert store.has_any()
        for which in ("latest", "best", 1):
            loaded = store.load(which)
            seed = 2 if loaded.state.episodes == 99 else 1
            assert same(loaded.tensors("policy.weights"), make_tensors(seed)["policy.weights"])
        assert [info.complete for info in store.infos()] == [True]
        store.save(make_state(2), make_tensors(2))
        names = sorted(path.name for path in store.root.iterdir())
        assert names == ["best", "latest", "step-000001", "step-000002"]
        if not killed:
            break
    assert 15 < number < 99


def test_the_same_step_is_replaced(
    store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    """As after a resume from an older one, when the newest was damaged."""
    store.save(make_state(1), make_tensors(1))
    store.save(make_state(1, episodes=99), make_tensors(2))
    loaded = store.load()
    assert loaded.state.episodes == 99
    assert same(loaded.tensors("policy.weights"), make_tensors(2)["policy.weights"])


@pytest.mark.parametrize("name", ["save_file", "write_json", "write_text"])
def test_a_disk_that_fills_up_costs_the_save_and_nothing_else(
    name: str, store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    store.save(make_state(1), make_tensors(1))

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module, name, full)
        with pytest.raises(RunError, match="the disk is full; older checkpoints stand"):
            store.save(make_state(2), make_tensors(2))
    assert store.load().step in (1, 2)
    assert store.load().skipped == ()


def test_too_little_room_is_told_before_anything_is_written(
    store: CheckpointStore,
    make_state: MakeState,
    make_tensors: MakeTensors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = make_tensors(1)
    size = size_of(tensors)
    assert size == 3 * 4 * 4 + 5 * 2 + 3 * 4 * 4
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage(0, 0, size))
    with pytest.raises(RunError, match=f"{size} are free"):
        store.save(make_state(1), tensors)
    assert not store.root.exists()


def test_a_checkpoint_without_the_tensors_of_a_role_is_refused(
    store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    store.save(make_state(1), make_tensors(1))
    with pytest.raises(RunError, match=r"critic\.weights\.safetensors cannot be read"):
        store.load().tensors("critic.weights")
