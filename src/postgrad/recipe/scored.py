"""Checks of what scores a sample: verifiers, a reward model, the environment. Each yields (place,
what is wrong).
"""

from collections.abc import Iterator

from postgrad.core.errors import UsageError
from postgrad.core.names import nearest
from postgrad.data.rows import dataset_name
from postgrad.recipe.lines import RecipeProblem
from postgrad.recipe.settings import AnsweringSections
from postgrad.rewards.learned import REWARD_MODEL
from postgrad.rewards.mixing import ENVIRONMENT
from postgrad.rewards.registry import build as build_verifier
from postgrad.rewards.registry import component_names, for_rollout
from postgrad.rollout.environments.base import build as build_environment

_ONE_TEMPLATE = "with an [environment] all sets have those of [data]: it answers through them too"


def reward_problems(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """Errors in [[rewards]] and [environment]."""
    yield from _rewards(recipe)
    yield from _reward_model(recipe)
    if recipe.environment is None:
        return
    try:
        build_environment(recipe.environment)
    except UsageError as error:
        yield ("environment",), str(error)
        return
    if (recipe.reward_components or []).count(ENVIRONMENT) > 1:
        yield ("rewards",), f"{ENVIRONMENT!r} is what the environment gives: `name` it otherwise"
    for key in ("chat_template", "chat_template_kwargs"):
        for section, sets in (("data", recipe.data.sets), ("eval", recipe.eval.sets)):
            for number, dataset in enumerate(sets):
                if getattr(dataset, key) != getattr(recipe.data, key):
                    yield (section, "sets", number, key), _ONE_TEMPLATE


def _rewards(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    if not recipe.rewards:
        return
    try:
        component_names(recipe.rewards)
    except UsageError as error:
        yield ("rewards",), str(error)
    yield from _routes(recipe)
    filled = for_rollout(recipe.rewards, recipe.rollout.max_new_tokens)
    for place, reward in enumerate(filled):
        if ":" in reward.type:
            continue  # a user's code is imported in the workers only
        try:
            build_verifier(reward)
        except UsageError as error:
            yield ("rewards", place), str(error)


def _reward_model(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """[[rewards]] that ask a reward model which the recipe does not name."""
    model = recipe.model_tables.get(("reward_model", "model"))
    for place, reward in enumerate(recipe.rewards):
        if reward.type != REWARD_MODEL:
            continue
        if model is None:
            yield (
                ("rewards", place, "type"),
                f'"{REWARD_MODEL}" is the reward model of an RL job; leave it out, or serve the '
                'model and ask it with type = "remote"',
            )
        elif model.path is None:
            yield (
                ("reward_model", "model", "path"),
                f'[[rewards]] of type "{REWARD_MODEL}" ask this model: give its directory or hub '
                "id",
            )


def _routes(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """Rewards for a dataset that the recipe does not read: nothing would ever be scored by them."""
    datasets = [*recipe.data.sources, *(eval_set.data for eval_set in recipe.eval.sets)]
    names = sorted({dataset_name(dataset) for dataset in datasets})
    for place, reward in enumerate(recipe.rewards):
        for name in reward.datasets or ():
            if name not in names:
                close = nearest(name, names)
                hint = f"did you mean {close!r}?" if close else f"known: {', '.join(names)}"
                yield ("rewards", place, "datasets"), f"no dataset is called {name!r}; {hint}"
