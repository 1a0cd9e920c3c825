"""One vLLM process on the controller's side: its pipes, its log, its end."""

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import psutil

from postgrad.core.errors import RunError, UsageError, WorkerLost
from postgrad.core.process import kill_group, write
from postgrad.models.linear import SHAPES_KEPT
from postgrad.parallel.device import without_expandable
from postgrad.rollout.vllm.protocol import Start, line

VARIABLE = "POSTGRAD_VLLM_PYTHON"
MEMORY, ROOM = "/dev/shm", 2**31  # a folder in memory; bytes that have to be free there
ENTRY = Path(__file__).parent / "entry.py"
TAIL = 2000  # characters of a log that a message shows
GRACE = 10.0  # seconds that a process has to end by itself before it is killed
TIDY = 2.0  # seconds that its children have to end by themselves after it
# How vLLM logs the lines of a worker's traceback; the error that it raises itself points there.
WORKERS_ERROR = re.compile(
    r"^\(.*?\) ERROR [^]]*\] ((?:[\w.]*(?:Error|Exception): |Worker proc ).*)$", re.MULTILINE
)
_IMPORT_SECONDS = 20.0  # that an interpreter may take to tell whether it has vLLM
# Variables of the controller that the process does not inherit.
_KEPT_OUT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", *SHAPES_KEPT)
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # files beside entry.py are no modules of their own
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in the process that we started
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # the token after a scored sequence is never computed
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy threads, and not run entry.py
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
NO_TORCHVISION = 2  # exit code of a look into vLLM's environment
STILL_SECONDS = 60.0  # after which processes that start are taken to hang
LOOK_SECONDS = 5.0  # between two measurements
# Statuses of a process that may hang. One that waits for a disk or a CPU, or is traced, does not.
_WAITS = (psutil.STATUS_SLEEPING, psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)


class Stillness:
    """Measures how long processes, and all that they started, have stood still.

    They stand still while none uses CPU time and none is ready to. A process that polls, waits with
    a timeout, computes, however slowly, or reads from a slow disk does not.
    """

    def __init__(self) -> None:
        self._moved = self._looked = time.monotonic()
        self._spent: dict[int, float] = {}

    def seconds(self, pids: Iterable[int]) -> float:
        """For how many seconds these processes have stood still."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            spent = _spent(pids)
            if spent is None or spent != self._spent:
                self._moved, self._spent = now, spent or {}
        return self._looked - self._moved


def _spent(pids: Iterable[int]) -> dict[int, float] | None:
    """CPU seconds by process id; None where a process is at work now."""
    spent: dict[int, float] = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):  # it has ended; its closed pipe reports that
            leader = psutil.Process(pid)
            for process in (leader, *leader.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    if process.status() not in _WAITS:
                        return None
                    spent[process.pid] = sum(process.cpu_times()[:2])
    return spent


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """How a process is started."""

    python: str  # interpreter of vLLM's environment
    threads: int  # of OpenMP, on CPUs
    devices: tuple[str, ...] | None  # CUDA devices that it sees, ("3",); None on CPUs
    log: Path  # file that its output is appended to


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message that arrived from a process."""

    number: int  # of the process
    message: dict[str, Any] | None  # None: its pipe has closed


