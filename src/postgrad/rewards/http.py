"""JSON requests to one server or several, with retries, a deadline and a circuit breaker.

Imports the standard library only, since every worker loads it.
"""

import errno
import http.client
import json
import os
import socket
import time
import urllib.error
import urllib.request
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, PrivateAttr

from postgrad.core.errors import UsageError
from postgrad.rewards.verifier import Verifier

LONGEST_WAIT = 30.0  # seconds before another try, whatever the server asks for
ABSENT_WAIT = 0.1  # seconds at least before another try at a server that was not there
LONGEST_REPLY = 1 << 22  # bytes
_BUSY = (408, 409, 425, 429)  # and 5xx: worth another try
_REQUESTS_FAULT = (400, 413, 422)  # the request is to blame, not the server
_EXCERPT = 300  # characters of an error's body that people see

Parsed = TypeVar("Parsed")


class ServerError(Exception):
    """No usable reply; the message is the cause of the last try.

    counts: whether the circuit breaker counts it as a failure of the server; False where the
    request or a moment's load is to blame. passing: the server may answer later.
    """

    def __init__(self, message: str, *, counts: bool = True, passing: bool = False) -> None:
        super().__init__(message)
        self.counts, self.passing = counts, passing

    def saying(self, message: str) -> "ServerError":
        """The same error with another message."""
        return ServerError(message, counts=self.counts, passing=self.passing)


class Breaker:
    """Circuit breaker: after `failures` failed tries in a row a server is not asked for `seconds`.

    After the pause one more failure opens it again, until a try succeeds. It decides only whether
    and how soon a score is a failure, never the score.
    """

    def __init__(self, failures: int, seconds: float) -> None:
        self._limit, self._seconds = failures, seconds
        self._failed: dict[str, int] = {}  # by address: in a row
        self._until: dict[str, float] = {}
        self._cause: dict[str, str] = {}

    def worked(self, url: str) -> None:
        """A try succeeded: the failures of this server are forgotten."""
        self._failed.pop(url, None)
        self._until.pop(url, None)

    def failed(self, url: str, cause: str) -> None:
        """A try failed and the server is to blame."""
        self._failed[url] = self._failed.get(url, 0) + 1
        if self._failed[url] >= self._limit:
            self._until[url] = time.monotonic() + self._seconds
            self._cause[url] = cause

    def left(self, url: str) -> float:
        """Seconds until this server may be asked again; 0 where it may be asked now."""
        return max(0.0, self._until.get(url, 0.0) - time.monotonic())

    def describe(self, url: str) -> str:
        """Why this server is not asked, for an error message."""
        return (
            f"{url} is left alone for another {self.left(url):.0f} s: {self._failed.get(url, 0)} "
            f"tries in a row failed, the last with {self._cause.get(url, '')}"
        )


