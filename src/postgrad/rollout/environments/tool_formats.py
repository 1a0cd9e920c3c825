"""How models write calls of tools: a reader for each format, and how a chat template shows it."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

ToolFormat = Literal["hermes", "llama", "qwen_xml", "glm", "mistral", "deepseek", "harmony", "kimi"]
Schemas = Mapping[str, Mapping[str, Any]]  # the JSON schema of the parameters of each tool, by name

# Texts come from models, and may be long: every pattern reads one in a time that grows with its
# length, and not with the square of it.
_SPACE = re.compile(r"\s*")
_NAMED = re.compile(  # since version 11 of Mistral's tokenizers
    r"(?P<name>[^\[{\s]+)\s*(?:\[CALL_ID\]\s*(?P<id>[^\[{\s]*)\s*)?(?:\[ARGS\])?(?P<json>\{.*)",
    re.DOTALL,
)
_FENCED = re.compile(r"(?P<name>[^\n]*)\n```(?:json)?\n(?P<json>.*)\n```\s*", re.DOTALL)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>[\w./-]+):\d+", re.ASCII)  # results repeat it
_MISTRAL_ID = re.compile("[A-Za-z0-9]{9}")
# Python's spelling, which some chat templates write for values of JSON.
_AS_JSON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    name: str  # of the tool
    arguments: dict[str, Any]
    id: str = ""  # as the model wrote it; "" where it wrote none


@dataclass(frozen=True, slots=True)
class Malformed:
    """Text that was meant as a call and is none."""

    reason: str  # shown to the model
    name: str = ""  # of the tool, where that can be told
    id: str = ""


Calls = list[Call | Malformed]
ReadCalls = Callable[[str, Schemas], Calls]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format of tool calls."""

    taught: tuple[str, ...]  # patterns that are all in a chat template which teaches it
    begin: str  # what stands before the first call of a turn; "": a call is the whole turn
    read: ReadCalls
    thoughts: tuple[str, ...] = ("</think>",)  # text up to the last of these is no call


def _marked(read: Callable[[str, Schemas], Call | Malformed]) -> ReadCalls:
    """A reader of calls between <tool_call> and </tool_call>. read: what is between."""

    def every(text: str, schemas: Schemas) -> Calls:
        parts = (part.partition("</tool_call>") for part in text.split("<tool_call>")[1:])
        return [
            read(inside, schemas)
            if closed
            else Malformed("a <tool_call> is not closed with </tool_call>")
            for inside, closed, _ in parts
        ]

    return every


def _hermes(text: str, schemas: Schemas) -> Call | Malformed:
    del schemas  # JSON says its types
    return _call(text, "arguments")


def _between(text: str, place: int, begin: str, end: str) -> tuple[str, int]:
    """What stands between two marks at a place, behind white space, and the place after them; the
    place is -1 where they are not there.
    """
    start = _after_space(text, place)
    stop = text.find(end, start + len(begin)) if text.startswith(begin, start) else -1
    return (text[start + len(begin) : stop], stop + len(end)) if stop >= 0 else ("", -1)


def _after_space(text: str, place: int) -> int:
    space = _SPACE.match(text, place)
    return space.end() if space else place


def _qwen_xml(text: str, schemas: Schemas) -> Call | Malformed:
    """As Qwen3-Coder and Qwen 3.5 write calls."""
    inside, (begin, end) = text.strip(), ("<function=", "</function>")
    name, separator, body = inside.removeprefix(begin).removesuffix(end).partition(">")
    if not inside.startswith(begin) or not inside.endswith(end) or not separator:
        return Malformed("a call is <function=NAME>, its parameters, and </function>")
    pairs, place = list[tuple[str, str]](), 0
    while _after_space(body, place) < len(body):
        parameter, place = _between(body, place, "<parameter=", "</parameter>")
        key, separator, value = parameter.partition(">")
        if not separator:
            reason = "a parameter is <parameter=NAME>, its value, and </parameter>"
            return Malformed(reason, name.strip())
        pairs.append((key.strip(), value.removeprefix("\n").removesuffix("\n")))
    name = name.strip()
    return Call(name, dict(_typed(iter(pairs), schemas.get(name, {}))))


