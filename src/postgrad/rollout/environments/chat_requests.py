"""What agents send, as OpenAI's chat completions have it: messages in one form whoever wrote them,
and which turn of the policy a request goes on behind.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from postgrad.data.chat_format import REASONING, parts_of
from postgrad.data.images import content_of
from postgrad.rollout.environments.tool_formats import Call

ShownTools = tuple[Mapping[str, Any], ...]  # JSON schemas of a conversation


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """A turn of the policy, as the agent has it."""

    messages: list[dict[str, Any]]  # that the policy read, and the turn itself, in one form
    calls: dict[str, Call]  # of these messages, by their ids: other conversations have the same
    tools: ShownTools

    def difference(self, messages: Sequence[Mapping[str, Any]], tools: ShownTools) -> str | None:
        """Where a request does not repeat what was read and said up to the turn; None where it
        does.
        """
        for place, message in enumerate(self.messages):
            if place >= len(messages) or not repeats(messages[place], message):
                has = json.dumps(messages[place])[:200] if place < len(messages) else "nothing"
                return f"message {place} is {has}, and was {json.dumps(message)[:200]}"
        if tools != self.tools:
            has, had = (tool_names(each)[:100] or "none" for each in (tools, self.tools))
            return f"its tools are {has}, and were {had}"
        return None

    def goes_on_in(self, messages: Sequence[Mapping[str, Any]], tools: ShownTools) -> bool:
        """Whether a request repeats what was read and said up to the turn, with the same tools, and
        adds messages that are not the policy's.
        """
        new = messages[len(self.messages) :]
        others = bool(new) and all(message["role"] != "assistant" for message in new)
        return others and self.difference(messages, tools) is None


def repeats(sent: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    """Whether a message is an earlier one, both in one form. It may be without the thoughts that
    the earlier one had apart from its content, as most programs send it.
    """
    if "thoughts" not in sent:
        earlier = {key: value for key, value in earlier.items() if key != "thoughts"}
    return sent == earlier


def plain_message(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Role, text, thoughts, images by their hashes, and calls of a message, in one form whoever
    wrote it. number: its own, which errors name. Raises ValueError for a part that the policy would
    not see.
    """
    content, images = message.get("content"), list(message.get("images", ()))
    if isinstance(content, Sequence) and not isinstance(content, str):
        content, sources = parts_of(content, number)
        images = [_digest(source, number) for source in sources]
    plain: dict[str, Any] = {"role": str(message.get("role")), "content": content or ""}
    if images:
        plain["images"] = images
    if plain["role"] == "assistant":
        texts = [text for key in REASONING if isinstance(text := message.get(key), str)]
        if thoughts := next((text.strip() for text in texts if text.strip()), ""):
            plain["thoughts"] = thoughts
    if plain["role"] == "tool" and isinstance(message.get("tool_call_id"), str):
        plain["tool_call_id"] = message["tool_call_id"]
    calls = message.get("tool_calls") or ()
    if calls:
        plain["calls"] = [_called(call) for call in calls]
    return plain


def calls_of(message: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Call]:
    """The calls of a message in one form by their ids. raw: the message as it came."""
    pairs = zip(message.get("calls", ()), raw.get("tool_calls") or (), strict=True)
    return {
        str(call.get("id") if isinstance(call, Mapping) else None): Call(str(name), arguments)
        for (name, arguments), call in pairs
    }


def answer_message(content: str, thoughts: str, calls: Mapping[str, Call]) -> dict[str, Any]:
    """A turn of the policy as an assistant's message. calls: by their ids."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["content"] = content or None
        message["tool_calls"] = [
            {
                "id": identifier,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for identifier, call in calls.items()
        ]
    return message


def tool_name(tool: Any) -> str | None:
    """The name of a tool's function; None where it has none."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def tool_names(tools: Sequence[Any]) -> str:
    """The names of tools for a message, with commas."""
    return ", ".join(str(tool_name(tool)) for tool in tools)


def _digest(source: Any, number: int) -> str:
    try:
        return hashlib.sha256(content_of(source, None)).hexdigest()
    except ValueError as error:
        raise ValueError(f"message {number} has an image that cannot be read: {error}") from error


def _called(call: Any) -> list[Any]:
    """Name and arguments of a call, the latter as JSON has them."""
    function = call.get("function", {}) if isinstance(call, Mapping) else {}
    arguments: Any = function.get("arguments")
    with suppress(ValueError, TypeError):
        arguments = json.loads(arguments)
    return [function.get("name"), arguments]
