"""A mirror: complete or absent at every instant, whoever fails or is killed."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.failing_store import FailingStore, StoreKilled
from postgrad.checkpoint import mirror as module
from postgrad.checkpoint.manifest import Damaged
from postgrad.checkpoint.mirror import Mirror, MirrorFailed, Owner, TakenOver
from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.store import CheckpointStore, read_checkpoint
from postgrad.core.errors import UsageError

MakeState = Callable[..., Any]
MakeTensors = Callable[[int], Any]
URL = "failing://bucket/run"
OWNER = Owner("a" * 32, {"recipe": {"job": "sft"}})


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 16)
    FailingStore.reset()


class Saved:
    """A run's folder with checkpoints and a log, which grows by a line at each save."""

    def __init__(self, root: Path, make_state: MakeState, make_tensors: MakeTensors) -> None:
        self.root, self._state, self._tensors = root, make_state, make_tensors
        self.store = CheckpointStore(root / "checkpoints", CheckpointSettings(max_ckpt_num=9))
        self.log = root / "metrics.jsonl"
        root.mkdir()
        self.log.write_bytes(b"")

    def save(self, step: int) -> None:
        with self.log.open("ab") as log:
            log.write(f"the line of step {step}\n".encode())
        offsets = {"metrics.jsonl": self.log.stat().st_size}
        self.store.save(self._state(step, log_offsets=offsets), self._tensors(step))

    def upload(self, mirror: Mirror, step: int) -> int:
        folder, state = self.store.place(step)
        size = state.log_offsets["metrics.jsonl"]
        return mirror.upload(step, folder, {"metrics.jsonl": (self.log, size)})


@pytest.fixture
def saved(tmp_path: Path, make_state: MakeState, make_tensors: MakeTensors) -> Saved:
    run = Saved(tmp_path / "run", make_state, make_tensors)
    for step in (1, 2, 3):
        run.save(step)
    return run


def claimed(url: str = URL) -> Mirror:
    mirror = Mirror(url)
    mirror.claim(OWNER)
    return mirror


def newest_intact(to: Path, url: str = URL) -> int:
    """The step that another machine goes on from, its files and its log checked; 0: none."""
    mirror = Mirror(url)
    for step in reversed(mirror.steps()):
        try:
            folder = to / f"{len(list(to.iterdir()))}"
            mirror.download(step, folder)
            state = read_checkpoint(folder, step).state
            table = mirror.table(step)
            mirror.download_file(table, "metrics.jsonl", folder / "log", to / "nothing")
        except Damaged:
            continue
        wanted = "".join(f"the line of step {n}\n" for n in range(1, step + 1))
        assert (folder / "log").read_text() == wanted
        assert state.log_offsets["metrics.jsonl"] == len(wanted)
        return step
    return 0


def objects(mirror: str = "/bucket/run") -> list[str]:
    return sorted(name for name in FailingStore.store if name.startswith(mirror))


@pytest.mark.parametrize("url", [URL, "memory://here/run", "file"])
def test_what_was_uploaded_is_downloaded_bit_for_bit(
    url: str, saved: Saved, tmp_path: Path
) -> None:
    url = (tmp_path / "mirror").as_uri() if url == "file" else url
    mirror = claimed(url)
    assert saved.upload(mirror, 2) > 0
    assert saved.upload(mirror, 2) == 0  # it is there
    (tmp_path / "to").mkdir()
    assert newest_intact(tmp_path / "to", url) == 2
    here = saved.store.root / "step-000002"
    there = tmp_path / "to" / "0"
    for file in here.iterdir():
        assert (there / file.name).read_bytes() == file.read_bytes()
    if url.startswith("memory"):
        fsspec.filesystem("memory").rm("/here", recursive=True)


def test_only_the_end_of_a_log_is_uploaded_again(saved: Saved) -> None:
    mirror = claimed()
    saved.upload(mirror, 1)
    before = set(objects("/bucket/run/pieces"))
    saved.upload(mirror, 2)
    after = set(objects("/bucket/run/pieces"))
    assert before < after  # nothing is replaced
    table = json.loads(FailingStore.store["/bucket/run/tables/step-000002.json"].getvalue())
    first, *_ = table["files"]["metrics.jsonl"]["pieces"]
    assert f"/bucket/run/pieces/{first}" in before  # 16 bytes that both have


def test_a_download_takes_what_is_there_already(saved: Saved, tmp_path: Path) -> None:
    mirror = claimed()
    saved.upload(mirror, 3)
    table = mirror.table(3)
    for name in objects("/bucket/run/pieces")[1:]:
        del FailingStore.store[name]
    mirror.download_file(table, "metrics.jsonl", tmp_path / "log", saved.log)
    assert (tmp_path / "log").read_bytes() == saved.log.read_bytes()
    with pytest.raises(Damaged, match=r"pieces/[0-9a-f]{64} is missing"):
        mirror.download_file(table, "metrics.jsonl", tmp_path / "other", tmp_path / "none")


