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
    """One evaluation set of questions. How its answers are sampled is what [eval] says, but for the
    keys that the set gives itself. Its pass@k and maj@k are those that its samples reach.
    """

    n_samples: int | None = Field(default=None, ge=1)  # [eval]'s if left out, as all below
    temperature: float | None = Field(default=None, gt=0.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0.0, lt=1.0)
    max_new_tokens: int | None = Field(default=None, ge=1)

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


class SetSampling(TokenFilters):
    """How the answers of one evaluation set are sampled: its own keys, else those of [eval]."""

    n_samples: int
    temperature: float
    max_new_tokens: int | None
    pass_at: tuple[int, ...]  # those of [eval] that n_samples reaches
    maj_at: tuple[int, ...]


# Keys that a set may have beside [eval], which decides where it has none.
SAMPLING = ("n_samples", "temperature", *TokenFilters.model_fields, "max_new_tokens")


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
    pass_at: tuple[int, ...] = (1,)  # the k of pass@k: of each set those up to its n_samples
    maj_at: tuple[int, ...] = ()  # the k of maj@k, majority votes; as pass_at
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

    def sampling_of(self, eval_set: EvalSet) -> SetSampling:
        """How the answers of one of the sets are sampled."""
        stated = {key: getattr(eval_set, key) for key in SAMPLING}
        chosen = {key: getattr(self, key) if v is None else v for key, v in stated.items()}
        pass_at = tuple(k for k in self.pass_at if k <= chosen["n_samples"])
        maj_at = tuple(k for k in self.maj_at if k <= chosen["n_samples"])
        return SetSampling.model_validate({**chosen, "pass_at": pass_at, "maj_at": maj_at})

    @property
    def samplings(self) -> tuple[SetSampling, ...]:
        """`sampling_of` each set, in their order."""
        return tuple(self.sampling_of(eval_set) for eval_set in self.sets)

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        most = max((s.n_samples or self.n_samples for s in self.sets), default=self.n_samples)
        if not self.pass_at or min(self.pass_at) < 1 or max(self.pass_at) > most:
            raise ValueError(
                f"pass_at = {list(self.pass_at)} needs numbers from 1 to n_samples = {most}"
            )
        if any(not 2 <= k <= most for k in self.maj_at):
            raise ValueError(
                f"maj_at = {list(self.maj_at)} needs numbers from 2 to n_samples = {most}"
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
