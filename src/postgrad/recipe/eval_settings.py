"""When a run evaluates, and on which sets."""

from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, model_validator

from postgrad.core.settings import Settings
from postgrad.data.settings import DataSettings, PairSettings
from postgrad.rollout.settings import TokenFilters


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
        """The settings that a reader takes: `subset` as `name`, rows in file order."""
        return _read_by(self, DataSettings)


class PairEvalSet(Named, PairSettings):
    """One evaluation set of preferences."""

    @property
    def data(self) -> PairSettings:
        """The settings that a reader takes: `subset` as `name`, rows in file order."""
        return _read_by(self, PairSettings)


def _read_by(eval_set: EvalSet | PairEvalSet, kind: type[DataSettings | PairSettings]) -> Any:
    fields = {field: getattr(eval_set, field) for field in kind.model_fields}
    data = kind.model_validate({**fields, "name": eval_set.subset, "shuffle": False})
    data.stand_beside(eval_set.paths_beside)
    return data


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


class EvalSettings(EvalTimes, TokenFilters):
    """When to evaluate, on what, and how answers are sampled there.

    In a file one set is given by its own keys in [eval], several as [[eval.sets]]. An answer is
    right when the score of `component` reaches `correct_at`. An SFT job without [[rewards]] samples
    nothing: it measures the loss of the rows' own answers.
    """

    sets: tuple[EvalSet, ...] = ()
    n_samples: int = Field(default=1, ge=1)  # samples of a prompt, for pass@k and maj@k
    pass_at: tuple[int, ...] = (1,)  # the k of pass@k
    maj_at: tuple[int, ...] = ()  # the k of maj@k, majority votes
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
        if any(not 2 <= k <= self.n_samples for k in self.maj_at):
            raise ValueError(
                f"maj_at = {list(self.maj_at)} needs numbers from 2 to n_samples = {self.n_samples}"
            )
        return self


def _require_names(sets: Sequence[EvalSet | PairEvalSet]) -> None:
    for eval_set in sets:
        eval_set.stand_beside([other.path for other in sets])
    names = [eval_set.name for eval_set in sets]
    for name in names:
        if names.count(name) > 1:
            shared = "have no name" if name is None else f"are called {name!r}"
            raise ValueError(f"{names.count(name)} of [[eval.sets]] {shared}: name each its own")
