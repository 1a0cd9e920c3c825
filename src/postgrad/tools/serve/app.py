"""The pages of the server: POST /score, GET /info, GET /metrics, GET /health."""

import asyncio
import hashlib
import hmac
import time
from collections.abc import AsyncGenerator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from postgrad.tools.pages import is_own
from postgrad.tools.serve import wire
from postgrad.tools.serve.batcher import Batcher, ScoringModel
from postgrad.tools.serve.images import RequestImages
from postgrad.tools.serve.metrics import CONTENT_TYPE, Metrics
from postgrad.tools.serve.wire import Refusal, ServerLimits

_OPEN = "/health"  # the only page that needs no token: it tells nothing of the model
_PATHS = ("/score", "/info", "/metrics", _OPEN)
_LAST_CALL = 5.0  # seconds for a call of the model whose requests have all gone
_READ_AWAY = 1 << 28  # bytes of a refused body that are read all the same
_PAUSE = 1.0  # seconds without a byte of it, after which no more are awaited
_GONE = 499  # the client did not wait for its answer

Awaited = TypeVar("Awaited")


class Pages:
    """The server's endpoints, and the model, queue and limits that they share."""

    def __init__(
        self, model: ScoringModel, name: str, limits: ServerLimits, metrics: Metrics
    ) -> None:
        self.limits, self.metrics = limits, metrics
        self.batcher = Batcher(model, limits, metrics)
        self._images = model.images
        reader = None if model.images is None else model.images.reader
        self._encoder = wire.Encoder(model.tokenizer, limits.input_tokens, model.separator, reader)
        self._encoding = ThreadPoolExecutor(1)  # tokenizers are for one thread at a time
        self._about_model = {"model": model.hash, "mean": model.mean, "std": model.std}
        self._info = {
            "name": name,
            **self._about_model,
            "step_separator": model.separator,
            "reads_images": model.images is not None,
            "tokenizer": tokenizer_hash(model.tokenizer),
            "limits": limits.to_json(),
        }
        self._open = 0  # requests for scores

    def app(self, token: str | None, hosts: frozenset[str] | None = None) -> ASGIApp:
        """All pages as one ASGI application.

        token: what requests have to send; None: they need none. hosts: what the Host header may
        say; None: anything, as behind a proxy of another name.
        """
        routes = [
            Route("/score", self.score, methods=["POST"]),
            Route("/info", self.info),
            Route("/metrics", self.metrics_page),
            Route(_OPEN, self.health),
        ]
        handlers = dict.fromkeys((Refusal, HTTPException, Exception), _answer_error)
        app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)
        app.router.redirect_slashes = False
        return Gate(app, token, self.metrics, hosts, self.limits.request_seconds)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        self.batcher.start()
        yield
        self.batcher.stop(_LAST_CALL)
        self._encoding.shutdown(wait=False, cancel_futures=True)

    async def score(self, request: Request) -> Response:
        """Scores for the inputs of one request, in their order."""
        began = time.monotonic()
        if self._open >= self.limits.requests:
            message = f"{self._open} requests are open, at most {self.limits.requests} may be"
            raise Refusal(503, "busy", message, retry_after=1)
        self._open += 1
        try:
            return await self._score(request)
        except ClientDisconnect:
            return Response(status_code=_GONE)  # for the metrics: nobody reads it
        finally:
            self._open -= 1
            self.metrics.request_seconds.observe(time.monotonic() - began)

    async def _score(self, request: Request) -> Response:
        seconds = self.limits.request_seconds
        arrived = False
        try:
            async with asyncio.timeout(seconds):
                body = await self._body(request)
                arrived = True
                scores = await _unless_gone(request, self._scores(body))
        except TimeoutError:
            if arrived:
                message = f"there were no scores after {seconds:g} s"
                raise Refusal(504, "timeout", message) from None
            message = f"the body had not arrived after {seconds:g} s"
            raise Refusal(408, "slow_request", message) from None
        return JSONResponse({"scores": scores, **self._about_model})

    async def _scores(self, body: bytes) -> list[Any]:
        loop = asyncio.get_running_loop()
        with RequestImages(self._images) as shown:
            encoding = loop.run_in_executor(self._encoding, self._sequences, body, shown)
            scores = await self.batcher.score(*await encoding)
        return [score.tolist() for score in scores]

    def _sequences(self, body: bytes, shown: RequestImages) -> tuple[list[Any], list[Any]]:
        return self._encoder.encode(wire.parse(body, self.limits).inputs, shown)

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which keeps pages of a browser on this machine out
            raise Refusal(415, "not_json", "send Content-Type: application/json")
        most = self.limits.request_bytes
        too_large = Refusal(413, "too_large", f"the body has more than {most} bytes")
        length = request.headers.get("content-length", "0")
        if int(length) > most:  # digits: the protocol has read it already
            raise too_large
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise too_large
        return bytes(body)

    async def info(self, request: Request) -> Response:
        """Which model this is, and the limits."""
        return JSONResponse(self._info)

    async def health(self, request: Request) -> Response:
        """200 while the model answers; 503 while a call of it lasts longer than a request may."""
        if self.batcher.busy_seconds() > self.limits.request_seconds:
            raise Refusal(503, "stuck", "the model has not come back from a call")
        return JSONResponse({"status": "ok"})

    async def metrics_page(self, request: Request) -> Response:
        """The metrics, as Prometheus reads them."""
        sequences, tokens = self.batcher.queue()
        self.metrics.queue_sequences.set(sequences)
        self.metrics.queue_tokens.set(tokens)
        self.metrics.open_requests.set(self._open)
        return Response(self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


class _Arriving:
    """The body of a request as it arrives, and whether all of it has."""

    def __init__(self, scope: Scope, receive: Receive, seconds: float) -> None:
        """seconds: that it has for that, from now on."""
        headers = dict(scope["headers"])
        self._late = time.monotonic() + seconds
        self._receive = receive
        # A client that asks first sends no body before the server has read from it.
        self._asks_first = b"expect" in headers
        self._large = int(headers.get(b"content-length", b"0")) > _READ_AWAY
        self.ended = False

    async def receive(self) -> Message:
        """The next message of the request."""
        message = await self._receive()
        self.ended = not message.get("more_body", False)
        self._asks_first = False
        return message

    async def read_away(self) -> None:
        """Reads what the client still sends. With "Connection: close" an answer before its end
        would be lost: the system resets a connection that is closed with bytes that nobody read.
        """
        rest = 0 if self._asks_first or self._large else _READ_AWAY
        with suppress(TimeoutError):
            while not self.ended and rest > 0 and (left := self._late - time.monotonic()) > 0:
                async with asyncio.timeout(min(_PAUSE, left)):
                    rest -= len((await self.receive()).get("body", b""))


class Gate:
    """ASGI middleware around all pages: refuses requests without the token or with a Host header
    that is not one of `hosts`, counts every answer, and sends none before the request has arrived.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        metrics: Metrics,
        hosts: frozenset[str] | None,
        seconds: float,
    ) -> None:
        """seconds: in which a request arrives."""
        self._app, self._metrics, self._hosts, self._seconds = app, metrics, hosts, seconds
        self._token = None if token is None else _digest(token.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in _PATHS else "other"
        arriving = _Arriving(scope, receive, self._seconds)
        receive = arriving.receive

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                await arriving.read_away()
                self._metrics.count_answer(path, message["status"])
            await send(message)

        if self._hosts is not None and not is_own(self._hosts, _hosts_of(scope)):
            names = ", ".join(sorted(self._hosts))
            refusal = Refusal(421, "wrong_host", f"this server is {names}; others need a token")
            await answer_of(refusal)(scope, receive, counting)
            return
        if scope["path"] != _OPEN and not self._has_token(scope):
            refusal = Refusal(401, "unauthorized", "send Authorization: Bearer with the token")
            answer = answer_of(refusal)
            answer.headers["WWW-Authenticate"] = "Bearer"
            await answer(scope, receive, counting)
            return
        await self._app(scope, receive, counting)

    def _has_token(self, scope: Scope) -> bool:
        """Whether a request has the token. Digests are compared in constant time: how long that
        takes tells nothing about the token.
        """
        if self._token is None:
            return True
        header = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = header.partition(b" ")
        return hmac.compare_digest(_digest(token.strip()), self._token) & (
            scheme.lower() == b"bearer"
        )


def _hosts_of(scope: Scope) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]


async def _unless_gone(request: Request, work: Awaitable[Awaited]) -> Awaited:
    """The result of `work`. Where the client disconnects first, cancels it and raises
    ClientDisconnect.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 (hex) of what decides token ids: vocabulary, rules, chat template."""
    rules = f"{tokenizer.backend_tokenizer.to_str()}\0{tokenizer.chat_template}"
    return hashlib.sha256(rules.encode()).hexdigest()


def answer_of(refusal: Refusal) -> JSONResponse:
    """The HTTP answer of a refusal."""
    answer = JSONResponse(refusal.body, refusal.status)
    if refusal.retry_after is not None:
        answer.headers["Retry-After"] = str(refusal.retry_after)
    return answer


def _answer_error(request: Request, error: Exception) -> Response:
    """What ended a request without scores, in the JSON shape that all errors have."""
    if isinstance(error, Refusal):
        return answer_of(error)
    if not isinstance(error, HTTPException):  # uvicorn shows where it comes from
        return answer_of(Refusal(500, "internal", f"the server failed: {type(error).__name__}"))
    code = {404: "no_such_page", 405: "wrong_method"}.get(error.status_code, "http_error")
    message = f"{error.detail}; there are POST /score and GET {', '.join(_PATHS[1:])}"
    answer = answer_of(Refusal(error.status_code, code, message))
    answer.headers.update(error.headers or {})
    return answer


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
