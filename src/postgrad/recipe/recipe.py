"""What a recipe may say: a class for each job, with its sections put together and checked."""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import PlainSerializer, PlainValidator, model_validator
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
from postgrad.core.batch import RolloutBatchSettings
from postgrad.core.errors import UsageError
from postgrad.core.settings import Settings
from postgrad.learner.settings import LearnerSettings
from postgrad.models.settings import ModelSettings
from postgrad.recipe import answering, checks, sampled_from, scored
from postgrad.recipe.lines import KeyPath, RecipeProblem
from postgrad.recipe.messages import Origin, explain
from postgrad.recipe.resolve import resolve
from postgrad.recipe.settings import (
    AnsweringSections,
    CommonSections,
    ComparingSections,
    CriticSettings,
    ReferenceSettings,
    RewardModelSettings,
    RowKind,
)
from postgrad.recipe.teachers import TeacherSettings, teacher_problems


def raise_problems(title: str, problems: Iterable[RecipeProblem]) -> None:
    """Raises one ValidationError with all problems, each at its place; nothing where there are
    none.
    """
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
            raise ValueError('a table with a `type` is expected, such as type = "grpo"')
        knobs = dict(cast(Mapping[str, Any], value))
        type_name = knobs.pop("type", None)
        kind = _class(type_name, base)
        return kind.model_validate_json(checks.as_json(knobs), strict=True)

    return build


def _fits(kind: type[Algorithm], base: type[Algorithm]) -> bool:
    """Whether an algorithm is for the job whose algorithms are of `base`. One that needs rollouts
    is for RL alone, also where its loss is one of pairs.
    """
    return issubclass(kind, base) and issubclass(kind, RolloutAlgorithm) <= issubclass(
        base, RolloutAlgorithm
    )


def _class(name: Any, base: type[Algorithm]) -> type[Algorithm]:
    """The algorithm's class, of those for the job whose algorithms are of `base`."""
    problem = ""
    try:
        kind = algorithm_class(name) if isinstance(name, str) else None
    except UsageError as error:
        kind, problem = None, str(error)
    if kind is not None and _fits(kind, base):
        return kind
    names = ", ".join(name for name in ALGORITHMS if _fits(algorithm_class(name), base))
    if kind is not None:
        problem = f"{name!r} is not for this job; known: {names}"
    if not problem:
        problem = "missing" if name is None else f"{name!r} is no name"
        problem += f"; it is one of {names}, or your own 'package.module:Class'"
    raise_problems("algorithm", [(("type",), problem)])
    raise AssertionError  # raise_problems has raised


def _with_type(algorithm: Algorithm) -> dict[str, Any]:
    kind = type(algorithm)
    target = f"{kind.__module__}:{kind.__qualname__}"
    name = next((name for name, shipped in ALGORITHMS.items() if shipped == target), target)
    return {"type": name, **algorithm.model_dump(mode="json")}


def _tables(value: Any) -> Any:
    """Settings as the tables of a file; fields that were not set are left out."""
    if isinstance(value, Algorithm):
        return _with_type(value)
    if isinstance(value, Settings):
        return {name: _tables(getattr(value, name)) for name in value.model_fields_set}
    if isinstance(value, Mapping):
        items = cast(Mapping[str, Any], value).items()
        return {name: _tables(entry) for name, entry in items}
    if isinstance(value, list | tuple):
        return [_tables(entry) for entry in cast(list[Any], value)]
    return value


