"""Environments behind an OpenEnv server (pypi.org/project/openenv): `reset` and `step` over a
WebSocket, an observation and a reward for each action.

The client is the official package, in a process with a Python of its own: openenv_client.py.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, cast
from urllib.parse import urlsplit

from pydantic import Field, PrivateAttr, field_validator, model_validator

from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt
from postgrad.rollout.environments.base import ChatEnvironment, Course, Reply, StepFailed
from postgrad.rollout.environments.client import ForeignClient
from postgrad.rollout.environments.mcp_servers import is_here

_FULL = "CAPACITY_REACHED"  # the server's code where it has no session left
_CLIENT = Path(__file__).with_name("openenv_client.py")


class OpenEnv(ChatEnvironment):
    """`url`: of the server, on this machine unless `remote` is true. `python`: the interpreter of
    an environment with the package openenv; left out, this one.

    `action`: the field of an action that the policy's turn fills; left out, the only one that the
    server's schema requires, or, where there are several, the turn is the whole action in JSON.
    `observation`: the field that the policy reads; left out, the whole observation in JSON.
    `malformed_reward`: of a turn that is no action.

    A row may have the columns `reset`, the arguments of the server's reset, and `observation`, what
    its messages say of it (`rows` writes both): another one is a failure. Without `observation` the
    policy reads what the reset shows behind the row's messages.
    """

    deterministic: ClassVar[bool] = False
    waits: ClassVar[bool] = True

    url: str
    remote: bool = False
    python: str = ""
    action: str = ""
    observation: str = ""
    malformed_reward: float = 0.0
    start_seconds: float = Field(default=60.0, gt=0.0)

    _server: ForeignClient | None = PrivateAttr(default=None)
    _schema: Mapping[str, Any] = PrivateAttr(default_factory=dict[str, Any])  # of an action

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError("an address such as http://127.0.0.1:8000 is wanted")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _near(self) -> "OpenEnv":
        if not self.remote and not is_here(self.url):
            raise ValueError(f"{self.url} is not on this machine: say remote = true if it is meant")
        return self

    def check(self, prompt: Prompt) -> str | None:
        arguments = prompt.metadata.get("reset", {})
        return None if isinstance(arguments, dict) else "its column reset is no JSON object"

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """With the process that speaks with the server, which has said what its actions are. Raises
        UsageError where it does not.
        """
        self._server = await ForeignClient.start(
            self.python, (str(_CLIENT), self.url), "the OpenEnv server"
        )
        try:
            self._schema = await self._schema_of_actions()
            yield
        finally:
            self._server.close()

    async def _schema_of_actions(self) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(self.start_seconds):
                return (await self.server.ask("schema", "", {}))["schema"]
        except (StepFailed, TimeoutError) as error:
            raise UsageError(
                f"environment: no OpenEnv server answers at {self.url}: {error or 'timeout'}; its "
                "client is the package openenv, in the environment of environment.python"
            ) from error

    def start(self, prompt: Prompt, sample: int) -> Course:
        return _Play(self, prompt.metadata)

    @property
    def server(self) -> ForeignClient:
        """The server, within `running`."""
        assert self._server is not None
        return self._server

    @property
    def schema(self) -> Mapping[str, Any]:
        """Of an action, within `running`."""
        return self._schema

    def text(self, observation: Any) -> str:
        """What the policy reads of an observation."""
        value = observation
        if self.observation:
            if not isinstance(observation, dict) or self.observation not in observation:
                names = ", ".join(cast(Mapping[str, Any], observation or {}))
                raise StepFailed(
                    "error", f"the observation has no field {self.observation!r}; it has: {names}"
                )
            value = cast(Mapping[str, Any], observation)[self.observation]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def action_of(self, turn: str, schema: Mapping[str, Any]) -> dict[str, Any] | None:
        """The action that a turn is; None where it is none."""
        required = schema.get("required", [])
        field = self.action or (required[0] if len(required) == 1 else "")
        if field:
            kind = schema.get("properties", {}).get(field, {}).get("type")
            if kind in ("string", None):
                return {field: turn}
        try:
            value = json.loads(turn)
        except ValueError:
            return None
        if field:
            return {field: value}
        return cast(dict[str, Any], value) if isinstance(value, dict) else None


class _Play:
    """One sample's session with the server."""

    def __init__(self, rules: OpenEnv, row: Mapping[str, Any]) -> None:
        self._rules = rules
        self._row = row
        self._session = ""

    async def begin(self) -> Reply:
        """Resets the server, and says what it shows where the row does not."""
        self._session = self._rules.server.session()
        shown = await self._reset()
        if "observation" in self._row:
            return Reply()
        return Reply(({"role": "user", "content": shown},))

    async def step(self, text: str) -> Reply:
        """Sends a turn of the policy as an action."""
        rules, server = self._rules, self._rules.server
        action = rules.action_of(text, rules.schema)
        if action is None:
            return self._malformed("no JSON object")
        answer = await server.ask("step", self._session, action)
        if "refused" in answer:
            return self._malformed(answer["refused"])
        done, reward = bool(answer["done"]), float(answer["reward"] or 0.0)
        counts = {"actions": 1.0, "malformed_actions": 0.0}
        if done:
            self.close()
            return Reply(done=True, reward=reward, counts=counts)
        message = {"role": "user", "content": rules.text(answer["observation"])}
        return Reply((message,), reward=reward, counts=counts)

    def close(self) -> None:
        """Ends the session with the server."""
        if self._session:
            self._rules.server.forget(self._session)
            self._session = ""

    async def _reset(self) -> str:
        arguments = self._row.get("reset", {})
        try:
            answer = await self._rules.server.ask("reset", self._session, arguments)
        except StepFailed as error:
            if _FULL not in str(error):
                raise
            raise StepFailed(
                error.cause,
                f"{error}; every sample of a step or an evaluation has a session while it is "
                "played: start the server with as many (max_concurrent_envs of its app), or lower "
                "rollout_batch_size or n_samples_per_prompt",
            ) from error
        if "refused" in answer:
            raise StepFailed("error", f"the server refuses its reset: {answer['refused']}")
        text = self._rules.text(answer["observation"])
        if self._row.get("observation", text) != text:
            raise StepFailed(
                "error",
                f"the reset gives the observation {text[:200]!r}, and the row's prompt has "
                f"{str(self._row['observation'])[:200]!r}: give the server's reset a seed",
            )
        return text

    def _malformed(self, why: str) -> Reply:
        counts = {"actions": 1.0, "malformed_actions": 1.0}
        message = {"role": "user", "content": f"That is no action: {why}"}
        return Reply((message,), reward=self._rules.malformed_reward, counts=counts)


def rows(
    size: int, seed: int, url: str, python: str = "", observation: str = "", remote: bool = False
) -> Iterator[dict[str, Any]]:
    """Rows for `data.path = "postgrad.rollout.environments.openenv:rows"`: what a reset with the
    seeds from `seed` on shows, as question, and the columns `reset` and `observation`.
    """
    rules = OpenEnv(url=url, python=python, observation=observation, remote=remote)
    with ThreadPoolExecutor(1) as thread:  # a loop of its own, whoever calls
        shown = thread.submit(asyncio.run, _shown(rules, range(seed, seed + size))).result()
    for number, text in enumerate(shown, seed):
        yield {"question": text, "reset": {"seed": number}, "observation": text, "answer": ""}


async def _shown(rules: OpenEnv, seeds: range) -> list[str]:
    texts: list[str] = []
    async with rules.running():
        session = rules.server.session()
        for seed in seeds:
            answer = await rules.server.ask("reset", session, {"seed": seed})
            texts.append(rules.text(answer.get("observation")))
    return texts
