"""The address that agents ask: OpenAI's chat completions, with a key for each sample."""

import asyncio
import secrets
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from postgrad.core.untrusted import parse_json

MODEL = "policy"  # what agents may call it; any name is taken
HOST = "127.0.0.1"
MOST_BYTES = 2**24  # of a request
NOT_DONE = ("stream", "logprobs", "top_logprobs")  # options of a request that are refused


class Asked(Protocol):
    """Who answers the requests with a sample's key."""

    async def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The policy's next message. Raises ValueError for a request that cannot be answered."""
        ...


class Desk:
    """The server: where an agent's key says which sample it speaks for."""

    def __init__(self) -> None:
        self.url = ""
        self._seats: dict[str, Asked] = {}

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        """Serves on a free port of this machine."""
        import uvicorn  # an extra
        from starlette.applications import Starlette
        from starlette.routing import Route

        app = Starlette(routes=[Route("/v1/chat/completions", self._complete, methods=["POST"])])
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        with socket.socket() as listening:
            listening.bind((HOST, 0))
            self.url = f"http://{HOST}:{listening.getsockname()[1]}/v1"
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            try:
                yield
            finally:
                server.should_exit = server.force_exit = True
                with suppress(asyncio.CancelledError):
                    await serving

    def seat(self, conversation: Asked) -> "_Seat":
        """A key for a sample, while its agent runs."""
        return _Seat(self._seats, conversation)

    async def _complete(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        kind, _, key = request.headers.get("authorization", "").partition(" ")
        conversation = self._seats.get(key) if kind.lower() == "bearer" else None
        if conversation is None:
            return JSONResponse(_error("this key is of no sample that is being played"), 401)
        try:
            message = await conversation.ask(await _body(request))
        except ValueError as error:
            return JSONResponse(_error(str(error)), 400)
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        about = {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": "chat.completion"}
        return JSONResponse({**about, "created": 0, "model": MODEL, "choices": [choice]})


class _Seat:
    def __init__(self, seats: dict[str, Asked], conversation: Asked) -> None:
        self._seats, self._conversation = seats, conversation
        self._key = secrets.token_urlsafe(24)

    def __enter__(self) -> str:
        self._seats[self._key] = self._conversation
        return self._key

    def __exit__(self, *error: object) -> None:
        del self._seats[self._key]


async def _body(request: Any) -> dict[str, Any]:
    """The checked JSON of a request. Raises ValueError where it cannot be answered."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MOST_BYTES:
            raise ValueError(f"a request has at most {MOST_BYTES} bytes")
    body = parse_json(bytes(raw))
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise ValueError("a request is an object with messages")
    for name in NOT_DONE:
        if body.get(name):
            raise ValueError(f"{name!r} is not possible here")
    if body.get("n", 1) != 1:
        raise ValueError("n = 1 is the only number of answers here")
    if not all(isinstance(message, dict) for message in body["messages"]):
        raise ValueError("messages are objects")
    return body


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}
