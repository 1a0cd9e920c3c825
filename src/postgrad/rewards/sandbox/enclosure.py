"""The sandbox of third-party verifiers: around the worker that runs them and around each child.

The worker imports them first and then isolates itself: no network, no files but those of libraries,
no other processes, no capabilities. A verifier that may run a sample's text as code does so in a
child process that is forked for one score, so that nothing of a sample is left for the next one.
"""

import json
import math
import os
import resource
import signal
import site
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from postgrad.core.errors import UsageError
from postgrad.rewards.sandbox import box, kernel, seccomp
from postgrad.rewards.sandbox.waiting import readable

MEMORY_BYTES = 1 << 30  # address space of a score, beyond what the worker has when it is ready
_ANSWER_BYTES = 1 << 17  # for each score
_TICK = 0.05  # seconds between two looks at a child's CPU clock
_DESCRIPTORS = 1 << 16
_THREADS = 8
_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/nix/store")


class ChildEnd(NamedTuple):
    """How the child process of a score ended."""

    answer: Any = None  # untrusted JSON that the child wrote
    cause: str | None = None  # "cpu_time" or "crash"; None where there is an answer
    message: str = ""


class Enclosure:
    """The isolation of this process. Create it before verifiers are imported, `isolate` after that.

    layer: "landlock", "namespaces", or "none" with the reason in `missing`; then `run_in_child`
    raises.
    """

    def __init__(self) -> None:
        """Raises SystemExit in the process that stays outside, where namespaces need a fork."""
        self.layer, self.missing = _layer()
        self._shut = False

    def isolate(self, packages: Iterable[str]) -> None:
        """Isolates this process for good. packages: files and folders of code that stay readable
        beside the libraries. Raises UsageError where a trial shows that the isolation has a hole.
        """
        if self.layer == "none":
            return
        readable = [path for path in _libraries(packages) if Path(path).exists()]
        held = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
        user = None
        if self.layer == "landlock":
            kernel.read_only([*readable, *box.DEVICES])
            kernel.drop_capabilities()
        else:
            user = box.restrict_root(readable)
            box.drop_rights(user, _THREADS)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _lower(resource.RLIMIT_AS, held + MEMORY_BYTES)
        kernel.install_filter(seccomp.build(os.uname().machine, forks=True))
        self._leaf = seccomp.build_leaf(os.uname().machine)
        self._shut = True
        escapes = self.run_in_child(_escapes, 5.0)
        if escapes.answer != []:
            raise UsageError(
                f"the sandbox of verifiers ({self.layer}) does not isolate them: {escapes}"
            )

    def run_in_child(
        self, score: Callable[[], Any], cpu_seconds: float, scores: int = 1
    ) -> ChildEnd:
        """Calls `score`, which returns a JSON value of so many scores, in a child process with that
        much CPU time.

        The child may run any code, and may forge its answer: check what you read. Raises UsageError
        where this process is not isolated.
        """
        if not self._shut:
            raise UsageError(
                f"the sample's text would run as code, and this machine has no sandbox for it: "
                f"{self.missing}"
            )
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            self._become(score, writing, cpu_seconds)
        os.close(writing)
        try:
            text, over = _watched(child, reading, cpu_seconds, scores * _ANSWER_BYTES)
        finally:
            os.close(reading)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if over or code == -signal.SIGXCPU:
            return ChildEnd(
                cause="cpu_time", message=f"used more than {cpu_seconds:g} s of CPU time"
            )
        try:
            return ChildEnd(json.loads(text))
        except (ValueError, RecursionError):
            ending = f"died of signal {-code}" if code < 0 else f"ended with exit code {code}"
            return ChildEnd(cause="crash", message=f"the process of the score {ending}")

    def _become(self, score: Callable[[], Any], writing: int, cpu_seconds: float) -> None:
        """In the child: closes all but standard streams and the pipe, scores, answers, exits."""
        code, leave = 1, os._exit  # kept here, since a text may replace os._exit
        try:
            os.dup2(writing, 3)
            os.closerange(4, _DESCRIPTORS)
            _lower(resource.RLIMIT_CPU, math.ceil(cpu_seconds) + 1)  # who watches is faster
            _lower(resource.RLIMIT_FSIZE, 0)
            kernel.install_filter(self._leaf)
            answer = memoryview(json.dumps(score(), allow_nan=False).encode())
            while answer:
                answer = answer[os.write(3, answer) :]
            code = 0
        except BaseException as error:  # noqa: BLE001  # the last words; the worker sees the code
            os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace")[:500])
        finally:
            leave(code)


def describe() -> str:
    """The layer that third-party verifiers get on this machine, or "none: " and why."""
    # In a process of its own, since isolation cannot be undone.
    command = [sys.executable, "-P", "-m", "postgrad.rewards.sandbox.enclosure"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return ended.stdout.strip() or f"none: {ended.stderr.strip().rpartition(chr(10))[2]}"


def _linux() -> str | None:
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    if not seccomp.is_known():
        return f"there is no list of system calls for {os.uname().machine}"
    return None


def _layer() -> tuple[str, str]:
    reason = _linux()
    if reason is not None:
        return "none", reason
    if kernel.landlock_version():
        return "landlock", ""
    try:
        status = box.enter_namespaces()
    except OSError as error:  # the process that goes on is a child all the same
        return "none", f"the kernel has no Landlock, and allows no namespaces ({error})"
    if status is not None:
        raise SystemExit(status)
    return "namespaces", ""


def _libraries(packages: Iterable[str]) -> list[str]:
    """Folders of code of the interpreter, installed packages and the system; no users' files."""
    installed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages(), *installed]
    postgrad = str(Path(__file__).parents[2])
    paths = [*_SYSTEM, *map(os.path.realpath, prefixes), *prefixes, postgrad, *packages]
    return [path for path in dict.fromkeys(paths) if path != "/"]


def _watched(child: int, reading: int, cpu_seconds: float, most: int) -> tuple[bytes, bool]:
    """(what the child wrote, whether it used too much CPU time). The child is killed when it closes
    the pipe, writes more than `most` bytes, or exceeds its time.
    """
    received, over, clock = b"", False, (~child << 3) | 2  # what clock_getcpuclockid gives
    while not over and len(received) <= most:
        if readable([reading], _TICK):
            part = os.read(reading, _ANSWER_BYTES)
            if not part:
                break
            received += part
        over = time.clock_gettime(clock) > cpu_seconds
    os.kill(child, signal.SIGKILL)
    return received, over


def _lower(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _escapes() -> list[str]:
    """The forbidden things that a child can do; empty where the sandbox holds."""
    import socket

    attempts: dict[str, Callable[[], Any]] = {
        "open a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
        "start a process": lambda: os.fork() or os._exit(0),
        "read /etc/passwd": lambda: Path("/etc/passwd").read_bytes(),
        "read another process": lambda: Path("/proc/1/environ").read_bytes(),
        "write a file": lambda: os.open(os.__file__, os.O_WRONLY),
        "signal its parent": lambda: os.kill(os.getppid(), 0),
    }
    return [name for name, attempt in attempts.items() if _can(attempt)]


def _can(attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    this = Enclosure()
    this.isolate([])
    print(f"none: {this.missing}" if this.layer == "none" else this.layer)