@dataclass(frozen=True, slots=True)
class Servers:
    """A client for one server or several that answer alike.

    With several servers a hash of the request picks the first one, so that they share the work, and
    each retry goes to the next. Where there is a deadline, a server that is not there, such as one
    that restarts, is tried again until then: `retries` counts tries that reached a server.
    """

    urls: tuple[str, ...]  # such as "http://127.0.0.1:8000"
    key: str | None  # sent in the Authorization header, and nowhere else
    timeout: float  # seconds of one try
    retries: int  # tries after the first one, at all servers together
    backoff: float  # retry n at one server waits backoff * 2^(n - 1) seconds
    breaker: Breaker
    deadline: float | None = None  # seconds of all tries and waits
    final_codes: frozenset[str] = frozenset()  # {"error": {"code": ...}}: the request is to blame

    def ask(
        self, path: str, body: Mapping[str, Any] | None, read: Callable[[bytes], Parsed]
    ) -> Parsed:
        """The first reply that `read` accepts, as `read` returns it. body: None for a GET.

        read: raises ServerError for a malformed reply; then only the other servers are asked again.
        Raises ServerError with the last cause where no try succeeds.
        """
        data = None if body is None else json.dumps(body).encode()
        try:
            return _Asking(self, path, data).reply(read)
        except ServerError as error:
            text = str(error)
            text = text.replace(self.key, "***") if self.key else text
            raise error.saying(text) from None

    def post(self, url: str, path: str, data: bytes | None, timeout: float) -> bytes:
        """One try: the bytes of the reply. Raises ServerError, _Busy, OSError, HTTPException."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(f"{url.rstrip('/')}{path}", data, headers)
        try:
            with _OPENER.open(request, timeout=timeout) as response:
                return _body_of(response, timeout)
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        with error:
            body = error.read(16 * _EXCERPT)
        text = f"HTTP {error.code} {error.reason}: {body.decode(errors='replace')[:_EXCERPT]}"
        if error.code in _REQUESTS_FAULT or _code_of(body) in self.final_codes:
            return ServerError(text, counts=False)
        if error.code in _BUSY or error.code >= 500:
            retry_after = error.headers.get("Retry-After")
            return _Busy(
                text, _seconds(retry_after), counts=error.code >= 500 and retry_after is None
            )
        return ServerError(text)


@dataclass(slots=True)
class _Asking:
    """The state of one request over its tries."""

    servers: Servers
    path: str
    data: bytes | None  # None for a GET
    tried: dict[str, int] = field(default_factory=dict[str, int])  # url -> tries so far
    asked_wait: dict[str, float] = field(default_factory=dict[str, float])  # url -> Retry-After

    def reply(self, read: Callable[[bytes], Parsed]) -> Parsed:
        servers = self.servers
        began = time.monotonic()
        deadline = began + servers.deadline if servers.deadline is not None else None
        remaining = self._in_turn()
        last = ServerError("")
        number, absent, ending = 0, 0, ""  # absent: tries that are not counted
        while remaining and number - absent <= servers.retries:
            url = remaining.popleft()
            wait = self._wait(url)
            if deadline is not None and time.monotonic() + wait >= deadline:
                ending = f" in {servers.deadline:g} s"
                break
            if wait:
                time.sleep(wait)
            number += 1
            try:
                return self._once(url, deadline, read)
            except _Busy as error:
                last, self.asked_wait[url] = error, error.after
                absent += error.absent and deadline is not None
                remaining.append(url)
            except ServerError as error:
                last = error
                if not remaining:
                    raise error.saying(self._named(url, str(error))) from error
            last = last.saying(self._named(url, str(last)))
        tries = f"{number} {'try' if number == 1 else 'tries'}"
        raise last.saying(f"{last} ({tries}{ending})")

    def _once(self, url: str, deadline: float | None, read: Callable[[bytes], Parsed]) -> Parsed:
        """One try, whose outcome the breaker records."""
        self.tried[url] = self.tried.get(url, 0) + 1
        timeout = self.servers.timeout
        if deadline is not None:
            timeout = min(timeout, max(0.001, deadline - time.monotonic()))
        try:
            reply = read(self.servers.post(url, self.path, self.data, timeout))
        except ServerError as error:
            if error.counts:
                self.servers.breaker.failed(url, str(error))
            raise
        except (OSError, http.client.HTTPException) as error:
            cause = f"{type(error).__name__}: {error}"
            self.servers.breaker.failed(url, cause)
            absent = _is_absent(error)
            raise _Busy(cause, ABSENT_WAIT if absent else 0.0, absent=absent) from error
        self.servers.breaker.worked(url)
        return reply

    def _in_turn(self) -> deque[str]:
        """The servers that may be asked, in the order in which this request tries them."""
        urls, breaker = self.servers.urls, self.servers.breaker
        first = zlib.crc32(self.data or b"") % len(urls)
        remaining = deque(url for url in urls[first:] + urls[:first] if not breaker.left(url))
        if not remaining:
            raise ServerError("; ".join(breaker.describe(url) for url in urls), counts=False)
        return remaining

    def _wait(self, url: str) -> float:
        tried = self.tried.get(url, 0)
        if not tried:
            return 0.0
        backoff = self.servers.backoff * 2.0 ** min(tried - 1, 64)
        return min(LONGEST_WAIT, max(self.asked_wait.get(url, 0.0), backoff))

    def _named(self, url: str, cause: str) -> str:
        return f"{url}: {cause}" if len(self.servers.urls) > 1 else cause


def plain_address(url: str, example: str, key_setting: str) -> str:
    """The address `url` of a recipe. Raises ValueError where it is not http(s), or holds a user
    name or a query, which could be secrets and would be stored with the recipe.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"an address such as {example} is expected")
    if parts.username is not None or parts.query:
        raise ValueError(
            f"an address without user name and query is expected, since recipes are stored: put "
            f"keys into the environment variable that {key_setting} names"
        )
    return url


