"""The process inside the sandbox that programs are forked from. Standard library only.

It has imported what programs usually import, so that a fork starts one in a millisecond or two. It
receives descriptors and limits over a socket, watches the CPU clocks of the programs that it
started, and answers how they ended. It never gets a reference answer.

    {"stride": descriptors of each program, "limits": {...}}
    {"ends": [{"code": 0, "cpu": 0.1, "trouble": ""}, ...], "over_cpu": false, "own_cpu": 0.1}

`cpu` counts from the moment at which the program itself began. Its isolation before that counts as
`own_cpu`, as does the work of this process: on a busy machine both grow without a program's fault.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postgrad.rewards.sandbox import box, guest, kernel, seccomp
from postgrad.rewards.sandbox.waiting import readable

_COMMON = """
    abc array ast atexit base64 bisect bz2 calendar cmath collections collections.abc contextlib
    copy ctypes dataclasses datetime decimal enum fractions functools gc hashlib heapq importlib
    inspect io itertools json linecache locale lzma math numbers operator queue random re statistics
    string struct sys textwrap threading time traceback types typing unicodedata weakref zlib
"""
MOST_DESCRIPTORS = 16
_OPEN_FILES = 64
_DESCRIPTORS = 1 << 16
_MESSAGE = 1 << 16
_LONGEST_TROUBLE = 600  # characters: a pipe takes 4 KiB at once


def main(layer: str, descriptor: int) -> None:
    """Serve the socket `descriptor` until its other end closes. layer: a name of layers.py."""
    control = socket.socket(fileno=descriptor)
    if layer != "none":
        kernel.die_with_parent()
    _import_common()
    if sys.platform == "linux":  # where memory runs out, programs go first
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")
    if layer == "namespaces":
        status = box.enter_namespaces()
        if status is not None:
            os._exit(status)
    walls = Walls(box.restrict_root(), os.pidfd_open(os.getpid())) if layer != "none" else None
    gc.collect()
    gc.freeze()
    control.sendall(b'{"ready": true}\n')
    while True:
        message, descriptors = _receive(control)
        if not message:
            return
        _run(control, walls, json.loads(message), descriptors)


class Walls:
    """What isolates every program.

    user: the number that programs run as, None where there is one user (box.restrict_root). pidfd:
    of this process. filter: of system calls.
    """

    def __init__(self, user: int | None, pidfd: int) -> None:
        self.user = user
        self.pidfd = pidfd
        self.filter = seccomp.build(os.uname().machine)


@dataclass
class _Child:
    """A process that becomes a program."""

    pid: int
    report: int  # non-blocking end of a pipe for {"began": ..., "trouble": ...}, see _say
    folder: str | None  # its scratch folder where it has no namespaces
    began: float | None = None  # on its CPU clock, in seconds, when the program began
    trouble: str = ""  # why the program could not begin
    end: dict[str, Any] | None = None  # its entry in "ends" of the answer, once it has ended

    def cpu(self) -> float:
        """CPU seconds of all its threads since the program began."""
        if self.end is not None:
            return self.end["cpu"]
        if sys.platform != "linux":
            return 0.0  # only the limit of whole seconds holds
        self._listen()
        if self.began is None:
            return 0.0
        return time.clock_gettime((~self.pid << 3) | 2) - self.began  # clock_getcpuclockid's

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError):
            words = os.read(self.report, _MESSAGE) if self.began is None else b""
            if words:
                first = json.loads(words)
                self.began, self.trouble = first["began"], first["trouble"]

    def kill(self) -> None:
        """Kills the child and with it its namespace; without namespaces, its process group."""
        if self.end is not None:
            return
        if self.folder is not None:
            # there is no group before the child has begun it; of zombies macOS refuses it
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> bool:
        """Reaps the child where it has ended. Returns whether it has, also on later calls."""
        if self.end is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid == 0:
                return False
            self._listen()
            os.close(self.report)
            self.began = self.began or 0.0
            cpu = max(0.0, usage.ru_utime + usage.ru_stime - self.began)
            code = os.waitstatus_to_exitcode(status)
            self.end = {"code": code, "cpu": cpu, "trouble": self.trouble}
            if self.folder is not None:
                shutil.rmtree(self.folder)
        return True


def _run(
    control: socket.socket, walls: Walls | None, order: dict[str, Any], descriptors: list[int]
) -> None:
    started = time.process_time()
    stride, limits = order["stride"], order["limits"]
    groups = [descriptors[i : i + stride] for i in range(0, len(descriptors), stride)]
    children = [_start(walls, limits, group) for group in groups]
    for descriptor in descriptors:
        os.close(descriptor)
    over = _watch(control, children, limits["cpu_seconds"], limits["threads"])
    overhead = time.process_time() - started + sum(child.began or 0.0 for child in children)
    answer = {"ends": [child.end for child in children], "over_cpu": over, "own_cpu": overhead}
    control.sendall(json.dumps(answer).encode() + b"\n")


def _watch(
    control: socket.socket, children: list[_Child], cpu_seconds: float, threads: int
) -> bool:
    """Waits until all children have ended; when the first one ends, the others are killed.

    Returns whether they used up `cpu_seconds` together.
    """
    at_once = min(os.cpu_count() or 1, threads * len(children))  # seconds that one second can cost
    clocks = [os.pidfd_open(child.pid) for child in children] if sys.platform == "linux" else []
    over = False
    while sum(child.reap() for child in children) < len(children):
        remaining = cpu_seconds - sum(child.cpu() for child in children)
        over = over or remaining <= 0.0
        if over or children[0].end is not None:
            for child in children:
                child.kill()
            remaining = 0.0
        ended = [child.end is not None for child in children]
        waiting = [clock for clock, gone in zip(clocks, ended, strict=True) if not gone]
        pause = max(remaining / at_once, 0.001) if clocks else 0.002
        if control.fileno() in readable([control.fileno(), *waiting], pause):
            request = control.recv(1)  # to kill; empty: nobody is there any more
            for child in children:
                child.kill()
            if not request:
                os._exit(0)
    for clock in clocks:
        os.close(clock)
    return over


def _start(walls: Walls | None, limits: dict[str, Any], descriptors: list[int]) -> _Child:
    report, tell = os.pipe()
    os.set_blocking(report, False)
    folder = None
    if walls is None:
        folder = tempfile.mkdtemp(prefix="postgrad-")
        child = os.fork()
    else:
        child = box.fork_isolated(walls.pidfd, walls.user, limits["scratch_bytes"])
    if child:
        os.close(tell)
        return _Child(child, report, folder)
    _become(walls, limits, descriptors, folder, tell)
    raise AssertionError("a program returned")


def _become(
    walls: Walls | None,
    limits: dict[str, Any],
    descriptors: list[int],
    folder: str | None,
    tell: int,
) -> None:
    """In the child: takes descriptors and limits, gives up its rights, runs the task, exits."""
    code, leave = 1, os._exit  # kept here, since a program may replace os._exit
    try:
        os.setsid()  # else kill(0) would reach the group of the worker
        tell = _take(descriptors, tell)
        if folder is not None:
            os.chdir(folder)
        with os.fdopen(guest.TASK, "rb") as file:
            task = json.loads(file.read())
        random.seed(0)  # else every start of this process would give other numbers
        _limit(limits)
        if walls is not None:
            box.drop_rights(walls.user, limits["threads"])
            kernel.install_filter(walls.filter)
    except BaseException as error:  # noqa: BLE001  # reported to the worker as SandboxError
        _say(tell, f"{type(error).__name__}: {error}")
        leave(code)
    try:
        _say(tell)
        os.close(tell)
        code = guest.run(task)
    finally:
        leave(code)


def _say(tell: int, trouble: str = "") -> None:
    """Reports to the parent that the program begins, or why it cannot; in one short write."""
    words = {"began": time.process_time(), "trouble": trouble[:_LONGEST_TROUBLE]}
    os.write(tell, json.dumps(words).encode())


def _take(descriptors: list[int], tell: int) -> int:
    """Makes `descriptors` 0, 1, 2 ... and `tell` the next one, and closes all others.

    Returns the new number of `tell`.
    """
    sources = [*descriptors, tell]
    copies = [os.dup2(d, 100 + i) for i, d in enumerate(sources)]
    for place, descriptor in enumerate(copies):
        os.dup2(descriptor, place)
    os.closerange(len(sources), _DESCRIPTORS)
    return len(sources) - 1


def _limit(limits: dict[str, Any]) -> None:
    seconds = int(limits["cpu_seconds"]) + 2  # the zygote is faster; this holds if it is not
    values = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: limits["output_bytes"] + 1,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if sys.platform == "linux":
        values[resource.RLIMIT_AS] = limits["memory_bytes"]
    for kind, value in values.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _import_common() -> None:
    for name in _COMMON.split():
        importlib.import_module(name)


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """(one line, the descriptors sent with it); the line is empty where the other end is closed."""
    message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE, MOST_DESCRIPTORS)
    while message and not message.endswith(b"\n"):
        chunk = control.recv(_MESSAGE)
        if not chunk:
            return b"", []
        message += chunk
    return message, list(descriptors)
