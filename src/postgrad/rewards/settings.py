"""What a recipe says about rewards."""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from postgrad.core.settings import Settings

FailurePolicy = Literal["drop_sample", "drop_group", "stop_run", "score"]


class RewardSettings(Settings):
    """One component of the reward. Further keys are the verifier's own settings.

    `type` is a verifier's name or "package.module:function". cpu_seconds is what one score may use
    of the processor; wall_seconds how long it may last, tried twice. `failure_score` is given where
    on_failure is "score".
    """

    model_config = ConfigDict(frozen=True, extra="allow", validate_default=True)

    type: str
    name: str | None = None  # in metrics; default: type, without the package
    weight: float = 1.0
    on_failure: FailurePolicy = "drop_sample"
    failure_score: float = 0.0
    cpu_seconds: float = Field(default=5.0, gt=0.0)
    wall_seconds: float = Field(default=30.0, gt=0.0)

    @property
    def own(self) -> dict[str, Any]:
        """The keys that belong to the verifier itself."""
        return dict(self.model_extra or {})


class ScoringSettings(Settings):
    """The workers that run verifiers. More than `max_failed_fraction` of a step stops the run."""

    workers: int = Field(default=2, ge=1)
    max_failed_fraction: float = Field(default=0.1, ge=0.0, le=1.0)
