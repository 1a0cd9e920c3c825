"""Requests to a package of others, in a process with a Python of its own.

Its pins are not those of postgrad. The process runs a script, openenv_client.py say, which answers
JSON lines, any number of requests at once:

    {"id": 7, "session": "12", "do": "step", "with": {...}}
    {"id": 7, ...}

"close" ends a session. An answer to what failed has "error".
"""

import asyncio
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.core.process import inherited
from postgrad.rollout.environments.base import StepFailed
from postgrad.rollout.environments.workers import PipedProcess


class ForeignClient:
    """The requests to one process, in one event loop."""

    def __init__(self, process: PipedProcess, title: str) -> None:
        """title: what messages call whoever answers."""
        self._process = process
        self._title = title
        self._numbers, self._sessions = count(), count()
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls, python: str, script: Sequence[str], title: str, variables: Iterable[str] = ()
    ) -> "ForeignClient":
        """Starts the script and its words with `python` ("": this one), which nothing of this
        process leads to. variables: names of those of this environment that it gets, beside those
        by which programs are found. Raises UsageError where there is no such program.
        """
        command = (python or sys.executable, "-I", *script)
        try:
            return cls(await PipedProcess.start(command, inherited(variables)), title)
        except OSError as error:
            raise UsageError(f"environment.python = {command[0]!r}: {error}") from error

    def session(self) -> str:
        """The name of a new session."""
        return str(next(self._sessions))

    async def ask(self, do: str, session: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request. Raises StepFailed where there is none."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        if self._reading.done():
            self._fail(self._reading.exception())
        else:
            self._send(number, do, session, arguments)
        try:
            result = await answer
        finally:
            self._asked.pop(number, None)
        if "error" in result:
            raise StepFailed("error", f"{self._title}: {result['error']}")
        return result

    def forget(self, session: str) -> None:
        """Ends a session, without waiting for it."""
        if not self._reading.done():
            self._send(next(self._numbers), "close", session, {})

    def close(self) -> None:
        """Ends the process and all requests."""
        self._reading.cancel()
        self._process.end()

    def _send(self, number: int, do: str, session: str, arguments: Mapping[str, Any]) -> None:
        self._process.send({"id": number, "session": session, "do": do, "with": dict(arguments)})

    async def _read(self) -> None:
        try:
            while True:
                answer = await self._process.receive()
                asked = self._asked.get(answer["id"])  # nobody waits for the end of a session
                if asked is not None and not asked.done():
                    asked.set_result(answer)
        except StepFailed as error:  # the process has ended
            self._fail(error)
            raise

    def _fail(self, error: BaseException | None) -> None:
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(error or StepFailed("crash", "its client has ended"))
