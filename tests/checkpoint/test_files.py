"""Killed or out of room at any change of the disk: the newest whole checkpoint is found."""

import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.disk import Killed, full, went_well
from helpers.sharded_saves import OnProcesses
from postgrad.checkpoint import files
from postgrad.checkpoint import store as module
from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.state import Best
from postgrad.checkpoint.store import CheckpointStore, SaveFailed, size_of
from postgrad.core.text import size_text

MakeState = Callable[..., Any]
MakeTensors = Callable[[int], Any]
Same = Callable[..., bool]


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk: the calls are counted, and no power is cut here."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def torn(named: Any, path: Path) -> None:
    """What a kill in the middle of a write leaves."""
    path.write_bytes(b"\x40\x00\x00")
    raise Killed


@pytest.mark.slow
@pytest.mark.parametrize(
    "fails",
    [
        lambda calls: Killed(),  # nothing runs after it, no `finally` either
        lambda calls: full() if calls[-1] in ("save_file", "mkdir", "fsync", "replace") else None,
    ],
    ids=["killed", "disk full"],
)
def test_before_any_change_of_the_disk_the_newest_whole_one_and_the_best_are_found(
    fails: Any, tmp_path: Path, make_state: MakeState, make_tensors: MakeTensors, same: Same
) -> None:
    begun = CheckpointStore(tmp_path / "begun", CheckpointSettings(max_ckpt_num=2))
    old, new = Best("m", 0.5, 2), Best("m", 0.9, 4)
    for step in (1, 2, 3):
        best = old if step > 1 else None
        begun.save(make_state(step, best=best), make_tensors(step), best=step == 2)
    for number in range(1, 100):
        root = shutil.copytree(begun.root, tmp_path / str(number))
        store = CheckpointStore(root, CheckpointSettings(max_ckpt_num=2))
        ended = went_well(
            number,
            lambda store=store: store.save(make_state(4, best=new), make_tensors(4), best=True),
            fails,
        )
        loaded = store.load()
        assert loaded.step in (3, 4)
        assert loaded.skipped == ()
        assert same(loaded.tensors("policy.weights"), make_tensors(loaded.step)["policy.weights"])
        best = 4 if loaded.step == 4 else 2
        assert store.load("best").step == best
        marks = {info.step: (info.latest, info.best) for info in store.infos()}
        assert marks[loaded.step] == (True, best == loaded.step)
        for step in (5, 6, 7):  # goes on from what it found
            store.save(make_state(step, best=loaded.state.best), make_tensors(step))
        left = sorted(path.name for path in root.iterdir())
        assert left == ["best", "latest", f"step-{best:06d}", "step-000006", "step-000007"]
        assert (root / "best").read_text("utf-8") == f"step-{best:06d}\n"
        assert (root / "latest").read_text("utf-8") == "step-000007\n"
        shutil.rmtree(root)
        if ended:
            break
    assert 13 < number < 99  # every call was tried, and there were many


def test_killed_while_the_only_one_is_replaced_one_of_both_is_found(
    tmp_path: Path, make_state: MakeState, make_tensors: MakeTensors, same: Same
) -> None:
    for number in range(1, 100):
        store = CheckpointStore(tmp_path / str(number), CheckpointSettings())
        store.save(make_state(1), make_tensors(1), best=True)
        ended = went_well(
            number,
            lambda store=store: store.save(make_state(1, episodes=99), make_tensors(2)),
            lambda calls: Killed(),
        )
        assert store.steps()
        for which in ("latest", "best", 1):
            loaded = store.load(which)
            seed = 2 if loaded.state.episodes == 99 else 1
            assert same(loaded.tensors("policy.weights"), make_tensors(seed)["policy.weights"])
        assert [info.complete for info in store.infos()] == [True]
        store.save(make_state(2), make_tensors(2))
        names = sorted(path.name for path in store.root.iterdir())
        assert names == ["best", "latest", "step-000001", "step-000002"]
        if ended:
            break
    assert 15 < number < 99