def upload_and_prune(saved: Saved, mirror: Mirror) -> None:
    saved.upload(mirror, 3)
    mirror.prune({3})


def changes_of_an_upload(saved: Saved) -> int:
    FailingStore.reset()
    mirror = claimed()
    saved.upload(mirror, 2)
    FailingStore.calm()
    upload_and_prune(saved, mirror)
    return FailingStore.changes


@pytest.mark.parametrize("error", [OSError, StoreKilled])
def test_wherever_an_upload_fails_the_newest_complete_checkpoint_is_intact(
    error: type[BaseException], saved: Saved, tmp_path: Path
) -> None:
    count = changes_of_an_upload(saved)
    assert count > 10
    (tmp_path / "to").mkdir()
    reached: list[int] = []
    for number in range(1, count + 1):
        FailingStore.reset()
        mirror = claimed()
        saved.upload(mirror, 2)
        FailingStore.calm()
        FailingStore.fails_at, FailingStore.error = number, error
        with pytest.raises((MirrorFailed, StoreKilled)):
            upload_and_prune(saved, mirror)
        FailingStore.calm()
        reached.append(newest_intact(tmp_path / "to"))
        # another process goes on, and nothing of the failed one is left
        mirror = claimed()
        upload_and_prune(saved, mirror)
        assert newest_intact(tmp_path / "to") == 3
        kept = {f"/bucket/run/pieces/{name}" for name in mirror.table(3).pieces}
        assert set(objects("/bucket/run/pieces")) == kept
        assert mirror.steps() == [3]
    assert set(reached) == {2, 3}
    assert reached == sorted(reached)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 25)), min_size=1, max_size=6))
def test_after_any_row_of_failures_a_checkpoint_that_was_complete_stays_so(
    saved: Saved, tmp_path_factory: pytest.TempPathFactory, tries: list[tuple[int, int]]
) -> None:
    """Each try uploads a step and fails at a change, or at none (0)."""
    FailingStore.reset()
    to = tmp_path_factory.mktemp("to")
    complete = 0
    for step, number in tries:
        mirror = claimed()
        FailingStore.calm()
        FailingStore.fails_at = number
        with suppress(MirrorFailed):
            saved.upload(mirror, step)
            complete = max(complete, step)
            mirror.prune({complete})
        FailingStore.calm()
        newest = newest_intact(to)
        assert newest >= complete  # what failed at its end may be there all the same
        complete = newest


def test_a_damaged_checkpoint_of_the_disk_is_not_passed_on(saved: Saved) -> None:
    mirror = claimed()
    path = saved.store.root / "step-000003" / "policy.weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(Damaged, match="has changed since it was written"):
        saved.upload(mirror, 3)
    assert mirror.steps() == []


def test_pruning_spares_what_is_not_ours(saved: Saved) -> None:
    mirror = claimed()
    for step in (2, 3):
        saved.upload(mirror, step)
    store = fsspec.filesystem("failing")
    foreign = [
        "/bucket/run/checkpoints/step-000001/weights.bin",
        "/bucket/run/checkpoints/step-000009/manifest.json",
        "/bucket/run/checkpoints/notes.txt",
        "/bucket/run/pieces/readme",
    ]
    for name in foreign:
        store.pipe_file(name, b"{}")
    mirror.prune({3})
    assert set(foreign) < set(objects())
    assert not [name for name in objects() if "step-000002" in name]
    mirror.clear()
    assert objects() == sorted(foreign)


def test_a_process_that_was_replaced_uploads_and_removes_no_more(saved: Saved) -> None:
    first, second = Mirror(URL), Mirror(URL)
    first.claim(OWNER)
    saved.upload(first, 2)
    second.claim(OWNER)
    with pytest.raises(TakenOver, match="another process has continued the run"):
        saved.upload(first, 3)
    with pytest.raises(TakenOver):
        first.prune(())
    saved.upload(second, 3)
    assert second.steps() == [2, 3]
    again = Mirror(URL)  # a restart within the process goes on under its name
    again.claim(OWNER, second._writer)
    again.prune({3})
    assert again.steps() == [3]


def test_a_folder_of_others_is_no_mirror() -> None:
    fsspec.filesystem("failing").pipe_file("/bucket/run/weights.bin", b"1")
    with pytest.raises(UsageError, match=r"holds other files \(weights.bin\)"):
        Mirror(URL).owner()


def test_an_owner_that_was_half_written_is_nobody() -> None:
    FailingStore.fails_at, FailingStore.error = 1, StoreKilled
    with pytest.raises(StoreKilled):
        claimed()
    FailingStore.calm()
    assert Mirror(URL).owner() is None
    assert claimed().owner() == OWNER


def rewritten(name: str, change: Callable[[Any], Any]) -> None:
    store, path = fsspec.filesystem("failing"), f"/bucket/run/{name}"
    value = json.loads(store.cat_file(path))
    changed = change(value)
    store.pipe_file(path, json.dumps(value if changed is None else changed).encode())


