"""Conversations as people store them, read into one form: OpenAI's messages, the hub's, ShareGPT's.

A message has a `role` and a `content`, which is text ("" where a message only calls tools), and all
other keys of the row that chat templates may read: `tool_calls`, `reasoning_content`, `name`. The
functions that a conversation may call are the key `tools` of its first message. A `weight` is what
each token of a message counts in the loss, where that is not 1. `images` are the sources of a
message's images, in the order of the MARKs in its content; None for one that another column of the
row has (data/images.py).
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from postgrad.core.media import MARK
from postgrad.data.json_text import parsed_json

Message = dict[str, Any]
# Of the chat format, and of models: OpenAI's developer, Llama's ipython, OLMo's environment.
Role = Literal["system", "developer", "user", "assistant", "tool", "ipython", "environment"]
# Which messages bear loss: all answers of the assistant, the last answer, all tokens of a
# conversation, or the messages of these roles.
LossTurns = Literal["all", "last", "everything"] | tuple[Role, ...]

SHAPE = 'a list of {"role": text, "content": text}'
SPEAKERS = {  # ShareGPT's `from`
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
REASONING = (
    "reasoning_content",
    "reasoning",
    "thinking",
)  # what templates call an answer's thoughts
THINK, THOUGHT = "<think>", "</think>"  # around the thoughts of an answer
WEIGHTS = ("weight", "loss", "train", "training")  # OpenAI, ms-swift, axolotl: what tokens count
WEIGHT_BOUNDS = (1e-6, 1e6)  # of a weight that is not 0: float32 holds their ratios well
EMPTY = (None, "", [], {})  # what tables fill in where a message lacks a key
TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image", "image_url", "input_image")
SOURCES = ("image", "image_url", "url", "path", "base64", "bytes")  # keys of such a part
READ_HERE = {"role", "content", "tool_calls", "function_call", "from", "value", "images", *WEIGHTS}


def messages_of(
    value: Any, *, strip: bool, learned: Collection[str] | None = None
) -> list[Message]:
    """A column's value as messages. strip: without white space at both ends of each content.
    learned: the roles of data.loss_turns; None: there is no such key, and answers alone bear loss.

    Raises ValueError that says what is wrong, with the number of the message from 0 on.
    """
    value = _parsed(value, SHAPE)
    if not isinstance(value, list):
        raise ValueError(f"{SHAPE}; it is {_kind(value)}")
    if not value:
        raise ValueError(f"{SHAPE}; the list is empty")
    messages = [_message(message, number, strip, learned) for number, message in enumerate(value)]
    for number, message in enumerate(messages):
        if "tools" in message:
            _require_tools(message, number)
    return messages


def parts_of(content: Sequence[Any], number: int) -> tuple[str, list[Any]]:
    """The parts of a message's content as one text, with a MARK for each image, and the sources of
    the images in order. Raises ValueError as `messages_of` does.
    """
    sources: list[Any] = []
    text = _text(content, number, False, sources)
    _require_marks(text, len(sources), number)
    return text, sources


def tools_of(value: Any) -> list[dict[str, Any]]:
    """The functions that a conversation may call, each {"type": "function", "function": {...}} with
    a JSON schema of its parameters, as transformers' chat templates take them. [] for no value.

    Columns of tables fill what a function does not have with null; nulls are left out. Raises
    ValueError that says what is wrong.
    """
    shape = 'a list of functions, {"name": text, "parameters": {...}}'
    value = _parsed(value, shape) if value != "" else None
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(shape)
    functions: list[dict[str, Any]] = []
    for tool in value:
        tool = tool if not isinstance(tool, dict) or "function" in tool else {"function": tool}
        if not isinstance(tool, dict) or not _is_named(tool["function"]):
            raise ValueError(shape)
        functions.append({"type": "function", **_without_nulls(tool)})
    return functions


def with_tools(messages: Sequence[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """`messages` with the functions that they may call."""
    first, *rest = messages
    return [{**first, "tools": tools}, *rest] if tools else list(messages)


def roles_of(turns: LossTurns) -> tuple[str, ...]:
    """The roles whose messages may bear loss."""
    if turns == "everything":
        return get_args(Role)
    return ("assistant",) if isinstance(turns, str) else turns


def learned_in(messages: Sequence[Message], turns: LossTurns, first: int = 0) -> list[int]:
    """The messages that bear loss, by number, from message `first` on."""
    roles = roles_of(turns)
    learned = [i for i in range(first, len(messages)) if bears_loss(messages[i], roles)]
    return learned[-1:] if turns == "last" else learned


def bears_loss(message: Mapping[str, Any], roles: Collection[str] = ("assistant",)) -> bool:
    """Whether a message is of one of these roles and is learned."""
    return message["role"] in roles and message.get("weight", 1) != 0


def says_nothing(message: Mapping[str, Any]) -> bool:
    """Whether a message has no text, no reasoning and no call of a tool."""
    if message["content"].strip():
        return False
    thoughts = [text for key in REASONING if isinstance(text := message.get(key), str)]
    return not any(map(str.strip, thoughts)) and not message.get("tool_calls")


def texts_of(message: Mapping[str, Any]) -> Iterator[str]:
    """The texts that a chat template writes of a message, about: content, thoughts, calls and
    tools.
    """
    yield message["content"]
    for key in REASONING:
        if isinstance(message.get(key), str):
            yield message[key]
    for part in (*message.get("tool_calls", ()), *message.get("tools", ())):
        yield json.dumps(part["function"], ensure_ascii=False)


def _parsed(value: Any, shape: str) -> Any:
    """The value of JSON text, as tables hold nested values; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return parsed_json(value)
    except ValueError as error:
        raise ValueError(f"{shape}; as JSON text it cannot be read: {error}") from None


