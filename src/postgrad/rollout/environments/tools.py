"""An environment of tools: the policy calls Python functions until it answers.

A turn without a call is the answer, which [[rewards]] score.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator

from postgrad.core.errors import PostgradError, RunError, UsageError
from postgrad.core.records import Prompt
from postgrad.core.text import resolve
from postgrad.rewards.sandbox.choice import shared
from postgrad.rewards.sandbox.client import Limits, Program, SandboxError
from postgrad.rollout.environments.base import ChatEnvironment, Course, Reply

LIMITS = Limits()
STOPPED = {
    "cpu_time": f"it used up its {LIMITS.cpu_seconds:g} s of CPU time",
    "idle": f"it waited for more than {LIMITS.idle_seconds:g} s",
    "output": f"it wrote more than {LIMITS.output_bytes >> 20} MiB",
    "signal": "it crashed, or ran out of memory",
}

ToolFormat = Literal["hermes", "llama"]

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
class Call:
    """A call of a tool."""

    name: str  # of the tool
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Malformed:
    """Text that was meant as a call and is none."""

    reason: str  # shown to the model


def format_of(template: str) -> ToolFormat | None:
    """The format of tool calls in a chat template's text; None where it has none of these two."""
    json_key = r'\\?"{}\\?":'  # GLM and Qwen 3.5 have the same mark around another format
    if "<tool_call>" in template and re.search(json_key.format("arguments"), template):
        return "hermes"
    if "ipython" in template and re.search(json_key.format("parameters"), template):
        return "llama"
    return None


def calls_in(text: str, style: ToolFormat) -> list[Call | Malformed]:
    """The calls of a turn in order; [] where it is an answer. Text up to </think> is ignored."""
    reply = text.rpartition("</think>")[2]
    return _hermes(reply) if style == "hermes" else _llama(reply)


def _hermes(text: str) -> list[Call | Malformed]:
    calls: list[Call | Malformed] = []
    for part in text.split("<tool_call>")[1:]:
        inside, closed, _ = part.partition("</tool_call>")
        if not closed:
            calls.append(Malformed("a <tool_call> is not closed with </tool_call>"))
            continue
        calls.append(_call(inside, "arguments"))
    return calls


def _llama(text: str) -> list[Call | Malformed]:
    reply = text.strip()
    marked = reply.startswith("<|python_tag|>")
    reply = reply.removeprefix("<|python_tag|>").strip()
    if not marked and not re.match(r'\{\s*"(name|type)"', reply):
        return []
    decoder, place = json.JSONDecoder(), 0
    calls: list[Call | Malformed] = []
    while place < len(reply):
        try:
            value, end = decoder.raw_decode(reply, place)
        except (ValueError, RecursionError) as error:
            return [*calls, Malformed(f"the call is not JSON: {error}")]
        calls.append(_checked(value, "parameters"))
        rest = re.compile(r"\s*;?\s*").match(reply, end)
        place = rest.end() if rest else end
    return calls or [Malformed("the call is empty")]


def _call(text: str, key: str) -> Call | Malformed:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Malformed(f"the call is not JSON: {error}")
    return _checked(value, key)


def _checked(value: Any, key: str) -> Call | Malformed:
    if not isinstance(value, dict):
        return Malformed(f'a call is an object {{"name": ..., "{key}": {{...}}}}')
    name, arguments = value.get("name"), value.get(key)
    if not isinstance(name, str):
        return Malformed('the call has no "name" of a tool')
    if not isinstance(arguments, dict):
        return Malformed(f'the call has no object "{key}"')
    return Call(name, arguments)


