"""Calls of tools in the text that a model writes, in the formats that chat templates teach."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

ToolFormat = Literal["hermes", "llama", "qwen_xml", "glm"]
FORMATS: tuple[ToolFormat, ...] = get_args(ToolFormat)
Schemas = Mapping[str, Mapping[str, Any]]  # the JSON schema of the parameters of each tool, by name

_FUNCTION = re.compile(r"\s*<function=([^>]*)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>]*)>(.*?)</parameter>\s*", re.DOTALL)
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
# Python's spelling, which some chat templates write for values of JSON.
_AS_JSON = {"True": "true", "False": "false", "None": "null"}


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
    """The format of tool calls in a chat template's text; None where it has none of these."""
    json_key = r'\\?"{}\\?":'
    if "<tool_call>" in template and "<parameter=" in template:
        return "qwen_xml"
    if "<tool_call>" in template and "<arg_key>" in template:
        return "glm"
    if "<tool_call>" in template and re.search(json_key.format("arguments"), template):
        return "hermes"
    if "ipython" in template and re.search(json_key.format("parameters"), template):
        return "llama"
    return None


def unknown_format() -> str:
    """What to say of a chat template that teaches none of the formats."""
    *others, last = (f'"{style}"' for style in FORMATS)
    return (
        "environment.tool_format: the tokenizer's chat template teaches no format of tool calls "
        f"that is known here: say tool_format = {', '.join(others)} or {last}, or take a tokenizer "
        "whose template does"
    )


def calls_in(text: str, style: ToolFormat, schemas: Schemas) -> list[Call | Malformed]:
    """The calls of a turn in order; [] where it is an answer. Text up to </think> is ignored.

    schemas: in "qwen_xml" and "glm" values are texts, and the schema of a tool says which of them
    are numbers, lists or other values of JSON.
    """
    reply = text.rpartition("</think>")[2]
    if style == "llama":
        return _llama(reply)
    return [_marked(part, style, schemas) for part in reply.split("<tool_call>")[1:]]


def _marked(part: str, style: ToolFormat, schemas: Schemas) -> Call | Malformed:
    """A call from what follows its mark <tool_call>."""
    inside, closed, _ = part.partition("</tool_call>")
    if not closed:
        return Malformed("a <tool_call> is not closed with </tool_call>")
    if style == "hermes":
        return _call(inside, "arguments")
    return _qwen_xml(inside, schemas) if style == "qwen_xml" else _glm(inside, schemas)


def _qwen_xml(text: str, schemas: Schemas) -> Call | Malformed:
    """As Qwen3-Coder and Qwen 3.5 write calls."""
    function = _FUNCTION.fullmatch(text)
    if function is None:
        return Malformed("a call is <function=NAME>, its parameters, and </function>")
    name, body = function[1].strip(), function[2]
    pairs = [(key.strip(), value) for key, value in _PARAMETER.findall(body)]
    if _PARAMETER.sub("", body).strip():
        return Malformed("a parameter is <parameter=NAME>, its value, and </parameter>")
    values = ((key, value.removeprefix("\n").removesuffix("\n")) for key, value in pairs)
    return Call(name, dict(_typed(values, schemas.get(name, {}))))


def _glm(text: str, schemas: Schemas) -> Call | Malformed:
    """As GLM 4.5 and later write calls."""
    name, mark, rest = text.partition("<arg_key>")
    name, body = name.strip(), mark + rest
    if not name or _PAIR.sub("", body).strip():
        return Malformed(
            "a call is NAME, then for each argument <arg_key>its name</arg_key> and "
            "<arg_value>its value</arg_value>"
        )
    pairs = ((key.strip(), value) for key, value in _PAIR.findall(body))
    return Call(name, dict(_typed(pairs, schemas.get(name, {}))))


def _typed(
    pairs: Iterator[tuple[str, str]], schema: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Values by the types that the schema of a tool's parameters allows: JSON of another type than
    text is read where it is allowed, or no text is. All else stays the text that it is.
    """
    properties: Mapping[str, Any] = schema.get("properties", {})
    for key, text in pairs:
        types = _types(properties.get(key, {}))
        try:
            value = json.loads(_AS_JSON.get(text.strip(), text))
        except (ValueError, RecursionError):
            value = text
        is_text = isinstance(value, str) or ("string" in types and not types & _types_of(value))
        yield key, text if is_text else value


def _types(schema: Any) -> set[str]:
    """The types of JSON that a parameter may have; none where its schema does not say."""
    if not isinstance(schema, Mapping):
        return set()
    stated = cast(Mapping[str, Any], schema)
    kind = stated.get("type", [])
    types = {kind} if isinstance(kind, str) else {k for k in kind if isinstance(k, str)}
    if stated.get("nullable"):
        types.add("null")
    for key in ("anyOf", "oneOf"):
        if isinstance(inner := stated.get(key), list):
            types = types.union(*map(_types, cast(list[Any], inner)))
    return types


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


def _types_of(value: Any) -> set[str]:
    """The types of JSON that a value which is no text has."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, list | dict):
        return {"array" if isinstance(value, list) else "object"}
    return {"integer", "number"} if isinstance(value, int) else {"number"}
