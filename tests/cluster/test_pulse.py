"""What a process says of a call beside it."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.rank_workers import NOTICED, WATCHDOG
from postgrad.cluster import pulse
from postgrad.cluster.pulse import Pulse, last_words, pulse_of, timed_out, uses_nothing

pytestmark = pytest.mark.skipif(
    not hasattr(time, "pthread_getcpuclockid"), reason="threads have no clocks here"
)
Done = threading.Event


@contextmanager
def called(work: Callable[[Done], None]) -> Iterator[int]:
    """A thread that works until the end."""
    done = Done()
    thread = threading.Thread(target=work, args=(done,), daemon=True)
    thread.start()
    assert thread.ident is not None
    yield thread.ident
    done.set()
    thread.join()


def waits_for_nothing(done: Done) -> None:
    done.wait()


def computes(done: Done) -> None:
    while not done.is_set():
        pass


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.01)


def test_without_a_call_there_is_nothing_to_say() -> None:
    assert pulse_of(None) == Pulse()


def test_a_call_that_computes_says_so() -> None:
    with called(computes) as thread:
        first = pulse_of(thread)
        until(lambda: pulse_of(thread).spent > first.spent)


def test_a_call_that_waits_says_where() -> None:
    with called(waits_for_nothing) as thread:
        until(lambda: pulse_of(thread) == pulse_of(thread))
        thread_pulse = pulse_of(thread)
    assert "threading.py:" in thread_pulse.place
    assert not thread_pulse.waits


def test_a_process_that_the_call_started_computes_for_it() -> None:
    with called(waits_for_nothing) as thread:
        before = pulse_of(thread).spent
        words = [sys.executable, "-c", "while True: pass"]
        with subprocess.Popen(words) as child:
            until(lambda: pulse_of(thread).spent > before + 0.05)
            child.kill()


def test_a_process_is_seen_from_outside() -> None:
    words = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-S", "-c", words], stdin=subprocess.PIPE) as child:
        until(lambda: uses_nothing(child.pid, 0.1))
        child.kill()
        child.wait()
        assert not uses_nothing(child.pid, 0.0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            WATCHDOG.format(rank=1),
            "_REDUCE_SCATTER_BASE of 544997376 values (number 7753), for 600 seconds",
        ),
        (
            "Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, SeqNum=458) "
            "ran for 1800600 ms",
            "ALLREDUCE (number 458)",
        ),
        ("Watchdog caught collective operation timeout: ", "a collective"),
        (NOTICED, ""),
        ("[PG ID 1] Received a dump signal due to a collective timeout from rank 0 and", ""),
        ("torch.OutOfMemoryError: CUDA out of memory", None),
        ("", None),
    ],
)
def test_the_watchdogs_words_are_told_from_others(words: str, expected: str | None) -> None:
    assert timed_out(f"before\n{words}\nafter") == expected


def test_the_last_words_are_the_end_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "LAST_BYTES", 4)
    file = tmp_path / "stderr"
    file.write_bytes(b"first\xffend")
    assert last_words(str(file)) == "\ufffdend"
    assert last_words(str(tmp_path / "none")) == ""
