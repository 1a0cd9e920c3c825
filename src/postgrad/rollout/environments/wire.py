"""How agents ask the policy: what every protocol is translated into, and what none can have here.

A protocol is three pure translations: its request into one of chat completions (messages, tools,
tool_choice), the policy's answer into its reply, and its reply into the events of a stream. What a
conversation is, and which tokens it has, is the same for all of them (conversed.py).
"""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

MODEL = "policy"  # what agents may call it; any name is taken
# Options of a request that are refused, and what to do instead, as chat completions name them.
# Others that say how to sample (temperature, max_tokens) are ignored: the recipe says it.
_NOT_DONE = {
    "logprobs": "samples.jsonl has them",
    "top_logprobs": "samples.jsonl has the logprobs of sampled tokens",
    "functions": "send tools",
    "stop": "set rollout.stop in the recipe",
    "response_format": "set rollout.json_schema, regex or lark in the recipe",
    "tool_choice": "the policy chooses",
}
# Of these, what a recipe may say to ignore: an agent that sends them can do without.
Ignorable = Literal["stop", "response_format", "tool_choice"]
_AS_USUAL = {"response_format": ({"type": "text"},), "tool_choice": ("auto", "none")}


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What a request gets: a turn of the policy."""

    message: dict[str, Any]  # of the assistant, as OpenAI's chat completions have it
    read: int  # tokens that the policy had read
    written: int  # tokens of the turn


class WireProtocol(ABC):
    """A protocol of agents, without a state of its own."""

    path: ClassVar[str]  # behind /v1
    count_path: ClassVar[str] = ""  # of requests whose tokens are to be counted, if it has such
    # Its own names of options of chat completions, where they differ.
    names: ClassVar[Mapping[str, str]] = {}
    # Options that it alone has and that are refused, and what to do instead.
    not_done: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def request(self, body: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
        """A request as one of chat completions. earlier: what `keep` has kept of this sample.

        Raises ValueError where there is none.
        """

    @abstractmethod
    def reply(self, body: Mapping[str, Any], answer: ChatAnswer) -> dict[str, Any]:
        """The policy's answer to a request, as JSON."""

    @abstractmethod
    def events(self, body: Mapping[str, Any], reply: Mapping[str, Any]) -> Iterator[str]:
        """A reply as the events of a stream: it is there at once, and so are they."""

    def counted(self, tokens: int) -> dict[str, Any]:
        """What a request to `count_path` gets."""
        return {"input_tokens": tokens}

    def keep(
        self,
        body: Mapping[str, Any],
        reply: Mapping[str, Any],
        earlier: dict[str, Any],
    ) -> None:
        """Adds to `earlier` what later requests of the sample may name."""
        del body, reply, earlier


class ChatCompletions(WireProtocol):
    """OpenAI's chat completions, the form in which conversations are held here."""

    path = "/chat/completions"

    def request(self, body: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
        del earlier
        return dict(body)

    def reply(self, body: Mapping[str, Any], answer: ChatAnswer) -> dict[str, Any]:
        reason = "tool_calls" if "tool_calls" in answer.message else "stop"
        usage = {
            "prompt_tokens": answer.read,
            "completion_tokens": answer.written,
            "total_tokens": answer.read + answer.written,
        }
        return {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL,
            "choices": [{"index": 0, "message": answer.message, "finish_reason": reason}],
            "usage": usage,
        }

    def events(self, body: Mapping[str, Any], reply: Mapping[str, Any]) -> Iterator[str]:
        (choice,) = reply["choices"]
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            calls = enumerate(delta["tool_calls"])
            delta["tool_calls"] = [{"index": number, **call} for number, call in calls]
        about = {key: reply[key] for key in ("id", "created", "model")}
        about["object"] = "chat.completion.chunk"
        for part, reason in ((delta, None), ({}, choice["finish_reason"])):
            chosen = {"index": 0, "delta": part, "finish_reason": reason}
            yield event({**about, "choices": [chosen]})
        options = body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            yield event({**about, "choices": [], "usage": reply["usage"]})
        yield "data: [DONE]\n\n"


def new_id(begin: str) -> str:
    """An identifier that no other reply has."""
    return f"{begin}{secrets.token_hex(8)}"


def event(data: Mapping[str, Any], name: str = "") -> str:
    """An event of a stream. name: where the protocol names its events."""
    return (
        f"event: {name}\ndata: {json.dumps(data)}\n\n" if name else f"data: {json.dumps(data)}\n\n"
    )


def listed_tools(body: Mapping[str, Any]) -> list[Any]:
    """The tools of a request. Raises ValueError where they are no list."""
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise ValueError(f"tools are no list: {repr(tools)[:200]}")
    return tools


def require_possible(
    request: Mapping[str, Any], protocol: WireProtocol, ignored: frozenset[str]
) -> None:
    """Raises ValueError with all that cannot be done of a request in the form of chat completions.

    ignored: options that are taken and do nothing.
    """
    messages = request.get("messages")
    if not isinstance(messages, list):
        raise ValueError("a request is an object with messages")
    _require_options(request, protocol, ignored)
    if request.get("n") not in (None, 1):
        raise ValueError("n = 1 is the only number of answers here")
    if not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages are objects")
    listed_tools(request)
    for message in messages:
        _require_message(message)


def _require_options(
    request: Mapping[str, Any], protocol: WireProtocol, ignored: frozenset[str]
) -> None:
    """Raises ValueError with all options of a request that are refused."""
    reasons = {**_NOT_DONE, **protocol.not_done}
    refused = [
        name for name in reasons
        if name not in ignored
        and request.get(name) and request[name] not in _AS_USUAL.get(name, ())
    ]  # fmt: skip
    if not refused:
        return
    why = "; ".join(
        f"{protocol.names.get(name, name)!r} is not possible here: {reasons[name]}"
        for name in refused
    )
    if needless := [name for name in refused if name in get_args(Ignorable)]:
        why += f"; environment.ignored = {json.dumps(needless)} takes what the agent need not have"
    raise ValueError(why)


def _require_message(message: Mapping[str, Any]) -> None:
    """Raises ValueError for a message whose content or calls are not as OpenAI's are."""
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(content, str | list | None):
        raise ValueError(
            f"the content of a message is no text and no list of parts: {repr(content)[:200]}"
        )
    if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
        raise ValueError(f"tool_calls of a message are no list of calls: {repr(calls)[:200]}")


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function"), dict)
