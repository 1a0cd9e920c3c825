"""The settings for a phase without progress, which observe/watchdog.py measures."""

from pydantic import Field

from postgrad.observe.sentinels.base import Acting


class Stall(Acting):
    """Speaks once for a phase that has made no progress for `seconds`."""

    seconds: float = Field(default=1800.0, gt=0.0)
