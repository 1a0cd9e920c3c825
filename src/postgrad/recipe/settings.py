"""Sections of a recipe that put rooms together: evaluation, reference, cluster."""

from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, model_validator

from postgrad.core.settings import Settings
from postgrad.data.pair_settings import PairSettings
from postgrad.data.settings import DataSettings
from postgrad.learner.settings import LearnerSettings
from postgrad.models.settings import ModelSettings


class ReferenceSettings(Settings):
    """The model that KL is measured from; what is left out is taken from the policy's.

    Frozen, unless it follows the policy: `refresh_steps` takes the policy's weights every so many
    steps, `ema_decay` keeps a moving average of them, one step at a time.
    """

    model: ModelSettings = ModelSettings()
    refresh_steps: int = Field(default=0, ge=0)  # 0: never
    ema_decay: float = Field(default=0.0, ge=0.0, lt=1.0)  # 0: no average

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.refresh_steps and self.ema_decay:
            raise ValueError("refresh_steps and ema_decay are two ways to follow: keep one")
        return self

    @property
    def moves(self) -> bool:
        """True where it follows the policy."""
        return bool(self.refresh_steps or self.ema_decay)


class CriticSettings(Settings):
    """The critic of PPO; what is left out is taken from the policy's, its weights from the reward
    model where there is one.
    """

    model: ModelSettings = ModelSettings()
    learner: LearnerSettings = LearnerSettings()


class RewardModelSettings(Settings):
    """The model that [[rewards]] of type "reward_model" ask."""

    model: ModelSettings = ModelSettings()


class Named(Settings):
    """What every evaluation set has. `name` is what it is called in metrics (eval/NAME/accuracy;
    without one eval/accuracy), so the configuration of a hub dataset is `subset` here.
    """

    name: str | None = None
    subset: str | None = None
    by: str | None = None  # a column of the rows, "dataset" say: rates for each of its values too


class EvalSet(Named, DataSettings):
    """One evaluation set of questions."""

    @property
    def data(self) -> DataSettings:
        """What a reader needs: `subset` under its own name, rows in file order."""
        return DataSettings.model_validate(_read(self, DataSettings))


class PairEvalSet(Named, PairSettings):
    """One evaluation set of preferences."""

    @property
    def data(self) -> PairSettings:
        """What a reader needs: `subset` under its own name, rows in file order."""
        return PairSettings.model_validate(_read(self, PairSettings))


def _read(one: Named, kind: type[Settings]) -> dict[str, Any]:
    own = {field: getattr(one, field) for field in kind.model_fields}
    return {**own, "name": one.subset, "shuffle": False}


class EvalTimes(Settings):
    """When to evaluate; counts are in steps."""

    every: int = Field(default=0, ge=0)  # steps; 0: not during the run
    at_start: bool = False  # before the first step
    at_end: bool = True  # after the last one


class PairEvalSettings(EvalTimes):
    """When to evaluate a reward model or a preference, and on which pairs. In a file one set is
    given by its own keys in [eval], several as [[eval.sets]].
    """

    sets: tuple[PairEvalSet, ...] = ()

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        _require_names(self.sets)
        return self


class EvalSettings(EvalTimes):
    """When to evaluate, on what, and how answers are sampled there.

    In a file one set is given by its own keys in [eval], several as [[eval.sets]]. An answer is
    right when the score of `component` reaches `correct_at`. An SFT job without [[rewards]] samples
    nothing: it measures the loss of the rows' own answers.
    """

    sets: tuple[EvalSet, ...] = ()
    n_samples: int = Field(default=1, ge=1)  # samples of a prompt, for pass@k
    pass_at: tuple[int, ...] = (1,)  # the k of pass@k
    temperature: float = Field(default=1.0, gt=0.0)  # of those samples
    greedy: bool = False  # also answer every prompt once at temperature 0
    max_new_tokens: int | None = Field(default=None, ge=1)  # rollout.max_new_tokens if left out
    component: str | None = None  # the first that applies to the row, if left out
    correct_at: float = 1.0
    # Of an SFT job: also the loss of the rows' answers. Without anything that scores, that alone.
    loss: bool = False

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        _require_names(self.sets)
        return self

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if not self.pass_at or min(self.pass_at) < 1 or max(self.pass_at) > self.n_samples:
            raise ValueError(
                f"pass_at = {list(self.pass_at)} needs numbers from 1 to n_samples = "
                f"{self.n_samples}"
            )
        return self


def _require_names(sets: Sequence[Named]) -> None:
    names = [one.name for one in sets]
    for name in names:
        if names.count(name) > 1:
            said = "have no name" if name is None else f"are called {name!r}"
            raise ValueError(f"{names.count(name)} of [[eval.sets]] {said}: name each its own")