def _glm(text: str, schemas: Schemas) -> Call | Malformed:
    """As GLM 4.5 and later write calls."""
    name, mark, rest = text.partition("<arg_key>")
    name, body = name.strip(), mark + rest
    pairs, place = list[tuple[str, str]](), 0 if name else -1
    while place >= 0 and _after_space(body, place) < len(body):
        key, place = _between(body, place, "<arg_key>", "</arg_key>")
        value, place = (
            _between(body, place, "<arg_value>", "</arg_value>") if place > 0 else ("", -1)
        )
        pairs.append((key.strip(), value))
    if place < 0:
        return Malformed(
            "a call is NAME, then for each argument <arg_key>its name</arg_key> and "
            "<arg_value>its value</arg_value>"
        )
    return Call(name, dict(_typed(iter(pairs), schemas.get(name, {}))))


def _llama(text: str, schemas: Schemas) -> Calls:
    del schemas
    reply = text.strip()
    marked = reply.startswith("<|python_tag|>")
    reply = reply.removeprefix("<|python_tag|>").strip()
    if not marked and not re.match(r'\{\s*"(name|type)"', reply):
        return []
    decoder, place = json.JSONDecoder(), 0
    calls: Calls = []
    while place < len(reply):
        try:
            value, end = decoder.raw_decode(reply, place)
        except (ValueError, RecursionError) as error:
            return [*calls, Malformed(f"the call is not JSON: {error}")]
        calls.append(_checked(value, "parameters"))
        rest = re.compile(r"\s*;?\s*").match(reply, end)
        place = rest.end() if rest else end
    return calls or [Malformed("the call is empty")]


def _mistral(text: str, schemas: Schemas) -> Calls:
    """A JSON list behind one mark (versions 3 to 7), or a mark for each call (later ones)."""
    del schemas
    calls: Calls = []
    for part in map(str.strip, text.split("[TOOL_CALLS]")[1:]):
        if part.startswith(("[ARGS]", "[CALL_ID]")) or not part.startswith(("[", "{")):
            calls.append(_mistral_named(part))
            continue
        try:
            value = json.loads(part)
        except (ValueError, RecursionError) as error:
            calls.append(Malformed(f"what follows [TOOL_CALLS] is not JSON: {error}"))
            continue
        for each in cast(list[Any], value) if isinstance(value, list) else [value]:
            identifier = each.get("id") if isinstance(each, dict) else ""
            calls.append(_with_id(_checked(each, "arguments"), str(identifier)))
    # Its templates refuse results of calls with any other id.
    return [call if _MISTRAL_ID.fullmatch(call.id) else _with_id(call, "") for call in calls]


def _mistral_named(text: str) -> Call | Malformed:
    named = _NAMED.fullmatch(text)
    if named is None:
        return Malformed("a call is [TOOL_CALLS]NAME[ARGS] and an object of its arguments in JSON")
    return _with_id(_addressed(named["name"].strip(), named["json"]), named["id"] or "")


def _deepseek(text: str, schemas: Schemas) -> Calls:
    """With the arguments in a block of code (V3, R1), or as they are (V3.1)."""
    del schemas
    calls: Calls = []
    for part in text.split("<｜tool▁call▁begin｜>")[1:]:
        inside, closed, _ = part.partition("<｜tool▁call▁end｜>")
        name, separator, arguments = inside.partition("<｜tool▁sep｜>")
        if not closed or not separator:
            missing = "<｜tool▁sep｜>" if closed else "<｜tool▁call▁end｜> at its end"
            calls.append(Malformed(f"a call has no {missing}"))
            continue
        if fenced := _FENCED.fullmatch(arguments):  # what stands before is "function"
            name, arguments = fenced["name"], fenced["json"]
        calls.append(_addressed(name.strip(), arguments))
    return calls


def _kimi(text: str, schemas: Schemas) -> Calls:
    """As Kimi K2 writes calls: the id begins with the name."""
    del schemas
    calls: Calls = []
    for part in text.split("<|tool_call_begin|>")[1:]:
        inside, closed, _ = part.partition("<|tool_call_end|>")
        identifier, separator, arguments = inside.partition("<|tool_call_argument_begin|>")
        named = _KIMI_ID.fullmatch(identifier.strip())
        if not closed or not separator or named is None:
            calls.append(
                Malformed(
                    "a call is <|tool_call_begin|>functions.NAME:NUMBER, "
                    "<|tool_call_argument_begin|>, its arguments in JSON, and <|tool_call_end|>"
                )
            )
            continue
        calls.append(_with_id(_addressed(named["name"], arguments), named[0]))
    return calls


