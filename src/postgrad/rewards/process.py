"""The pool's side of one worker process: its pipes, its jobs, and the time that they have used."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from postgrad.core.process import import_path, inherited
from postgrad.rewards import protocol
from postgrad.rewards.descendants import cpu_of, end_with_descendants
from postgrad.rewards.protocol import ScoreJob, VerifierTraits
from postgrad.rewards.sandbox.waiting import readable
from postgrad.rewards.settings import RewardSettings

TAIL = 2000  # bytes kept of what a worker prints
_CHUNK = 1 << 18
# Hash order must not differ between workers, one thread each leaves the cores to the sampler, and
# pydantic would look for plugins in every installed package: a quarter of a worker's start.
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYDANTIC_DISABLE_PLUGINS": "1",
}
# Variables for verifiers that may ask servers. No keys: a verifier names those that it needs.
_NETWORK = """SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE HTTP_PROXY HTTPS_PROXY
    ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy
    HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_DATASETS_CACHE XDG_CACHE_HOME"""


def environment(rewards: Sequence[RewardSettings], sandboxed: bool) -> dict[str, str]:
    """The environment variables of workers for these components.

    Variables that hold no secret, and those that the components name in `env` or in a setting that
    ends in `_env`.
    """
    names = set(() if sandboxed else _NETWORK.split())
    for reward in rewards:
        named = [value for key, value in reward.verifier_settings.items() if key.endswith("_env")]
        names |= {*reward.env, *(value for value in named if isinstance(value, str))}
    return inherited(names) | import_path() | _ENVIRONMENT


def start_worker(environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process that waits for its hello (rewards/worker.py), its standard streams pipes."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "postgrad.rewards.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        start_new_session=True,  # Ctrl-C is for the controller; and its children die with it
        bufsize=0,
    )


class WorkerProcess:
    """A worker and its open jobs. `jobs`: sent and not answered; the first is running.

    The pool measures time, not the worker. `observed` is for how many wall seconds the pool has
    watched the running job: time in which nobody polled does not count against it.
    """

    def __init__(self, hello: bytes, environment: Mapping[str, str]) -> None:
        self._process = start_worker(environment)
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self.stdin, self.stdout, self.stderr = (pipe.fileno() for pipe in pipes if pipe)
        for descriptor in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(descriptor, False)
        self.traits: list[VerifierTraits] | None = None  # of each component; None until it is ready
        self.jobs: deque[ScoreJob] = deque()
        self.first: ScoreJob | None = None  # to be sent alone as soon as it is ready
        self.observed = 0.0
        self.judged = 0.0  # `observed` when its CPU time was last asked for
        self._cpu_before = self._cpu_beside = 0.0
        self._outgoing = bytearray(hello)
        self._incoming = bytearray()
        self._printed = b""

    @property
    def pid(self) -> int:
        """The id of the process and of its process group."""
        return self._process.pid

    def send(self, jobs: Sequence[ScoreJob]) -> None:
        """Queue a batch for writing."""
        self.jobs.extend(jobs)
        self._start_clock()
        self._outgoing += protocol.batch(jobs)

    def write(self) -> bool:
        """Write what the pipe takes; True while some is left. For a dead worker all is dropped."""
        while self._outgoing:
            try:
                written = os.write(self.stdin, bytes(self._outgoing[:_CHUNK]))
            except BlockingIOError:
                return True
            except BrokenPipeError:  # its death is seen on the pipe it answers on
                self._outgoing.clear()
                return False
            del self._outgoing[:written]
        return False

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The answers that have arrived, and whether the worker has ended.

        ValueError where a line is no JSON object: a verifier wrote on the protocol's own pipe.
        """
        ended = False
        while True:
            try:
                chunk = os.read(self.stdout, _CHUNK)
            except BlockingIOError:
                break
            if not chunk:
                ended = True
                break
            self._incoming += chunk
        complete, _, rest = self._incoming.rpartition(b"\n")
        self._incoming = bytearray(rest)
        answers = [json.loads(line) for line in complete.splitlines()]
        if not all(isinstance(answer, dict) for answer in answers):
            raise ValueError("a line is no JSON object")
        return answers, ended

    def has_answered(self) -> bool:
        """Whether there is something to read: an answer, or the end of the worker's pipe."""
        return bool(readable([self.stdout], 0.0))

    def read_printed(self) -> bool:
        """Keep the tail of what the worker has printed; False once its standard error is closed."""
        for _ in range(16):  # a verifier that prints without end must not hold the pool
            try:
                chunk = os.read(self.stderr, _CHUNK)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self._printed = (self._printed + chunk)[-TAIL:]
        return True

    def printed(self) -> str:
        """The last `TAIL` bytes of what the worker printed since it was ready, as text."""
        self.read_printed()
        return self._printed.decode(errors="replace").strip()

    def became_ready(self, traits: list[VerifierTraits], used: float) -> None:
        """The worker has built its verifiers; what it printed until now is forgotten.

        traits: of each component. used: CPU seconds of the worker so far.
        """
        self.printed()
        self._printed = b""
        self.traits = traits
        self._cpu_before = used
        # CPU time of the processes that only hold a namespace for the worker: not the worker's.
        self._cpu_beside = cpu_of(self.pid) - used
        self._start_clock()

    def finished(self, key: int, used: float) -> tuple[ScoreJob, float]:
        """(job, its CPU seconds): the running job `key` has been answered, and the next one starts.

        used: CPU seconds of the worker so far. Raises ValueError where another job is running.
        """
        if not self.jobs or self.jobs[0].key != key:
            raise ValueError(f"job {key} is not the one that is running")
        seconds, self._cpu_before = used - self._cpu_before, used
        self._start_clock()
        return self.jobs.popleft(), seconds

    def cpu_of_running(self) -> float:
        """CPU seconds of the running job, its children's included."""
        return cpu_of(self.pid) - self._cpu_beside - self._cpu_before

    def is_dead(self) -> bool:
        """Whether the process has ended, even while a child of it still holds its pipes."""
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def end(self, grace: float = 0.0) -> str:
        """Kill and reap the process and its group, close its pipes. Returns how it ended, as text.

        grace: seconds for a process that is exiting already, since its pipes close a moment before.
        """
        deadline = time.monotonic() + grace
        while not (dead := self.is_dead()) and time.monotonic() < deadline:
            time.sleep(0.001)
        code = end_with_descendants(self._process, group=True)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe:
                pipe.close()
        if not dead:
            return "was killed"
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def _start_clock(self) -> None:
        self.observed = self.judged = 0.0
