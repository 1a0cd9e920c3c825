"""What a process does for itself: its signals, and the children that end with it."""

import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from postgrad.core.process import command_of_child, interrupt, signals_handled


def test_signals_come_to_a_handler_inside_and_to_who_had_them_afterwards() -> None:
    heard: list[int] = []
    before = signal.getsignal(signal.SIGUSR2)
    with signals_handled((signal.SIGUSR2,), record(heard)):
        signal.raise_signal(signal.SIGUSR2)
    assert heard == [signal.SIGUSR2]
    assert signal.getsignal(signal.SIGUSR2) is before


def test_another_thread_than_the_main_one_sets_no_handlers() -> None:
    before = signal.getsignal(signal.SIGUSR2)

    def inside() -> Any:
        with signals_handled((signal.SIGUSR2,), record([])):
            return signal.getsignal(signal.SIGUSR2)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(inside).result() is before


def record(heard: list[int]) -> Callable[[int, object], None]:
    def handler(number: int, _: object) -> None:
        heard.append(number)

    return handler


def test_a_signal_may_interrupt_as_ctrl_c_does() -> None:
    with pytest.raises(KeyboardInterrupt), signals_handled((signal.SIGUSR2,), interrupt):
        signal.raise_signal(signal.SIGUSR2)


def test_a_child_runs_the_command_line() -> None:
    done = subprocess.run(
        command_of_child(["--version"]), capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0
    assert done.stdout.startswith("postgrad ")