def add(name: str, **entry: Any) -> Callable[[Any], Any]:
    return lambda value: value["files"].update({name: entry})


def pieces(change: Callable[[list[str]], Any]) -> Callable[[Any], Any]:
    return lambda table: change(table["files"]["metrics.jsonl"]["pieces"])


TABLE, MANIFEST = "tables/step-000003.json", "checkpoints/step-000003/manifest.json"
FORGED = {
    "of another step": (TABLE, lambda table: table.update(step=2), "is of step 2"),
    "other pieces": (TABLE, lambda table: table.update(piece_bytes=32), "pieces of another size"),
    "a name above": (TABLE, add("../x", size=0, pieces=[]), "leads out"),
    "a name at the root": (TABLE, add("/x", size=0, pieces=[]), "leads out"),
    "a name with a dot": (TABLE, add("init/./x", size=0, pieces=[]), "leads out"),
    "a piece above": (TABLE, pieces(lambda names: names.append("../" + "a" * 61)), "match pattern"),
    "a piece too few": (TABLE, pieces(lambda names: names.clear()), "pieces of"),
    "no table": (TABLE, lambda table: [], "no table of ours"),
    "a file above": (MANIFEST, add("../x", size=1, sha256=""), "outside the checkpoint"),
    "a file that is larger": (MANIFEST, add("state.json", size=1, sha256=""), "1 are expected"),
}


@pytest.mark.parametrize(("name", "change", "message"), FORGED.values(), ids=FORGED.keys())
def test_what_a_mirror_says_is_checked_before_it_is_used(
    name: str, change: Callable[[Any], Any], message: str, saved: Saved, tmp_path: Path
) -> None:
    mirror = claimed()
    saved.upload(mirror, 3)
    rewritten(name, change)
    with pytest.raises(Damaged, match=message):
        (mirror.table if name == TABLE else lambda step: mirror.download(step, tmp_path / "to"))(3)
    assert not (tmp_path / "x").exists()


def test_an_object_of_another_content_is_named(saved: Saved, tmp_path: Path) -> None:
    mirror = claimed()
    saved.upload(mirror, 3)
    name = "/bucket/run/checkpoints/step-000003/policy.weights.safetensors"
    flip_last_bit(name)
    with pytest.raises(Damaged, match=r"policy.weights.safetensors is damaged: its SHA-256"):
        mirror.download(3, tmp_path / "to")


def flip_last_bit(name: str) -> None:
    content = bytearray(FailingStore.store[name].getvalue())
    content[-1] ^= 1
    fsspec.filesystem("failing").pipe_file(name, bytes(content))


def test_a_piece_that_a_download_saw_damaged_is_uploaded_again(
    saved: Saved, tmp_path: Path
) -> None:
    mirror, reader = claimed(), Mirror(URL)
    saved.upload(mirror, 2)
    table = mirror.table(2)
    damaged = table.files["metrics.jsonl"][1][0]
    flip_last_bit(f"/bucket/run/pieces/{damaged}")
    with pytest.raises(Damaged, match=f"{damaged} is damaged: .*; removed, so that the next"):
        reader.download_file(table, "metrics.jsonl", tmp_path / "log", tmp_path / "none")
    saved.upload(mirror, 3)
    (tmp_path / "to").mkdir()
    assert newest_intact(tmp_path / "to") == 3
    reader.download_file(table, "metrics.jsonl", tmp_path / "old log", tmp_path / "none")


def test_a_piece_that_was_damaged_on_its_way_alone_stays(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = claimed()
    saved.upload(mirror, 3)
    table, before, readings = mirror.table(3), objects(), list[str]()
    read = FailingStore.cat_file

    def garbled(store: FailingStore, path: str, **where: Any) -> bytes:
        readings.append(path)
        content = read(store, path, **where)
        return bytes(len(content)) if readings.count(path) == 1 else content

    monkeypatch.setattr(FailingStore, "cat_file", garbled)
    mirror.download_file(table, "metrics.jsonl", tmp_path / "log", tmp_path / "none")
    assert (tmp_path / "log").read_bytes() == saved.log.read_bytes()
    assert objects() == before


def test_a_url_that_nothing_opens_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"checkpoint.mirror = 'nosuch://a/b' cannot be opened"):
        Mirror("nosuch://a/b")
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(UsageError, match=r"s3fs.*: pip install 'postgrad\[s3\]'"):
        Mirror("s3://bucket/folder")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/a/folder", "a URL of a folder is expected"),
        ("s3://", "a URL of a folder is expected"),
        ("simplecache::s3://a/b", "a URL of a folder is expected"),
        ("s3://a/b?x=1", "a URL of a folder is expected"),
        ("memory://folder", "gone when the run ends"),
        ("sftp://me:secret@host/folder", "a password in it would be in every recipe.json"),
    ],
)
def test_a_mirror_is_the_url_of_a_folder(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CheckpointSettings(mirror=url)
    assert CheckpointSettings(mirror="sftp://me@host/folder").most_kept(1) == 4
