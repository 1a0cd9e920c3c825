"""The limits of a server of scores, and the refusal of what exceeds them."""

from dataclasses import asdict, dataclass
from typing import Any

from postgrad.core.errors import UsageError

_QUEUED_BATCHES = 64


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What one server takes on. More than one limit may refuse a request; each refusal names its
    own.
    """

    request_bytes: int = 4 << 20
    request_seconds: float = 60.0  # from the first byte of a request to the answer
    requests: int = 512  # open at a time
    inputs: int = 256  # of one request
    input_tokens: int = 16384  # of one input
    batch_tokens: int = 16384  # of one call of the model
    queue_tokens: int = 1 << 20  # that wait for the model

    def to_json(self) -> dict[str, Any]:
        """For the page /info: each limit by its name."""
        return asdict(self)


def limits_of(
    batch_tokens: int | None, request_bytes: int | None, request_seconds: float | None
) -> ServerLimits:
    """The limits with those that the command line gives. UsageError where one is not positive."""
    usual = ServerLimits()
    for name, value in (
        ("--max-batch-tokens", batch_tokens),
        ("--max-request-bytes", request_bytes),
        ("--request-seconds", request_seconds),
    ):
        if value is not None and not 0 < value < 2**40:
            raise UsageError(f"{name} {value:g}: a positive number is wanted")
    batch_tokens = batch_tokens or usual.batch_tokens
    return ServerLimits(
        request_bytes=request_bytes or usual.request_bytes,
        request_seconds=request_seconds or usual.request_seconds,
        input_tokens=batch_tokens,
        batch_tokens=batch_tokens,
        queue_tokens=max(usual.queue_tokens, _QUEUED_BATCHES * batch_tokens),
    )


class Refusal(Exception):
    """A request that gets no scores: HTTP status, a code for programs, a message for people."""

    def __init__(
        self, status: int, code: str, message: str, *, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.retry_after = retry_after  # seconds

    @property
    def body(self) -> dict[str, Any]:
        """The one shape of every error."""
        return {"error": {"code": self.code, "message": self.message}}