def test_a_file_half_written_at_a_kill_is_never_read(
    tmp_path: Path,
    make_state: MakeState,
    make_tensors: MakeTensors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = CheckpointStore(tmp_path, CheckpointSettings())
    store.save(make_state(1), make_tensors(1))
    monkeypatch.setattr(module.shutil, "rmtree", lambda *args, **kwargs: None)
    monkeypatch.setattr(files, "save_file", torn)
    with pytest.raises(Killed):
        store.save(make_state(2), make_tensors(2))
    monkeypatch.undo()
    assert [path.name for path in files.left_behind(tmp_path)] == [f".saving-2-{os.getpid()}"]
    assert store.load().step == 1
    assert store.load().skipped == ()
    store.save(make_state(3), make_tensors(3))
    assert files.left_behind(tmp_path) == []


def test_a_full_disk_leaves_no_half_of_a_checkpoint(
    tmp_path: Path,
    make_state: MakeState,
    make_tensors: MakeTensors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The words are safetensors' own; it names no errno."""
    store = CheckpointStore(tmp_path, CheckpointSettings())
    store.save(make_state(1), make_tensors(1))
    before = sorted(path.name for path in tmp_path.rglob("*"))

    def fill(named: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise files.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(files, "save_file", fill)
    with pytest.raises(SaveFailed, match="the disk is full; older checkpoints are kept"):
        store.save(make_state(2), make_tensors(2))
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_part_that_a_stale_listing_does_not_show_is_in_the_manifest(
    tmp_path: Path, make_state: MakeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system shows for a while what a folder held before another machine wrote."""
    store = CheckpointStore(tmp_path, CheckpointSettings())
    parts = OnProcesses({"weight": torch.arange(12.0).reshape(4, 3)}, 2)
    list_now = Path.iterdir

    def listed(folder: Path) -> list[Path]:
        return [path for path in list_now(folder) if "rank-0001" not in path.name]

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", listed)
        store.save(make_state(1), {"policy.weights": parts})
    read = store.load().tensors("policy.weights")
    assert torch.equal(read["weight"], torch.arange(12.0).reshape(4, 3))


def test_a_part_that_is_not_there_is_a_save_that_failed(
    tmp_path: Path, make_state: MakeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, CheckpointSettings())
    parts = OnProcesses({"weight": torch.zeros(4, 3)}, 2)
    monkeypatch.setattr(parts, "write", lambda folder, stem: [f"{stem}.rank-0000-of-0002"])
    with pytest.raises(SaveFailed, match=r"step 1 .*rank-0000-of-0002"):
        store.save(make_state(1), {"policy.weights": parts})
    assert store.steps() == []


def test_what_a_killed_save_left_counts_as_room(
    tmp_path: Path,
    make_state: MakeState,
    make_tensors: MakeTensors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next save removes it: a disk it filled is not full for ever."""
    store = CheckpointStore(tmp_path, CheckpointSettings())
    tensors = make_tensors(1)
    needed = size_of(tensors) + module.SPARE_BYTES
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage(0, 0, needed - 5))
    takes = f"takes {size_text(size_of(tensors))}, 1.0 MiB have to stay, and 1.0 MiB are free"
    with pytest.raises(SaveFailed, match=takes):
        store.save(make_state(1), tensors)
    left = tmp_path / ".saving-1-4711"
    left.mkdir()
    (left / "policy.weights.safetensors").write_bytes(b"12345")
    store.save(make_state(1), tensors)
    assert not left.exists()


def test_names_that_only_look_like_ours_are_never_touched(
    tmp_path: Path, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    for name in (".saving-mine", ".saving-1", ".replaced-mine", ".best.x.tmp", "step-7"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").write_text("mine", "utf-8")
    (tmp_path / ".saving-notes").write_text("mine", "utf-8")
    (tmp_path / "step-000009").write_text("mine", "utf-8")
    before = set(tmp_path.rglob("*"))
    store = CheckpointStore(tmp_path, CheckpointSettings(max_ckpt_num=1))
    for step in (1, 2, 3):
        store.save(make_state(step), make_tensors(step))
    assert before <= set(tmp_path.rglob("*"))
    assert list(files.steps_in(tmp_path)) == [3]


def test_what_has_the_name_of_a_step_and_is_not_ours_is_kept_under_another(
    tmp_path: Path, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    store = CheckpointStore(tmp_path, CheckpointSettings())
    for text in ("first", "second"):
        shutil.rmtree(tmp_path / "step-000001", ignore_errors=True)
        (tmp_path / "step-000001").mkdir()
        (tmp_path / "step-000001" / "notes").write_text(text, "utf-8")
        store.save(make_state(1), make_tensors(1))
    assert store.load().step == 1
    kept = [(tmp_path / f"step-000001.aside-{n}" / "notes").read_text("utf-8") for n in (1, 2)]
    assert kept == ["first", "second"]
    assert list(files.steps_in(tmp_path)) == [1]


tensors = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1),
    st.tuples(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
        st.lists(st.integers(0, 3), max_size=3),
        st.binary(min_size=8 * 27, max_size=8 * 27),
    ).map(lambda drawn: tensor_of(*drawn)),
    max_size=4,
).filter(lambda named: "__metadata__" not in named)


def tensor_of(dtype: torch.dtype, shape: list[int], content: bytes) -> Tensor:
    """Any bits at all: NaN with payloads, infinities, minus zero, denormals."""
    count = torch.Size(shape).numel()
    flat = torch.frombuffer(bytearray(content), dtype=dtype)[:count].clone()
    return flat.reshape(shape)


@pytest.mark.slow
@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(tensors)
def test_every_tensor_comes_back_to_the_bit(
    make_state: MakeState,
    same: Same,
    tmp_path_factory: pytest.TempPathFactory,
    named: dict[str, Tensor],
) -> None:
    store = CheckpointStore(tmp_path_factory.mktemp("bits"), CheckpointSettings())
    store.save(make_state(1), {"policy.weights": named})
    assert same(store.load().tensors("policy.weights"), named)
