"""Verifiers by the names that a recipe may use, and Python functions as verifiers."""

import inspect
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

from pydantic import ConfigDict, ValidationError

from postgrad.core.errors import SettingsError, UsageError
from postgrad.core.settings import problem_of_table
from postgrad.core.text import resolve
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier

VERIFIERS = {
    "gsm8k": "postgrad.rewards.gsm8k:GSM8K",
    "math": "postgrad.rewards.math:Math",
    "exact_match": "postgrad.rewards.exact_match:ExactMatch",
    "ifeval": "postgrad.rewards.ifeval.verifier:IFEval",
    "multiple_choice": "postgrad.rewards.multiple_choice:MultipleChoice",
    "f1": "postgrad.rewards.f1:F1",
    "format": "postgrad.rewards.format:Format",
    "regex": "postgrad.rewards.format:Regex",
    "overlong": "postgrad.rewards.length:Overlong",
    "stop_properly": "postgrad.rewards.length:StopProperly",
    "target_length": "postgrad.rewards.length:TargetLength",
    "relative_length": "postgrad.rewards.length:RelativeLength",
    "repetition": "postgrad.rewards.repetition:RepeatedNgrams",
    "judge": "postgrad.rewards.judge:Judge",
    "remote": "postgrad.rewards.remote:Remote",
    "reward_model": "postgrad.rewards.learned:RewardModel",
    "process_reward": "postgrad.rewards.process_reward:StepScores",
    "reasoning_gym": "postgrad.rewards.reasoning_gym:ReasoningGym",
    "code": "postgrad.rewards.code:Code",
}


class FunctionVerifier(Verifier):
    """A Python function (prompt, rollout, **knobs) -> float | Score as a verifier."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    function: Callable[..., float | Score]
    knobs: dict[str, Any]

    def score(self, prompt: PromptView, rollout: RolloutView) -> float | Score:
        return self.function(prompt, rollout, **self.knobs)


class GroupFunctionVerifier(Verifier):
    """A Python function (prompt, rollouts, **knobs) -> list[float | Score] as a verifier."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    function: Callable[..., Sequence[float | Score]]
    knobs: dict[str, Any]

    def score_group(
        self, prompt: PromptView, rollouts: Sequence[RolloutView]
    ) -> Sequence[float | Score]:
        return self.function(prompt, rollouts, **self.knobs)


def component_names(rewards: Sequence[RewardSettings]) -> list[str]:
    """The name of each reward in metrics: `name`, else its type without package and module.

    Raises UsageError where there is no reward, or where two have the same name.
    """
    if not rewards:
        raise UsageError("no reward: add at least one [[rewards]] with a type")
    names = [reward.name or reward.type.rpartition(":")[2] for reward in rewards]
    for name, count in Counter(names).items():
        if count > 1:
            second = [number for number, other in enumerate(names) if other == name][1]
            key = "name" if rewards[second].name else "type"
            text = f"{count} of [[rewards]] are called {name!r}: give each its own `name`"
            raise SettingsError("rewards", [((second, key), text)])
    return names


def build(reward: RewardSettings) -> Verifier:
    """The verifier that `reward` names, with its settings.

    Imports the code of "package.module:name", so in a run only workers call it for such a type.
    Raises SettingsError for an unknown name or key, or a wrong value.
    """
    try:
        target = resolve(reward.type, VERIFIERS, "verifier")
    except UsageError as error:
        raise SettingsError("rewards", [(("type",), str(error))]) from error
    if inspect.isclass(target) and issubclass(target, Verifier):
        if target.waits and reward.sandbox:
            why = f"{reward.type!r} asks a server, and sandbox = true has no network: leave it out"
            raise SettingsError("rewards", [(("sandbox",), why)])
        target.check_component(reward)
        return _from_settings(target, reward)
    if inspect.isclass(target) or not callable(target):
        why = (
            f"{reward.type!r} is neither a function (prompt, rollout) -> float or (prompt, "
            "rollouts) -> list of floats, nor a subclass of postgrad.rewards.verifier.Verifier"
        )
        raise SettingsError("rewards", [(("type",), why)])
    return _from_function(cast(Callable[..., Any], target), reward)


def controller_verifier(reward: RewardSettings) -> Verifier:
    """The verifier that `reward` names as a controller sees it.

    Third-party code is imported by workers only: for it this is a Verifier with all defaults.
    Raises UsageError as `build` does.
    """
    return build(reward) if reward.type in VERIFIERS else Verifier()


def compares(reward: RewardSettings) -> bool:
    """Whether it is a verifier of ours to which a lone sample says nothing (Verifier.compares)."""
    return reward.type in VERIFIERS and resolve(reward.type, VERIFIERS, "verifier").compares


def highest_score(reward: RewardSettings) -> float | None:
    """The highest score that a verifier of ours can give; None where that is not known, or its
    settings are wrong, which is told elsewhere.
    """
    try:
        return controller_verifier(reward).highest
    except UsageError:
        return None


def for_rollout(rewards: Sequence[RewardSettings], max_new_tokens: int) -> list[RewardSettings]:
    """The rewards with the settings that they take from the rollout's filled in.

    That is `max_new_tokens` of our own verifiers: third-party code is not imported here.
    """
    key = "max_new_tokens"
    filled: list[RewardSettings] = []
    for reward in rewards:
        kind = resolve(reward.type, VERIFIERS, "verifier") if reward.type in VERIFIERS else Verifier
        if key in kind.model_fields and reward.verifier_settings.get(key) is None:
            reward = reward.model_copy(update={key: max_new_tokens})
        filled.append(reward)
    return filled


def _from_function(function: Callable[..., Any], reward: RewardSettings) -> Verifier:
    """The verifier of groups where the second parameter is called `rollouts`, else of samples."""
    signature, knobs = inspect.signature(function), reward.verifier_settings
    second = list(signature.parameters.values())[1:2]
    of_groups = any(p.name == "rollouts" and p.kind is not p.VAR_POSITIONAL for p in second)
    try:
        signature.bind(None, None, **knobs)
    except TypeError as error:
        raise UsageError(
            f"rewards: {reward.type!r} cannot be called with (prompt, "
            f"{'rollouts' if of_groups else 'rollout'}"
            f"{''.join(f', {key}=' for key in knobs)}): {error}"
        ) from error
    if of_groups:
        return GroupFunctionVerifier(function=function, knobs=knobs)
    return FunctionVerifier(function=function, knobs=knobs)


def _from_settings(kind: type[Verifier], reward: RewardSettings) -> Verifier:
    # A verifier may have a field of the component, such as a time limit: it gets the same value.
    shared_keys = RewardSettings.model_fields.keys() & kind.model_fields.keys()
    values = {key: getattr(reward, key) for key in shared_keys}
    shared = {key: value for key, value in values.items() if value is not None}
    try:
        return kind.model_validate_json(
            json.dumps(shared | reward.verifier_settings, default=str), strict=True
        )
    except ValidationError as error:
        known_keys = [*kind.model_fields, *RewardSettings.model_fields]
        problems = [
            problem_of_table(problem, repr(reward.type), known_keys) for problem in error.errors()
        ]
        raise SettingsError("rewards", problems) from error
