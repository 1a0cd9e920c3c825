"""Log files: only added to, cut back to what a checkpoint knew."""

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.errors import DiskFull, RunError
from postgrad.observe.sinks import Logs, copy_logs, fast_json, to_json


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_lines_are_added_in_order_with_keys_as_given(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    logs.metric({"step": 1, "loss": 0.1, "a": 1})
    logs.metric({"step": 2})
    assert (tmp_path / "metrics.jsonl").read_text("utf-8") == (
        '{"step": 1, "loss": 0.1, "a": 1}\n{"step": 2}\n'
    )
    logs.evaluation({"set": None})
    logs.event("sentinel", "look", step=3)
    assert lines(tmp_path / "eval.jsonl") == [{"set": None}]
    event = lines(tmp_path / "events.jsonl")[0]
    assert (event["event"], event["message"], event["step"]) == ("sentinel", "look", 3)
    logs.close()


def test_what_json_cannot_say_is_null() -> None:
    line = {"loss": math.nan, "inner": {"list": [math.inf, 1.0]}, "text": "ß"}
    assert to_json(line) == '{"loss": null, "inner": {"list": [null, 1.0]}, "text": "ß"}'


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(), JSON))
def test_samples_are_written_fast_and_say_the_same(line: dict[str, Any]) -> None:
    """Half surrogate pairs, numbers beyond 64 bits and what is not finite too."""
    assert json.loads(fast_json(line)) == json.loads(to_json(line))


def test_a_rewind_leaves_no_step_twice_and_none_missing(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    logs.metric({"step": 1})
    logs.samples([{"ticket": 0}, {"ticket": 1}])
    offsets = logs.sync()
    assert offsets == {"metrics.jsonl": 12, "samples.jsonl": 26}
    logs.metric({"step": 2})
    logs.samples([{"ticket": 2}])
    logs.event("killed", "here")
    logs.close()
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "lo')  # a line that was being written
    again = Logs(tmp_path)
    again.rewind(offsets)
    again.metric({"step": 2})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]
    assert lines(tmp_path / "samples.jsonl") == [{"ticket": 0}, {"ticket": 1}]
    assert [line["event"] for line in lines(tmp_path / "events.jsonl")] == ["killed"]
    again.close()


def test_a_run_that_begins_again_begins_with_empty_files(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    logs.metric({"step": 1})
    logs.rewind({})
    logs.metric({"step": 1})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1}]
    logs.close()


def test_half_a_surrogate_pair_is_written_as_json_has_it(tmp_path: Path) -> None:
    """Data read from JSON may hold one, and no file of ours can."""
    logs = Logs(tmp_path)
    logs.samples([{"answer": "a\ud800b\\", "ß": "€"}])
    logs.close()
    assert (tmp_path / "samples.jsonl").read_bytes() == (
        '{"answer": "a\\ud800b\\\\", "ß": "€"}\n'.encode()
    )
    assert lines(tmp_path / "samples.jsonl") == [{"answer": "a\ud800b\\", "ß": "€"}]


FLAT = st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@pytest.mark.slow
@given(st.lists(st.dictionaries(st.text(), FLAT | st.lists(FLAT))))
def test_every_line_is_one_line_and_comes_back(
    tmp_path_factory: pytest.TempPathFactory, written: list[Any]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "samples.jsonl").unlink(missing_ok=True)
    logs = Logs(folder)
    logs.samples(written)
    logs.close()
    raw = (folder / "samples.jsonl").read_bytes().split(b"\n")
    assert raw.pop() == b""
    assert [json.loads(line) for line in raw] == written


