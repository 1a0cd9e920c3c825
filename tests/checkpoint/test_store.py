"""The store: whatever happens, the newest whole checkpoint is found."""

import errno
import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postgrad.checkpoint import store as module
from postgrad.checkpoint.manifest import Entry, entry_of, manifest_of
from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.state import Best
from postgrad.checkpoint.store import CheckpointStore, parse_which, size_of
from postgrad.core.errors import RunError, UsageError

MakeState = Callable[..., Any]
MakeTensors = Callable[[int], Any]
Same = Callable[..., bool]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", CheckpointSettings(max_ckpt_num=2))


def steps(store: CheckpointStore) -> list[int]:
    return [info.step for info in store.infos()]


def test_what_was_saved_is_loaded_bit_for_bit(
    store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors, same: Same
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
    assert [(info.latest, info.best) for info in store.infos()] == [
        (False, True),
        (False, False),
        (True, False),
    ]


def test_checkpoints_of_the_steps_to_keep_are_never_removed(
    tmp_path: Path, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    kept = CheckpointSettings(max_ckpt_num=2, save_steps=2, keep_steps=4)
    store = CheckpointStore(tmp_path / "kept", kept)
    for step in range(2, 13, 2):
        store.save(make_state(step), make_tensors(step), best=step == 6)
    assert steps(store) == [4, 6, 8, 10, 12]
    other = CheckpointStore(store.root, CheckpointSettings(max_ckpt_num=1))  # resumed without it
    other.save(make_state(13, best=Best("m", 1.0, 6)), make_tensors(13))
    assert steps(other) == [6, 13]


@pytest.mark.parametrize(
    ("save_steps", "keep_steps", "message"),
    [
        (0, 20, "nothing saves at them: say save_steps too, 20 or a divisor of it"),
        (20, 50, "no multiple of save_steps = 20.* take 40 or 60, or another save_steps"),
        (20, 10, "no multiple of save_steps = 20.* take 20, or another save_steps"),
    ],
)
def test_steps_to_keep_after_which_nothing_is_saved_are_refused(
    save_steps: int, keep_steps: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        CheckpointSettings(save_steps=save_steps, keep_steps=keep_steps)
    CheckpointSettings(save_steps=20, keep_steps=60)
    CheckpointSettings(save_steps=20, keep_steps=20)


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
    assert [info.complete for info in store.infos()] == [True, False]


def test_where_none_is_intact_people_hear_what_to_do(
    store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    for step in (1, 2):
        (store.save(make_state(step), make_tensors(step)) / "state.json").unlink()
    message = r"step 2 is damaged .*step 1 is damaged .*; put their files back from a copy of the"
    with pytest.raises(RunError, match=message):
        store.load()


def measured(tmp_path: Path, **settings: Any) -> CheckpointStore:
    options = {"best_metric": "eval/accuracy", **settings}
    return CheckpointStore(tmp_path / "measured", CheckpointSettings(**options))


def test_a_start_that_nothing_has_beaten_is_told_with_its_value_and_what_to_do(
    tmp_path: Path, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    higher = measured(tmp_path)
    higher.save(make_state(8, best=Best("eval/accuracy", 0.625, 0, waited=2)), make_tensors(1))
    with pytest.raises(RunError) as error:
        higher.load("best")
    text = str(error.value)
    assert "set checkpoint.best_metric" not in text  # which is set
    assert "eval/accuracy was 0.625 there, and none of the 2 evaluations since was higher" in text
    assert "or the latest checkpoint" in text
    lower = measured(tmp_path, best_metric="eval/loss", best_mode="min")
    lower.save(make_state(9, best=Best("eval/loss", 1.5, 0, waited=1)), make_tensors(1))
    with pytest.raises(RunError, match="since was lower"):
        lower.load("best")


def test_without_a_best_checkpoint_the_message_says_which_of_the_causes_it_is(
    tmp_path: Path, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    store = measured(tmp_path)
    with pytest.raises(RunError, match="there is no intact one"):
        store.load("best")
    store.save(make_state(1), make_tensors(1))
    with pytest.raises(RunError, match=r"no evaluation has measured checkpoint\.best_metric"):
        store.load("best")
    store.save(make_state(4, best=Best("eval/accuracy", 0.5, 3)), make_tensors(1))
    with pytest.raises(RunError, match=r"best after step 3 .* could not be saved or is gone"):
        store.load("best")


def test_none_at_all_is_told_with_every_reason(
    store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    assert not store.steps()
    with pytest.raises(RunError, match="no checkpoint was saved"):
        store.load()
    path = store.save(make_state(1), make_tensors(1))
    (path / "state.json").unlink()
    with pytest.raises(RunError, match=r"state\.json is missing"):
        store.load()
    with pytest.raises(RunError, match=r"has no best checkpoint: set checkpoint\.best_metric"):
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


def test_the_same_step_is_replaced(
    store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors, same: Same
) -> None:
    """As after a resume from an older one, when the newest was damaged."""
    store.save(make_state(1), make_tensors(1))
    store.save(make_state(1, episodes=99), make_tensors(2))
    loaded = store.load()
    assert loaded.state.episodes == 99
    assert same(loaded.tensors("policy.weights"), make_tensors(2)["policy.weights"])


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
    with pytest.raises(
        RunError, match=f"takes {size} bytes, 1.0 MiB have to stay, and {size} bytes are free"
    ):
        store.save(make_state(1), tensors)
    assert not store.root.exists()


def test_a_checkpoint_without_the_tensors_of_a_role_is_refused(
    store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    store.save(make_state(1), make_tensors(1))
    with pytest.raises(RunError, match=r"critic\.weights\.safetensors is no file of this"):
        store.load().tensors("critic.weights")


def test_tensors_that_no_manifest_names_are_not_loaded(
    store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    """Nobody checked them."""
    path = store.save(make_state(1), make_tensors(1))
    shutil.copy(path / "policy.weights.safetensors", path / "policy.ema.safetensors")
    with pytest.raises(RunError, match=r"policy\.ema\.safetensors is no file of this checkpoint"):
        store.load().tensors("policy.ema")


def test_a_disk_that_cannot_be_read_is_a_damaged_checkpoint(
    store: CheckpointStore,
    make_state: MakeState,
    make_tensors: MakeTensors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.save(make_state(1), make_tensors(1))
    bad = store.save(make_state(2), make_tensors(2))
    read = entry_of

    def failing(path: Path) -> Entry:
        if path.parent == bad:
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr("postgrad.checkpoint.manifest.entry_of", failing)
    loaded = store.load()
    assert loaded.step == 1
    assert "cannot be read: [Errno 5] Input/output error" in loaded.skipped[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {**state, "step": 9}, r"state\.json is of step 9"),
        (lambda state: {**state, "step": "1"}, "step is '1': input should be a valid integer"),
        (lambda state: [state], "no JSON object"),
        (lambda state: {}, "format None"),
    ],
)
def test_a_state_that_is_not_this_steps_is_refused_though_its_hash_is_right(
    change: Callable[[Any], Any],
    message: str,
    store: CheckpointStore,
    make_state: MakeState,
    make_tensors: MakeTensors,
) -> None:
    path = store.save(make_state(1), make_tensors(1))
    text = json.dumps(change(json.loads((path / "state.json").read_text("utf-8"))))
    reseal(path, text)
    with pytest.raises(RunError, match=message):
        store.load()


def test_a_state_nested_without_end_is_damaged(
    store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    path = store.save(make_state(1), make_tensors(1))
    reseal(path, "[" * 100_000)
    assert [info.complete for info in store.infos()] == [False]


def reseal(path: Path, state: str) -> None:
    """Another state.json under a manifest that agrees with it."""
    (path / "state.json").write_text(state, "utf-8")
    (path / "manifest.json").unlink()
    sealed = manifest_of(path, 1, [file.name for file in path.iterdir()]).to_json()
    (path / "manifest.json").write_text(json.dumps(sealed), "utf-8")


@pytest.mark.parametrize("text", ["", "step-1", "../step-000001", "\xff", "step-000009"])
def test_a_broken_best_file_loses_no_best_checkpoint(
    text: str, store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    """The newest state knows it too: what is best is never pushed out (OpenRLHF#506)."""
    best = Best("eval/accuracy", 0.9, 1)
    store.save(make_state(1, best=best), make_tensors(1), best=True)
    for name in ("best", "latest"):
        (store.root / name).write_bytes(text.encode("latin-1"))
    assert store.load("best").step == 1
    assert [(info.latest, info.best) for info in store.infos()] == [(True, True)]
    for step in (2, 3, 4):
        store.save(make_state(step, best=best), make_tensors(step))
    assert steps(store) == [1, 3, 4]
    assert (store.root / "best").read_text("utf-8") == "step-000001\n"


def test_a_best_checkpoint_that_could_not_be_saved_leaves_the_one_before(
    store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    store.save(make_state(1, best=Best("m", 0.5, 1)), make_tensors(1), best=True)
    store.save(make_state(3, best=Best("m", 0.9, 2)), make_tensors(3))  # of step 2 there is none
    assert store.load("best").step == 1


def test_the_state_resumed_from_says_what_is_best_when_a_newer_one_is_damaged(
    store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    store.save(make_state(1, best=Best("m", 0.5, 1)), make_tensors(1), best=True)
    path = store.save(make_state(4, best=Best("m", 0.9, 4)), make_tensors(4), best=True)
    (path / "policy.weights.safetensors").write_bytes(b"")
    store.save(make_state(2, best=store.load().state.best), make_tensors(2))
    assert store.load("best").step == 1
    assert [(info.step, info.latest, info.best) for info in store.infos()] == [
        (1, False, True),
        (2, True, False),
        (4, False, False),
    ]


def test_state_that_is_not_json_is_told_and_nothing_is_left(
    store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    with pytest.raises(RunError, match=r"the state of step 1 cannot be saved: .*nan"):
        store.save(make_state(1, algorithm={"kl_coef": float("nan")}), make_tensors(1))
    assert list(store.root.iterdir()) == []


def test_a_run_that_goes_on_ends_what_a_killed_save_began(
    store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    """It may have nothing left to save: the names would lag for ever."""
    store.save(make_state(1, best=Best("m", 0.5, 1)), make_tensors(1), best=True)
    for step in (2, 3, 4):
        store.save(make_state(step, best=Best("m", 0.9, 4)), make_tensors(step), best=step == 4)
    for name in ("latest", "best"):  # as before the last save's commit
        (store.root / name).write_text("step-000001\n", "utf-8")
    shutil.copytree(store.root / "step-000003", store.root / "step-000002")
    manifest = store.root / "step-000002" / "manifest.json"
    manifest.write_text(manifest.read_text("utf-8").replace('"step": 3', '"step": 2'), "utf-8")
    newest = store.load()
    store.tidy(newest.state)
    assert (store.root / "latest").read_text("utf-8") == "step-000004\n"
    assert (store.root / "best").read_text("utf-8") == "step-000004\n"
    assert steps(store) == [3, 4]


def test_a_checkpoint_is_named_by_latest_best_or_its_step(
    store: CheckpointStore, make_state: MakeState, make_tensors: MakeTensors
) -> None:
    store.save(make_state(1, best=Best("m", 0.5, 1)), make_tensors(1), best=True)
    store.save(make_state(2, best=Best("m", 0.5, 1)), make_tensors(2))
    for which, step in (("latest", 2), ("best", 1), ("000001", 1), ("2", 2), (1, 1)):
        assert store.load(which).step == step
    assert [parse_which(text) for text in ("latest", "best", "000010")] == ["latest", "best", 10]
    for text in ("", "newest", "-1", "1.0", " 1", "step-000001", "\u00b2"):
        with pytest.raises(UsageError, match="latest, best, or the number of a step"):
            store.load(text)


def test_samples_under_way_are_in_the_checkpoint_to_the_bit_and_no_tensors_of_a_role(
    tmp_path: Path, make_state: Callable[..., Any], make_tensors: Callable[[int], Any]
) -> None:
    arrays = {
        "tokens": np.arange(5, dtype=np.int32),
        "logprobs": np.array([-0.1, np.nan], np.float32),
        "turns": np.zeros((0, 5), np.int64),
    }
    store = CheckpointStore(tmp_path, CheckpointSettings())
    store.save(make_state(1, pending=arrays), make_tensors(1))
    loaded = store.load()
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in loaded.state.pending.items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in arrays.items()
    }
    assert loaded.stems == sorted(make_tensors(1))
    store.save(make_state(2), make_tensors(2))
    assert store.load().state.pending == {}


def test_samples_under_way_that_were_changed_are_damage(
    tmp_path: Path, make_state: Callable[..., Any], make_tensors: Callable[[int], Any]
) -> None:
    store = CheckpointStore(tmp_path, CheckpointSettings())
    path = store.save(make_state(1, pending={"a": np.zeros(3)}), make_tensors(1))
    file = path / "pending.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(RunError, match=r"pending\.safetensors"):
        store.load()
