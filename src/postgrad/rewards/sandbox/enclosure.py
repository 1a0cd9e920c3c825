"""The walls around verifiers of others, for the worker that runs them and for each of its children.

The worker imports them first and shuts itself in then: no network, no files but those of libraries,
no other processes, no capability. What may run a sample's text as code does so in a child of its
own, forked for that one score and gone with it, so that nothing of one sample is left for the next.
"""

import json
import math
import os
import resource
import select
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

MEMORY_BYTES = 1 << 30  # address space of a score, beside what the worker holds when it is ready
_ANSWER_BYTES = 1 << 17
_TICK = 0.05  # seconds between two looks at a child's CPU clock
_DESCRIPTORS = 1 << 16
_THREADS = 8
_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/nix/store")


class End(NamedTuple):
    """How a child ended: its answer, JSON that it chose itself; else a cause and a message."""

    answer: Any = None
    cause: str | None = None
    message: str = ""


class Enclosure:
    """Begins before the verifiers are imported, and is shut after.

    layer: "landlock", "namespaces", or "none" with the reasons in `missing`. Where there is none,
    `apart` refuses.
    """

    def __init__(self) -> None:
        """Raises SystemExit in the process that stays outside, where namespaces need one."""
        self.layer, self.missing = _layer()
        self._shut = False

    def shut(self, packages: Iterable[str]) -> None:
        """Put the walls up around this process, for good. packages: files and folders of code that
        stay readable, beside the libraries. Raises UsageError where a wall does not hold.
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
            user = box.narrow(readable)
            box.give_up(user, _THREADS)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _lower(resource.RLIMIT_AS, held + MEMORY_BYTES)
        kernel.install_filter(seccomp.build(os.uname().machine, forks=True))
        self._leaf = seccomp.build_leaf(os.uname().machine)
        self._shut = True
        escapes = self.apart(_escapes, 5.0)
        if escapes.answer != []:
            raise UsageError(f"the sandbox of verifiers ({self.layer}) does not hold: {escapes}")

    def apart(self, score: Callable[[], Any], cpu_seconds: float) -> End:
        """What `score` returns, a JSON value, in a child of its own with so much CPU time.

        The child may run anything, and write its answer itself: who reads it believes a number at
        most. Raises UsageError where there are no walls.
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
            text, over = _watched(child, reading, cpu_seconds)
        finally:
            os.close(reading)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if over or code == -signal.SIGXCPU:
            return End(cause="cpu_time", message=f"used more than {cpu_seconds:g} s of CPU time")
        try:
            return End(json.loads(text))
        except (ValueError, RecursionError):
            ending = f"died of signal {-code}" if code < 0 else f"ended with exit code {code}"
            return End(cause="crash", message=f"the process of the score {ending}")

    def _become(self, score: Callable[[], Any], writing: int, cpu_seconds: float) -> None:
        """In the child: nothing open but standard streams and the pipe; score, answer, end."""
        code, leave = 1, os._exit  # by its own name: text may replace that of the module
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
    """The layer that verifiers of others get on this machine, or why there is none."""
    command = [sys.executable, "-m", "postgrad.rewards.sandbox.enclosure"]  # it would shut us in
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
        status = box.enter()
    except OSError as error:  # the process that goes on is a child all the same
        return "none", f"the kernel has no Landlock, and allows no namespaces ({error})"
    if status is not None:
        raise SystemExit(status)
    return "namespaces", ""


def _libraries(packages: Iterable[str]) -> list[str]:
    """Folders of code: of the interpreter, of installed packages, of the system. Nobody's files."""
    installed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    own = [sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages(), *installed]
    postgrad = str(Path(__file__).parents[2])
    paths = [*_SYSTEM, *map(os.path.realpath, own), *own, postgrad, *packages]
    return [path for path in dict.fromkeys(paths) if path != "/"]


def _watched(child: int, reading: int, cpu_seconds: float) -> tuple[bytes, bool]:
    """What the child writes, and whether it used too much. It has ended, or is killed, after: who
    closes the pipe has nothing more to say.
    """
    received, over, clock = b"", False, (~child << 3) | 2  # what clock_getcpuclockid gives
    while not over and len(received) <= _ANSWER_BYTES:
        if select.select([reading], [], [], _TICK)[0]:
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
    """What a child can do and should not."""
    import socket

    deeds: dict[str, Callable[[], Any]] = {
        "open a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
        "start a process": lambda: os.fork() or os._exit(0),
        "read /etc/passwd": lambda: Path("/etc/passwd").read_bytes(),
        "read another process": lambda: Path("/proc/1/environ").read_bytes(),
        "write a file": lambda: os.open(os.__file__, os.O_WRONLY),
        "signal its parent": lambda: os.kill(os.getppid(), 0),
    }
    return [name for name, deed in deeds.items() if _can(deed)]


def _can(deed: Callable[[], Any]) -> bool:
    try:
        deed()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    this = Enclosure()
    this.shut([])
    print(f"none: {this.missing}" if this.layer == "none" else this.layer)
