"""A phase that hangs is named, with every stack; one that advances is left alone."""

import json
import time
from io import StringIO
from pathlib import Path

import pytest

from postgrad.core.errors import RunError
from postgrad.observe.console import Console
from postgrad.observe.settings import Action, SentinelSettings
from postgrad.observe.sinks import Logs
from postgrad.observe.watchdog import Watchdog

LIMIT = 0.05


def watchdog(folder: Path, action: Action, stream: StringIO) -> Watchdog:
    settings = SentinelSettings(stall=action, stall_seconds=LIMIT)
    return Watchdog(settings, Logs(folder), Console("plain", stream), folder)


def stalls(folder: Path) -> int:
    path = folder / "events.jsonl"
    if not path.exists():
        return 0
    return sum(json.loads(line)["sentinel"] == "stall" for line in path.open(encoding="utf-8"))


def wait_for_stall(folder: Path) -> None:
    ends = time.monotonic() + 10
    while not stalls(folder) and time.monotonic() < ends:
        time.sleep(LIMIT / 5)


def test_a_hanging_phase_is_told_once_with_its_stacks(tmp_path: Path) -> None:
    stream = StringIO()
    with watchdog(tmp_path, "warn", stream) as dog, dog.phase("sample"):
        wait_for_stall(tmp_path)
        time.sleep(3 * LIMIT)
    assert stalls(tmp_path) == 1
    assert "phase sample makes no progress" in stream.getvalue()
    assert "wait_for_stall" in (tmp_path / "stacks.txt").read_text("utf-8")


def test_a_phase_that_advances_and_no_phase_at_all_are_left_alone(tmp_path: Path) -> None:
    stream = StringIO()
    settings = SentinelSettings(stall="warn", stall_seconds=5.0)
    with Watchdog(settings, Logs(tmp_path), Console("plain", stream), tmp_path) as dog:
        with dog.phase("train"):
            for _ in range(5):
                dog.beat()
        time.sleep(LIMIT)
    assert stalls(tmp_path) == 0
    assert stream.getvalue() == ""


def test_stop_ends_the_run_from_the_main_thread(tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match="phase sample made no progress"),
        watchdog(tmp_path, "stop", StringIO()) as dog,
        dog.phase("sample"),
    ):
        time.sleep(30)
