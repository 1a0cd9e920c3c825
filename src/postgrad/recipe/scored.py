"""Checks of what scores answers: [[rewards]] and [environment]. Each yields (place in the recipe,
what is wrong).
"""

from collections.abc import Iterator, Sequence

from postgrad.algorithms.base import RolloutAlgorithm
from postgrad.core.errors import SettingsError, UsageError
from postgrad.core.text import nearest, require_module
from postgrad.data.rows import dataset_name
from postgrad.data.settings import NO_ENVIRONMENT, DataSettings
from postgrad.recipe.eval_settings import EvalSettings
from postgrad.recipe.lines import KeyPath, RecipeProblem
from postgrad.recipe.settings import AnsweringSections
from postgrad.rewards.learned import REWARD_MODELS
from postgrad.rewards.mixing import ENVIRONMENT
from postgrad.rewards.registry import build as build_verifier
from postgrad.rewards.registry import compares, component_names, for_rollout, highest_score
from postgrad.rewards.settings import RewardSettings
from postgrad.rollout.environments.base import build as build_environment

SCALES = (
    "reward_model",
    "remote",
    "process_reward",
)  # models, whose scores have scales of their own
_ONE_TEMPLATE = "with an [environment] all sets have those of [data]: it answers through them too"


def reward_problems(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """Errors in [[rewards]] and [environment], of any job whose policy answers."""
    yield from _rewards(recipe)
    yield from _reward_model(recipe)
    yield from _played_sets(recipe)
    if recipe.environment is None:
        return
    for place, environment in enumerate(recipe.environment.sets):
        try:
            build_environment(environment)
        except UsageError as error:
            yield from _at_its_keys(("environment", "sets", place), error)
    names = recipe.reward_components or []
    if names.count(ENVIRONMENT) > 1:
        place = names.index(ENVIRONMENT)
        key = "name" if recipe.rewards[place].name else "type"
        why = f"the rewards of [environment] are called {ENVIRONMENT!r}: give this another `name`"
        yield ("rewards", place, key), why
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
        yield from _at_its_keys(("rewards",), error)
    yield from _routes(recipe)
    filled = for_rollout(recipe.rewards, recipe.rollout.max_new_tokens)
    for place, reward in enumerate(filled):
        try:
            if ":" in reward.type:  # a user's code is imported in the workers only
                require_module(reward.type, "verifier")
            else:
                build_verifier(reward)
        except SettingsError as error:
            yield from _at_its_keys(("rewards", place), error)
        except UsageError as error:
            yield ("rewards", place, "type"), str(error)


def _at_its_keys(table: KeyPath, error: UsageError) -> Iterator[RecipeProblem]:
    """What is wrong with a table, each at the key that it is about where the error says so."""
    if not isinstance(error, SettingsError):
        yield table, str(error)
        return
    for place, text in error.problems:
        yield (*table, *place), text


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


def nothing_observed(
    recipe: AnsweringSections, algorithm: RolloutAlgorithm
) -> Iterator[RecipeProblem]:
    """Replies to predict, where nothing replies."""
    if getattr(algorithm, "observation_coef", 0.0) and recipe.environment is None:
        yield (
            ("algorithm", "observation_coef"),
            "weighs the replies of an environment, and there is no [environment]: leave it out",
        )


def all_weightless(
    recipe: AnsweringSections, algorithm: RolloutAlgorithm
) -> Iterator[RecipeProblem]:
    """Rewards none of which can make the total of a sample other than 0: nothing would be learned.

    A gate gives its gate_value, whatever the weights are. A teacher teaches without rewards, and so
    do an environment's replies.
    """
    needs, names = algorithm.needs(), recipe.reward_components
    # An algorithm of the user's own may weigh the components as it likes.
    unknown = needs.components and not hasattr(algorithm, "component_weights")
    if not names or needs.teacher or unknown or getattr(algorithm, "observation_coef", 0.0):
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


def scores(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """Rewards whose scores say nothing: of a lone sample, or of which answers are right."""
    yield from _lone_samples(recipe)
    yield from _out_of_reach(recipe)


def _lone_samples(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """Rewards that compare the samples of a prompt, where each prompt has only one."""
    comparing = [n for n, reward in enumerate(recipe.rewards) if compares(reward)]
    if recipe.trains_on_rollouts and recipe.answers_per_prompt == 1:
        for place in comparing:
            yield (
                ("rewards", place, "type"),
                f'"{recipe.rewards[place].type}" compares the samples of a prompt, and gives 0 '
                "where there is one: raise batch.n_samples_per_prompt to at least 2, or leave it "
                "out",
            )
    single = [n for n, sampling in enumerate(recipe.eval.samplings) if sampling.n_samples == 1]
    if not (recipe.evaluates_answers and comparing and single):
        return
    stated = recipe.eval.sets[single[0]].n_samples is not None
    of_set = ("eval", "sets", single[0], "n_samples") if stated else ("eval", "n_samples")
    for place in {*judges(recipe.eval, recipe.rewards)} & {*comparing}:
        name = recipe.rewards[place].name or recipe.rewards[place].type
        yield (
            ("eval", "component") if recipe.eval.component else of_set,
            f"{name!r} would judge which answers are right; it compares the samples of a prompt, "
            "and gives 0 where there is one: let eval.component name another of [[rewards]], or "
            "raise eval.n_samples",
        )


def _out_of_reach(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """Components that judge answers of an evaluation, and cannot call any right. Where no reward
    can and nothing is said of it, the evaluation is for their means.
    """
    settings, names = recipe.eval, recipe.reward_components
    if not names:
        return
    best = [highest_score(reward) for reward in recipe.rewards]
    able = [n for n, most in enumerate(best) if most is None or most >= settings.correct_at]
    if not able and settings.component is None and settings.correct_at == 1.0:
        return
    for place in judges(recipe.eval, recipe.rewards):
        if place in able:
            continue
        others = ", ".join(repr(names[n]) for n in able) or "another of [[rewards]]"
        yield (
            ("eval", "component" if settings.component else "correct_at"),
            f"{names[place]!r} would judge which answers are right, and its best score, "
            f"{best[place]:g}, is below correct_at = {settings.correct_at:g}: let eval.component "
            f"name {others}, or lower eval.correct_at",
        )


def judges(settings: EvalSettings, rewards: Sequence[RewardSettings]) -> list[int]:
    """The places of the rewards that say which answers of an evaluation are right: the one that
    eval.component names, else the first for each dataset.
    """
    places: set[int] = set()
    for dataset in {dataset_name(eval_set.data) for eval_set in settings.sets}:
        for place, reward in enumerate(rewards):
            name = reward.name or reward.type.rpartition(":")[2]
            wanted = settings.component in (None, name)
            if wanted and dataset in (reward.datasets or (dataset,)):
                places.add(place)
                break
    return sorted(places)


def rates_mean_nothing(settings: EvalSettings, rewards: Sequence[RewardSettings]) -> bool:
    """Whether nobody says which answers of an evaluation are right: what judges them has a scale of
    its own, or cannot reach correct_at, and the recipe names neither a component nor a limit. Then
    people are shown means, and no accuracy.
    """
    if settings.component is not None or settings.correct_at != 1.0:
        return False
    judging = [rewards[place] for place in judges(settings, rewards)]
    best = [None if reward.type in SCALES else highest_score(reward) for reward in judging]
    return bool(judging) and all(
        reward.type in SCALES or (most is not None and most < settings.correct_at)
        for reward, most in zip(judging, best, strict=True)
    )


def _played_sets(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """Datasets of which it is not clear what environment plays them."""
    places: dict[KeyPath, DataSettings] = {("data",): recipe.data}
    if recipe.data.sets:
        places = {("data", "sets", n): dataset for n, dataset in enumerate(recipe.data.sets)}
    places |= {("eval", "sets", n): held.data for n, held in enumerate(recipe.eval.sets)}
    for place, dataset in places.items():
        try:
            if recipe.environment is not None:
                recipe.environment.plays(dataset.environment)
            elif dataset.environment not in (None, NO_ENVIRONMENT):
                raise UsageError(f"{dataset.environment!r}: the recipe has no [environment]")
        except UsageError as error:
            yield (*place, "environment"), str(error)