def _kind(value: Any) -> str:
    """What a JSON value is, for a message."""
    names = {type(None): "null", dict: "an object", list: "a list", str: "text", bool: "a bool"}
    return names.get(type(value), "a number")


def _message(value: Any, number: int, strip: bool, learned: Collection[str] | None) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"{SHAPE}; message {number} is {_kind(value)}")
    if "role" not in value and "from" in value:
        value = _from_sharegpt(value, number)
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str):
        raise ValueError(f"{SHAPE}; the role of message {number} is {_kind(role)}")
    calls = value.get("tool_calls") or []
    if value.get("function_call"):  # OpenAI's form before tool_calls
        calls = [value["function_call"]]
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls of message {number} are no list")
    images: list[Any] = []
    if isinstance(content, str):
        text = content
    else:
        empty = bool(calls) or any(value.get(key) for key in REASONING)  # content may be left out
        text = _text(content, number, empty, images)
    if images or value.get("images"):
        _require_places(value, text, len(images), number)
    message: Message = {
        "role": "tool" if role == "function" else role,
        "content": text.strip() if strip else text,
    }
    if images:
        message["images"] = images
    if calls:
        message["tool_calls"] = [_call(call, number) for call in calls]
    weight = _weight(value, message["role"], number, learned)
    if weight != 1:
        message["weight"] = weight
    for key, other in value.items():
        if key not in READ_HERE and other not in EMPTY:
            message[key] = other
    return message


def _text(content: Any, number: int, empty: bool, images: list[Any]) -> str:
    """The text of a content: text, a list of parts, or null where the message may be `empty`.
    images: gets the source of each image, and the text a MARK.
    """
    if content is None and empty:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{SHAPE}; the content of message {number} is {_kind(content)}")
    texts: list[str] = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind in IMAGE_PARTS and isinstance(part, dict):
            named = (part[key] for key in SOURCES if part.get(key) not in EMPTY)
            images.append(next(named, None))
            texts.append(MARK)
            continue
        if kind not in TEXT_PARTS:
            raise ValueError(
                f"message {number} has a part of type {str(kind)[:40]!r}, and only text and images "
                "are read"
            )
        if not isinstance(text, str):
            raise ValueError(f"message {number} has a part without text")
        if isinstance(part, dict) and any(part.get(key) not in (None, 1) for key in WEIGHTS):
            raise ValueError(
                f"message {number} has a part with a weight of its own, and weights are of whole "
                "messages: take it out with data.map, or divide the message"
            )
        texts.append(text)
    return "".join(texts)


