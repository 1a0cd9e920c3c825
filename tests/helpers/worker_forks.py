"""Scoring workers as forks of a process that has imported what workers import: each takes a
hundredth of a CPU second to start, where an interpreter of its own takes a fifth, and the tests
start eight hundred. Nothing of a test stays in them: a fork scores for one pool and ends. How a
worker starts without this is shown by tests/rewards/test_scorer.py and by every test that runs a
command as a process.

A server is started for each environment that an interpreter reads at its start, and imports; it
forks whenever it is asked. The worker is a child of the process that asked, as any worker is: the
fork between them ends at once, and Linux gives the orphan to the nearest process that adopts.
"""

import gc
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, cast

from helpers.fork_requests import (
    SIZE,
    receive_request,
    require_one_thread,
    send_request,
    take_place,
)
from postgrad.rewards.descendants import adopting

# Variables that an interpreter and the C library read once, at their start.
READ_AT_START = ("PYTHON", "PYDANTIC", "LC_", "LANG", "LD_", "OMP_", "OPENBLAS_", "VIRTUAL_ENV")

IMPORTED = [
    f"postgrad.rewards.{name}"
    for name in ("call", "descendants", "protocol", "registry", "settings", "verifier")
]
StartWorker = Callable[[Mapping[str, str]], subprocess.Popen[bytes]]


@contextmanager
def forked_workers() -> Iterator[StartWorker]:
    """Inside, the scoring workers of this process are forks (Linux only). Yields what starts one
    that is none.
    """
    import pytest

    from postgrad.rewards.process import start_worker

    if sys.platform != "linux":
        yield start_worker
        return
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        servers: dict[tuple[tuple[str, str], ...], _Server] = {}

        def start(environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
            at_start = {k: v for k, v in environment.items() if k.startswith(READ_AT_START)}
            key = tuple(sorted(at_start.items()))
            if key not in servers:
                servers[key] = _Server(at_start)
                stack.callback(servers[key].end)
            return cast("subprocess.Popen[bytes]", servers[key].fork(environment))

        patch.setattr("postgrad.rewards.process.start_worker", start)
        yield start_worker


class _Server:
    """at_start: the environment of its interpreter."""

    def __init__(self, at_start: dict[str, str]) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "helpers.worker_forks", str(theirs.fileno())],
                env=at_start,
                cwd=Path(__file__).parents[1],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fork(self, environment: Mapping[str, str]) -> "Fork":
        """A worker that has this environment, and the folder of this process."""
        (its_in, stdin), (stdout, its_out), (stderr, its_err) = (os.pipe() for _ in range(3))
        request = [dict(environment), str(Path.cwd())]
        with self._lock, adopting():
            send_request(self._socket, request, [its_in, its_out, its_err])
            answer = self._socket.recv(SIZE)
        for descriptor in (its_in, its_out, its_err):
            os.close(descriptor)
        assert answer, "the server of forks has ended"
        pipes = os.fdopen(stdin, "wb", 0), os.fdopen(stdout, "rb", 0), os.fdopen(stderr, "rb", 0)
        return Fork(int.from_bytes(answer, "big"), *pipes)

    def end(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


class Fork:
    """What the pool uses of a Popen."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout, self.stderr = pid, stdin, stdout, stderr
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _serve(asked: socket.socket) -> None:
    """Forks workers until who asks has ended. Returns in each worker, once that has ended."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # shared with the forks
    require_one_thread()
    while (asked_for := receive_request(asked)) is not None:
        (environment, folder), streams = asked_for
        adopted, tell_adopted = os.pipe()
        pids, tell_pid = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork() != 0:
                os._exit(0)
            os.setsid()  # before anybody can kill its group
            os.write(tell_pid, os.getpid().to_bytes(SIZE, "big"))
            for descriptor in (asked.detach(), tell_adopted, pids, tell_pid):
                os.close(descriptor)
            os.read(adopted, 1)  # only then its parent is the one with which it has to end
            os.close(adopted)
            take_place(streams, environment, folder)
            _work(folder)
            return
        os.waitpid(between, 0)
        asked.sendall(os.read(pids, SIZE))
        for descriptor in (*streams, adopted, tell_adopted, pids, tell_pid):
            os.close(descriptor)


def _work(folder: str) -> None:
    """Runs the program of workers to its end, as an interpreter of its own would."""
    sys.path[0] = folder
    runpy.run_module("postgrad.rewards.worker", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
