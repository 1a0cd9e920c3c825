"""Anthropic's Messages API (platform.claude.com/docs/en/build-with-claude/working-with-messages).

A message has blocks: the results of tools are blocks of the user, thoughts and calls those of the
assistant. What only serves a cache or a bill (cache_control, metadata) is no part of a message
here: it changes from request to request, and the conversation stays the same.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from postgrad.rollout.environments.wire import (
    MODEL,
    ChatAnswer,
    WireProtocol,
    event,
    listed_tools,
    new_id,
)

_READ = {
    "user": "text, image and tool_result",
    "assistant": "text, thinking and tool_use",
    "system": "text",
}
_CHOICES = {"auto": "auto", "none": "none"}
# Claude Code writes such a line into the system's text, another one in each request.
_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE)


class AnthropicMessages(WireProtocol):
    """A message of a thread is kept for the sample: the next request of the thread names it."""

    path = "/messages"
    count_path = "/messages/count_tokens"
    names = {"stop": "stop_sequences", "response_format": "output_config.format"}
    not_done = {
        "mcp_servers": "send the servers' tools, and call them in the agent",
        "compaction": "ask for a summary in a message",
    }

    def request(self, body: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
        body = _continued(body, earlier)
        output = body.get("output_config")
        messages: list[dict[str, Any]] = []
        if system := body.get("system"):
            messages.append(_system(_blocks({"content": system}, "system")))
        for number, message in enumerate(body["messages"]):
            role = message.get("role") if isinstance(message, dict) else None
            if not isinstance(role, str) or role not in _READ:
                raise ValueError(
                    f"message {number} is {repr(message)[:60]}, and only those with the role "
                    f"{', '.join(_READ)} are read"
                )
            messages += _messages(role, _blocks(message, f"message {number}"), number)
        return {
            "messages": messages,
            "tools": [_function(tool) for tool in listed_tools(body)],
            "tool_choice": _choice(body.get("tool_choice")),
            "stop": body.get("stop_sequences"),
            "response_format": output.get("format") if isinstance(output, dict) else None,
            **{key: body.get(key) for key in self.not_done},
        }

    def reply(self, body: Mapping[str, Any], answer: ChatAnswer) -> dict[str, Any]:
        del body
        return {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": list(_content(answer.message)),
            "stop_reason": "tool_use" if "tool_calls" in answer.message else "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": answer.read, "output_tokens": answer.written},
        }

    def keep(
        self, body: Mapping[str, Any], reply: Mapping[str, Any], earlier: dict[str, Any]
    ) -> None:
        if body.get("thread") is not None:
            sent = _continued(body, earlier)
            answer = {"role": "assistant", "content": reply["content"]}
            held = {"system": sent.get("system"), "tools": sent.get("tools")}
            earlier[reply["id"]] = {**held, "messages": [*sent["messages"], answer]}

    def events(self, body: Mapping[str, Any], reply: Mapping[str, Any]) -> Iterator[str]:
        del body
        for name, data in _steps(reply):
            yield event({"type": name, **data}, name)


def _continued(body: Mapping[str, Any], earlier: Mapping[str, Any]) -> Mapping[str, Any]:
    """A request with all messages, where it has only those that its thread does not hold."""
    thread, messages = body.get("thread"), body.get("messages")
    if not isinstance(messages, list):
        raise ValueError("a request is an object with messages")
    if thread is None or (isinstance(thread, dict) and thread.get("type") == "create"):
        return body
    previous = thread.get("previous_message_id") if isinstance(thread, dict) else None
    held = earlier.get(previous) if isinstance(previous, str) else None
    if not isinstance(held, dict):
        raise ValueError(
            f"the thread {repr(thread)[:100]} goes on from no message that this sample keeps: send "
            "all messages"
        )
    return {**body, **held, "messages": [*held["messages"], *messages]}


def _blocks(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The blocks of a message's content, which may be a text."""
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ValueError(
            f"the content of {where} is no text and no list of blocks: {repr(content)[:200]}"
        )
    return content


