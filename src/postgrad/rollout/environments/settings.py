"""The recipe's settings of an environment."""

from typing import Any

from pydantic import ConfigDict, Field

from postgrad.core.settings import Settings


class EnvironmentSettings(Settings):
    """What answers the policy. Further keys are the environment's extra_settings settings.

    `type` is an environment's name or "package.module:Class". `weight` is that of its rewards among
    [[rewards]]. An episode ends after `max_turns` turns of the policy.
    """

    model_config = ConfigDict(frozen=True, extra="allow", validate_default=True)

    type: str
    weight: float = 1.0
    max_turns: int = Field(default=8, ge=1)

    @property
    def extra_settings(self) -> dict[str, Any]:
        """The keys that are not declared here: the environment's own settings."""
        return dict(self.model_extra or {})
