"""Functions of others, called in processes that are killed where a call hangs.

A call has a process of its own while it lasts. Processes are started when all others are busy, and
are used again. One that dies, or whose call is cancelled, is killed with all that it has started.
"""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from postgrad.core.process import import_path, inherited
from postgrad.rewards.descendants import end_with_descendants
from postgrad.rollout.environments import function_worker
from postgrad.rollout.environments.base import StepFailed

_VARIABLES = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_CALLER = (sys.executable, "-P", "-m", function_worker.__name__)
_MOST_BYTES = 2**24  # of an answer
_TAIL = 300  # bytes that are told of what a process printed last


class Told(ValueError):
    """An error of a function that a model may read. described: the same for people."""

    def __init__(self, message: str, described: str) -> None:
        super().__init__(message)
        self.described = described


class FunctionWorkers:
    """Calls functions by name. To be used within one event loop; close it there."""

    def __init__(self, variables: Iterable[str] = ()) -> None:
        """variables: names of the environment variables that the processes get, beside those by
        which programs and libraries are found.
        """
        self._environment = inherited(variables) | _VARIABLES | import_path()
        self._idle: list[PipedProcess] = []
        self._busy: set[PipedProcess] = set()

    async def call(self, function: str, arguments: Mapping[str, Any]) -> Any:
        """What `function`, "package.module:function", returns: a JSON value.

        Raises Told with what a tool tells the model (function_worker.TOLD); StepFailed where it
        raised anything else, where its process ended, and where it returned no JSON.
        """
        process = (
            self._idle.pop() if self._idle else await PipedProcess.start(_CALLER, self._environment)
        )
        self._busy.add(process)
        try:
            answer = await process.ask({"function": function, "arguments": dict(arguments)})
        except BaseException:  # it was cancelled, or the process is gone
            process.end()
            raise
        finally:
            self._busy.discard(process)
        self._idle.append(process)
        if "told" in answer:
            raise Told(answer["told"], f"{function}: {answer['error']}")
        if "error" in answer:
            raise StepFailed("error", f"{function}: {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        """Kills all processes, busy ones too."""
        for process in (*self._idle, *self._busy):
            process.end()
        self._idle, self._busy = [], set()


class _Tail(asyncio.Protocol):
    """Keeps the end of what a process prints."""

    def __init__(self) -> None:
        self.text = b""

    def data_received(self, data: bytes) -> None:
        self.text = (self.text + data)[-_TAIL:]


class PipedProcess:
    """A process that answers JSON objects, a line each, on its standard output. To be used within
    one event loop.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
            bufsize=0,
        )
        self._answers = asyncio.StreamReader(limit=_MOST_BYTES)
        self._printed = _Tail()
        self._writing: asyncio.WriteTransport | None = None
        self._transports: list[asyncio.BaseTransport] = []

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> "PipedProcess":
        """A process that can be asked. Raises OSError where there is no such program."""
        process = cls(command, environment)
        loop, pipes = asyncio.get_running_loop(), process._process
        reading, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(process._answers), pipes.stdout
        )
        printing, _ = await loop.connect_read_pipe(lambda: process._printed, pipes.stderr)
        writing, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, pipes.stdin)
        process._writing = writing
        process._transports = [reading, printing, writing]
        return process

    async def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request, one at a time. Raises StepFailed where the process ends without
        one.
        """
        self.send(message)
        return await self.receive()

    def send(self, message: Mapping[str, Any]) -> None:
        """Begins a request, whose answer is the next."""
        assert self._writing is not None  # since it was started
        self._writing.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any]:
        """The next answer. Raises as `ask`."""
        try:
            line = await self._answers.readline()
            answer = json.loads(line) if line else None
        except ValueError as error:
            raise StepFailed(
                "error", f"its process gave no answer that can be read: {error}"
            ) from error
        if not isinstance(answer, dict):
            raise StepFailed("crash", f"its process {self._ending()}")
        return answer

    def end(self) -> None:
        """Kills the process, and those that it has started."""
        for transport in self._transports:
            transport.close()
        end_with_descendants(self._process, group=True)

    def _ending(self) -> str:
        code = end_with_descendants(self._process, group=True)
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        printed = self._printed.text.decode(errors="replace").strip()
        return how + (f"; it printed: {printed}" if printed else "")
