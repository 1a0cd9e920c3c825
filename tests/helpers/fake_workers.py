"""A process of a shared engine without Ray: a thread that calls an EngineWorker, and can die."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

from postgrad.core.errors import RunError, WorkerLost
from postgrad.core.process import Handle
from postgrad.fleet.engines import EngineWorker

Dies = Callable[[str, int], bool]  # (method, how often it was called before): whether it dies there


class FakeWorkers:
    """`cluster.workers.Workers` of one process: an EngineWorker in a thread, which can die."""

    size, places = 1, (("here", 0),)

    def __init__(self, worker: EngineWorker, dies: Dies) -> None:
        self._worker = worker
        self._dies = dies
        self._turns = ThreadPoolExecutor(1)
        self._beside = ThreadPoolExecutor(1)
        self._calls: dict[str, int] = {}
        self.held = Event()  # turns wait while it is clear
        self.held.set()
        self.dead = False

    def call(self, method: str, *arguments: Any) -> Handle[Any]:
        if self.dead:
            raise RunError("the rollout workers have ended: see the error before this one")
        return self._turns.submit(self._do, method, arguments)

    def aside(self, method: str, *arguments: Any) -> Handle[Any]:
        if self.dead:
            raise RunError("the rollout workers have ended: see the error before this one")
        return self._beside.submit(getattr(self._worker, method), *arguments)

    def description(self) -> str:
        return "1 rollout worker: in a thread"

    def close(self) -> None:
        self.dead = True

    def _do(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self.held.wait()
        if method == "publish":
            arguments = tuple(json.loads(json.dumps(arguments)))
        name = arguments[0] if method == "publish" else method
        number = self._calls.get(name, 0)
        self._calls[name] = number + 1
        try:
            if self._dies(name, number):
                self.close()
            else:
                return getattr(self._worker, method)(*arguments)
        except RunError:
            if not self.dead:
                raise
        raise WorkerLost(f"rollout worker died in {name} {number}")
