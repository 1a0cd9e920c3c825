"""What a recipe says about rewards."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from postgrad.core.settings import Settings

FailurePolicy = Literal["drop_sample", "drop_group", "stop_run", "score"]
Plain = str | int | float | bool


class RewardSettings(Settings):
    """One component of the reward. Further keys are the verifier's own settings.

    `type` is a verifier's name or "package.module:function". cpu_seconds is what one score may use
    of the processor; wall_seconds how long it may last, tried twice. `failure_score` is given where
    on_failure is "score". Where a `gate` scores below gate_at, the total is gate_value; where
    `multiply` is set, the score multiplies the weighted sum. It applies to prompts of `datasets`
    whose columns are as `when` says.
    """

    model_config = ConfigDict(frozen=True, extra="allow", validate_default=True)

    type: str
    name: str | None = None  # in metrics; default: type, without the package
    weight: float = 1.0  # of its score in the total
    gate: bool = False
    gate_at: float = 1.0
    gate_value: float = 0.0
    multiply: bool = False
    datasets: tuple[str, ...] | None = Field(default=None, min_length=1)  # None: all of them
    when: dict[str, Plain | tuple[Plain, ...]] = {}  # column of the row -> its value, or one of
    on_failure: FailurePolicy = "drop_sample"
    failure_score: float = 0.0
    cpu_seconds: float = Field(default=5.0, gt=0.0)
    wall_seconds: float | None = Field(default=None, gt=0.0)  # None: as the verifier needs
    waits: bool | None = None  # for a server; None: as the verifier is
    sandbox: bool | None = (
        None  # behind walls, as a sample's text may run; None: as the verifier is
    )
    env: tuple[str, ...] = ()  # variables of the environment that its worker gets

    @model_validator(mode="after")
    def _one_way_into_the_total(self) -> Self:
        if self.multiply and (self.gate or self.weight != 1.0):
            raise ValueError("multiply = true stands without gate, and without a weight")
        if not self.gate and (self.gate_at, self.gate_value) != (1.0, 0.0):
            raise ValueError("gate_at and gate_value are read only where gate = true")
        return self

    @model_validator(mode="after")
    def _no_server_behind_walls(self) -> Self:
        if self.sandbox and self.waits:
            raise ValueError("waits = true asks a server, and sandbox = true has no network")
        if self.sandbox and self.env:
            raise ValueError("sandbox = true runs what a sample says: it gets no `env`")
        return self

    @property
    def own(self) -> dict[str, Any]:
        """The keys that belong to the verifier itself."""
        return dict(self.model_extra or {})

    def applies(self, dataset: str, metadata: Mapping[str, Any]) -> bool:
        """Whether it scores samples of a row of `dataset` with these columns."""
        if self.datasets is not None and dataset not in self.datasets:
            return False
        return all(
            column in metadata
            and metadata[column] in (wanted if isinstance(wanted, tuple) else (wanted,))
            for column, wanted in self.when.items()
        )


class ScoringSettings(Settings):
    """The workers that run verifiers. More than `max_failed_fraction` of a step stops the run.

    Verifiers that wait for a server have `waiting_workers` of their own: that many wait at a time.
    """

    workers: int = Field(default=2, ge=1)
    waiting_workers: int = Field(default=8, ge=1)
    max_failed_fraction: float = Field(default=0.1, ge=0.0, le=1.0)
