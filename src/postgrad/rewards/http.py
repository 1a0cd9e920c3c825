"""JSON to one server or several, with tries, a deadline and a circuit breaker. Light imports."""

import http.client
import json
import time
import urllib.error
import urllib.request
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

LONGEST_WAIT = 30.0  # seconds before another try, whatever the server asks for
LONGEST_REPLY = 1 << 22  # bytes
_BUSY = (408, 409, 425, 429)  # and 5xx: worth another try
_REQUESTS_FAULT = (400, 413, 422)  # says nothing about the server
_SAID = 300  # characters of an error's body that people see

Reply = TypeVar("Reply")


class ServerError(Exception):
    """No reply that can be used: the last try's cause.

    counts: whether the server, and not this request or a moment's load, is to blame.
    """

    def __init__(self, message: str, *, counts: bool = True) -> None:
        super().__init__(message)
        self.counts = counts


class Breaker:
    """Leaves a server alone for `seconds` once `failures` tries in a row have failed there.

    After that one more failure is enough, until a try succeeds. What it remembers decides only
    whether a score is a failure, and how soon, never the score.
    """

    def __init__(self, failures: int, seconds: float) -> None:
        self._limit, self._seconds = failures, seconds
        self._failed: dict[str, int] = {}  # by address: in a row
        self._until: dict[str, float] = {}
        self._cause: dict[str, str] = {}

    def worked(self, url: str) -> None:
        """It answered."""
        self._failed.pop(url, None)

    def failed(self, url: str, cause: str) -> None:
        """A try failed for a cause that counts."""
        self._failed[url] = self._failed.get(url, 0) + 1
        if self._failed[url] >= self._limit:
            self._until[url] = time.monotonic() + self._seconds
            self._cause[url] = cause

    def left(self, url: str) -> float:
        """For how many more seconds it is left alone; 0 where it may be asked."""
        return max(0.0, self._until.get(url, 0.0) - time.monotonic())

    def describe(self, url: str) -> str:
        """Why it is left alone."""
        return (
            f"{url} is left alone for another {self.left(url):.0f} s: {self._failed.get(url, 0)} "
            f"tries in a row failed, the last with {self._cause.get(url, '')}"
        )


@dataclass(frozen=True, slots=True)
class Servers:
    """Where to ask, and how patiently.

    timeout: seconds of one try. Before try n at one server comes a wait of backoff * 2^(n - 1);
    where there are several, each try goes to the next one, and the first try of a request to
    whichever its bytes say, so that they share the work. deadline: seconds of all tries and waits.
    final_codes: of errors {"error": {"code": ...}} for which the request is to blame. `key` goes
    into the Authorization header and nowhere else.
    """

    urls: tuple[str, ...]
    key: str | None
    timeout: float
    retries: int
    backoff: float
    breaker: Breaker
    deadline: float | None = None
    final_codes: frozenset[str] = frozenset()

    def ask(
        self, path: str, body: Mapping[str, Any] | None, read: Callable[[bytes], Reply]
    ) -> Reply:
        """What `read` makes of the first reply that it accepts. body: None for a GET.

        read: raises ServerError for a reply that makes no sense; that server is not asked again,
        others are. Raises ServerError with the last cause where no try succeeds.
        """
        data = None if body is None else json.dumps(body).encode()
        try:
            return _Asking(self, path, data).reply(read)
        except ServerError as error:
            text = str(error)
            text = text.replace(self.key, "***") if self.key else text
            raise ServerError(text, counts=error.counts) from None

    def post(self, url: str, path: str, data: bytes | None, timeout: float) -> bytes:
        """The bytes of one try's reply. Raises ServerError, _Busy, OSError, HTTPException."""
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
            said = error.read(16 * _SAID)
        text = f"HTTP {error.code} {error.reason}: {said.decode(errors='replace')[:_SAID]}"
        if error.code in _REQUESTS_FAULT or _code_of(said) in self.final_codes:
            return ServerError(text, counts=False)
        if error.code in _BUSY or error.code >= 500:
            asked = error.headers.get("Retry-After")
            return _Busy(text, _seconds(asked), counts=error.code >= 500 and asked is None)
        return ServerError(text)


