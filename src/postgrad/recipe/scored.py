"""Checks of what scores answers: [[rewards]] and [environment]. Each yields (place in the recipe,
what is wrong).
"""

from collections.abc import Iterator

from postgrad.algorithms.base import RolloutAlgorithm
from postgrad.core.errors import UsageError
from postgrad.core.text import nearest, require_module
from postgrad.data.rows import dataset_name
from postgrad.recipe.checks import played_sets
from postgrad.recipe.lines import KeyPath, RecipeProblem
from postgrad.recipe.settings import AnsweringSections
from postgrad.rewards.learned import REWARD_MODELS
from postgrad.rewards.mixing import ENVIRONMENT
from postgrad.rewards.registry import build as build_verifier
from postgrad.rewards.registry import component_names, for_rollout
from postgrad.rollout.environments.base import build as build_environment

_ONE_TEMPLATE = "with an [environment] all sets have those of [data]: it answers through them too"


def reward_problems(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """Errors in [[rewards]] and [environment], of any job whose policy answers."""
    yield from _rewards(recipe)
    yield from _reward_model(recipe)
    yield from played_sets(recipe)
    if recipe.environment is None:
        return
    for place, environment in enumerate(recipe.environment.sets):
        try:
            build_environment(environment)
        except UsageError as error:
            yield ("environment", "sets", place), str(error)
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
        try:
            if ":" in reward.type:  # a user's code is imported in the workers only
                require_module(reward.type, "verifier")
            else:
                build_verifier(reward)
        except UsageError as error:
            yield ("rewards", place), str(error)


def _reward_model(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """[[rewards]] that ask a reward model which the recipe does not name."""
    model = recipe.model_tables.get(("reward_model", "model"))
    for place, reward in enumerate(recipe.rewards):
        if reward.type not in REWARD_MODELS:
            continue
        by_step = reward.verifier_settings.get("credit") == "step"
        if by_step and any(other.gate or other.multiply for other in recipe.rewards):
            yield (
                ("rewards", place, "credit"),
                '"step" gives parts of a sum to steps, and with gate or multiply the reward is no '
                "sum: leave them out",
            )
        if model is None:
            yield (
                ("rewards", place, "type"),
                f'"{reward.type}" is the reward model of an RL job; leave it out, or serve the '
                'model and ask it with type = "remote"',
            )
        elif model.path is None:
            yield (
                ("reward_model", "model", "path"),
                f'[[rewards]] of type "{reward.type}" ask this model: give its directory or hub id',
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


def components_apart(
    recipe: AnsweringSections, algorithm: RolloutAlgorithm
) -> Iterator[RecipeProblem]:
    """Rewards that are no addends, or have no weight, where the algorithm reads each apart."""
    weights, names = getattr(algorithm, "component_weights", None), recipe.reward_components
    if weights is not None and names and {*weights} != {*names}:
        yield (
            ("algorithm", "component_weights"),
            f"has weights of {', '.join(weights) or 'none'}, and the rewards are "
            f"{', '.join(names)}: give each its weight here, or leave this out for theirs",
        )
    for number, reward in enumerate(recipe.rewards if algorithm.needs().components else ()):
        for key in ("gate", "multiply"):
            if getattr(reward, key):
                yield (
                    ("rewards", number, key),
                    "rules over the other rewards, and the algorithm reads each of them apart: "
                    "leave it out",
                )
        if reward.on_failure == "score":
            yield (
                ("rewards", number, "on_failure"),
                '"score" gives the total a score, and the algorithm reads each reward apart: take '
                '"drop_sample", "drop_group" or "stop_run"',
            )


def all_weightless(
    recipe: AnsweringSections, algorithm: RolloutAlgorithm
) -> Iterator[RecipeProblem]:
    """Rewards none of which can make the total of a sample other than 0: nothing would be learned.

    A gate gives its gate_value, whatever the weights are. A teacher teaches without rewards.
    """
    needs, names = algorithm.needs(), recipe.reward_components
    # An algorithm of the user's own may weigh the components as it likes.
    unknown = needs.components and not hasattr(algorithm, "component_weights")
    if not names or needs.teacher or unknown:
        return
    stated = getattr(algorithm, "component_weights", None)
    factors = [name for name, reward in zip(names, recipe.rewards, strict=False) if reward.multiply]
    weights = recipe.reward_weights if stated is None else stated
    weighed = any(weight for name, weight in weights.items() if name not in factors)
    if weighed or any(reward.gate_value for reward in recipe.rewards):
        return
    place: KeyPath = ("rewards",) if recipe.rewards else ("environment", "weight")
    if stated is not None:
        place = ("algorithm", "component_weights")
    yield (
        place,
        f"all weights are 0 ({', '.join(names)}): every sample would have the reward 0, and "
        "nothing is learned; give one of them a weight (0 is for rewards that are only logged, "
        "beside others)",
    )
