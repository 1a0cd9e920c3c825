"""The worker's side of the sandbox: programs and limits go in, how they ended comes out."""

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from postgrad.rewards.descendants import cpu_under, descendants, end_with_descendants
from postgrad.rewards.sandbox.layers import ENVIRONMENT, Layer
from postgrad.rewards.sandbox.waiting import readable

START_SECONDS = 60.0
_TICK = 0.2  # seconds between two looks at how long a program has been idle
_CLOCK = 0.02  # resolution, in seconds, of the kernel's start time of a process
_REPLY = 1 << 16  # bytes of one read
_TELLS_WAITS = Path("/proc/stat").exists()  # whether the kernel says who waits for a processor


class SandboxError(Exception):
    """The sandbox itself failed: nothing is known about the program."""


@dataclass(frozen=True)
class Limits:
    """What the programs of one run may use.

    Idle is the time in which programs neither ran nor waited for a processor, so that a busy host
    makes no program idle.
    """

    cpu_seconds: float = 2.0  # of all programs together
    idle_seconds: float = 5.0  # of all programs together
    memory_bytes: int = 512 << 20  # address space of each
    threads: int = 16  # of each
    output_bytes: int = 1 << 20  # largest file or stream
    scratch_bytes: int = 16 << 20  # size of /tmp


@dataclass
class Program:
    """A program to run."""

    task: dict[str, Any]  # JSON for guest.run: "mode", "sources" and what the mode needs
    stdin: bytes = b""
    pipes: tuple[int, ...] = ()  # (ask, reply): descriptors for remote.py, closed by `run`


@dataclass(frozen=True)
class End:
    """How a run ended. Code, output and result are those of its first program."""

    cause: str | None  # "cpu_time", "idle", "output", "exit" or "signal"; None: exit status 0
    code: int  # exit status, or minus the signal
    output: bytes  # standard output
    errors: tuple[str, ...]  # the end of each program's standard error
    result: Any  # JSON that the mode of guest.py returned; None where it did not get so far
    cpu_seconds: float  # of the programs
    idle_seconds: float
    own_cpu_seconds: float  # of the sandbox itself


@dataclass
class _ProgramFiles:
    """The files of one program, in memory. Close them with `close`."""

    program: Program
    # Descriptors: stdin, stdout, stderr, task, result.
    numbers: list[int] = field(default_factory=list)

    def open(self) -> list[int]:
        task = json.dumps(self.program.task).encode()
        self.numbers += [_memory(content) for content in (self.program.stdin, b"", b"", task, b"")]
        return [*self.numbers, *self.program.pipes]

    def read(self, place: int, most: int) -> bytes:
        return os.pread(self.numbers[place], most, 0)

    def close(self) -> None:
        for number in self.numbers:
            os.close(number)
        self.numbers.clear()