@dataclass(slots=True)
class _Asking:
    """One request on its way: how often each server was tried, what wait it asked for."""

    servers: Servers
    path: str
    data: bytes | None
    tried: dict[str, int] = field(default_factory=dict[str, int])
    asked_wait: dict[str, float] = field(default_factory=dict[str, float])

    def reply(self, read: Callable[[bytes], Reply]) -> Reply:
        one = self.servers
        began = time.monotonic()
        late = began + one.deadline if one.deadline is not None else None
        left = self._in_turn()
        last = ServerError("")
        number, ending = 0, ""
        while left and number <= one.retries:
            url = left.popleft()
            wait = self._wait(url)
            if late is not None and time.monotonic() + wait >= late:
                ending = f" in {one.deadline:g} s"
                break
            if wait:
                time.sleep(wait)
            number += 1
            try:
                return self._once(url, late, read)
            except _Busy as error:
                last, self.asked_wait[url] = error, error.after
                left.append(url)
            except ServerError as error:
                last = error
                if not left:
                    raise ServerError(self._named(url, str(error)), counts=error.counts) from error
            last = ServerError(self._named(url, str(last)), counts=last.counts)
        tries = f"{number} {'try' if number == 1 else 'tries'}"
        raise ServerError(f"{last} ({tries}{ending})", counts=last.counts)

    def _once(self, url: str, late: float | None, read: Callable[[bytes], Reply]) -> Reply:
        """One try, told to the breaker."""
        self.tried[url] = self.tried.get(url, 0) + 1
        timeout = self.servers.timeout
        if late is not None:
            timeout = min(timeout, max(0.001, late - time.monotonic()))
        try:
            found = read(self.servers.post(url, self.path, self.data, timeout))
        except ServerError as error:
            if error.counts:
                self.servers.breaker.failed(url, str(error))
            raise
        except (OSError, http.client.HTTPException) as error:
            cause = f"{type(error).__name__}: {error}"
            self.servers.breaker.failed(url, cause)
            raise _Busy(cause, 0.0) from error
        self.servers.breaker.worked(url)
        return found

    def _in_turn(self) -> deque[str]:
        """The servers that may be asked, in the order in which this request tries them."""
        urls, breaker = self.servers.urls, self.servers.breaker
        first = zlib.crc32(self.data or b"") % len(urls)
        left = deque(url for url in urls[first:] + urls[:first] if not breaker.left(url))
        if not left:
            raise ServerError("; ".join(breaker.describe(url) for url in urls), counts=False)
        return left

    def _wait(self, url: str) -> float:
        tried = self.tried.get(url, 0)
        if not tried:
            return 0.0
        backoff = self.servers.backoff * 2 ** (tried - 1)
        return min(LONGEST_WAIT, max(self.asked_wait.get(url, 0.0), backoff))

    def _named(self, url: str, cause: str) -> str:
        return f"{url}: {cause}" if len(self.servers.urls) > 1 else cause


def plain_address(url: str, example: str, key_setting: str) -> str:
    """A recipe's address; ValueError where it is none, or holds what must not be stored."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"an address such as {example} is wanted")
    if parts.username is not None or parts.query:
        raise ValueError(f"recipes are stored: keys go into the variable of {key_setting}")
    return url


class _Busy(ServerError):
    """The server may answer later; after: the seconds that it asks for."""

    def __init__(self, message: str, after: float, *, counts: bool = True) -> None:
        super().__init__(message, counts=counts)
        self.after = after


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Another address is none that the recipe named: the key must not go there."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _body_of(response: http.client.HTTPResponse, timeout: float) -> bytes:
    """A server that sends a byte now and then meets no timeout of the socket: hence a clock."""
    late = time.monotonic() + timeout
    found = bytearray()
    while chunk := response.read1(1 << 16):
        found += chunk
        if len(found) > LONGEST_REPLY:
            raise ServerError(f"a reply of more than {LONGEST_REPLY} bytes")
        if time.monotonic() > late:
            raise TimeoutError(f"the reply had not ended after {timeout:g} s")
    if response.length:
        raise http.client.IncompleteRead(bytes(found), response.length)
    return bytes(found)


def _code_of(said: bytes) -> str | None:
    """The code of an error {"error": {"code": ...}}; None where it is another shape."""
    try:
        code = json.loads(said)["error"]["code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return code if isinstance(code, str) else None


def _seconds(asked: str | None) -> float:
    """Seconds of a Retry-After header; 0 without one, or where it is a date."""
    try:
        return max(0.0, float(asked or 0.0))
    except ValueError:
        return 0.0
