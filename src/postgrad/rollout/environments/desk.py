"""The server that the agents of environments/conversed.py ask, in the protocol that they speak."""

import asyncio
import hashlib
import json
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from postgrad.core.untrusted import parse_json
from postgrad.rollout.environments.anthropic_messages import AnthropicMessages
from postgrad.rollout.environments.responses import Responses
from postgrad.rollout.environments.wire import (
    MODEL,
    ChatAnswer,
    ChatCompletions,
    Ignorable,
    WireProtocol,
    require_possible,
)

ENDED = "the sample has ended"
_HOST = "127.0.0.1"
_MOST_BYTES = 2**24  # of a request
_PROTOCOLS = (ChatCompletions(), Responses(), AnthropicMessages())
# OpenAI's clients take an address with /v1 behind it, Anthropic's add one to what they get.
_BEGINS = ("/v1", "/v1/v1")
_ERRORS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
_RETRY = "x-stainless-retry-count"  # clients count in it how often they have sent a request

# The policy's next turn in a conversation, for a request. Raises ValueError where the request
# cannot be answered.
Ask = Callable[[Mapping[str, Any]], Awaitable[ChatAnswer]]
Measure = Callable[[Mapping[str, Any]], Awaitable[int]]  # the tokens that it would read for one


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

        routes = [Route(f"{begin}/models", self._models) for begin in _BEGINS]
        for protocol, begin in product(_PROTOCOLS, _BEGINS):
            answers = partial(self._served, protocol, _answer)
            routes.append(Route(f"{begin}{protocol.path}", answers, methods=["POST"]))
            if protocol.count_path:
                counts = partial(self._served, protocol, _count)
                routes.append(Route(f"{begin}{protocol.count_path}", counts, methods=["POST"]))
        missing = {404: self._missing, 405: self._missing}
        app = Starlette(routes=routes, exception_handlers=missing)
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

    def seat(self, ask: Ask, count: Measure) -> "_Seat":
        """A key for a sample, while its agent runs."""
        return _Seat(self._seats, ask, count)

    async def _served(self, protocol: WireProtocol, serve: "_Serve", request: Any) -> Any:
        """The response to a request of a sample, by what serves its path."""
        from starlette.requests import ClientDisconnect
        from starlette.responses import Response

        seat = self._seats.get(_key(request.headers))
        if seat is None:
            return _refused("this key is of no sample that is being played", 401)
        again = request.headers.get(_RETRY, "0") != "0"
        try:
            body = await _body(request)
            chat = protocol.request(body, seat.earlier)
            require_possible(chat, protocol, self._ignored)
            return await serve(_DeskRequest(protocol, seat, body, chat, again))
        except ValueError as error:
            return _refused(str(error), 400)
        except ClientDisconnect:  # in the middle of its request: nobody hears an answer
            return Response(status_code=400)

    async def _models(self, request: Any) -> Any:
        """The list of models, which some programs ask for first."""
        del request
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "postgrad"}
        return _json({"object": "list", "data": [model]})

    async def _missing(self, request: Any, error: Exception) -> Any:
        """Frameworks that ask for something else show their user this."""
        del error
        served = ", ".join(f"/v1{protocol.path}" for protocol in _PROTOCOLS)
        return _refused(
            f"{request.method} {request.url.path} is not served, only {served} and /v1/models: "
            "let the agent use one of these",
            404,
        )


class _Seat:
    """A sample's key, and the requests with it: a client that had no answer in time, or lost its
    connection, sends one again and means the same turn of the policy.
    """

    def __init__(self, seats: "dict[str, _Seat]", ask: Ask, count: Measure) -> None:
        self._seats, self._ask, self.count = seats, ask, count
        self._key = secrets.token_urlsafe(24)
        self._turns: dict[bytes, asyncio.Future[ChatAnswer]] = {}  # by the request's hash
        self.earlier: dict[str, Any] = {}  # what requests may name (WireProtocol.keep)

    def __enter__(self) -> str:
        self._seats[self._key] = self
        return self._key

    def __exit__(self, *error: object) -> None:
        del self._seats[self._key]

    async def answer(self, asked: "_DeskRequest") -> ChatAnswer:
        """The answer to a request."""
        sent = json.dumps([asked.protocol.path, asked.body], sort_keys=True)
        key = hashlib.sha256(sent.encode()).digest()
        if not (asked.again and key in self._turns):
            self._turns[key] = asyncio.ensure_future(self._ask(asked.chat))
        turn = self._turns[key]
        try:
            return await asyncio.shield(turn)  # which another request may wait for
        except asyncio.CancelledError:  # by the end of the run, which waits for no answer
            raise ValueError(ENDED) from None


@dataclass(frozen=True, slots=True)
class _DeskRequest:
    """A request of a sample."""

    protocol: WireProtocol
    seat: _Seat
    body: dict[str, Any]  # as it came
    chat: dict[str, Any]  # the same as one of chat completions
    again: bool  # whether the client says that it has sent it before


_Serve = Callable[[_DeskRequest], Awaitable[Any]]


async def _answer(asked: _DeskRequest) -> Any:
    from starlette.responses import StreamingResponse

    answer = await asked.seat.answer(asked)
    reply = asked.protocol.reply(asked.body, answer)
    asked.protocol.keep(asked.body, reply, asked.seat.earlier)
    if not asked.body.get("stream"):
        return _json(reply)
    events = asked.protocol.events(asked.body, reply)
    return StreamingResponse(events, media_type="text/event-stream")


async def _count(asked: _DeskRequest) -> Any:
    return _json(asked.protocol.counted(await asked.seat.count(asked.chat)))


def _key(headers: Mapping[str, str]) -> str:
    """The key of a request, as OpenAI's and Anthropic's clients send it; "" where there is none."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key if kind.lower() == "bearer" else headers.get("x-api-key", "")


async def _body(request: Any) -> dict[str, Any]:
    """The JSON object of a request. Raises ValueError where there is none."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > _MOST_BYTES:
            raise ValueError(f"a request has at most {_MOST_BYTES} bytes")
    body = parse_json(bytes(raw))
    if not isinstance(body, dict):
        raise ValueError("a request is an object")
    return body


def _json(data: Mapping[str, Any], status: int = 200) -> Any:
    from starlette.responses import Response

    text = json.dumps(data)  # also of half a surrogate pair, which a request may have had
    return Response(text, status, media_type="application/json")


def _refused(message: str, status: int) -> Any:
    """An error with the keys that the clients of each protocol read."""
    text = message.encode(errors="backslashreplace").decode()  # half a surrogate pair
    return _json({"type": "error", "error": {"message": text, "type": _ERRORS[status]}}, status)
