"""Servers of the Model Context Protocol, whose tools a policy calls (modelcontextprotocol.io).

A server is a process that speaks on its standard input and output, or an address. The client is the
official package `mcp`, an optional extra.
"""

import asyncio
import importlib.util
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from ipaddress import ip_address
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from postgrad.core.errors import UsageError
from postgrad.core.process import inherited
from postgrad.core.settings import Settings
from postgrad.rollout.environments.base import StepFailed

_CLOSING = 5.0  # seconds
_PAGES = 100  # of a list of tools


class MCPServer(Settings):
    """`command`: the words of a program that is started, without a shell; or `url`: the address of
    one that runs, on this machine unless `remote` is true.

    `tools`: names of those that the policy may call; left out, all. `env`: names of environment
    variables that the program gets. `start_seconds`: until it has said which tools it has.
    """

    command: tuple[str, ...] = ()
    url: str | None = None
    remote: bool = False
    tools: tuple[str, ...] | None = Field(default=None, min_length=1)
    env: tuple[str, ...] = ()
    start_seconds: float = Field(default=30.0, gt=0.0)

    @field_validator("url")
    @classmethod
    def _address(cls, url: str | None) -> str | None:
        if url is not None and urlsplit(url).scheme not in ("http", "https"):
            raise ValueError("an address such as http://127.0.0.1:8000/mcp is wanted")
        return url

    @model_validator(mode="after")
    def _either(self) -> Self:
        if bool(self.command) == (self.url is not None):
            raise ValueError("either command or url is wanted")
        if self.url is not None and not self.remote and not is_here(self.url):
            raise ValueError(f"{self.url} is not on this machine: say remote = true if it is meant")
        return self

    def client(self) -> Any:
        """A client that is not connected yet. Raises UsageError without the package."""
        if importlib.util.find_spec("mcp") is None:
            raise UsageError("environment.mcp needs the package mcp: pip install 'postgrad[mcp]'")
        from mcp import Client, StdioServerParameters  # an extra

        if self.url is not None:
            return Client(self.url)
        program, *words = self.command
        variables = inherited(self.env)
        return Client(StdioServerParameters(command=program, args=words, env=variables))


