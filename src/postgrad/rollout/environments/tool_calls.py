"""Calls of tools in the text that a model writes, in the two formats that chat templates teach."""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

ToolFormat = Literal["hermes", "llama"]


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
