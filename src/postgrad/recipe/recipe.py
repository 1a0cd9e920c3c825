"""What a recipe may say: the settings of the rooms below, put together and checked as a whole."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, PlainSerializer, PlainValidator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from postgrad.algorithms.base import (
    Algorithm,
    PreferenceAlgorithm,
    RewardAlgorithm,
    RolloutAlgorithm,
)
from postgrad.algorithms.bradley_terry import BradleyTerry
from postgrad.algorithms.dpo import DPO
from postgrad.algorithms.registry import ALGORITHMS, algorithm_class
from postgrad.algorithms.sft import SFT
from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.cluster.settings import ClusterSettings
from postgrad.core.batch import (
    BatchGeometry,
    BatchSettings,
    Parallel,
    RolloutBatchSettings,
    RunLength,
)
from postgrad.core.errors import UsageError
from postgrad.core.geometry import geometry
from postgrad.core.settings import Settings
from postgrad.data.pair_settings import PairMixSettings
from postgrad.data.settings import MixSettings
from postgrad.learner.settings import LearnerSettings
from postgrad.models.settings import ModelSettings
from postgrad.observe.settings import ObserveSettings, SentinelSettings
from postgrad.recipe import checks
from postgrad.recipe.messages import Origin, explain
from postgrad.recipe.resolve import resolve
from postgrad.recipe.settings import (
    CriticSettings,
    EvalSettings,
    PairEvalSettings,
    ReferenceSettings,
    RewardModelSettings,
)
from postgrad.rewards.settings import RewardSettings, ScoringSettings
from postgrad.rollout.environments.settings import EnvironmentSettings
from postgrad.rollout.settings import RolloutSettings


def problems_found(title: str, problems: list[tuple[tuple[str | int, ...], str]]) -> None:
    """Raises a ValidationError with each (place, message), so that places keep their names."""
    details = [
        InitErrorDetails(
            type=PydanticCustomError("recipe", "{text}", {"text": text}), loc=place, input=None
        )
        for place, text in problems
    ]
    if details:
        raise ValidationError.from_exception_data(title, details)


def _algorithm(base: type[Algorithm]) -> Callable[[Any], Algorithm]:
    """A validator: {"type": name, knob: value, ...} to the algorithm of that name."""

    def build(value: Any) -> Algorithm:
        if isinstance(value, base):
            return value
        if not isinstance(value, Mapping):
            raise ValueError('a table with a `type` is wanted, such as type = "grpo"')
        knobs = dict(cast(Mapping[str, Any], value))
        name = knobs.pop("type", None)
        known = [other for other in ALGORITHMS if issubclass(algorithm_class(other), base)]
        kind = _class(name, base, known)
        return kind.model_validate_json(checks.as_json(knobs), strict=True)

    return build


def _class(name: Any, base: type[Algorithm], known: list[str]) -> type[Algorithm]:
    message = f"one of {', '.join(known)}, or your own 'package.module:Class'"
    try:
        kind = algorithm_class(name) if isinstance(name, str) else None
    except UsageError as error:
        kind, message = None, str(error)
    if kind is not None and not issubclass(kind, base):
        message = f"{name!r} is not for this job; known: {', '.join(known)}"
    if kind is None or not issubclass(kind, base):
        problems_found("algorithm", [(("type",), message)])
        raise AssertionError  # problems_found has raised
    return kind


def _with_type(algorithm: Algorithm) -> dict[str, Any]:
    kind = type(algorithm)
    target = f"{kind.__module__}:{kind.__qualname__}"
    name = next((name for name, known in ALGORITHMS.items() if known == target), target)
    return {"type": name, **algorithm.model_dump(mode="json")}


def _tables(value: Any) -> Any:
    """Settings as the tables of a file that say the same; what they do not state stays unsaid."""
    if isinstance(value, Algorithm):
        return _with_type(value)
    if isinstance(value, Settings):
        return {name: _tables(getattr(value, name)) for name in value.model_fields_set}
    if isinstance(value, Mapping):
        items = cast(Mapping[str, Any], value).items()
        return {name: _tables(one) for name, one in items}
    if isinstance(value, list | tuple):
        return [_tables(one) for one in cast(list[Any], value)]
    return value


class _Recipe(Settings):
    """What every job says. Exactly one of steps, total_episodes and epochs says how long."""

    run_dir: str = Field(min_length=1)  # where the run writes
    seed: int = Field(default=0, ge=0)  # of fresh weights, the order of rows, samples
    steps: int | None = Field(default=None, ge=1)  # passes of the loop
    total_episodes: int | None = Field(default=None, ge=1)  # a budget of samples
    epochs: float | None = Field(default=None, gt=0.0)  # passes over the data
    model: ModelSettings = ModelSettings()
    batch: BatchSettings = BatchSettings()
    learner: LearnerSettings = LearnerSettings()
    cluster: ClusterSettings = ClusterSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    sentinels: SentinelSettings = SentinelSettings()
    observe: ObserveSettings = ObserveSettings()

    def __init__(self, **sections: Any) -> None:
        """A recipe made in Python, checked and completed as one of a file: a section is a table, or
        its settings. Raises UsageError with a line for every problem.
        """
        kind = type(self)
        raw: dict[str, Any] = {"job": kind.model_fields["job"].default, **_tables(sections)}
        text = checks.as_json(resolve(raw))
        try:
            self.__pydantic_validator__.validate_json(text, strict=True, self_instance=self)
        except ValidationError as error:
            raise explain(error, kind, Origin(kind.__name__, raw, {})) from error

    # Not how files and JSON are validated: pydantic asks this of an __init__ of its own alone.
    __init__.__pydantic_base_init__ = True  # pyright: ignore[reportFunctionMemberAccess]

    @property
    def parallel(self) -> Parallel:
        """The learner's ranks."""
        one = self.learner
        return Parallel(one.ranks, one.tensor_parallel, one.context_parallel)

    def length(self, rows: int | None = None) -> RunLength:
        """How long the run is; rows of the training data turn epochs into steps."""
        return RunLength(self.steps, self.total_episodes, self.epochs, rows)

    def geometry(self, rows: int | None = None) -> BatchGeometry:
        """Every batch number; `rows` of the training data are needed where epochs are stated."""
        return geometry(self.batch, self.length(rows), self.parallel)

    def dump(self) -> dict[str, Any]:
        """The resolved recipe as JSON values; it loads again to an equal recipe."""
        return self.model_dump(mode="json")