def _require_places(value: Mapping[str, Any], text: str, images: int, number: int) -> None:
    """Raises ValueError where it cannot be told which image stands where."""
    if value.get("images"):
        raise ValueError(
            f"message {number} has images beside its content: they are read from parts of the "
            "content, or from a column of the row (data.images)"
        )
    if value.get("role") == "assistant":
        raise ValueError(f"message {number} is by the assistant and has an image: it writes text")
    _require_marks(text, images, number)


def _require_marks(text: str, images: int, number: int) -> None:
    if text.count(MARK) != images:
        raise ValueError(f"message {number} has U+FFFC in its text, which stands for an image here")


def _call(call: Any, number: int) -> dict[str, Any]:
    """A call with its arguments as an object. Null arguments are left out of objects, since tables
    fill in the arguments of other calls; JSON text keeps them.
    """
    function: Any = call.get("function", call) if isinstance(call, dict) else None
    if not _is_named(function):
        raise ValueError(f"a call in message {number} names no function: {str(call)[:60]}")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = _without_nulls(arguments)
    elif isinstance(arguments, str) and arguments.strip():
        arguments = _parsed(arguments, f"arguments of a call in message {number} are not JSON")
    elif not arguments:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments of a call in message {number} are no JSON object")
    named = {"name": function["name"], "arguments": arguments}
    identifier = {"id": call["id"]} if call.get("id") else {}
    return {**identifier, "type": "function", "function": named}


def _require_tools(message: Message, number: int) -> None:
    """Brings the tools of a message into the form of `tools_of`. Raises ValueError where they are
    none, or would not reach the chat template.
    """
    if number:
        raise ValueError(
            f"message {number} has tools, which the first message has for all of a conversation, "
            "or a column of the row (data.tools)"
        )
    try:
        tools = tools_of(message.pop("tools"))
    except ValueError as error:
        raise ValueError(f"the tools of message 0 are not {error}") from None
    if tools:
        message["tools"] = tools


def _is_named(function: Any) -> bool:
    name = function.get("name") if isinstance(function, dict) else None
    return isinstance(name, str) and bool(name)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _weight(
    value: Mapping[str, Any], role: str, number: int, learned: Collection[str] | None
) -> int | float:
    """What each token of a message counts in the loss; 0: it bears none."""
    stated = {key: value[key] for key in WEIGHTS if value.get(key) is not None}
    (low, high), roles = WEIGHT_BOUNDS, learned or ("assistant",)
    for key, weight in stated.items():
        if not isinstance(weight, int | float) or not (weight == 0 or low <= weight <= high):
            raise ValueError(
                f"message {number} has {key} = {weight!r}: it has to be 0, or a number from "
                f"{low:g} to {high:g}"
            )
        if role not in roles and (weight not in (0, 1) or (weight == 1 and key != "weight")):
            other = "" if learned is None else ", and data.loss_turns names no other role"
            raise ValueError(
                f"message {number} is by the {role} and has {key} = {weight!r}: only messages of "
                f"the {' and the '.join(roles)} are learned{other}"
            )
    if len({*stated.values()}) > 1:
        both = " and ".join(f"{key} = {weight!r}" for key, weight in stated.items())
        raise ValueError(f"message {number} has {both}, which differ: keep one of them")
    weight = next(iter(stated.values()), 1)
    return int(weight) if weight == int(weight) else weight


def _from_sharegpt(value: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A message with `from` and `value` as one with `role` and `content`."""
    speaker, text = value["from"], value.get("value")
    role = SPEAKERS.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        raise ValueError(
            f"message {number} is from {str(speaker)[:40]!r}; read are {', '.join(SPEAKERS)}"
        )
    others = {key: other for key, other in value.items() if key not in ("from", "value")}
    if speaker.lower() != "function_call":
        return {**others, "role": role, "content": text}
    calls = _parsed(text, f"the call in message {number} is not JSON")
    return {**others, "role": role, "tool_calls": calls if isinstance(calls, list) else [calls]}
