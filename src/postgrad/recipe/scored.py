"""What scores a sample, by name: the verifiers of [[rewards]], and the environment itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from postgrad.core.errors import UsageError
from postgrad.core.names import nearest
from postgrad.data.rows import dataset_name
from postgrad.rewards import registry as verifiers
from postgrad.rewards.learned import REWARD_MODEL
from postgrad.rewards.mixing import ENVIRONMENT
from postgrad.rollout.environments import registry as environments

if TYPE_CHECKING:
    from postgrad.recipe.recipe import Answering, Recipe

_ONE_TEMPLATE = "with an [environment] all sets have those of [data]: it answers through them too"


def environment_weight(recipe: Answering) -> float | None:
    """The weight of the environment's rewards; None where there are none."""
    settings = recipe.environment
    return (
        settings.weight
        if settings is not None and environments.build(settings).gives_rewards
        else None
    )


def components(recipe: Answering) -> list[str] | None:
    """The names of a sample's rewards, the environment's last; None where they cannot be told."""
    try:
        names = verifiers.component_names(recipe.rewards) if recipe.rewards else []
        weight = environment_weight(recipe)
    except UsageError:
        return None
    return names if weight is None else [*names, ENVIRONMENT]


def samples_answers(recipe: Recipe) -> bool:
    """True where the policy answers questions in this run: to learn, or to be evaluated. An SFT job
    without anything that scores answers writes none.
    """
    if recipe.job == "rl":
        return True
    return recipe.job == "sft" and bool(recipe.eval.sets) and components(recipe) != []


def measures_loss(recipe: Recipe) -> bool:
    """True where held-out conversations are evaluated by their loss."""
    if recipe.job != "sft" or not recipe.eval.sets:
        return False
    return recipe.eval.loss or not samples_answers(recipe)


def problems(recipe: Answering) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """What is wrong with [[rewards]] and [environment], as recipe.checks says it."""
    yield from _rewards(recipe)
    yield from _learned(recipe)
    if recipe.environment is None:
        return
    try:
        environments.build(recipe.environment)
    except UsageError as error:
        yield ("environment",), str(error)
        return
    if (components(recipe) or []).count(ENVIRONMENT) > 1:
        yield ("rewards",), f"{ENVIRONMENT!r} is what the environment gives: `name` it otherwise"
    for key in ("chat_template", "chat_template_kwargs"):
        wanted = getattr(recipe.data, key)
        sets = [("data", n, getattr(one, key)) for n, one in enumerate(recipe.data.sets)]
        sets += [("eval", n, getattr(one, key)) for n, one in enumerate(recipe.eval.sets)]
        for section, number, given in sets:
            if given != wanted:
                yield (section, "sets", number, key), _ONE_TEMPLATE


def _rewards(recipe: Answering) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if not recipe.rewards:
        return
    try:
        verifiers.component_names(recipe.rewards)
    except UsageError as error:
        yield ("rewards",), str(error)
    yield from _routes(recipe)
    filled = verifiers.for_rollout(recipe.rewards, recipe.rollout.max_new_tokens)
    for place, reward in enumerate(filled):
        if ":" in reward.type:
            continue  # a user's code is imported in the workers only
        try:
            verifiers.build(reward)
        except UsageError as error:
            yield ("rewards", place), str(error)


def _learned(recipe: Answering) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Who asks a reward model has to have one: known here, not after the rows are read."""
    for place, reward in enumerate(recipe.rewards):
        if reward.type != REWARD_MODEL:
            continue
        if recipe.job != "rl":
            yield (
                ("rewards", place, "type"),
                f'"{REWARD_MODEL}" is the reward model of an RL job; leave it out, or serve the '
                'model and ask it with type = "remote"',
            )
        elif recipe.reward_model.model.path is None:
            yield (
                ("reward_model", "model", "path"),
                f'[[rewards]] of type "{REWARD_MODEL}" ask this model: give its directory or hub '
                "id",
            )


def _routes(recipe: Answering) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """A reward for a dataset that nobody reads would never be asked, in silence."""
    read = [*recipe.data.sources, *(one.data for one in recipe.eval.sets)]
    known = sorted({dataset_name(one) for one in read})
    for place, reward in enumerate(recipe.rewards):
        for name in reward.datasets or ():
            if name not in known:
                close = nearest(name, known)
                hint = f"did you mean {close!r}?" if close else f"known: {', '.join(known)}"
                yield ("rewards", place, "datasets"), f"no dataset is called {name!r}; {hint}"