class _Busy(ServerError):
    """The server may answer later. after: seconds that it asks to wait. absent: nobody was there to
    take the request.
    """

    def __init__(
        self, message: str, after: float, *, counts: bool = True, absent: bool = False
    ) -> None:
        super().__init__(message, counts=counts, passing=True)
        self.after, self.absent = after, absent


def _is_absent(error: Exception) -> bool:
    """Whether no connection came about, so that nobody has seen the request."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else None
    if isinstance(reason, OSError) and reason.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return True
    return isinstance(reason, ConnectionRefusedError | socket.gaierror)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: the key must not go to an address that the recipe does not name."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _body_of(response: http.client.HTTPResponse, timeout: float) -> bytes:
    """The body, read within `timeout` seconds: a server that sends a byte now and then never
    exceeds the timeout of the socket.
    """
    deadline = time.monotonic() + timeout
    body = bytearray()
    while chunk := response.read1(1 << 16):
        body += chunk
        if len(body) > LONGEST_REPLY:
            raise ServerError(f"a reply of more than {LONGEST_REPLY} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the reply had not ended after {timeout:g} s")
    if response.length:
        raise http.client.IncompleteRead(bytes(body), response.length)
    return bytes(body)


def _code_of(body: bytes) -> str | None:
    """The code of an error {"error": {"code": ...}}; None where it is another shape."""
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return code if isinstance(code, str) else None


def _seconds(retry_after: str | None) -> float:
    """Seconds of a Retry-After header; 0 without one, or where it is a date."""
    try:
        return max(0.0, float(retry_after or 0.0))
    except ValueError:
        return 0.0


class AsksServers(Verifier):
    """Base of verifiers that ask servers: how often to try, how long to wait, when to give up.

    A server whose last `breaker_failures` tries have failed is not asked for `breaker_seconds`.
    Each worker counts for itself.
    """

    waits: ClassVar[bool] = True

    timeout: float = Field(default=60.0, gt=0.0)  # seconds of one request
    retries: int = Field(default=3, ge=0, le=20)  # tries after the first one
    backoff: float = Field(default=1.0, ge=0.0)  # seconds before the second try, then twice that
    breaker_failures: int = Field(default=5, ge=1)
    breaker_seconds: float = Field(default=30.0, ge=0.0)
    _breaker: Breaker = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        self._breaker = Breaker(self.breaker_failures, self.breaker_seconds)

    @property
    def default_wall_seconds(self) -> float:
        """Seconds of all tries and of the longest waits between them, and 5 to spare."""
        return (self.retries + 1) * self.timeout + self.retries * LONGEST_WAIT + 5.0

    def servers(self, *urls: str, key: str | None, **more: Any) -> Servers:
        """A client for the servers at `urls` with these settings; more: other fields of Servers."""
        patience = (self.timeout, self.retries, self.backoff)
        return Servers(urls, key, *patience, self._breaker, **more)


def secret(variable: str | None, setting: str, description: str) -> str | None:
    """The text of the environment variable, None where `variable` is None.

    setting: the recipe key that names the variable; description: what the secret is for. Both are
    for the message of the UsageError that is raised where the variable is not set.
    """
    if variable is None:
        return None
    text = os.environ.get(variable, "").strip()
    if not text:
        raise UsageError(
            f"{description} should be in the environment variable {variable} ({setting}), "
            "which is not set"
        )
    return text
