"""An agent as the environment: a Python function that asks the policy (conversed.py)."""

import inspect
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from pydantic import PrivateAttr, field_validator

from postgrad.core.errors import UsageError
from postgrad.core.text import resolve
from postgrad.rollout.environments.base import StepFailed, failure_of
from postgrad.rollout.environments.conversed import Conversed, Ended
from postgrad.rollout.environments.wire import MODEL
from postgrad.rollout.environments.workers import FunctionWorkers, Told


class Agent(Conversed):
    """`agent`: "package.module:function", called for every sample with the keywords base_url,
    api_key, model and row ({"question", "answer", "messages", and the row's other columns}).

    An `async def` runs in the run's process, any other function in a process of its own, with the
    variables that `env` names. It returns the sample's reward, or None.
    """

    agent: str

    _workers: FunctionWorkers | None = PrivateAttr(default=None)

    @field_validator("agent")
    @classmethod
    def _resolvable(cls, name: str) -> str:
        try:
            function = resolve(name, {}, "agent")
        except UsageError as error:
            raise ValueError(str(error)) from error
        if not inspect.isfunction(function):
            raise ValueError(f"{name!r} is no Python function")
        return name

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Also with processes for agents that are plain functions."""
        self._workers = FunctionWorkers(self.env)
        try:
            async with super().running():
                yield
        finally:
            self._workers.close()

    async def converse(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Ended:
        """Calls the function, here or in a process of its own."""
        assert self._workers is not None  # within `running`
        function: Callable[..., Any] = resolve(self.agent, {}, "agent")
        asked = {"base_url": base_url, "api_key": api_key, "model": MODEL, "row": dict(row)}
        if inspect.iscoroutinefunction(function):
            try:
                return await function(**asked), {}
            except SystemExit as error:  # it would end the loop that all samples share
                raise StepFailed("error", failure_of(error).message) from error
        try:
            return await self._workers.call(self.agent, asked), {}
        except Told as error:  # which only tools tell the policy
            raise StepFailed("error", error.described) from error
