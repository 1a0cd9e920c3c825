"""What verifiers that ask a server have in common: their patience, and the key."""

import os
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr

from postgrad.core.errors import UsageError
from postgrad.rewards.http import LONGEST_WAIT, Breaker, Servers
from postgrad.rewards.verifier import Verifier


class AsksServers(Verifier):
    """Tries, waits and the circuit breaker: one that failed `breaker_failures` times in a row is
    left alone for `breaker_seconds`, as far as this worker knows.
    """

    waits: ClassVar[bool] = True

    timeout: float = Field(default=60.0, gt=0.0)  # seconds of one request
    retries: int = Field(default=3, ge=0, le=20)
    backoff: float = Field(default=1.0, ge=0.0)  # seconds before the second try, then twice that
    breaker_failures: int = Field(default=5, ge=1)
    breaker_seconds: float = Field(default=30.0, ge=0.0)
    _breaker: Breaker = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        self._breaker = Breaker(self.breaker_failures, self.breaker_seconds)

    @property
    def default_wall_seconds(self) -> float:
        """All tries and the waits between them."""
        return (self.retries + 1) * self.timeout + self.retries * LONGEST_WAIT + 5.0

    def servers(self, *urls: str, key: str | None, **more: Any) -> Servers:
        """The servers at `urls`, asked as the settings say; more: further fields of Servers."""
        patience = (self.timeout, self.retries, self.backoff)
        return Servers(urls, key, *patience, self._breaker, **more)


def secret(variable: str | None, setting: str, what: str) -> str | None:
    """The environment variable's text; None where none is named. UsageError where it is not set."""
    if variable is None:
        return None
    found = os.environ.get(variable, "").strip()
    if not found:
        raise UsageError(
            f"{what} should be in the environment variable {variable} ({setting}), which is not set"
        )
    return found
