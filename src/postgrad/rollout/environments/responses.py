"""OpenAI's Responses API (developers.openai.com/api/reference/resources/responses).

A request has items in place of messages: what the policy thought, said and called in one turn are
several of them. Here they are one message again, as the conversation has them.
"""

import time
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

_ROLES = ("user", "assistant", "system", "developer")
_READ = "message, function_call, function_call_output and reasoning"
_INSTRUCTIONS = ("system", "developer")  # roles of the same rank; chat templates know the first


class Responses(WireProtocol):
    """A response is kept for the sample, unless `store` is false: later requests may name it."""

    path = "/responses"
    count_path = "/responses/input_tokens"
    names = {"response_format": "text.format", "logprobs": "include"}
    not_done = {
        "background": "a request waits for its answer",
        "conversation": "send the items, or previous_response_id",
        "prompt": "send the items that it stands for",
    }

    def request(self, body: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
        text, include = body.get("text"), body.get("include")
        logprobs = isinstance(include, list) and "message.output_text.logprobs" in include
        return {
            "messages": _messages(body.get("instructions"), _items(body, earlier)),
            "tools": [_function(tool) for tool in listed_tools(body)],
            "response_format": text.get("format") if isinstance(text, dict) else None,
            "logprobs": logprobs,
            **{key: body.get(key) for key in ("tool_choice", "top_logprobs", *self.not_done)},
        }

    def reply(self, body: Mapping[str, Any], answer: ChatAnswer) -> dict[str, Any]:
        return {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "completed",
            "error": None,
            "incomplete_details": None,
            "model": MODEL,
            "output": list(_output(answer.message)),
            "usage": {
                "input_tokens": answer.read,
                # Clients demand the details: nothing is billed here, cached or not.
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": answer.written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.read + answer.written,
            },
            "parallel_tool_calls": True,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
            "previous_response_id": body.get("previous_response_id"),
        }

    def counted(self, tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def keep(
        self,
        body: Mapping[str, Any],
        reply: Mapping[str, Any],
        earlier: dict[str, Any],
    ) -> None:
        if body.get("store") is not False:
            earlier[reply["id"]] = [*_items(body, earlier), *reply["output"]]

    def events(self, body: Mapping[str, Any], reply: Mapping[str, Any]) -> Iterator[str]:
        del body
        for number, (name, data) in enumerate(_steps(reply)):
            yield event({"type": name, "sequence_number": number, **data}, name)


def _items(body: Mapping[str, Any], earlier: Mapping[str, Any]) -> list[Any]:
    """The items of a request, behind those of the response that it goes on from."""
    items, previous = body.get("input"), body.get("previous_response_id")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise ValueError("the input of a request is a text or a list of items")
    if previous is None:
        return items
    before = earlier.get(previous) if isinstance(previous, str) else None
    if not isinstance(before, list):
        raise ValueError(
            f"previous_response_id {str(previous)[:60]!r} is of no response that this sample "
            "keeps: send the items themselves, or do not set store = false"
        )
    return [*before, *items]


def _messages(instructions: Any, items: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages of chat completions that items are."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for number, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            _add_message(messages, item, number)
        elif kind == "reasoning":
            answer = _answer(messages, "content", "tool_calls")
            answer["reasoning_content"] = "\n".join(
                filter(None, (answer.get("reasoning_content"), _thoughts(item)))
            )
        elif kind == "function_call":
            function = {key: item.get(key) for key in ("name", "arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _answer(messages).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            result = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append({"role": "tool", **result})
        else:
            about = repr(item)[:60] if kind is None else f"of type {str(kind)[:40]!r}"
            raise ValueError(f"item {number} of the input is {about}, and only {_READ} are read")
    return messages


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any], number: int) -> None:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise ValueError(
            f"item {number} of the input has the role {str(role)[:40]!r}, and only "
            f"{', '.join(_ROLES)} are read"
        )
    if role == "assistant":
        _answer(messages, "content", "tool_calls")["content"] = content
    elif role in _INSTRUCTIONS:
        _instruct(messages, content)
    else:
        messages.append({"role": role, "content": content})


def _instruct(messages: list[dict[str, Any]], content: Any) -> None:
    """Adds instructions. Those before the first other message are one: many chat templates read a
    single message of the system, and no other than the first.
    """
    first = messages[0] if len(messages) == 1 and messages[0]["role"] == "system" else None
    contents = [content] if first is None else [first["content"], content]
    if first is None or not all(isinstance(each, str | list) for each in contents):
        messages.append({"role": "system", "content": content})
        return
    before, behind = (
        [{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents
    )
    first["content"] = [*before, {"type": "text", "text": "\n\n"}, *behind]


def _answer(messages: list[dict[str, Any]], *empty: str) -> dict[str, Any]:
    """The message of the policy that an item is a part of: the newest, if it has none of the keys
    `empty` yet.
    """
    newest = messages[-1] if messages else {"role": None}
    if newest["role"] != "assistant" or any(newest.get(key) is not None for key in empty):
        newest = {"role": "assistant", "content": None}
        messages.append(newest)
    return newest


def _thoughts(item: Mapping[str, Any]) -> str:
    """What an item of type reasoning says; "" where the client has left that out."""
    for key in ("content", "summary"):
        parts = item.get(key)
        texts = [
            text for part in (parts if isinstance(parts, list) else ())
            if isinstance(part, dict) and isinstance(text := part.get("text"), str)
        ]  # fmt: skip
        if any(texts):
            return "\n".join(texts)
    return ""


def _function(tool: Any) -> Any:
    """A function as chat completions have it; a tool of another kind stays, and is refused with
    those that chat completions have.
    """
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    keys = ("name", "description", "parameters")
    function = {key: tool[key] for key in keys if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _output(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The items of an answer: thoughts, text, calls."""
    if thoughts := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thoughts}]
        yield {
            "id": new_id("rs_"), "type": "reasoning", "summary": [], "content": content,
            "status": "completed",
        }  # fmt: skip
    if message["content"] is not None:
        text = {"type": "output_text", "text": message["content"]}
        content = [{**text, "annotations": [], "logprobs": []}]
        about = {"id": new_id("msg_"), "type": "message", "role": "assistant"}
        yield {**about, "content": content, "status": "completed"}
    for call in message.get("tool_calls", ()):
        about = {"id": new_id("fc_"), "type": "function_call", "call_id": call["id"]}
        yield {**about, **call["function"], "status": "completed"}


def _steps(reply: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a stream in their order, without their numbers."""
    begun = {**reply, "status": "in_progress", "output": [], "usage": None}
    for name in ("response.created", "response.in_progress"):
        yield name, {"response": begun}
    for index, item in enumerate(reply["output"]):
        empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        open_item = {**item, **empty, "status": "in_progress"}
        yield "response.output_item.added", {"output_index": index, "item": open_item}
        about = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            arguments, name = item["arguments"], "response.function_call_arguments"
            yield f"{name}.delta", {**about, "delta": arguments}
            yield f"{name}.done", {**about, "name": item["name"], "arguments": arguments}
        else:
            yield from _part_steps(item["content"][0], {**about, "content_index": 0})
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield "response.completed", {"response": reply}


def _part_steps(
    part: Mapping[str, Any], about: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a text or of thoughts."""
    name = f"response.{part['type']}"
    more = {"logprobs": []} if part["type"] == "output_text" else {}
    yield "response.content_part.added", {**about, "part": {**part, "text": ""}}
    yield f"{name}.delta", {**about, "delta": part["text"], **more}
    yield f"{name}.done", {**about, "text": part["text"], **more}
    yield "response.content_part.done", {**about, "part": part}