def _messages(
    role: str, blocks: Sequence[Mapping[str, Any]], number: int
) -> Iterator[dict[str, Any]]:
    """The messages of chat completions that a message is."""
    if role == "assistant":
        yield _answer(blocks, number)
        return
    if role == "system":
        yield _system(blocks)
        return
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            parts.append(_part(block, role, number))
            continue
        if parts:
            yield {"role": "user", "content": parts}
            parts = []
        within = {"content": block.get("content") or ""}
        inner = _blocks(within, f"a tool_result of message {number}")
        content = [_part(each, role, number) for each in inner]
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
    if parts or not blocks:
        yield {"role": "user", "content": parts}


def _system(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    parts = [_part(block, "system", 0) for block in blocks]
    return {
        "role": "system",
        "content": [{**part, "text": _BILLING.sub("", part["text"])} for part in parts],
    }


def _answer(blocks: Sequence[Mapping[str, Any]], number: int) -> dict[str, Any]:
    """An assistant's message: its thoughts, its text, its calls."""
    texts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") == "thinking":
            thoughts.append(_text(block, "thinking", number))
        elif block.get("type") == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            texts.append(_part(block, "assistant", number))
    message: dict[str, Any] = {"role": "assistant", "content": texts}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _part(block: Mapping[str, Any], role: str, number: int) -> dict[str, Any]:
    """A text or an image as a part of a content."""
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": _text(block, "text", number)}
    if kind == "image" and role == "user":
        return {"type": "image_url", "image_url": {"url": _image(block.get("source"))}}
    raise ValueError(
        f"message {number} has a block of type {str(kind)[:40]!r}, and only {_READ[role]} of "
        f"role {role} are read"
    )


def _text(block: Mapping[str, Any], key: str, number: int) -> str:
    text = block.get(key)
    if not isinstance(text, str):
        raise ValueError(f"message {number} has a block of type {key!r} without a text")
    return text


def _image(source: Any) -> Any:
    """The address of an image: a data URL, where the image itself is there."""
    if isinstance(source, dict) and source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    return source.get("url") if isinstance(source, dict) else None


def _function(tool: Any) -> Any:
    """A function as chat completions have it; a tool of another kind stays, and is refused with
    those that chat completions have.
    """
    if not isinstance(tool, dict) or tool.get("type", "custom") not in ("custom", None):
        return tool
    function = {key: tool[key] for key in ("name", "description") if tool.get(key) is not None}
    if tool.get("input_schema") is not None:
        function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    """A tool_choice as chat completions have it, as far as it can be met."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    return _CHOICES.get(kind, choice) if isinstance(kind, str) else choice


def _content(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The blocks of an answer: thoughts, text, calls."""
    if thoughts := message.get("reasoning_content"):
        # Some clients leave thoughts without a signature out when they send them back.
        yield {"type": "thinking", "thinking": thoughts, "signature": MODEL}
    if message["content"] is not None:
        yield {"type": "text", "text": message["content"]}
    for call in message.get("tool_calls", ()):
        function = call["function"]
        about = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        yield {**about, "input": json.loads(function["arguments"])}


def _steps(reply: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a stream in their order."""
    read, written = reply["usage"]["input_tokens"], reply["usage"]["output_tokens"]
    usage = {"input_tokens": read, "output_tokens": 0}
    begun = {**reply, "content": [], "stop_reason": None, "usage": usage}
    yield "message_start", {"message": begun}
    for index, block in enumerate(reply["content"]):
        empty, deltas = _pieces(block)
        yield "content_block_start", {"index": index, "content_block": empty}
        for delta in deltas:
            yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    ended = {"stop_reason": reply["stop_reason"], "stop_sequence": None}
    yield "message_delta", {"delta": ended, "usage": {"output_tokens": written}}
    yield "message_stop", {}


def _pieces(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as a stream begins it, and what is added to it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        return {**block, "thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    written = json.dumps(block["input"])
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": written}]