class Sandbox:
    """Runs programs in a layer. Its process starts with the first run; close it, or use `with`.

    A run raises SandboxError where the sandbox fails; the next run starts it again.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._printed: Any = None

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, programs: Sequence[Program], limits: Limits) -> End:
        """Run programs side by side until the first of them ends; the others are killed then."""
        files = [_ProgramFiles(program) for program in programs]
        try:
            numbers = [file.open() for file in files]
            order = {"stride": len(numbers[0]), "limits": asdict(limits)}
            control = self._started()
            try:
                message = json.dumps(order).encode() + b"\n"
                # Before programs are: this process may have to wait now.
                started, stolen = time.monotonic(), _stolen()
                socket.send_fds(control, [message], [n for group in numbers for n in group])
                for program in programs:  # so that a side sees the other one end
                    for pipe in program.pipes:
                        os.close(pipe)
                    program.pipes = ()
                answer, idle = self._await(control, limits, started, stolen)
            except OSError as error:
                raise self._broken(f"it cannot be reached: {error}") from error
            return _end(files, answer, idle, limits)
        finally:
            for file in files:
                file.close()
            for program in programs:
                for pipe in program.pipes:
                    os.close(pipe)

    def close(self) -> None:
        """End the sandbox's process, and whatever runs in it."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                end_with_descendants(self._process)
            self._process = None
        if self._printed is not None:
            self._printed.close()
            self._printed = None

    def _started(self) -> socket.socket:
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair()
        self._control = ours
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close
        try:
            self._process = subprocess.Popen(
                self.layer.command(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._printed,
                pass_fds=[theirs.fileno()],
                env=ENVIRONMENT,
                cwd="/",
            )
        except OSError as error:
            raise self._broken(f"it cannot be started: {error}") from error
        finally:
            theirs.close()
        if not readable([ours.fileno()], START_SECONDS) or not ours.recv(_REPLY):
            raise self._broken("it does not start")
        return ours

    def _await(
        self, control: socket.socket, limits: Limits, started: float, stolen: float
    ) -> tuple[dict[str, Any], float]:
        """(the zygote's answer, idle seconds of the programs); at the idle limit they are killed.

        started, stolen: the clock and `_stolen()` when the run began.
        """
        idle, ended = 0.0, False
        used, grew = 0.0, started  # CPU seconds of the programs, and when they were seen to grow
        received = b""
        while not received.endswith(b"\n"):
            pause = min(max(limits.idle_seconds - idle, 0.01), _TICK)
            if readable([control.fileno()], pause):
                chunk = control.recv(_REPLY)
                if not chunk:
                    raise self._broken("it ended")
                received += chunk
            elif not ended:
                now = time.monotonic()
                if _TELLS_WAITS:
                    idle = max(idle, self._idle(now - started) - (_stolen() - stolen))
                else:  # a program that waits long for a processor is taken for idle
                    before, used = used, self._used()
                    grew = now if used > before else grew
                    idle = max(idle, now - grew)
                if idle >= limits.idle_seconds:
                    control.send(b"k")
                    ended = True
        return json.loads(received), idle

    def _used(self) -> float:
        """CPU seconds of the programs, which run under the zygote."""
        assert self._process is not None
        return cpu_under(self._process.pid)

    def _idle(self, elapsed: float) -> float:
        """Seconds out of `elapsed` in which the programs neither ran nor waited for a processor.

        0 while one of them runs or waits, since the kernel counts a wait only when it is over.
        """
        assert self._process is not None
        pids = list(descendants(self._process.pid))
        with contextlib.suppress(OSError):  # what ends meanwhile is no longer idle
            # From when the first of them was started, which may be late on a busy host. Who starts
            # them is older than that.
            begun = max((age for age in map(_age, pids) if age <= elapsed + _CLOCK), default=0.0)
            looks = [_look(pid) for pid in pids if not _has_children(pid)]
            if not any(look.runnable for look in looks):
                return min(elapsed, begun) - sum(look.busy for look in looks)
        return 0.0

    def _broken(self, why: str) -> SandboxError:
        printed = ""
        process, self._process = self._process, None
        if process is not None:
            end_with_descendants(process)
        if self._printed is not None:
            self._printed.seek(0)
            printed = self._printed.read().decode(errors="replace").strip()[-300:]
        self.close()
        last = printed.rpartition("\n")[2]
        return SandboxError(f"the sandbox ({self.layer.name}): {why}{': ' if last else ''}{last}")


def _end(files: list[_ProgramFiles], answer: dict[str, Any], idle: float, limits: Limits) -> End:
    ends = answer["ends"]
    for end in ends:
        if end["trouble"]:
            raise SandboxError(f"a program could not be started: {end['trouble']}")
    code, most = ends[0]["code"], limits.output_bytes
    output, result = (files[0].read(place, most + 1) for place in (1, 4))
    errors = [file.read(2, most + 1) for file in files]
    used = sum(end["cpu"] for end in ends)
    cause = None
    if answer["over_cpu"] or used > limits.cpu_seconds:
        cause = "cpu_time"
    elif idle >= limits.idle_seconds:
        cause = "idle"
    elif max(len(part) for part in (output, result, *errors)) > most:
        cause = "output"
    elif code:
        cause = "exit" if code > 0 else "signal"
    value = None
    with contextlib.suppress(ValueError, RecursionError):  # of a program, so it may be anything
        value = json.loads(result)
    last_errors = tuple(error[-2000:].decode(errors="replace").strip() for error in errors)
    return End(cause, code, output, last_errors, value, used, idle, answer["own_cpu"])


def _memory(content: bytes) -> int:
    """A file in memory that holds `content`, to be read from its start."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("program")
    else:
        with tempfile.TemporaryFile() as file:
            number = os.dup(file.fileno())
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(number, rest) :]
    os.lseek(number, 0, os.SEEK_SET)
    return number


def _stolen() -> float:
    """Steal time: seconds in which the host ran other machines, the mean over processors.

    A program that computes meanwhile neither runs nor waits. 0 where the kernel has no /proc/stat.
    """
    try:
        times = Path("/proc/stat").read_text("ascii").partition("\n")[0].split()
    except OSError:
        return 0.0
    ticks = int(times[8]) if len(times) > 8 else 0
    return ticks / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


def _has_children(pid: int) -> bool:
    return next(descendants(pid), None) is not None


def _age(pid: int) -> float:
    """Seconds since a process was started."""
    began = int(_fields(Path(f"/proc/{pid}"))[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


class _Look(NamedTuple):
    """A process at one moment."""

    busy: float  # seconds of all its threads on a processor or in the queue for one
    runnable: bool  # a thread is on a processor or in the queue now


def _look(pid: int) -> _Look:
    total, runnable = 0, False
    for thread in Path(f"/proc/{pid}/task").iterdir():
        runnable = runnable or _fields(thread)[0] == "R"
        ran, waited, _ = (thread / "schedstat").read_text("ascii").split()
        total += int(ran) + int(waited)
    return _Look(total / 1e9, runnable)


def _fields(folder: Path) -> list[str]:
    """The fields of /proc/PID/stat from the state on: the name before may hold any character."""
    return (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
