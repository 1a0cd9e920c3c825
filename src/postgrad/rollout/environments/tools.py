"""An environment of tools: the policy calls Python functions until it answers.

A turn without a call is the answer, which [[rewards]] score.
"""

import inspect
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import Field, PrivateAttr, field_validator, model_validator

from postgrad.core.errors import RunError, UsageError
from postgrad.core.records import Prompt
from postgrad.core.text import resolve
from postgrad.data.chat_format import IMAGE_PARTS, TEXT_PARTS, Message
from postgrad.rewards.sandbox.choice import shared
from postgrad.rewards.sandbox.client import Limits, Program, SandboxError
from postgrad.rollout.environments.base import (
    ChatEnvironment,
    Course,
    HeardTurn,
    Reply,
    StepFailed,
)
from postgrad.rollout.environments.function_worker import TOLD
from postgrad.rollout.environments.mcp_servers import MCPServer, ServerSessions, tools_of
from postgrad.rollout.environments.tool_calls import (
    calls_in,
    ids_of,
    result_example,
    result_message,
    taught_format,
    text_beside,
)
from postgrad.rollout.environments.tool_formats import Call, Calls, Malformed, ToolFormat
from postgrad.rollout.environments.workers import FunctionWorkers

LIMITS = Limits()
STOPPED = {
    "cpu_time": f"it used up its {LIMITS.cpu_seconds:g} s of CPU time",
    "idle": f"it waited for more than {LIMITS.idle_seconds:g} s",
    "output": f"it wrote more than {LIMITS.output_bytes >> 20} MiB",
    "signal": "it crashed, or ran out of memory",
}

TOOLS = {
    "calculator": "postgrad.rollout.environments.calculator:calculator",
    "python": "postgrad.rollout.environments.tools:python",
}

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def ready() -> None:
    """Checks that this machine can run programs in a sandbox. Raises UsageError if not."""
    shared()


def python(code: str) -> str:
    """Runs a Python program and returns what it printed.

    Args:
        code: The program. Print what you want to know; nothing is kept for the next one.
    """
    # A program that draws random numbers or reads the clock is exact no more: docs/environments.md.
    try:
        end = shared().run([Program({"mode": "script", "sources": [code]})], LIMITS)
    except SandboxError as error:
        raise RunError(f"the sandbox of the tool `python` failed: {error}") from error
    printed = end.output.decode(errors="replace")
    if end.cause is None:
        return printed
    message = end.errors[0].strip() if end.cause == "exit" else ""
    reason = message or STOPPED.get(end.cause, f"it ended with exit code {end.code}")
    return f"{printed.rstrip()}\n{reason}".lstrip()


