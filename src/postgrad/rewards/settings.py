"""The settings of rewards in a recipe: [[rewards]] and [scoring]."""

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, model_validator

from postgrad.core.settings import Settings

FailurePolicy = Literal["drop_sample", "drop_group", "stop_run", "score"]
Plain = str | int | float | bool


class EnvironmentRewards(NamedTuple):
    """What becomes of the rewards of an environment, and of samples that it failed on."""

    weight: float | None  # in the sum with [[rewards]]; None: it gives none
    on_failure: FailurePolicy = "drop_sample"


class RewardSettings(Settings):
    """One component of the reward. Further keys are settings of its verifier.

    It applies to prompts of `datasets` whose columns have the values in `when`. Where a `gate`
    scores below gate_at, the total reward is gate_value; with `multiply` the score multiplies the
    weighted sum of the others.
    """

    model_config = ConfigDict(frozen=True, extra="allow", validate_default=True)

    type: str  # name of a verifier, or "package.module:function"
    name: str | None = None  # in metrics; None: type without the package
    weight: float = 1.0  # of its score in the total
    gate: bool = False
    gate_at: float = 1.0
    gate_value: float = 0.0
    multiply: bool = False
    datasets: tuple[str, ...] | None = Field(default=None, min_length=1)  # None: all of them
    when: dict[str, Plain | tuple[Plain, ...]] = {}  # column of the row -> its value, or a choice
    # The verifier reads what a sample wrote behind the last of this text, and nothing of a sample
    # without it: "</think>" leaves thoughts out.
    after: str | None = Field(default=None, min_length=1)
    special_tokens: bool = False  # the verifier reads a sample's special tokens too
    on_failure: FailurePolicy = "drop_sample"
    failure_score: float = 0.0  # for on_failure = "score"
    # CPU time of one score; where the verifier scores groups, of one group.
    cpu_seconds: float = Field(default=5.0, gt=0.0)
    wall_seconds: float | None = Field(default=None, gt=0.0)  # as cpu_seconds; None: the verifier's
    waits: bool | None = None  # waits for a server; None: as its verifier does
    sandbox: bool | None = None  # runs sandboxed, since text may run as code; None: as its verifier
    env: tuple[str, ...] = ()  # names of environment variables that its worker gets

    @model_validator(mode="after")
    def _one_way_into_the_total(self) -> Self:
        if self.multiply and (self.gate or self.weight != 1.0):
            raise ValueError("multiply = true cannot go with gate or weight")
        if not self.gate and (self.gate_at, self.gate_value) != (1.0, 0.0):
            raise ValueError("gate_at and gate_value are read only where gate = true")
        return self

    @model_validator(mode="after")
    def _no_server_behind_walls(self) -> Self:
        if self.sandbox and self.waits:
            raise ValueError("waits = true needs a network, and sandbox = true has none")
        if self.sandbox and self.env:
            raise ValueError("sandbox = true may run a sample's text as code: it gets no `env`")
        return self

    @property
    def verifier_settings(self) -> dict[str, Any]:
        """The further keys, which are settings of the verifier."""
        return dict(self.model_extra or {})

    def read(self, text: str) -> str:
        """What its verifier reads of a sample's text."""
        if self.after is None:
            return text
        _, mark, rest = text.rpartition(self.after)
        return rest if mark else ""

    def applies(self, dataset: str, metadata: Mapping[str, Any]) -> bool:
        """Whether it scores samples of a row of `dataset` with the columns `metadata`.

        A column with a list, as Open-Instruct writes, has each of its values.
        """
        if self.datasets is not None and dataset not in self.datasets:
            return False
        return all(
            column in metadata
            and any(value in _listed(wanted) for value in _listed(metadata[column]))
            for column, wanted in self.when.items()
        )


def _listed(value: Any) -> Collection[Any]:
    return value if isinstance(value, tuple | list) else (value,)


class ScoringSettings(Settings):
    """The workers that run verifiers."""

    workers: int = Field(default=2, ge=1)  # processes
    waiting_workers: int = Field(default=8, ge=1)  # more, for verifiers that wait for a server
    max_failed_fraction: float = Field(default=0.1, ge=0.0, le=1.0)  # of a step; more stops the run