@dataclass(frozen=True, slots=True)
class Tool:
    """A Python function that a model may call."""

    function: Callable[..., Any]
    schema: Mapping[str, Any]  # JSON schema that the chat template shows to the model

    @property
    def name(self) -> str:
        """The name that calls use: the function's own."""
        return self.schema["function"]["name"]

    def wrong(self, arguments: Mapping[str, Any]) -> str | None:
        """What is wrong with the arguments of a call, as text for the model; None if they fit."""
        parameters = self.schema["function"]["parameters"]
        properties: Mapping[str, Any] = parameters.get("properties", {})
        for name in parameters.get("required", ()):
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
        return Tool(function, schemas.get_json_schema(function))
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
    """`tools`: names of TOOLS, or functions as "package.module:function".

    A tool takes JSON values and returns one; a string is shown as it is, cut to `longest_result`
    characters. What it raises as ValueError, ArithmeticError or LookupError is told to the model,
    and so is a call that is malformed, of no known tool, or with wrong arguments: each of these has
    `malformed_reward`. Anything else that a tool raises stops the run. Tools run in the run's own
    process, one call after the other; the same arguments must always give the same result.
    """

    role: ClassVar[str] = "tool"
    special_tokens: ClassVar[bool] = True

    tools: tuple[str, ...] = Field(min_length=1)
    tool_format: Literal["auto", "hermes", "llama"] = "auto"
    malformed_reward: float = Field(default=0.0, le=0.0)
    longest_result: int = Field(default=2000, ge=1)

    @field_validator("tools")
    @classmethod
    def _resolvable(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        function_names = [_valid_function(name).__name__ for name in names]
        for name in function_names:
            if function_names.count(name) > 1:
                raise ValueError(f"{function_names.count(name)} tools are called {name!r}")
        return names

    @property
    def gives_rewards(self) -> bool:
        return self.malformed_reward != 0.0

    def variables(self) -> Mapping[str, Any]:
        return {"tools": [dict(load_tool(name).schema) for name in self.tools]}

    def for_template(self, template: str) -> Self:
        if "python" in self.tools:
            ready()  # now, and not at the first call
        if self.tool_format != "auto":
            return self
        tool_format = format_of(template)
        if tool_format is None:
            raise UsageError(
                "environment.tool_format: the tokenizer's chat template teaches no format of tool "
                'calls that is known here: say tool_format = "hermes" or "llama", or take a '
                "tokenizer whose template does"
            )
        return self.model_copy(update={"tool_format": tool_format})

    def start(self, prompt: Prompt, sample: int) -> Course:
        if self.tool_format == "auto":
            raise ValueError("for_template has not been called")
        return _Course(self, self.tool_format)


class _Course:
    def __init__(self, rules: Tools, style: ToolFormat) -> None:
        self._rules = rules
        self._style: ToolFormat = style
        self._tools = {tool.name: tool for tool in map(load_tool, rules.tools)}

    def step(self, text: str) -> Reply:
        """The results of the turn's calls as messages; a turn without calls ends the episode."""
        calls = calls_in(text, self._style)
        answers = [self._answer(call) for call in calls]
        malformed = sum(wrong for _, wrong in answers)
        return Reply(
            messages=tuple({"role": "tool", "content": content} for content, _ in answers),
            done=not calls,
            reward=malformed * self._rules.malformed_reward,
            counts={"calls": float(len(calls)), "malformed_calls": float(malformed)},
        )

    def _answer(self, call: Call | Malformed) -> tuple[str, bool]:
        """(text for the model, whether the call counts as malformed). RunError if a tool fails."""
        wrong = call.reason if isinstance(call, Malformed) else self._wrong(call)
        if isinstance(call, Malformed) or wrong is not None:
            return f"Error: {wrong}", True
        try:
            result = self._tools[call.name].function(**call.arguments)
        except (ValueError, ArithmeticError, LookupError) as error:
            return f"Error: {error}"[: self._rules.longest_result], True
        except PostgradError:  # has its own message: the sandbox of `python`
            raise
        except Exception as error:
            raise RunError(
                f"the tool {call.name!r} failed on {json.dumps(call.arguments)[:500]}: {error!r}; "
                "raise ValueError for what the model should be told"
            ) from error
        return _text(call.name, result)[: self._rules.longest_result], False

    def _wrong(self, call: Call) -> str | None:
        if call.name not in self._tools:
            return f"there is no tool {call.name[:60]!r}; there is: {', '.join(self._tools)}"
        return self._tools[call.name].wrong(call.arguments)


def _valid_function(name: str) -> Callable[..., Any]:
    try:
        return _function(name)
    except UsageError as error:
        raise ValueError(str(error)) from error


def _text(name: str, result: Any) -> str:
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RunError(
            f"the tool {name!r} returned {type(result).__name__}, which is not JSON: {error}"
        ) from error