@dataclass(frozen=True, slots=True)
class Tool:
    """What a model may call: a Python function, or a tool of an MCP server."""

    schema: Mapping[str, Any]  # JSON schema that the chat template shows to the model
    path: str = ""  # "package.module:function"
    function: Callable[..., Any] | None = None  # None: of a server
    server: str = ""  # its name in environment.mcp

    @property
    def name(self) -> str:
        """The name that calls use: the function's own."""
        return self.schema["function"]["name"]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of its arguments."""
        return self.schema["function"]["parameters"]

    def wrong(self, arguments: Mapping[str, Any]) -> str | None:
        """What is wrong with the arguments of a call, as text for the model; None if they fit."""
        properties: Mapping[str, Any] = self.parameters.get("properties", {})
        for name in self.parameters.get("required", ()):
            if name not in arguments:
                return f"the argument {name!r} of {self.name} is missing"
        for name, value in arguments.items():
            if name not in properties:
                return f"{self.name} has no argument {name!r}; it has: {', '.join(properties)}"
            json_type = properties[name].get("type")
            kinds = _TYPES.get(json_type) if isinstance(json_type, str) else None
            if kinds is None:
                continue
            if not isinstance(value, kinds) or isinstance(value, bool) != (json_type == "boolean"):
                return f"the argument {name!r} of {self.name} is of type {json_type}"
        return None


@lru_cache(maxsize=64)
def load_tool(name: str) -> Tool:
    """The tool called `name`: one of TOOLS, or "package.module:function".

    Raises UsageError where there is no such function, or no schema can be made of its type hints
    and the `Args:` of its docstring.
    """
    from transformers.utils import chat_template_utils as schemas  # takes a second; runs only

    refused = (schemas.DocstringParsingException, schemas.TypeHintParsingException)
    function = _function(name)
    try:
        return Tool(schemas.get_json_schema(function), TOOLS.get(name, name), function)
    except refused as error:
        raise UsageError(
            f"environment.tools: {name!r} has no schema: {error}; give the function type hints and "
            "a docstring that describes each argument under `Args:`"
        ) from error


def _function(name: str) -> Callable[..., Any]:
    function = resolve(name, TOOLS, "tool")
    if not inspect.isfunction(function):
        raise UsageError(f"tool {name!r} is no Python function")
    return function


class Tools(ChatEnvironment):
    """`tools`: names of TOOLS, or functions as "package.module:function". `mcp`: servers by name.

    A tool takes JSON values and returns one; a string is shown as it is, cut to `longest_result`
    characters. A policy that reads images is shown those of a result, which is a list of parts of a
    message then. What it raises as ValueError, ArithmeticError or LookupError is told to the model,
    and so is a call that is malformed, of no known tool, or with wrong arguments: each of these has
    `malformed_reward`. Anything else that a tool raises is a failure of its sample.

    `calculator` runs in the run's process. An `async def` is awaited there; every other function is
    called in a process of its own, with the variables that `env` names. The calls of a turn run in
    their order.
    """

    role: ClassVar[str] = "tool"
    special_tokens: ClassVar[bool] = True

    tools: tuple[str, ...] = ()
    mcp: dict[str, MCPServer] = {}
    tool_format: Literal["auto", ToolFormat] = "auto"
    malformed_reward: float = Field(default=0.0, le=0.0)
    longest_result: int = Field(default=2000, ge=1)
    env: tuple[str, ...] = ()  # names of environment variables that the tools' processes get

    _workers: FunctionWorkers | None = PrivateAttr(default=None)
    _sessions: ServerSessions | None = PrivateAttr(default=None)
    _shows_images: bool = PrivateAttr(default=False)

    @field_validator("tools")
    @classmethod
    def _resolvable(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        function_names = [_valid_function(name).__name__ for name in names]
        for name in function_names:
            if function_names.count(name) > 1:
                raise ValueError(f"{function_names.count(name)} tools are called {name!r}")
        return names

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.tools and not self.mcp:
            raise ValueError("a function in `tools`, or a server in `mcp`, is wanted")
        return self

    @property
    def deterministic(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Functions are taken to be; programs that a model wrote, and servers, are not."""
        return not self.mcp and "python" not in self.tools

    @property
    def waits(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether there is a tool that does not run at once."""
        return bool(self.mcp) or any(name != "calculator" for name in self.tools)

    @property
    def gives_rewards(self) -> bool:
        return self.malformed_reward != 0.0

    def all_tools(self) -> dict[str, Tool]:
        """All tools by name. Raises UsageError where two have the same, or a server has none."""
        every = [load_tool(name) for name in self.tools]
        for name, server in self.mcp.items():
            every += [Tool(schema, server=name) for schema in tools_of(name, server)]
        by_name = {tool.name: tool for tool in every}
        if len(by_name) < len(every):
            names = [tool.name for tool in every]
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError(f"environment: {names.count(twice)} tools are called {twice!r}")
        return by_name

    def variables(self) -> Mapping[str, Any]:
        return {"tools": [dict(tool.schema) for tool in self.all_tools().values()]}

    def for_template(self, template: str) -> Self:
        if "python" in self.tools:
            ready()  # now, and not at the first call
        if self.tool_format != "auto":
            return self
        return self.model_copy(update={"tool_format": taught_format(template)})

    def examples(self) -> Sequence[Message]:
        return [result_example(next(iter(self.all_tools())))]

    def read(
        self, turn: HeardTurn, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, Sequence[Call]]:
        """A turn with a call that is malformed is text alone."""
        del tools
        if self.tool_format == "auto":
            raise ValueError("for_template has not been called")
        schemas = {name: tool.parameters for name, tool in self.all_tools().items()}
        calls = calls_in(turn.marked, self.tool_format, schemas)
        well_formed = [call for call in calls if isinstance(call, Call)]
        if len(well_formed) < len(calls):
            return turn.marked, ()
        return text_beside(turn.marked, self.tool_format), well_formed

    def for_policy(self, *, reads_images: bool) -> Self:
        environment = self.model_copy()
        environment._shows_images = reads_images
        return environment

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """With processes for functions and sessions of servers."""
        self._workers, self._sessions = FunctionWorkers(self.env), ServerSessions(self.mcp)
        try:
            await self._sessions.open()
            yield
        finally:
            self._workers.close()
            await self._sessions.close()

    def start(self, prompt: Prompt, sample: int) -> Course:
        return self.resume(prompt, sample, ())

    def resume(self, prompt: Prompt, sample: int, turns: Sequence[str]) -> Course:
        """A new course, since tools keep nothing between turns; calls are counted on."""
        if self.tool_format == "auto":
            raise ValueError("for_template has not been called")
        return _Course(self, self.tool_format, turns)

    def shown(self, name: str, result: Any) -> str | list[dict[str, Any]]:
        """What the model reads of what the tool `name` returned."""
        if not (self._shows_images and _has_images(result)):
            return _readable(_text(name, result)[: self.longest_result])
        parts, left = list[dict[str, Any]](), self.longest_result
        for part in result:
            if part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
                part = {**part, "text": _readable(part["text"][:left])}
                left -= len(part["text"])
            parts.append(part)
        return parts

    async def result(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        """What a call returns. Raises TOLD with what the model is told, else StepFailed."""
        if tool.server:
            assert self._sessions is not None  # within `running`
            images = self._shows_images
            return await self._sessions.call(tool.server, tool.name, arguments, images=images)
        assert tool.function is not None
        if inspect.iscoroutinefunction(tool.function):
            return await tool.function(**arguments)
        if tool.path == TOOLS["calculator"]:
            return tool.function(**arguments)
        assert self._workers is not None
        return await self._workers.call(tool.path, arguments)


class _Course:
    def __init__(self, rules: Tools, style: ToolFormat, turns: Sequence[str]) -> None:
        self._rules = rules
        self._style: ToolFormat = style
        self._tools = rules.all_tools()
        self._schemas = {name: tool.parameters for name, tool in self._tools.items()}
        self._answered = sum(len(self._calls(text)) for text in turns)  # calls of the episode

    def _calls(self, text: str) -> Calls:
        return calls_in(text, self._style, self._schemas)

    async def step(self, text: str) -> Reply:
        """The results of the turn's calls as messages; a turn without calls ends the episode."""
        calls = self._calls(text)
        answers = [await self._answer(call) for call in calls]
        malformed = sum(wrong for _, wrong in answers)
        results = zip(calls, ids_of(calls, self._answered), answers, strict=True)
        self._answered += len(calls)
        return Reply(
            messages=tuple(result_message(c, i, content) for c, i, (content, _) in results),
            done=not calls,
            reward=malformed * self._rules.malformed_reward,
            counts={"calls": float(len(calls)), "malformed_calls": float(malformed)},
        )

    async def _answer(self, call: Call | Malformed) -> tuple[str | list[dict[str, Any]], bool]:
        """(what the model reads, whether it counts as malformed). StepFailed if a tool fails."""
        wrong = call.reason if isinstance(call, Malformed) else self._wrong(call)
        if isinstance(call, Malformed) or wrong is not None:
            return _readable(f"Error: {wrong}"), True
        try:
            result = await self._rules.result(self._tools[call.name], call.arguments)
        except TOLD as error:
            return _readable(f"Error: {error}"[: self._rules.longest_result]), True
        except StepFailed as error:
            raise StepFailed(error.cause, f"{_failed_call(call)}: {error}") from error
        except Exception as error:
            raise StepFailed("error", f"{_failed_call(call)}: {error!r}") from error
        return self._rules.shown(call.name, result), False

    def _wrong(self, call: Call) -> str | None:
        if call.name not in self._tools:
            return f"there is no tool {call.name[:60]!r}; there is: {', '.join(self._tools)}"
        return self._tools[call.name].wrong(call.arguments)


def _failed_call(call: Call) -> str:
    return f"the tool {call.name!r} failed on {json.dumps(call.arguments)[:500]}"


def _valid_function(name: str) -> Callable[..., Any]:
    try:
        return _function(name)
    except UsageError as error:
        raise ValueError(str(error)) from error


def _readable(text: str) -> str:
    """Half a surrogate pair as its escape: the JSON of a call or a result can write one, and no
    tokenizer reads it.
    """
    return text.encode(errors="backslashreplace").decode()


def _has_images(result: Any) -> bool:
    """Whether what a tool returned is a list of parts of a message, and one of them an image."""
    if not isinstance(result, list):
        return False
    parts = cast(list[Any], result)
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
    are_parts = all(kind in (*TEXT_PARTS, *IMAGE_PARTS) for kind in kinds)
    return are_parts and any(kind in IMAGE_PARTS for kind in kinds)


def _text(name: str, result: Any) -> str:
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        kind = type(result).__name__
        raise StepFailed(
            "error", f"the tool {name!r} returned {kind}, which is not JSON"
        ) from error
