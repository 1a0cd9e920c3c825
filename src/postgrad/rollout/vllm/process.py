"""One process with vLLM as the controller sees it: its pipes, its log, its end."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import psutil

from postgrad.core.errors import RunError, UsageError
from postgrad.core.pipes import write
from postgrad.models.linear import SHAPES_KEPT
from postgrad.rollout.vllm.protocol import Start, line

VARIABLE = "POSTGRAD_VLLM_PYTHON"
ENTRY = Path(__file__).parent / "entry.py"
TAIL = 2000  # characters of a log that a message shows
GRACE = 10.0  # seconds in which a process ends by itself before it is killed
TIDY = 2.0  # seconds in which its children do so when it is gone
# vLLM writes every line of a worker's traceback so; what it raises then only says to look there.
WORKERS_ERROR = re.compile(
    r"^\(.*?\) ERROR [^]]*\] ((?:[\w.]*(?:Error|Exception): |Worker proc ).*)$", re.MULTILINE
)
_IMPORT_SECONDS = 20.0  # seconds in which an interpreter says whether it has vLLM
# Of the controller's own environment.
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


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """Where a process runs. devices: CUDA devices that it sees, None on CPUs; threads: of a CPU."""

    python: str
    threads: int
    devices: tuple[str, ...] | None
    log: Path


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message of process `number`; None: its pipe has closed."""

    number: int
    message: dict[str, Any] | None


def interpreter(stated: str | None) -> str:
    """The Python of vLLM's environment, found to have vLLM. Raises UsageError."""
    python = stated or os.environ.get(VARIABLE)
    where = "rollout.vllm.python" if stated else VARIABLE
    if not python:
        raise UsageError(
            'rollout.type = "vllm" needs the Python of an environment that has vLLM: name it in '
            f"rollout.vllm.python or in the environment variable {VARIABLE} (docs/vllm.md)"
        )
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        ended = subprocess.run(
            [python, "-I", "-c", look], capture_output=True, timeout=_IMPORT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{where} = {python} is no Python that starts: {error}") from error
    if ended.returncode:
        raise UsageError(f"{where} = {python} has no package vllm: install it there (docs/vllm.md)")
    return python


class VLLMProcess:
    """Started at once; what it says arrives in `inbox`, which several processes may share."""

    def __init__(
        self, number: int, options: ProcessOptions, start: Start, inbox: "SimpleQueue[Arrived]"
    ) -> None:
        self.number = number
        self._log = options.log
        # The file at which its workers meet: vLLM removes it only where they end by themselves.
        self._own = TemporaryDirectory(prefix="postgrad-vllm-", ignore_cleanup_errors=True)
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
        self.send(asdict(start) | {"folder": self._own.name})

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises RunError where the process has gone."""
        try:
            write(self._requests, line(message))
        except (BrokenPipeError, ValueError) as error:
            raise self.died() from error

    @property
    def pid(self) -> int:
        """Of this process, and of the group of everything that it started."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs; one that left its workers behind does not."""
        return self._process.poll() is None

    def error(self, problem: str) -> RunError:
        """What ends a run: what happened, the first error of a worker, and the end of the log."""
        first = WORKERS_ERROR.search(self._log_text())
        cause = f"; the first error of its workers: {first[1]}" if first else ""
        return RunError(
            f"vLLM engine {self.number} {problem}{cause}. The end of {self._log}:\n{self.tail()}"
        )

    def died(self) -> RunError:
        """The error of a process that has closed its pipe."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        code = self._process.poll()
        return self.error("closed its pipe" if code is None else f"died (exit code {code})")

    def tail(self) -> str:
        """The last lines of its log."""
        log = self._log_text()
        return log if len(log) <= TAIL else log[-TAIL:].partition("\n")[2] or log[-TAIL:]

    def _log_text(self) -> str:
        """Its log, without what engines of an earlier start of the run wrote."""
        with self._log.open("rb") as log:
            log.seek(self._begins)
            return log.read().decode(errors="replace")

    def kill(self) -> None:
        """End it and everything that it started. It is its group's leader. The kernel ends its
        workers with it, and one of its children, which gives their shared memory back, ends by
        itself.
        """
        self._process.kill()
        self._process.wait()
        late = time.monotonic() + TIDY
        while _lives(self._process.pid) and time.monotonic() < late:
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._own.cleanup()

    def close(self) -> None:
        """Let it end by itself, then end what is left of it."""
        if self._requests.closed:
            return
        self._requests.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        self.kill()


def _environment(options: ProcessOptions) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _KEPT_OUT}
    environment |= _ENVIRONMENT
    if options.devices is None:
        return environment | {"OMP_NUM_THREADS": str(options.threads)}
    return environment | {"CUDA_VISIBLE_DEVICES": ",".join(options.devices)}


def _lives(group: int) -> bool:
    """Whether a process of this group does. Who is only not yet waited for has ended."""
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
