"""One question to a server that speaks OpenAI's chat completions, with retries. Light imports."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LONGEST_WAIT = 30.0  # seconds before another try, whatever the server asks for
LONGEST_REPLY = 1 << 22  # bytes
_BUSY = (408, 409, 425, 429)  # and 5xx: worth another try


class ChatError(Exception):
    """No reply: the last try's cause."""


@dataclass(frozen=True, slots=True)
class ChatServer:
    """Where to ask. timeout: seconds of one try; before try n comes a wait of backoff * 2^(n - 1).

    `key` goes into the Authorization header and nowhere else.
    """

    base_url: str
    key: str | None
    timeout: float
    retries: int
    backoff: float

    def complete(self, body: Mapping[str, Any]) -> str:
        """The text of the reply. Raises ChatError with the last try's cause where there is none."""
        try:
            return self._complete(body)
        except ChatError as error:
            text = str(error)
            raise ChatError(text.replace(self.key, "***") if self.key else text) from None

    def _complete(self, body: Mapping[str, Any]) -> str:
        cause, after = "", 0.0
        for number in range(self.retries + 1):
            if number:
                time.sleep(min(LONGEST_WAIT, max(after, self.backoff * 2 ** (number - 1))))
            after = 0.0
            try:
                return _content(self._post(body))
            except _Busy as error:
                cause, after = str(error), error.after
            except (OSError, http.client.HTTPException) as error:
                cause = f"{type(error).__name__}: {error}"
        raise ChatError(f"{cause} ({self.retries + 1} {'tries' if self.retries else 'try'})")

    def _post(self, body: Mapping[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        address = f"{self.base_url.rstrip('/')}/chat/completions"
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        try:
            with _OPENER.open(request, timeout=self.timeout) as response:
                return self._read(response)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(300).decode(errors="replace")
            text = f"HTTP {error.code} {error.reason}: {said}"
            if error.code in _BUSY or error.code >= 500:
                raise _Busy(text, _asked_wait(error)) from error
            raise ChatError(text) from error

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        """A server that sends a byte now and then meets no timeout of the socket: hence a clock."""
        late = time.monotonic() + self.timeout
        found = bytearray()
        while chunk := response.read1(1 << 16):
            found += chunk
            if len(found) > LONGEST_REPLY:
                raise ChatError(f"a reply of more than {LONGEST_REPLY} bytes")
            if time.monotonic() > late:
                raise TimeoutError(f"the reply had not ended after {self.timeout:g} s")
        if response.length:
            raise http.client.IncompleteRead(bytes(found), response.length)
        return bytes(found)


class _Busy(Exception):
    """The server may answer later; after: the seconds that it asks for."""

    def __init__(self, message: str, after: float) -> None:
        super().__init__(message)
        self.after = after


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Another address is none that the recipe named: the key must not go there."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _content(reply: bytes) -> str:
    try:
        content = json.loads(reply)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        said = reply[:200].decode(errors="replace")
        raise ChatError(f"the reply is no chat completion: {said!r}") from error
    if not isinstance(content, str) or not content.strip():
        raise ChatError(f"the reply has no text: {content!r}")
    return content


def _asked_wait(error: urllib.error.HTTPError) -> float:
    """Seconds of a Retry-After header; 0 without one, or where it is a date."""
    try:
        return max(0.0, float(error.headers.get("Retry-After") or 0.0))
    except ValueError:
        return 0.0
