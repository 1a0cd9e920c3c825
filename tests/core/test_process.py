"""What a process does for itself: its signals and ports, and the children that end with it."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from postgrad.core import process
from postgrad.core.process import (
    command_of_child,
    import_path,
    interrupt,
    kill_group,
    signals_handled,
)


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


def test_a_group_of_zombies_is_no_error_as_macos_reports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(group: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "killpg", refuse)
    with pytest.raises(PermissionError):
        kill_group(4711)
    monkeypatch.setattr(sys, "platform", "darwin")
    kill_group(4711)


def test_without_linux_a_thread_kills_the_process_once_its_parent_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parents, killed = iter([7, 7, 1]), threading.Event()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(process, "PARENT_SECONDS", 0.0)
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.set())
    process.die_with_parent()
    assert killed.wait(10.0)


@pytest.mark.parametrize(
    ("limits", "cpus"),
    [
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "9900000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({}, 8),
    ],
)
def test_a_container_can_use_as_many_cpus_as_it_has_time_for(
    limits: dict[str, str], cpus: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 64)
    (tmp_path / "cpu").mkdir()
    for name, text in limits.items():
        (tmp_path / name).write_text(text, "utf-8")
    assert process.usable_cpus() == cpus
    assert process.usable_cores() == cpus


def test_cores_of_apple_silicon_are_its_performance_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(process, "macos_value", lambda name: (6).to_bytes(4, sys.byteorder))
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert process.usable_cores() == 6


def test_a_held_port_is_free_for_the_store_of_the_ranks_alone() -> None:
    held, port = process.held_port()
    with held:
        with socket.socket() as other, pytest.raises(OSError, match="already in use"):
            other.bind(("", port))
        store = TCPStore("127.0.0.1", port, 1, is_master=True, timeout=timedelta(seconds=10))
        store.set("rank", "0")
        assert store.get("rank") == b"0"


def test_a_child_imports_what_this_process_and_its_variable_name_each_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/of/this", "/of/both"])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/of/both", "", "for/children"]))
    folders = import_path()["PYTHONPATH"].split(os.pathsep)
    assert folders == [f"{tmp_path}", "/of/this", "/of/both", f"{tmp_path}/for/children"]


@pytest.mark.skipif(sys.platform != "linux", reason="the others hold the port at one address")
@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_a_held_port_is_taken_at_every_address_of_this_machine(address: str) -> None:
    held, port = process.held_port()
    with held, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((address, port))
