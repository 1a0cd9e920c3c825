"""The last save of a run on a full disk: it waits for room, and loses no step."""

import errno
import os
import shutil
import signal
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from helpers.runs import assert_same_run, lines
from helpers.tiny_runs import MakeRecipe
from postgrad.checkpoint import files
from postgrad.checkpoint import store as checkpoints
from postgrad.checkpoint.store import NoRoom, SaveFailed
from postgrad.core.errors import RunError
from postgrad.observe.console import Console
from postgrad.tools.dry_run.dry_run import dry_run
from postgrad.training import saving
from postgrad.training.run import Stopped
from postgrad.training.sft import SFTJob
from postgrad.training.start import resume, train

NO_SPACE = "I/O error: No space left on device (os error 28)"
OVER_QUOTA = "I/O error: Disk quota exceeded (os error 122)"
WAITS = "the last save of the run waits for room: "
NEVER_SLEPT = 123.0  # seconds between two attempts, where a test stands in for the sleep


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "RETRY_SECONDS", 0.0)


class Disk:
    """Refuses the first `refused` files of tensors with `text`; counts all that are tried."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refused: float, text: str = NO_SPACE):
        self.tries = 0
        save = files.save_file

        def refuse(named: Any, path: Path) -> None:
            self.tries += 1
            if self.tries <= refused:
                path.write_bytes(b"half")
                raise SafetensorError(text)
            save(named, path)

        monkeypatch.setattr(files, "save_file", refuse)


def events(run_dir: str, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines(Path(run_dir) / "events.jsonl") if line["event"] == kind]


def on_sleep(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> list[int]:
    """Calls act(number of the wait, from 1) where the run sleeps between two attempts."""
    monkeypatch.setattr(saving, "RETRY_SECONDS", NEVER_SLEPT)
    sleep, waits = time.sleep, list[int]()

    def wait(seconds: float) -> None:
        if seconds != NEVER_SLEPT or threading.current_thread() is not threading.main_thread():
            sleep(seconds)
            return
        waits.append(len(waits) + 1)
        act(waits[-1])

    monkeypatch.setattr(time, "sleep", wait)
    return waits


def ask(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("text", [NO_SPACE, OVER_QUOTA], ids=["full disk", "quota"])
def test_a_run_that_waited_for_room_ends_with_the_same_bits(
    text: str, make_recipe: MakeRecipe, trained: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, shown = make_recipe("sft"), StringIO()
    with monkeypatch.context() as patch:
        disk = Disk(patch, 3, text)
        assert train(recipe, Console("plain", shown))["steps"] == 3
    assert disk.tries == 5  # weights three times in vain, then weights and optimizer
    assert_same_run(trained("sft"), recipe, 3)
    assert shown.getvalue().count(WAITS) == 1
    assert "there is room: the checkpoint of step 3 is saved" in shown.getvalue()
    [event] = events(recipe.run_dir, "waiting_for_room")
    assert (event["step"], event["folder"]) == (3, f"{recipe.run_dir}/checkpoints")
    [saved] = events(recipe.run_dir, "saved")
    assert event["needed_bytes"] == saved["size_bytes"] + checkpoints.SPARE_BYTES
    assert not events(recipe.run_dir, "save_failed")


def test_the_message_names_the_folder_what_is_free_and_what_is_needed(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last save finds 70,000 bytes free, and so does the message."""
    recipe, shown = make_recipe("sft"), StringIO()
    usage, step, little = namedtuple("usage", "total used free"), SFTJob.step, list[int]()

    def fill(job: SFTJob, state: Any) -> Any:
        little.extend([70_000] * 2 if state.step == 2 else [])
        return step(job, state)

    monkeypatch.setattr(SFTJob, "step", fill)
    monkeypatch.setattr(
        checkpoints.shutil, "disk_usage", lambda _: usage(0, 0, little.pop() if little else 10**9)
    )
    train(recipe, Console("plain", shown))
    [event] = events(recipe.run_dir, "waiting_for_room")
    assert event["free_bytes"] == 70_000
    needed = event["needed_bytes"] / 2**20
    assert event["message"] == (
        f"{WAITS}{recipe.run_dir}/checkpoints has 0.1 MiB free; the checkpoint of step 3 takes "
        f"about {needed:.1f} MiB; free space there: it is tried again every 0 s, for 10 min at "
        "most (checkpoint.wait_for_room_minutes); Ctrl-C gives up"
    )
    assert event["message"] in shown.getvalue()