def is_here(url: str) -> bool:
    """Whether an address is of this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def tools_of(name: str, server: MCPServer) -> list[dict[str, Any]]:
    """The tools of a server, in the form that chat templates read. A program is started for it and
    ended. Raises UsageError where it does not answer, or lacks a tool that is named.
    """
    return json.loads(_listed(name, server.model_dump_json()))


@lru_cache(maxsize=64)
def _listed(name: str, settings: str) -> str:
    server = MCPServer.model_validate_json(settings)
    with ThreadPoolExecutor(1) as thread:  # a loop of its own, whoever calls
        try:
            tools = thread.submit(asyncio.run, _list(server)).result()
        except UsageError:
            raise
        except Exception as error:
            raise _unanswered(name, server, error) from error
    names = [tool["function"]["name"] for tool in tools]
    for wanted in server.tools or ():
        if wanted not in names:
            raise UsageError(
                f"environment.mcp.{name}.tools: it has no tool {wanted!r}; it has: "
                f"{', '.join(names)}"
            )
    chosen = [t for t in tools if server.tools is None or t["function"]["name"] in server.tools]
    if not chosen:
        raise UsageError(f"environment.mcp.{name}: it has no tools")
    return json.dumps(chosen)


def _unanswered(name: str, server: MCPServer, error: Exception) -> UsageError:
    if isinstance(error, TimeoutError):
        return UsageError(
            f"environment.mcp.{name}: it did not answer within start_seconds = "
            f"{server.start_seconds:g}"
        )
    return UsageError(
        f"environment.mcp.{name}: {' '.join(server.command) or server.url} does not answer as an "
        f"MCP server: {_cause(error)}"
    )


async def _list(server: MCPServer) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    async with asyncio.timeout(server.start_seconds), server.client() as client:
        cursor = None
        for _ in range(_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                parameters = tool.input_schema or {"type": "object", "properties": {}}
                about = {"name": tool.name, "description": tool.description or ""}
                tools.append({"type": "function", "function": {**about, "parameters": parameters}})
            if (cursor := page.next_cursor) is None:
                break
    return tools


class ServerSessions:
    """One session with each server, in which calls run side by side. To be used in one event loop.

    After a call that was given up, and where the server has ended, later calls get a new session:
    the old one ends with the last of its own calls.
    """

    def __init__(self, servers: Mapping[str, MCPServer]) -> None:
        self._servers = servers
        self._sessions: dict[str, _Session] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Starts all sessions, so that no call waits for it. Raises UsageError where one cannot."""
        for name, server in self._servers.items():
            session = self._sessions[name] = _Session(server)
            try:
                async with asyncio.timeout(server.start_seconds):
                    await asyncio.shield(session.client)
            except Exception as error:
                await self.close()
                raise _unanswered(name, server, error) from error

    async def call(
        self, server: str, tool: str, arguments: Mapping[str, Any], *, images: bool = False
    ) -> str | list[dict[str, Any]]:
        """The text of a tool's result; with `images` its parts, where it has an image. Raises
        ValueError with what the server calls an error, which the model is told; StepFailed where
        there is no result.
        """
        session = self._sessions.get(server)
        if session is None:
            session = self._sessions[server] = _Session(self._servers[server])
        session.calls += 1
        try:
            client = await asyncio.shield(session.client)
            result = await client.call_tool(tool, dict(arguments))
        except asyncio.CancelledError:
            self._retire(server, session)
            raise
        except Exception as error:
            self._retire(server, session)
            raise StepFailed("crash", f"the MCP server {server}: {_cause(error)}") from error
        finally:
            session.calls -= 1
            self._end_if_idle(session)
        text = "\n".join(_shown(part) for part in result.content)
        if result.is_error:
            raise ValueError(text)
        if images and any(getattr(part, "type", "") == "image" for part in result.content):
            return [_part(part) for part in result.content]
        return text

    async def close(self) -> None:
        """Ends all sessions, and the programs of their servers."""
        for server, session in list(self._sessions.items()):
            self._retire(server, session)
            session.stop.set()
        if self._ending:
            await asyncio.wait(self._ending, timeout=_CLOSING)

    def _retire(self, server: str, session: "_Session") -> None:
        if self._sessions.get(server) is session:
            del self._sessions[server]
        session.retired = True
        self._ending.add(session.task)
        session.task.add_done_callback(self._ending.discard)

    def _end_if_idle(self, session: "_Session") -> None:
        if session.retired and not session.calls:
            session.stop.set()


class _Session:
    """A connection to a server, opened and closed in a task of its own."""

    def __init__(self, server: MCPServer) -> None:
        self.calls = 0  # under way
        self.retired = False
        self.stop = asyncio.Event()
        self.client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._serve(server))

    async def _serve(self, server: MCPServer) -> None:
        try:
            async with server.client() as client:
                self.client.set_result(client)
                await self.stop.wait()
        except Exception as error:  # noqa: BLE001  # told to whoever calls
            if not self.client.done():
                self.client.set_exception(error)
                self.client.exception()  # it is looked at, even if nobody calls any more


def _shown(part: Any) -> str:
    text = getattr(part, "text", None)
    return text if isinstance(text, str) else f"[{getattr(part, 'type', 'something')}]"


def _part(part: Any) -> dict[str, Any]:
    """A part of a result as one of a message; an image has its file as base64."""
    if getattr(part, "type", "") == "image":
        return {"type": "image", "base64": part.data}
    return {"type": "text", "text": f"{_shown(part)}\n"}


def _cause(error: BaseException) -> str:
    """The first error of a group, as text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {str(error)[:300]}"
