"""The environment and the scorer of a recipe, and the data as the environment wants it."""

from typing import Any, TypeVar

from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt
from postgrad.data.draws import Draws
from postgrad.data.settings import DataSettings, MixSettings
from postgrad.data.templates import template_call
from postgrad.jobs.learned import LearnedReward, by_component
from postgrad.recipe.recipe import Answering
from postgrad.rewards.registry import for_rollout
from postgrad.rewards.scorer import Scorer
from postgrad.rollout.environments.chat import Dialogue, dialogue
from postgrad.rollout.environments.registry import build

AnyData = TypeVar("AnyData", DataSettings, MixSettings)


def environment_of(recipe: Answering, tokenizer: Any) -> Dialogue | None:
    """The environment that answers the policy's turns; None where an episode is one answer. Raises
    the errors of `dialogue`.
    """
    if recipe.environment is None:
        return None
    return dialogue(recipe.environment, tokenizer, template_call(recipe.data))


def scorer_of(recipe: Answering, learned: LearnedReward | None = None) -> Scorer:
    """The recipe's scorer; rewards of the environment are one of its components.

    learned: the run's own reward model. Raises UsageError where the recipe's rewards are wrong.
    """
    rewards = for_rollout(recipe.rewards, recipe.rollout.max_new_tokens)
    learned_scores = by_component(recipe, learned)
    return Scorer(rewards, recipe.scoring, recipe.environment_weight, learned_scores)


def with_tools(recipe: Answering, data: AnyData) -> AnyData:
    """The data settings with the environment's tools among the variables of the chat template.

    Raises UsageError where the recipe sets one of these variables itself.
    """
    if recipe.environment is None:
        return data
    more = build(recipe.environment).variables()
    for key in more:
        if key in data.chat_template_kwargs:
            raise UsageError(f"data.chat_template_kwargs: {key!r} comes from [environment]")
    update: dict[str, Any] = {"chat_template_kwargs": {**data.chat_template_kwargs, **more}}
    if isinstance(data, MixSettings):
        update["sets"] = tuple(dataset.model_copy(update=update) for dataset in data.sets)
    return data.model_copy(update=update)


def check_rows(recipe: Answering, prompts: Draws[Prompt]) -> None:
    """Raises UsageError where the environment cannot start an episode from a row."""
    if recipe.environment is None:
        return
    chat = build(recipe.environment)
    rows = prompts.all()
    bad = [(row, reason) for row in rows if (reason := chat.check(row)) is not None]
    if bad:
        prompt, reason = bad[0]
        raise UsageError(
            f"{len(bad)} of {len(rows)} rows cannot be played in the environment "
            f"{recipe.environment.type!r}; the first is row {prompt.row} of {prompt.dataset}: "
            f"{reason}; mend the rows, or choose another environment.type"
        )