class _Recipe(CommonSections):
    """The sections with a constructor for Python code."""

    def __init__(self, **sections: Any) -> None:
        """Checks and completes the sections as those of a file: each is a table, or its settings.
        Raises UsageError with a line for every problem.
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


class SFTRecipe(_Recipe, AnsweringSections):
    """Supervised fine-tuning: a step is one update of `train_batch_size` conversations.

    Rewards are for the accuracy of [eval] only; without rewards it measures the loss. So is
    rollout, but where the algorithm learns from the policy's own answers too.
    """

    job: Literal["sft"] = "sft"
    algorithm: Annotated[SFT, PlainValidator(_algorithm(SFT)), PlainSerializer(_with_type)] = SFT()
    teacher: TeacherSettings = TeacherSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = [
            *checks.common(self, self.job),
            *answering.answering(self),
            *answering.unrewarded(self),
            *answering.own_answers(self),
            *teacher_problems(self),
            *answering.hints(self, self.algorithm),
        ]
        raise_problems("recipe", problems)
        return self

    @property
    def model_tables(self) -> dict[KeyPath, ModelSettings]:
        """That of the teacher too, where the algorithm has one."""
        tables: dict[KeyPath, ModelSettings] = {("model",): self.model}
        return tables | (self.teacher.tables if self.algorithm.needs().teacher else {})

    @property
    def loaded_models(self) -> dict[KeyPath, ModelSettings]:
        return self.model_tables

    @property
    def row_kind(self) -> RowKind:
        return "conversation"

    @property
    def measures_loss(self) -> bool:
        return bool(self.eval.sets) and (self.eval.loss or not self.evaluates_answers)

    @property
    def samples_answers(self) -> bool:
        return self.evaluates_answers or self.own_answers > 0

    @property
    def own_answers(self) -> float:
        return self.algorithm.needs().own_answers


class RLRecipe(_Recipe, AnsweringSections):
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
    teacher: TeacherSettings = TeacherSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = [
            *checks.common(self, self.job),
            *answering.answering(self),
            *answering.sampling(self),
            *sampled_from.correction(self.algorithm, self.rollout),
            *sampled_from.stale_samples(self.algorithm, self.rollout),
            *sampled_from.router_replay(self, self.rollout),
            *sampled_from.sampling_mask(self.rollout, self.algorithm, self.teacher),
            *checks.moving_reference(self.reference, self.model, self.algorithm),
            *answering.group_size(self.algorithm, self.batch),
            *answering.adapted_kl(self.algorithm, self.batch),
            *scored.components_apart(self, self.algorithm),
            *scored.all_weightless(self, self.algorithm),
            *scored.nothing_observed(self, self.algorithm),
            *teacher_problems(self),
            *answering.hints(self, self.algorithm),
            *answering.group_hints(self, self.algorithm, self.batch),
        ]
        raise_problems("recipe", problems)
        return self

    @property
    def row_kind(self) -> RowKind:
        return "prompt"

    @property
    def model_tables(self) -> dict[KeyPath, ModelSettings]:
        return {
            ("model",): self.model,
            ("reference", "model"): self.reference.model,
            ("critic", "model"): self.critic.model,
            ("reward_model", "model"): self.reward_model.model,
            **self.teacher.tables,
        }

    @property
    def loaded_models(self) -> dict[KeyPath, ModelSettings]:
        needs = self.algorithm.needs()
        used: dict[KeyPath, bool] = {
            ("model",): True,
            ("reference", "model"): needs.loads_reference,
            ("critic", "model"): needs.critic,
            ("reward_model", "model"): self.asks_reward_model,
            **dict.fromkeys(self.teacher.models, needs.teacher),
        }
        return {place: model for place, model in self.model_tables.items() if used.get(place)}

    @property
    def shares_critic_base(self) -> bool:
        """Whether a reward model from the critic's files is the frozen weights under its adapter,
        rather than a copy.
        """
        critic = self.critic.model
        return critic.lora is not None and critic.loads_as(self.reward_model.model)

    @property
    def learner_tables(self) -> dict[KeyPath, LearnerSettings]:
        return {("learner",): self.learner, ("critic", "learner"): self.critic.learner}

    @property
    def reference_moves(self) -> bool:
        return self.reference.moves

    @property
    def trains_on_rollouts(self) -> bool:
        return True

    @property
    def sampled_tokens(self) -> int:
        """Never the whole of data.max_len: a prompt has at least one token."""
        return min(self.rollout.max_new_tokens, self.data.max_len - 1)

    @property
    def min_micro_tokens(self) -> int:
        return self.data.max_len * (2 if self.algorithm.level == "pair" else 1)

    @property
    def logprob_temperature(self) -> float:
        return self.rollout.temperature

    @property
    def answers_per_prompt(self) -> int:
        return self.batch.n_samples_per_prompt


class RewardRecipe(_Recipe, ComparingSections):
    """A reward model: a step is one update of `train_batch_size` pairs, or of as many answers with
    labelled steps for an algorithm of level "step" (process rewards).
    """

    job: Literal["reward"] = "reward"
    algorithm: Annotated[
        RewardAlgorithm,
        PlainValidator(_algorithm(RewardAlgorithm)),
        PlainSerializer(_with_type),
    ] = BradleyTerry()  # pyright: ignore[reportCallIssue]

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_problems("recipe", [*checks.common(self, self.job), *checks.comparing(self)])
        return self

    @property
    def row_kind(self) -> RowKind:
        return _row_kind(self.algorithm)

    @property
    def trained_role(self) -> Literal["reward_model"]:
        return "reward_model"


class PreferenceRecipe(_Recipe, ComparingSections):
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
        problems = [
            *checks.common(self, self.job),
            *checks.comparing(self),
            *checks.moving_reference(self.reference, self.model, self.algorithm),
            *checks.other_answers(self, self.algorithm),
        ]
        raise_problems("recipe", problems)
        return self

    @property
    def row_kind(self) -> RowKind:
        return _row_kind(self.algorithm)

    @property
    def model_tables(self) -> dict[KeyPath, ModelSettings]:
        return {("model",): self.model, ("reference", "model"): self.reference.model}

    @property
    def reference_moves(self) -> bool:
        return self.reference.moves

    @property
    def loaded_models(self) -> dict[KeyPath, ModelSettings]:
        return self.model_tables if self.algorithm.needs().reference else {("model",): self.model}


def _row_kind(algorithm: RewardAlgorithm | PreferenceAlgorithm) -> RowKind:
    kinds: dict[str, RowKind] = {"pair": "pair", "step": "steps"}
    return kinds.get(algorithm.level, "labelled")


Answering = SFTRecipe | RLRecipe
Comparing = RewardRecipe | PreferenceRecipe
Recipe = Answering | Comparing
JOBS: dict[str, type[Recipe]] = {
    "sft": SFTRecipe,
    "reward": RewardRecipe,
    "preference": PreferenceRecipe,
    "rl": RLRecipe,
}
