"""Tasksets of the package verifiers (pypi.org/project/verifiers): prompts, tools and rewards.

Each sample is a rollout of a task by the package itself: its setup, its tool servers and its
scoring. Only the policy's turns come from the run's own engine, over the endpoint of agent.py. The
package is in a process with a Python of its own: verifiers_client.py.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr

from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt
from postgrad.rollout.environments.base import COUNTED, StepFailed
from postgrad.rollout.environments.client import ForeignClient
from postgrad.rollout.environments.conversed import Conversed, Ended
from postgrad.rollout.environments.wire import MODEL

_CLIENT = Path(__file__).with_name("verifiers_client.py")


class VerifiersTasks(Conversed):
    """`taskset`: the id of an installed taskset, `settings`: its own. `python`: the interpreter of
    an environment with the package verifiers and the taskset; left out, this one.

    `tools`: the schemas of the tools that the tasks give, where prompts are to show them; others
    are a failure, which names them.
    What a task's metrics count are counters. A row has the column `task`, a number in the taskset,
    and its messages (`rows` writes both).
    """

    taskset: str
    settings: dict[str, Any] = Field(default_factory=dict[str, Any])
    python: str = ""
    start_seconds: float = Field(default=120.0, gt=0.0)

    _client: ForeignClient | None = PrivateAttr(default=None)

    def check(self, prompt: Prompt) -> str | None:
        if not isinstance(prompt.metadata.get("task"), int):
            return "its column task is no number"
        return super().check(prompt)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Also with the package's process, which has loaded the taskset."""
        async with super().running(), self.loaded() as client:
            self._client = client
            yield

    @asynccontextmanager
    async def loaded(self) -> AsyncGenerator[ForeignClient]:
        """The package's process. Raises UsageError where it cannot load the taskset."""
        client = await ForeignClient.start(self.python, (str(_CLIENT),), "verifiers", self.env)
        try:
            about = {"taskset": self.taskset, "settings": self.settings}
            try:
                async with asyncio.timeout(self.start_seconds):
                    await client.ask("load", "", about)
            except (StepFailed, TimeoutError) as error:
                raise UsageError(
                    f"environment.taskset = {self.taskset!r} cannot be loaded: "
                    f"{error or 'timeout'}; it and the package verifiers have to be installed in "
                    "the environment of environment.python"
                ) from error
            yield client
        finally:
            client.close()

    async def converse(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Ended:
        """The task's rollout; its rewards are added up with the weights that they have there."""
        client = self._client
        assert client is not None  # within `running`
        session = client.session()
        about = {"task": row["task"], "base_url": base_url, "api_key": api_key, "model": MODEL}
        try:
            answer = await client.ask("play", session, {**about, "tools": list(self.tools)})
        except asyncio.CancelledError:
            client.forget(session)
            raise
        metrics: Mapping[str, float] = answer["metrics"]
        return answer["reward"], {
            f"task_{name}" if name in COUNTED else name: value for name, value in metrics.items()
        }


def rows(
    size: int,
    seed: int,
    taskset: str,
    python: str = "",
    settings: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Rows for `data.path = "postgrad.rollout.environments.verifiers:rows"`: of the tasks from
    number `seed` on, as far as there are some, the messages and the column `task`.
    """
    rules = VerifiersTasks(taskset=taskset, python=python, settings=dict(settings or {}))
    with ThreadPoolExecutor(1) as thread:  # a loop of its own, whoever calls
        prompts = thread.submit(asyncio.run, _prompts(rules, seed, size)).result()
    if not prompts:
        raise UsageError(f"taskset {taskset!r} has no task {seed}: data.seed is the first one")
    for number, messages in enumerate(prompts, seed):
        yield {"messages": messages, "task": number}


async def _prompts(rules: VerifiersTasks, first: int, count: int) -> list[list[dict[str, Any]]]:
    async with rules.loaded() as client:
        try:
            answer = await client.ask("prompts", "", {"first": first, "count": count})
        except StepFailed as error:
            raise UsageError(f"taskset {rules.taskset!r}: {error}") from error
    return answer["prompts"]
