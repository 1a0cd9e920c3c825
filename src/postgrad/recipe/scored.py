"""What scores a sample, by name: the verifiers of [[rewards]], and the environment itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from postgrad.core.errors import UsageError
from postgrad.rewards.mixing import ENVIRONMENT
from postgrad.rewards.registry import component_names
from postgrad.rollout.environments.registry import build

if TYPE_CHECKING:
    from postgrad.recipe.recipe import RLRecipe, SFTRecipe


def environment_weight(recipe: SFTRecipe | RLRecipe) -> float | None:
    """The weight of the environment's rewards; None where there are none."""
    settings = recipe.environment
    return settings.weight if settings is not None and build(settings).gives_rewards else None


def components(recipe: SFTRecipe | RLRecipe) -> list[str] | None:
    """The names of a sample's rewards, the environment's last; None where they cannot be told."""
    try:
        names = component_names(recipe.rewards) if recipe.rewards else []
        weight = environment_weight(recipe)
    except UsageError:
        return None
    return names if weight is None else [*names, ENVIRONMENT]


def problems(recipe: SFTRecipe | RLRecipe) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """What is wrong with [environment], as recipe.checks says it."""
    if recipe.environment is None:
        return
    try:
        build(recipe.environment)
    except UsageError as error:
        yield ("environment",), str(error)
        return
    if (components(recipe) or []).count(ENVIRONMENT) > 1:
        yield ("rewards",), f"{ENVIRONMENT!r} is what the environment gives: `name` it otherwise"
    wanted = recipe.data.chat_template_kwargs
    sets = [("data", n, one.chat_template_kwargs) for n, one in enumerate(recipe.data.sets)]
    sets += [("eval", n, one.chat_template_kwargs) for n, one in enumerate(recipe.eval.sets)]
    for section, number, given in sets:
        if given != wanted:
            yield (
                (section, "sets", number, "chat_template_kwargs"),
                "with an [environment] all sets have those of [data]: it answers through them too",
            )