class _Answering(_Recipe):
    """Jobs whose policy answers questions: while it learns, or when it is evaluated."""

    data: MixSettings
    eval: EvalSettings = EvalSettings()
    rewards: tuple[RewardSettings, ...] = ()
    scoring: ScoringSettings = ScoringSettings()
    environment: EnvironmentSettings | None = None
    rollout: RolloutSettings = RolloutSettings()


class _Comparing(_Recipe):
    """Jobs that learn which of two answers is preferred: a sample is a pair."""

    data: PairMixSettings
    eval: PairEvalSettings = PairEvalSettings()


class SFTRecipe(_Answering):
    """Supervised fine-tuning: a step is one update of `train_batch_size` conversations.

    Rewards and rollout are for the accuracy of [eval] only; without rewards it measures the loss.
    """

    job: Literal["sft"] = "sft"
    algorithm: Annotated[SFT, PlainValidator(_algorithm(SFT)), PlainSerializer(_with_type)] = SFT()

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems_found("recipe", [*checks.common(self), *checks.answering(self)])
        return self


class RLRecipe(_Answering):
    """Reinforcement learning: sample, score, train."""

    job: Literal["rl"] = "rl"
    algorithm: Annotated[
        RolloutAlgorithm,
        PlainValidator(_algorithm(RolloutAlgorithm)),
        PlainSerializer(_with_type),
    ]
    batch: RolloutBatchSettings = RolloutBatchSettings()  # pyright: ignore[reportIncompatibleVariableOverride]
    reference: ReferenceSettings = ReferenceSettings()
    critic: CriticSettings = CriticSettings()
    reward_model: RewardModelSettings = RewardModelSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        found = [*checks.common(self), *checks.answering(self), *checks.sampling(self)]
        problems_found("recipe", found)
        return self


class RewardRecipe(_Comparing):
    """A reward model from pairs: a step is one update of `train_batch_size` pairs."""

    job: Literal["reward"] = "reward"
    algorithm: Annotated[
        RewardAlgorithm,
        PlainValidator(_algorithm(RewardAlgorithm)),
        PlainSerializer(_with_type),
    ] = BradleyTerry()  # pyright: ignore[reportCallIssue]

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems_found("recipe", [*checks.common(self), *checks.comparisons(self)])
        return self


class PreferenceRecipe(_Comparing):
    """A policy from pairs, without a reward model: a step is one update of `train_batch_size`
    pairs, or labelled answers for an algorithm that reads one at a time (KTO).
    """

    job: Literal["preference"] = "preference"
    algorithm: Annotated[
        PreferenceAlgorithm,
        PlainValidator(_algorithm(PreferenceAlgorithm)),
        PlainSerializer(_with_type),
    ] = DPO()  # pyright: ignore[reportCallIssue]
    reference: ReferenceSettings = ReferenceSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems_found("recipe", [*checks.common(self), *checks.comparisons(self)])
        return self


Answering = SFTRecipe | RLRecipe
Comparing = RewardRecipe | PreferenceRecipe
Recipe = Answering | Comparing
JOBS: dict[str, type[Recipe]] = {
    "sft": SFTRecipe,
    "reward": RewardRecipe,
    "preference": PreferenceRecipe,
    "rl": RLRecipe,
}
