"""uvicorn with a limit on the time in which a request arrives, and an orderly end."""

import asyncio
import contextlib
import json
import logging
import math
import signal
import socket
from collections.abc import Callable, Generator
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from postgrad.core.errors import UsageError
from postgrad.core.process import signals_handled
from postgrad.tools.serve.metrics import Metrics
from postgrad.tools.serve.wire import Refusal, ServerLimits

_GRACE = 1.0  # seconds by which a page's own answer comes before the protocol's
_KEEP_ALIVE = 30  # seconds
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to an address. Raises UsageError where it cannot be bound."""
    if not 0 <= port < 1 << 16:
        raise UsageError(f"--port {port}: a number from 0 to 65535 is expected")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind)
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror or error}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise UsageError(
            f"cannot listen at {host}:{port}: {error.strerror or error}; take another --port"
        ) from error
    return listening


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT: then it takes no more connections, answers the requests under
    way and ends. A second SIGINT ends it at once.
    """

    def __init__(
        self, app: ASGIApp, limits: ServerLimits, metrics: Metrics, started: Callable[[], None]
    ) -> None:
        self._started_call = started
        config = uvicorn.Config(
            app,
            http=_protocol(limits, metrics),
            ws="none",
            lifespan="on",
            log_config=None,  # nothing of a request is logged, only what is wrong with the server
            log_level=logging.ERROR,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=math.ceil(limits.request_seconds + _GRACE),
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started_call()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """As uvicorn's, but without raising the signal again after an orderly end: the command goes
        on and shows its results.
        """
        with signals_handled(_SIGNALS, self.handle_exit):
            yield


def _protocol(limits: ServerLimits, metrics: Metrics) -> type[asyncio.Protocol]:
    class Bounded(BoundedProtocol):
        seconds = limits.request_seconds
        counted = metrics

    return Bounded


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with a limit on the time in which a request arrives.

    The time runs from the connection, or from the first byte of a later request, to the last byte
    of the request. What is no HTTP, or too slow, is answered in the JSON shape of all errors, and
    the connection is closed.

    Public options of uvicorn (0.54) bound the body, which the application reads, and the wait for
    a second request (timeout_keep_alive), but not the first headers: with them a connection that
    sends nothing, half of its headers, or a byte at a time was still open after 12 seconds, and
    what is no HTTP was answered in plain text. ASGI middleware sees neither.
    """

    seconds: float
    counted: Metrics
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        self._cut(Refusal(400, "malformed_http", msg))

    def _watch(self) -> None:
        state = self.conn.their_state
        begun = state is h11.IDLE and bool(self.conn.trailing_data[0])
        if begun or state is h11.SEND_BODY:
            self._arm()
        else:
            self._disarm()

    def _arm(self) -> None:
        if self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(self.seconds + _GRACE, self._give_up)

    def _disarm(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        if self.transport.is_closing():
            return
        if self.conn.our_state is h11.IDLE:
            message = f"the request had not arrived after {self.seconds:g} s"
            self._cut(Refusal(408, "slow_request", message))
        else:
            self.transport.abort()

    def _cut(self, refusal: Refusal) -> None:
        """Answer and close the connection."""
        self.counted.count_answer("none", refusal.status)
        body = json.dumps(refusal.body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        send: Any = cast(Any, self.conn.send)
        for event in (
            h11.Response(status_code=refusal.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(send(event))
        self.transport.close()