@pytest.mark.parametrize(("minutes", "tries"), [(0.0, 1), (1e-9, 2)], ids=["none", "hardly any"])
def test_a_wait_ends_at_its_limit_as_a_failed_last_save(
    minutes: float, tries: int, make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, shown = make_recipe("sft", checkpoint={"wait_for_room_minutes": minutes}), StringIO()
    monkeypatch.setattr(saving, "RETRY_SECONDS", 0.001)
    disk = Disk(monkeypatch, float("inf"))
    with pytest.raises(NoRoom) as failed:
        train(recipe, Console("plain", shown))
    assert str(failed.value) == (
        f"no checkpoint of step 3 could be saved in {recipe.run_dir}/checkpoints: the disk is "
        "full; older checkpoints are kept; make room"
    )
    assert disk.tries == tries
    assert shown.getvalue().count(WAITS) == (1 if minutes else 0)


def test_a_limit_may_change_at_a_resume(
    make_recipe: MakeRecipe, trained: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"save_steps": 2, "wait_for_room_minutes": 0}
    recipe = make_recipe("sft", checkpoint=settings)
    with monkeypatch.context() as patch:
        Disk(patch, float("inf"))
        with pytest.raises(SaveFailed):
            train(recipe, console)
    with monkeypatch.context() as patch:
        disk = Disk(patch, 1)
        resume(Path(recipe.run_dir), ["--checkpoint.wait_for_room_minutes", "1"], [], console)
        assert disk.tries > 1
    assert_same_run(trained("sft"), recipe, 3)


def test_an_error_that_room_does_not_mend_is_raised_at_once(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, shown = Disk(monkeypatch, 1, "I/O error: Input/output error (os error 5)"), StringIO()
    with pytest.raises(SaveFailed, match="Input/output error"):
        train(make_recipe("sft"), Console("plain", shown))
    assert disk.tries == 1
    assert WAITS not in shown.getvalue()


def test_a_save_waits_for_its_log_lines_too(
    make_recipe: MakeRecipe, trained: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("sft")
    write, step, left = os.pwrite, SFTJob.step, [0]

    def refuse(handle: int, data: bytes, place: int) -> int:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return write(handle, data, place)

    def fill(job: SFTJob, state: Any) -> Any:
        left[0] = 12 if state.step == 2 else 0
        return step(job, state)

    shown = StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        patch.setattr(SFTJob, "step", fill)
        train(recipe, Console("plain", shown))
        assert not left[0]
    assert_same_run(trained("sft"), recipe, 3)
    assert shown.getvalue().count(f"{WAITS}{recipe.run_dir} has ") == 1
    assert "log lines wait to be written there, before the checkpoint of" in shown.getvalue()


def test_ctrl_c_ends_the_wait_as_a_failed_last_save_and_names_what_is_kept(
    make_recipe: MakeRecipe, trained: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("sft", checkpoint={"save_steps": 2})
    save = files.save_file

    def full_at_last(named: Any, path: Path) -> None:
        if ".saving-3-" in str(path):
            raise SafetensorError(NO_SPACE)
        save(named, path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "save_file", full_at_last)
        waits = on_sleep(patch, lambda wait: ask(signal.SIGINT) if wait == 2 else None)
        with pytest.raises(NoRoom) as failed:
            train(recipe, console)
    assert waits == [1, 2]
    kept = "the checkpoint of step 2 is kept; continue with postgrad resume"
    assert f"the disk is full; older checkpoints are kept; make room; {kept}" in str(failed.value)
    assert failed.value.exit_code == 1
    resume(Path(recipe.run_dir), [], [], console)
    assert_same_run(trained("sft"), recipe, 3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_first_signal_that_asks_to_save_leaves_the_wait_as_it_is(
    number: int, make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(monkeypatch, 3)
    waits = on_sleep(monkeypatch, lambda wait: ask(number) if wait == 1 else None)
    assert train(make_recipe("sft"), console)["steps"] == 3
    assert waits == [1, 2, 3]


def asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM before the third step."""
    step = SFTJob.step

    def asked(job: SFTJob, state: Any) -> Any:
        if state.step == 2:
            ask(signal.SIGTERM)
        return step(job, state)

    monkeypatch.setattr(SFTJob, "step", asked)


def test_a_run_that_is_asked_to_stop_waits_for_room_and_is_saved(
    make_recipe: MakeRecipe, trained: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("sft")
    with monkeypatch.context() as patch:
        asked_to_stop(patch)
        disk = Disk(patch, 3)
        with pytest.raises(Stopped, match="stopped after step 2: the checkpoint of step 2 is kept"):
            train(recipe, console)
    assert disk.tries == 5
    resume(Path(recipe.run_dir), [], [], console)
    assert_same_run(trained("sft"), recipe, 3)


def test_a_second_signal_ends_the_wait_of_a_run_that_was_asked_to_stop(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_to_stop(monkeypatch)
    disk = Disk(monkeypatch, float("inf"))
    waits = on_sleep(monkeypatch, lambda wait: ask(signal.SIGTERM))
    with pytest.raises(NoRoom, match="no checkpoint of step 2 could be saved"):
        train(make_recipe("sft"), console)
    assert (waits, disk.tries) == ([1], 1)


def test_a_signal_between_two_waits_ends_them_after_the_attempt(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the second attempt writes, which is left to end."""
    tries: list[int] = []
    ended = threading.Event()

    def full(named: Any, path: Path) -> None:
        tries.append(1)
        if len(tries) == 2:
            ask(signal.SIGINT)
        raise SafetensorError(NO_SPACE)

    monkeypatch.setattr(files, "save_file", full)
    waits = on_sleep(monkeypatch, lambda wait: ended.set() if wait == 2 else None)
    with pytest.raises(NoRoom):
        train(make_recipe("sft"), console)
    assert (waits, len(tries)) == ([1], 2)
    assert not ended.is_set()


def test_a_run_directory_that_is_removed_to_make_room_is_not_made_again(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("sft")
    run = Path(recipe.run_dir)
    Disk(monkeypatch, 2)
    waits = on_sleep(monkeypatch, lambda wait: shutil.rmtree(run) if wait == 1 else None)
    with pytest.raises(RunError, match=f"run_dir {run} was moved or removed"):
        train(recipe, console)
    assert waits == [1]
    assert not run.exists()


def test_a_dry_run_does_not_wait(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, float("inf"))
    report = dry_run(make_recipe("reward"), console)
    assert [problem.check for problem in report.problems] == ["save"]
    assert disk.tries == 1
