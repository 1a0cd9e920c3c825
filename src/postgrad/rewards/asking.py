"""Common to verifiers that ask a server: retries, the circuit breaker, the key."""

import os
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr

from postgrad.core.errors import UsageError
from postgrad.rewards.http import LONGEST_WAIT, Breaker, Servers
from postgrad.rewards.verifier import Verifier


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
