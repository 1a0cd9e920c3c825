"""A phase that hangs is named, with every stack; one that advances is left alone."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest

from postgrad.core.errors import RunError
from postgrad.observe.console import Console
from postgrad.observe.sentinels.base import Action
from postgrad.observe.sentinels.stall import Stall
from postgrad.observe.sinks import Logs
from postgrad.observe.watchdog import Watchdog

LIMIT = 0.05


@contextmanager
def watchdog(folder: Path, action: Action, stream: StringIO) -> Iterator[Watchdog]:
    settings, logs = Stall(action=action, seconds=LIMIT), Logs(folder)
    try:
        with Watchdog(settings, logs, Console("plain", stream), folder) as dog:
            yield dog
    finally:
        logs.close()


def stalls(folder: Path) -> int:
    path = folder / "events.jsonl"
    if not path.exists():
        return 0
    return sum(json.loads(line)["sentinel"] == "stall" for line in path.open(encoding="utf-8"))


def wait_for_stall(folder: Path, number: int = 1) -> None:
    wait(lambda: stalls(folder) == number)


def wait(done: Callable[[], bool]) -> None:
    ends = time.monotonic() + 10
    while not done() and time.monotonic() < ends:
        time.sleep(LIMIT / 5)


def test_a_hanging_phase_is_told_once_with_its_stacks(tmp_path: Path) -> None:
    stream = StringIO()
    with watchdog(tmp_path, "warn", stream) as dog, dog.phase("sample"):
        wait_for_stall(tmp_path)
        wait(lambda: "makes no progress" in stream.getvalue())
        time.sleep(3 * LIMIT)
    assert stalls(tmp_path) == 1
    assert stream.getvalue().count("phase sample makes no progress") == 1
    assert "wait_for_stall" in (tmp_path / "stacks.txt").read_text("utf-8")


def test_a_hanging_phase_says_what_it_waits_for(tmp_path: Path) -> None:
    stream = StringIO()
    awaited = lambda: "ticket 7 (samples 1 being written)"  # noqa: E731
    with watchdog(tmp_path, "warn", stream) as dog, dog.phase("sample", awaited):
        wait_for_stall(tmp_path)
        wait(lambda: "stacks are in" in stream.getvalue())
    assert ", waiting for ticket 7 (samples 1 being written); stacks are in" in stream.getvalue()


def test_a_phase_that_advances_and_no_phase_at_all_are_left_alone(tmp_path: Path) -> None:
    stream = StringIO()
    settings = Stall(action="warn", seconds=5.0)
    with Watchdog(settings, Logs(tmp_path), Console("plain", stream), tmp_path) as dog:
        with dog.phase("train"):
            for _ in range(5):
                dog.beat()
        time.sleep(LIMIT)
    assert stalls(tmp_path) == 0
    assert stream.getvalue() == ""


def test_a_phase_that_waits_for_people_is_watched_again_after_that(tmp_path: Path) -> None:
    with watchdog(tmp_path, "observe", StringIO()) as dog, dog.phase("save"):
        with dog.aside():
            time.sleep(4 * LIMIT)
        assert stalls(tmp_path) == 0
        wait_for_stall(tmp_path)
    assert stalls(tmp_path) == 1


def test_a_stall_stands_in_the_terminals_block_while_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str | None] = []
    monkeypatch.setattr(Console, "spoken", lambda self, name, text: messages.append(text))
    with watchdog(tmp_path, "warn", StringIO()) as dog, dog.phase("sample"):
        wait(lambda: len(messages) == 1)
        dog.beat()
    assert "phase sample makes no progress" in (messages[0] or "")
    assert messages[1:] == [None]


def test_stop_ends_the_run_from_the_main_thread(tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match="phase sample made no progress"),
        watchdog(tmp_path, "stop", StringIO()) as dog,
        dog.phase("sample"),
    ):
        time.sleep(30)


def test_a_phase_that_hangs_again_after_progress_is_told_again(tmp_path: Path) -> None:
    stream = StringIO()
    with watchdog(tmp_path, "observe", stream) as dog, dog.phase("sample"):
        wait_for_stall(tmp_path)
        dog.beat()
        wait_for_stall(tmp_path, 2)
    assert stalls(tmp_path) == 2
    assert stream.getvalue() == ""  # observe only records


def test_people_are_told_and_the_run_stopped_where_nothing_can_be_recorded(tmp_path: Path) -> None:
    """A full or lost disk is what a phase may hang on."""
    stream = StringIO()
    folder = tmp_path / "gone"
    with (
        pytest.raises(RunError, match="phase sample made no progress"),
        watchdog(folder, "stop", stream) as dog,
        dog.phase("sample"),
    ):
        time.sleep(30)
    assert "phase sample makes no progress" in stream.getvalue()
    assert "it could not be recorded" in stream.getvalue()


def test_a_signal_of_somebody_else_is_no_stall(tmp_path: Path) -> None:
    """Schedulers send SIGUSR1 too."""
    before = signal.getsignal(signal.SIGUSR1)
    settings = Stall(action="stop", seconds=60.0)
    with Watchdog(settings, Logs(tmp_path), Console("quiet", StringIO()), tmp_path) as dog:
        os.kill(os.getpid(), signal.SIGUSR1)
        with dog.phase("sample"):
            os.kill(os.getpid(), signal.SIGUSR1)
    assert stalls(tmp_path) == 0
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_phase_that_fails_is_no_longer_watched(tmp_path: Path) -> None:
    with watchdog(tmp_path, "warn", StringIO()) as dog:
        with pytest.raises(ValueError, match="wrong"), dog.phase("sample"):
            raise ValueError("wrong")
        time.sleep(3 * LIMIT)
    assert stalls(tmp_path) == 0
