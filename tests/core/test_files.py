"""Files that are whole or not there."""

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from postgrad.core import files


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"a": [1, "ß"]})
    assert path.read_text("utf-8") == '{\n  "a": [\n    1,\n    "ß"\n  ]\n}\n'
    files.write_text(path, "b\n")
    assert path.read_text("utf-8") == "b\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    files.write_text(path, "old")

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        files.write_text(path, "new")
    assert path.read_text("utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_whole() -> None:
        with files.whole_file(path) as written:
            written.write_text("text")

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "a.json"
    for write in (lambda: files.write_text(path, "text"), write_whole):
        with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
            write()


def test_of_a_path_that_is_not_there_the_nearest_folder_is_taken(tmp_path: Path) -> None:
    assert files.existing(tmp_path) == tmp_path
    assert files.existing(tmp_path / "a" / "b") == tmp_path
    assert files.existing(Path("no-such-folder") / "b") == Path.cwd()


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(tmp_path / "a.json", {"a": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_are_not_finite_are_null_wherever_they_stand() -> None:
    value = {"a": [float("nan"), 1.5, ("x", float("inf"))], "b": {"c": -float("inf"), "d": None}}
    assert files.finite(value) == {"a": [None, 1.5, ["x", None]], "b": {"c": None, "d": None}}


@pytest.mark.parametrize(("number", "left"), [(1, "old"), (2, "new"), (3, "new")])
def test_interrupted_at_any_sync_the_file_is_the_old_or_the_new_one(
    number: int, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sync is the file's, before it has the name; the second the folder's."""
    path = tmp_path / "a.txt"
    files.write_text(path, "old")
    synced: list[int] = []

    def interrupt(handle: int) -> None:
        synced.append(handle)
        if len(synced) == number:
            raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt) if number < 3 else nullcontext():
        files.write_text(path, "new")
    assert path.read_text("utf-8") == left
    assert list(tmp_path.iterdir()) == [path]
    assert len(synced) == min(number, 2)


def test_no_handle_stays_open_where_a_folder_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles: list[int] = []

    def refuse(handle: int) -> None:
        handles.append(handle)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(files.os, "fsync", refuse)
    with pytest.raises(OSError, match="Invalid argument"):
        files.sync_directory(tmp_path)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handles[0])


def test_text_that_is_no_utf_8_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    files.write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_text(path, "\ud800")
    assert path.read_text("utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_replaced_and_what_it_led_to_is_left(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("mine", "utf-8")
    (tmp_path / "a.txt").symlink_to(tmp_path / "outside")
    files.write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "outside").read_text("utf-8") == "mine"
    assert (tmp_path / "a.txt").read_text("utf-8") == "new"


def test_the_error_of_a_write_names_the_file_that_people_know(tmp_path: Path) -> None:
    path = tmp_path / "report.html"

    def refuse() -> None:
        with files.whole_file(path) as written:
            raise OSError(errno.EROFS, "Read-only file system", str(written))

    with pytest.raises(OSError, match="Read-only") as caught:
        refuse()
    assert caught.value.filename == str(path)


def test_a_directory_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "model"

    def write_half() -> None:
        with files.whole_directory(path, replace=False) as folder:
            (folder / "a.txt").write_text("a", "utf-8")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert list(tmp_path.iterdir()) == []
    with files.whole_directory(path, replace=False) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a.txt").write_text("a", "utf-8")
        assert not path.exists()
    assert (path / "inner" / "a.txt").read_text("utf-8") == "a"


@pytest.mark.parametrize("replace", [False, True])
def test_a_directory_of_that_name_is_replaced_only_where_that_is_wanted(
    replace: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "mine.txt").write_text("mine", "utf-8")
    expected = nullcontext() if replace else pytest.raises(OSError, match="not empty")
    with expected, files.whole_directory(path, replace=replace) as folder:
        (folder / "new.txt").write_text("new", "utf-8")
    assert [entry.name for entry in path.iterdir()] == ["new.txt" if replace else "mine.txt"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_that_has_only_what_the_system_writes_is_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / ".DS_Store").touch()
    with files.whole_directory(path, replace=False) as folder:
        (folder / "new.txt").write_text("new", "utf-8")
    assert [entry.name for entry in path.iterdir()] == ["new.txt"]


def test_the_error_of_a_directory_names_the_place_that_people_know(tmp_path: Path) -> None:
    path = tmp_path / "model"

    def write(name: str) -> None:
        with files.whole_directory(path, replace=False) as folder:
            (folder / name).write_text("new", "utf-8")

    with pytest.raises(FileNotFoundError) as caught:
        write("nowhere/new.txt")
    assert str(caught.value) == f"[Errno 2] No such file or directory: '{path}/nowhere/new.txt'"
    path.mkdir()
    (path / "mine.txt").touch()
    with pytest.raises(OSError, match="not empty") as caught:
        write("new.txt")
    assert str(caught.value).endswith(f"not empty: '{path}'")
    file = tmp_path / "file"
    file.mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        files.write_text(file, "new")
    assert str(caught.value).endswith(f"directory: '{file}'")


def test_everything_in_a_directory_is_synced_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    synced: list[tuple[str, bool]] = []

    def note(handle: int) -> None:
        name = Path(f"/proc/self/fd/{handle}").readlink().name
        synced.append((name.partition(".")[0], path.exists()))

    with files.whole_directory(path, replace=False) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_text("a", "utf-8")
        monkeypatch.setattr(files.os, "fsync", note)
    assert sorted(synced[:-1]) == [("", False), ("a", False), ("inner", False)]
    assert synced[-1] == (tmp_path.name, True)


def test_what_a_killed_process_was_writing_is_told_from_what_is_not_ours(tmp_path: Path) -> None:
    ours = [".a.json.12.tmp", ".model.7.tmp"]
    for name in (*ours, ".a.json.tmp", ".other.12.tmp", "a.json", ".a.json.12.tmp.bak", ".a.x.tmp"):
        (tmp_path / name).touch()
    assert [path.name for path in files.left_behind(tmp_path, ("a.json", "model"))] == ours


def test_removing_a_link_leaves_what_lies_behind_it(tmp_path: Path) -> None:
    behind = tmp_path / "behind"
    behind.mkdir()
    (behind / "a").touch()
    (tmp_path / "link").symlink_to(behind)
    files.remove(tmp_path / "link")
    assert (behind / "a").exists()
    files.remove(behind)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_of_a_directory_are_as_readable_as_the_umask_lets_them_be(
    tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        with files.whole_directory(tmp_path / "model", replace=False) as folder:
            os.close(os.open(folder / "model.safetensors", os.O_CREAT, 0o600))
    finally:
        os.umask(before)
    assert (tmp_path / "model" / "model.safetensors").stat().st_mode & 0o777 == mode


def test_a_name_that_is_too_long_for_the_disk_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert files.is_file(tmp_path / "a")
    assert not files.is_file(tmp_path)
    assert not files.is_file(tmp_path / ("9" * 5000))


def test_a_second_name_is_a_hard_link_or_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, link, copy = tmp_path / "a", tmp_path / "link", tmp_path / "copy"
    path.write_bytes(b"content")
    files.link_or_copy(path, link)
    assert link.samefile(path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))

    monkeypatch.setattr(files.os, "link", refuse)
    files.link_or_copy(path, copy)
    assert (copy.read_bytes(), copy.samefile(path)) == (b"content", False)
    with pytest.raises(FileExistsError):
        files.link_or_copy(path, copy)


def test_a_file_that_was_replaced_before_it_was_linked_is_copied_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a link to a secret, between the look at a file and the link to it."""
    path, secret, to, link = tmp_path / "a", tmp_path / "secret", tmp_path / "to", os.link
    path.write_text("content", "utf-8")
    secret.write_text("secret", "utf-8")

    def racing(source: Path, target: Path, **how: bool) -> None:
        path.unlink()
        path.symlink_to(secret)
        link(source, target, **how)

    monkeypatch.setattr(files.os, "link", racing)
    files.link_or_copy(path, to)
    assert not to.is_symlink()
    assert to.read_text("utf-8") == "content"


def test_what_has_no_room_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file may say any size."""
    path = tmp_path / "a"
    path.touch()
    os.truncate(path, 2**42)
    monkeypatch.setattr(files.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(OSError, match="No space left on device"):
        files.link_or_copy(path, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_hard_link_in_a_directory_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("secret", "utf-8")
    path.chmod(0o600)
    with files.whole_directory(tmp_path / "model", replace=False) as folder:
        files.link_or_copy(path, folder / "linked")
        (folder / "new").write_text("new", "utf-8")
        (folder / "new").chmod(0o600)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "model").iterdir()}
    assert modes["linked"] == 0o600
    assert modes["new"] & 0o444 == (tmp_path / "model").stat().st_mode & 0o444


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `computed` was asked for, with an empty cache in the folder "cache"."""
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    return []


def computed(made_by: str, asked: list[str]) -> str:
    return files.computed_once("texts", made_by, lambda: asked.append(made_by) or f"of {made_by} ß")


def test_a_text_is_computed_once_for_all_that_it_depends_on(asked: list[str]) -> None:
    texts = [computed(made_by, asked) for made_by in ("one", "one", "two", "one")]
    assert texts == ["of one ß", "of one ß", "of two ß", "of one ß"]
    assert asked == ["one", "two"]


@pytest.mark.parametrize(
    "damage",
    [lambda text: text[:-1], lambda text: text.replace(b"of", b"if"), lambda _: b"", bytes.upper],
)
def test_a_damaged_text_is_computed_again(
    damage: Callable[[bytes], bytes], asked: list[str], tmp_path: Path
) -> None:
    computed("one", asked)
    (path,) = (tmp_path / "cache" / "texts").iterdir()
    written = path.read_bytes()
    path.write_bytes(damage(written))
    assert [computed("one", asked) for _ in range(2)] == ["of one ß"] * 2
    assert asked == ["one", "one"]
    assert path.read_bytes() == written


def test_without_a_place_for_the_cache_a_text_is_computed_each_time(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").touch()  # a file where the folder would be
    assert [computed("one", asked) for _ in range(2)] == ["of one ß"] * 2
    monkeypatch.setattr(files, "cache_folder", lambda _: None)
    assert computed("one", asked) == "of one ß"
    assert asked == ["one", "one", "one"]


def test_where_computing_fails_nothing_is_kept(asked: list[str], tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        files.computed_once("texts", "one", lambda: str(1 / 0))
    assert not list((tmp_path / "cache").rglob("*.json"))
    assert computed("one", asked) == "of one ß"


@pytest.mark.parametrize("refusal", [None, errno.ENOTSUP, errno.EIO])
def test_on_macos_the_drive_is_flushed_too_and_fsync_stands_in_where_that_is_unknown(
    refusal: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, synced = list[int](), list[int]()

    def full_sync(handle: int, command: int) -> int:
        asked.append(command)
        if refusal is not None:
            raise OSError(refusal, os.strerror(refusal))
        return 0

    monkeypatch.setattr(files.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(files.fcntl, "fcntl", full_sync)
    monkeypatch.setattr(os, "fsync", synced.append)
    (tmp_path / "state").write_text("1", "utf-8")
    with pytest.raises(OSError) if refusal == errno.EIO else nullcontext():
        files.sync_file(tmp_path / "state")
    assert asked == [51]
    assert len(synced) == (refusal == errno.ENOTSUP)
