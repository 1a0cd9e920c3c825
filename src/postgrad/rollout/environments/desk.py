"""OpenAI's interface to the policy, for the agents of environments/conversed.py: a server."""

import asyncio
import hashlib
import json
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

from postgrad.core.untrusted import parse_json

MODEL = "policy"  # what agents may call it; any name is taken
ENDED = "the sample has ended"
_HOST = "127.0.0.1"
_MOST_BYTES = 2**24  # of a request
# Options of a request that are refused, and what to do instead. Others that say how to sample
# (temperature, max_tokens) are ignored: the recipe says it.
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
_RETRY = (
    "x-stainless-retry-count"  # OpenAI's clients count in it how often they have sent a request
)


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What a request gets: a turn of the policy."""

    message: dict[str, Any]  # of the assistant, as OpenAI's interface has it
    read: int  # tokens that the policy had read
    written: int  # tokens of the turn

    def completion(self) -> dict[str, Any]:
        """The whole answer, as JSON."""
        choice = {"index": 0, "message": self.message, "finish_reason": self._reason}
        return {**_about("chat.completion"), "choices": [choice], "usage": self._usage}

    def chunks(self, *, usage: bool) -> Iterator[str]:
        """The answer as the events of a stream: it is there at once, and so are they."""
        delta = dict(self.message)
        if "tool_calls" in delta:
            calls = enumerate(delta["tool_calls"])
            delta["tool_calls"] = [{"index": number, **call} for number, call in calls]
        about = _about("chat.completion.chunk")
        for part, reason in ((delta, None), ({}, self._reason)):
            choice = {"index": 0, "delta": part, "finish_reason": reason}
            yield _event({**about, "choices": [choice]})
        if usage:
            yield _event({**about, "choices": [], "usage": self._usage})
        yield "data: [DONE]\n\n"

    @property
    def _reason(self) -> str:
        return "tool_calls" if "tool_calls" in self.message else "stop"

    @property
    def _usage(self) -> dict[str, int]:
        total = self.read + self.written
        return {
            "prompt_tokens": self.read, "completion_tokens": self.written, "total_tokens": total
        }  # fmt: skip


def _about(kind: str) -> dict[str, Any]:
    identifier = f"chatcmpl-{secrets.token_hex(8)}"
    return {"id": identifier, "object": kind, "created": int(time.time()), "model": MODEL}


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


# The policy's next turn in a conversation, for a request. Raises ValueError where the request
# cannot be answered.
Ask = Callable[[Mapping[str, Any]], Awaitable[ChatAnswer]]


class Desk:
    """The server: where an agent's key says which sample it speaks for."""

    def __init__(self, ignored: Sequence[Ignorable] = ()) -> None:
        """ignored: options of requests that are taken and do nothing."""
        self.url = ""
        self._ignored = frozenset[str](ignored)
        self._seats: dict[str, _Seat] = {}

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        """Serves on a free port of this machine."""
        import uvicorn  # an extra
        from starlette.applications import Starlette
        from starlette.routing import Route

        complete = Route("/v1/chat/completions", self._complete, methods=["POST"])
        models = Route("/v1/models", self._models)
        app = Starlette(routes=[complete, models], exception_handlers={404: self._missing})
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        with socket.socket() as listening:
            listening.bind((_HOST, 0))
            listening.listen()  # requests before the server has started wait, and are not refused
            self.url = f"http://{_HOST}:{listening.getsockname()[1]}/v1"
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            try:
                yield
            finally:
                server.should_exit = server.force_exit = True
                with suppress(asyncio.CancelledError):
                    await serving

    def seat(self, ask: Ask) -> "_Seat":
        """A key for a sample, while its agent runs."""
        return _Seat(self._seats, ask)

    async def _complete(self, request: Any) -> Any:
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse, Response, StreamingResponse

        kind, _, key = request.headers.get("authorization", "").partition(" ")
        seat = self._seats.get(key) if kind.lower() == "bearer" else None
        if seat is None:
            return JSONResponse(_error("this key is of no sample that is being played"), 401)
        again = request.headers.get(_RETRY, "0") != "0"
        try:
            body = await _body(request, self._ignored)
            answer = await seat.answer(body, again=again)
        except ValueError as error:
            return JSONResponse(_error(str(error)), 400)
        except ClientDisconnect:  # in the middle of its request: nobody hears an answer
            return Response(status_code=400)
        if not body.get("stream"):
            return JSONResponse(answer.completion())
        options = body.get("stream_options")
        usage = isinstance(options, dict) and bool(options.get("include_usage"))
        return StreamingResponse(answer.chunks(usage=usage), media_type="text/event-stream")

    async def _models(self, request: Any) -> Any:
        """The list of models, which some programs ask for first."""
        from starlette.responses import JSONResponse

        del request
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "postgrad"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _missing(self, request: Any, error: Exception) -> Any:
        """Frameworks that ask for something else, as the Responses API, show their user this."""
        from starlette.responses import JSONResponse

        del error
        message = (
            f"{request.url.path} is not served, only /v1/chat/completions and /v1/models: let the "
            "agent use the chat completions API"
        )
        return JSONResponse(_error(message), 404)