def harmony_messages(text: str) -> Iterator[tuple[str, str, str]]:
    """(recipient, channel, body) of each message in a turn of gpt-oss, "" where there is none."""
    for part in text.split("<|start|>"):
        head, separator, body = part.partition("<|message|>")
        if not separator and "<|channel|>" not in head:  # plain text
            head, body = "", head
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        body = re.split(r"<\|(?:end|call|return)\|>", body, maxsplit=1)[0]
        yield recipient[1] if recipient else "", channel[1] if channel else "", body


def _harmony(text: str, schemas: Schemas) -> Calls:
    """As gpt-oss writes a call: a message to functions.NAME, which ends the turn."""
    del schemas
    asked = [(to, body) for to, _, body in harmony_messages(text) if to]
    if not asked:
        return []
    name, body = asked[-1]
    if len(asked) > 1:
        reason = f"a turn has one call, which <|call|> ends, and this one has {len(asked)}"
        return [Malformed(reason, name.removeprefix("functions."))]
    if not name.startswith("functions."):
        return [Malformed(f"a call goes to=functions.NAME, and this one goes to={name}", name)]
    return [_addressed(name.removeprefix("functions."), body)]


FORMATS: Mapping[ToolFormat, CallFormat] = {  # the first that fits a template is what it teaches
    "qwen_xml": CallFormat(("<tool_call>", "<parameter="), "<tool_call>", _marked(_qwen_xml)),
    "glm": CallFormat(("<tool_call>", "<arg_key>"), "<tool_call>", _marked(_glm)),
    "hermes": CallFormat(("<tool_call>", r'\\?"arguments\\?":'), "<tool_call>", _marked(_hermes)),
    "llama": CallFormat(("ipython", r'\\?"parameters\\?":'), "", _llama),
    "mistral": CallFormat((r"\[TOOL_CALLS\]",), "[TOOL_CALLS]", _mistral, ("</think>", "[/THINK]")),
    "deepseek": CallFormat(("<｜tool▁call▁begin｜>",), "<｜tool▁calls▁begin｜>", _deepseek),
    "harmony": CallFormat((r"<\|channel\|>", r"<\|call\|>"), "", _harmony, ()),
    "kimi": CallFormat((r"<\|tool_call_argument_begin\|>",), "<|tool_calls_section_begin|>", _kimi),
}
assert set(FORMATS) == set(get_args(ToolFormat))


def _call(text: str, key: str) -> Call | Malformed:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Malformed(f"the call is not JSON: {error}")
    return _checked(value, key)


def _checked(value: Any, key: str) -> Call | Malformed:
    """A call that is an object of JSON. key: of its arguments."""
    if not isinstance(value, dict):
        return Malformed(f'a call is an object {{"name": ..., "{key}": {{...}}}}')
    stated = cast(dict[str, Any], value)
    name, arguments = stated.get("name"), stated.get(key)
    if not isinstance(name, str):
        return Malformed('the call has no "name" of a tool')
    if not isinstance(arguments, dict):
        return Malformed(f'the call has no object "{key}"', name)
    return Call(name, cast(dict[str, Any], arguments))


def _addressed(name: str, text: str) -> Call | Malformed:
    """A call whose name stands apart from its arguments, an object of JSON."""
    if not name:
        return Malformed("the call has no name of a tool")
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Malformed(f"the arguments of {name[:60]} are not JSON: {error}", name)
    if not isinstance(arguments, dict):
        return Malformed(f"the arguments of {name[:60]} are no object of JSON", name)
    return Call(name, cast(dict[str, Any], arguments))


def _with_id(call: Call | Malformed, identifier: str) -> Call | Malformed:
    if isinstance(call, Malformed):
        return Malformed(call.reason, call.name, identifier)
    return Call(call.name, call.arguments, identifier)


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


def _types_of(value: Any) -> set[str]:
    """The types of JSON that a value which is no text has."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, list | dict):
        return {"array" if isinstance(value, list) else "object"}
    return {"integer", "number"} if isinstance(value, int) else {"number"}