def interpreter(stated: str | None, *, torchvision: bool = False) -> str:
    """The Python of vLLM's environment. stated: rollout.vllm.python; None: $POSTGRAD_VLLM_PYTHON.
    torchvision: vLLM is to sample a model whose module imports it.

    Raises UsageError where none is named, it does not start, or it lacks one of these packages.
    """
    python = stated or os.environ.get(VARIABLE)
    where = "rollout.vllm.python" if stated else VARIABLE
    if not python:
        raise UsageError(
            'rollout.type = "vllm" needs the Python of an environment that has vLLM: name it in '
            f"rollout.vllm.python or in the environment variable {VARIABLE} (docs/vllm.md)"
        )
    wanted = ("vllm", "torchvision") if torchvision else ("vllm",)
    look = (
        "import importlib.util, sys\n"
        f"missing = [importlib.util.find_spec(name) is None for name in {wanted}]\n"
        "sys.exit(sum(2**n for n, lacks in enumerate(missing) if lacks))"
    )
    try:
        ended = subprocess.run(
            [python, "-I", "-c", look], capture_output=True, timeout=_IMPORT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{where} = {python} cannot be started as Python: {error}") from error
    if ended.returncode == NO_TORCHVISION:
        raise UsageError(
            f"{where} = {python} has no package torchvision, without which vLLM cannot import a "
            "model of this type: install the build that belongs to its torch (docs/vllm.md)"
        )
    if ended.returncode:
        raise UsageError(f"{where} = {python} has no package vllm: install it there (docs/vllm.md)")
    return python


class VLLMProcess:
    """A running process. A thread puts its messages into `inbox`, which processes may share."""

    def __init__(
        self, number: int, options: ProcessOptions, start: Start, inbox: "SimpleQueue[Arrived]"
    ) -> None:
        self.number = number
        self._log = options.log
        # For the file at which its workers meet: vLLM removes it only if they end by themselves.
        # And for adapters, in memory where there is room.
        where = MEMORY if start.lora_rank and _free(MEMORY) > ROOM else None
        self._folder = TemporaryDirectory(
            prefix="postgrad-vllm-", dir=where, ignore_cleanup_errors=True
        )
        with options.log.open("ab") as log:
            self._begins = log.tell()
            self._process = subprocess.Popen(
                [options.python, str(ENTRY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(options),
                start_new_session=True,  # Ctrl-C is for the controller; its workers die with it
                bufsize=0,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests: BinaryIO = self._process.stdin  # pyright: ignore[reportAttributeAccessIssue]
        reader = threading.Thread(
            target=_read, args=(self._process.stdout, number, inbox), daemon=True
        )
        reader.start()
        self.send(asdict(start) | {"folder": self._folder.name})

    def send(self, message: Mapping[str, Any]) -> None:
        """Write a message to the process. Raises RunError where it has ended."""
        try:
            write(self._requests, line(message))
        except (BrokenPipeError, ValueError) as error:
            raise self.died() from error

    @property
    def folder(self) -> Path:
        """A folder of this process alone, which ends with it."""
        return Path(self._folder.name)

    @property
    def pid(self) -> int:
        """The id of the process and of its process group, which has all that it started."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process itself runs, whatever its workers do."""
        return self._process.poll() is None

    def error(self, problem: str) -> RunError:
        """The error that ends the run: `problem`, a worker's first error, the end of the log."""
        first = WORKERS_ERROR.search(self._log_text())
        cause = f"; the first error of its workers: {first[1]}" if first else ""
        return RunError(
            f"vLLM engine {self.number} {problem}{cause}. The end of {self._log}:\n{self.tail()}"
        )

    def died(self) -> WorkerLost:
        """The error of a process that has closed its pipe."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        code = self._process.poll()
        how = "closed its pipe" if code is None else f"died (exit code {code})"
        return WorkerLost(str(self.error(how)))

    def tail(self) -> str:
        """The last lines of its log, up to TAIL characters."""
        log = self._log_text()
        return log if len(log) <= TAIL else log[-TAIL:].partition("\n")[2] or log[-TAIL:]

    def _log_text(self) -> str:
        """Its log, without the lines of processes that wrote to the same file before."""
        with self._log.open("rb") as log:
            log.seek(self._begins)
            return log.read().decode(errors="replace")

    def kill(self) -> None:
        """Kill the process and its group, which has everything that it started. The kernel ends its
        workers with it; the child that frees their shared memory gets TIDY seconds to end by
        itself.
        """
        self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + TIDY
        while _lives(self._process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        kill_group(self._process.pid)
        self._folder.cleanup()

    def close(self) -> None:
        """Close its input and give it GRACE seconds to end by itself, then kill what is left."""
        if self._requests.closed:
            return
        self._requests.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        self.kill()


def _free(folder: str) -> int:
    """Bytes that are free there; 0 where there is no such folder."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _environment(options: ProcessOptions) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _KEPT_OUT}
    environment = without_expandable(environment) | _ENVIRONMENT
    if options.devices is None:
        return environment | {"OMP_NUM_THREADS": str(options.threads)}
    return environment | {"CUDA_VISIBLE_DEVICES": ",".join(options.devices)}


def _lives(group: int) -> bool:
    """Whether any process of the group lives; zombies do not count."""
    for pid in psutil.pids():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _read(answers: BinaryIO, number: int, inbox: "SimpleQueue[Arrived]") -> None:
    for text in answers:
        inbox.put(Arrived(number, json.loads(text)))
    answers.close()
    inbox.put(Arrived(number, None))