def test_events_are_never_cut_and_files_of_others_neither(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text("mine\n", "utf-8")
    logs = Logs(tmp_path)
    logs.event("one", "a")
    logs.rewind({})
    logs.event("two", "b")
    assert [line["event"] for line in lines(tmp_path / "events.jsonl")] == ["one", "two"]
    assert (tmp_path / "notes.jsonl").read_text("utf-8") == "mine\n"
    logs.close()


def test_events_that_lost_lines_are_named_too(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    logs.event("one", "a")
    logs.close()
    with pytest.raises(RunError, match=r"events\.jsonl has \d+ bytes and had 9999"):
        logs.rewind({"events.jsonl": 9999})


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match=r"metrics\.jsonl cannot be written: .*directory"):
        Logs(tmp_path).metric({"step": 1})


def full_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Takes `after` bytes of the next write, and no more."""
    write = os.pwrite
    room = [after]

    def some(handle: int, data: bytes, place: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(handle, data[: room[0]], place)
        room[0] -= written
        return written

    monkeypatch.setattr(os, "pwrite", some)


def test_lines_wait_for_room_on_a_full_disk_and_none_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    logs = Logs(tmp_path, warnings.append)
    with monkeypatch.context() as disk:
        full_disk(disk, after=17)
        for step in range(1, 4):
            logs.metric({"step": step})
        logs.samples([{"ticket": 0}])
        assert len((tmp_path / "metrics.jsonl").read_bytes()) == 17
        assert warnings == [f"{tmp_path}: the disk is full; log lines wait in memory for room"]
        with pytest.raises(DiskFull, match=r"metrics\.jsonl cannot be written: the disk is full"):
            logs.sync()
    logs.metric({"step": 4})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": step} for step in range(1, 5)]
    assert logs.sync() == {"metrics.jsonl": 48, "samples.jsonl": 13}
    logs.close()


def test_lines_that_never_found_room_are_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    logs = Logs(tmp_path, warnings.append)
    full_disk(monkeypatch, after=0)
    logs.metric({"step": 1})
    logs.close()
    assert warnings[1:] == ["metrics.jsonl: 12 bytes were lost on a full disk"]


def test_a_write_that_is_interrupted_is_not_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler may raise between the write and what follows it."""
    logs = Logs(tmp_path)
    logs.metric({"step": 1})
    write = os.pwrite

    def interrupted(handle: int, data: bytes, place: int) -> int:
        write(handle, data, place)
        raise KeyboardInterrupt

    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", interrupted)
        with pytest.raises(KeyboardInterrupt):
            logs.metric({"step": 2})
    logs.metric({"step": 3})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}, {"step": 3}]
    logs.close()


def test_an_fsync_that_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it did not write may be gone: a second fsync would say that all is well."""
    logs = Logs(tmp_path)
    logs.metric({"step": 1})

    def fail(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunError, match="resume the run when the disk works again") as caught:
        logs.sync()
    assert not isinstance(caught.value, DiskFull)
    logs.close()


def test_an_event_that_was_half_written_at_a_kill_did_not_happen(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "one"}\n{"event": "tw', "utf-8")
    logs = Logs(tmp_path)
    logs.rewind({"events.jsonl": 17})
    logs.event("two", "b")
    assert [line["event"] for line in lines(tmp_path / "events.jsonl")] == ["one", "two"]
    logs.close()


def test_a_file_that_lost_lines_is_named(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    way_out = r"samples\.jsonl has 0 bytes and had 7 .* put the file back .*`postgrad export .*run"
    with pytest.raises(RunError, match=way_out):
        logs.rewind({"samples.jsonl": 7})


def test_a_copy_ends_where_a_rewind_would(tmp_path: Path) -> None:
    source, to = tmp_path / "run", tmp_path / "copy"
    source.mkdir()
    to.mkdir()
    logs = Logs(source, compress=True)
    logs.metric({"step": 1})
    logs.samples([{"ticket": 0}])
    logs.event("started", "")
    offsets = logs.sync()
    logs.metric({"step": 2})
    logs.samples([{"ticket": 1}])
    logs.evaluation({"step": 2})
    logs.close()
    copy_logs(source, to, offsets)
    Logs(source).rewind({**offsets})
    for name in ("metrics.jsonl", "samples.jsonl.gz", "events.jsonl"):
        assert (to / name).read_bytes() == (source / name).read_bytes()
    assert sorted(path.name for path in to.iterdir()) == sorted(offsets)


@pytest.mark.parametrize("size", [0, 5])
def test_a_log_that_lost_lines_is_not_copied(size: int, tmp_path: Path) -> None:
    source, to = tmp_path / "run", tmp_path / "copy"
    source.mkdir()
    to.mkdir()
    (source / "metrics.jsonl").write_bytes(b"x" * size)
    with pytest.raises(RunError, match=rf"has {size} bytes and had 9 .* lines were lost"):
        copy_logs(source, to, {"metrics.jsonl": 9})
    os.truncate(source / "metrics.jsonl", 2**42)  # sparse
    with pytest.raises(OSError, match="No space left on device"):
        copy_logs(source, to / "..", {"metrics.jsonl": 2**42})