class _Seat:
    """A sample's key, and the requests with it: a client that had no answer in time, or lost its
    connection, sends one again and means the same turn of the policy.
    """

    def __init__(self, seats: "dict[str, _Seat]", ask: Ask) -> None:
        self._seats, self._ask = seats, ask
        self._key = secrets.token_urlsafe(24)
        self._turns: dict[bytes, asyncio.Future[ChatAnswer]] = {}  # by the request's hash

    def __enter__(self) -> str:
        self._seats[self._key] = self
        return self._key

    def __exit__(self, *error: object) -> None:
        del self._seats[self._key]

    async def answer(self, body: dict[str, Any], *, again: bool) -> ChatAnswer:
        """The answer to a request. again: the client says that it has sent it before."""
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()
        if not (again and key in self._turns):
            self._turns[key] = asyncio.ensure_future(self._ask(body))
        turn = self._turns[key]
        try:
            return await asyncio.shield(turn)  # which another request may wait for
        except asyncio.CancelledError:  # by the end of the run, which waits for no answer
            raise ValueError(ENDED) from None


async def _body(request: Any, ignored: frozenset[str]) -> dict[str, Any]:
    """The checked JSON of a request. Raises ValueError where it cannot be answered."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > _MOST_BYTES:
            raise ValueError(f"a request has at most {_MOST_BYTES} bytes")
    body = parse_json(bytes(raw))
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise ValueError("a request is an object with messages")
    _require_possible(body, ignored)
    if body.get("n") not in (None, 1):
        raise ValueError("n = 1 is the only number of answers here")
    if not all(isinstance(message, dict) for message in body["messages"]):
        raise ValueError("messages are objects")
    if not isinstance(body.get("tools") or [], list):
        raise ValueError(f"tools are no list: {repr(body['tools'])[:200]}")
    for message in body["messages"]:
        _require_openai(message)
    return body


def _require_possible(body: Mapping[str, Any], ignored: frozenset[str]) -> None:
    """Raises ValueError with all options of a request that are refused."""
    refused = [
        name for name in _NOT_DONE.keys() - ignored
        if body.get(name) and body[name] not in _AS_USUAL.get(name, ())
    ]  # fmt: skip
    if not refused:
        return
    refused.sort(key=list(_NOT_DONE).index)
    why = "; ".join(f"{name!r} is not possible here: {_NOT_DONE[name]}" for name in refused)
    if needless := [name for name in refused if name in get_args(Ignorable)]:
        why += f"; environment.ignored = {json.dumps(needless)} takes what the agent need not have"
    raise ValueError(why)


def _require_openai(message: Mapping[str, Any]) -> None:
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


def _error(message: str) -> dict[str, Any]:
    text = message.encode(
        errors="backslashreplace"
    ).decode()  # half a surrogate pair of the request
    return {"error": {"message": text, "type": "invalid_request_error"}}
