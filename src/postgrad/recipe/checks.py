"""Checks across the sections of a recipe: each yields (place in the recipe, what is wrong).

Whatever can be wrong before a row or a weight is read is reported here, not after half an hour
(NeMo RL#2783).
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

from postgrad.algorithms.base import Algorithm, RolloutAlgorithm
from postgrad.core.errors import UsageError
from postgrad.core.geometry import derive
from postgrad.data.rows import dataset_name
from postgrad.data.settings import NO_ENVIRONMENT, WHICH_ROWS, DataSettings, RowSettings
from postgrad.models.settings import ROUTER, ModelSettings
from postgrad.recipe.arrangement import rank_problems
from postgrad.recipe.hub_sources import revision_problems
from postgrad.recipe.lines import KeyPath, RecipeProblem
from postgrad.recipe.placement import placement_problems
from postgrad.recipe.settings import (
    AnsweringSections,
    ComparingSections,
    ReferenceSettings,
    Sections,
)
from postgrad.rewards.registry import compares, highest_score

LOWER_IS_BETTER = ("/loss", "/perplexity")  # ends of the names of such metrics


def as_json(values: Mapping[str, Any]) -> str:
    """Values of a TOML file as JSON text; dates become strings."""
    return json.dumps(values, default=str)


def common(recipe: Sections, job: str) -> Iterator[RecipeProblem]:
    """Problems that every job can have."""
    yield from _batch(recipe)
    yield from _model(recipe)
    yield from _eos_token(recipe)
    yield from rank_problems(recipe)
    yield from placement_problems(recipe, job)
    yield from _data(recipe)
    yield from _eval_fraction(recipe)
    yield from revision_problems(recipe)
    yield from _evaluation(recipe)
    for place in _not_finite(recipe.model_dump()):
        yield place, "infinity and NaN are no values for a recipe"


def comparing(recipe: ComparingSections) -> Iterator[RecipeProblem]:
    """Problems of jobs on pairs."""
    yield from token_budget(recipe, "a pair of sequences")
    yield from evaluation_lengths(recipe)


def token_budget(recipe: Sections, contents: str) -> Iterator[RecipeProblem]:
    """A stated budget too small for the longest sample. contents: of one forward, in words."""
    budget, needed = recipe.batch.stated_tokens, recipe.min_micro_tokens
    if budget is not None and budget < needed:
        yield (
            ("batch", "micro_train_tokens"),
            f"{budget} tokens cannot hold {contents} of data.max_len = {recipe.data.max_len}: "
            f"at least {needed}",
        )


def _evaluation(recipe: Sections) -> Iterator[RecipeProblem]:
    """[eval] without data or beyond the model's positions; a best metric that it does not give."""
    settings = recipe.eval
    yield from _best_metric(recipe)
    if not settings.sets and (settings.every or settings.at_start):
        yield ("eval",), "there is nothing to evaluate on: give path, or [[eval.sets]]"
    init = recipe.model.init if recipe.model.path is None else None
    for number, eval_set in enumerate(settings.sets):
        longest = eval_set.max_len
        if init is not None and recipe.data.max_len < longest > init.max_position_embeddings:
            yield (
                ("eval", "sets", number, "max_len"),
                f"{longest} tokens are more than the model's positions: "
                f"max_position_embeddings = {init.max_position_embeddings}",
            )


def _best_metric(recipe: Sections) -> Iterator[RecipeProblem]:
    """A best metric that no evaluation of the run gives, or that is taken the wrong way round; an
    early stop without one.
    """
    place, times = ("checkpoint", "best_metric"), recipe.eval
    metric, mode = recipe.checkpoint.best_metric, recipe.checkpoint.best_mode
    if metric is None:
        if recipe.checkpoint.early_stop:
            yield (
                ("checkpoint", "early_stop"),
                "needs to know what better is: give checkpoint.best_metric, such as "
                '"eval/accuracy"',
            )
        return
    if not metric.startswith("eval/"):
        yield (
            place,
            f'{metric!r} is no metric of an evaluation: their names begin with "eval/", as '
            '"eval/accuracy" does',
        )
    elif not times.sets:
        yield place, f"{metric!r} needs an evaluation: give [eval] a path"
    elif not (times.every or times.at_start or times.at_end):
        yield place, f"{metric!r} is never measured: give eval.every, or set eval.at_end = true"
    elif (choices := _measured(recipe, metric)) is not None:
        yield (
            place,
            f"{metric!r} is not what this recipe's evaluations measure: {', '.join(choices)}",
        )
    if metric.startswith("eval/") and metric.endswith(LOWER_IS_BETTER) and mode == "max":
        yield (
            ("checkpoint", "best_mode"),
            f'"max" would keep the worst {metric}: lower is better, say best_mode = "min"',
        )


def _measured(recipe: Sections, metric: str) -> list[str] | None:
    """The names of what evaluations measure, where `metric` cannot be among them; None where it is,
    or where rows and environments decide whether it is.
    """
    names = _metric_names(recipe)
    if not names:
        return None
    of_answers = list[str]()
    open_ended = ["rows/", *(f"{name}/" for name in names if name != "reward")]
    if isinstance(recipe, AnsweringSections) and recipe.evaluates_answers:
        at = (1, *recipe.eval.pass_at, *recipe.eval.maj_at)
        of_answers = ["dead_end_fraction", *(f"left_out@{k}" for k in at)]
        open_ended.append("environment/")
    measured: list[str] = []
    for eval_set in recipe.eval.sets:
        prefix = "eval/" if eval_set.name is None else f"eval/{eval_set.name}/"
        name = metric.removeprefix(prefix) if metric.startswith(prefix) else ""
        if name in (*names, *of_answers) or name.startswith(tuple(open_ended)):
            return None
        measured += [prefix + name for name in names]
    return measured


def _metric_names(recipe: Sections) -> list[str] | None:
    """What an evaluation measures of every set (evaluation/results.py), but for what depends on
    rows; None or nothing where [[rewards]] have an error or are missing, which is told elsewhere.
    """
    if not isinstance(recipe, AnsweringSections):
        if recipe.row_kind == "steps":
            return ["accuracy", "loss", "step_accuracy", "erroneous", "correct", "f1"]
        scores = ("chosen", "rejected", "mean", "std")
        return ["accuracy", "margin", "calibration_error", *(f"reward_{name}" for name in scores)]
    names = list[str]()
    if recipe.reward_components is None:
        return None
    if recipe.evaluates_answers:
        settings = recipe.eval
        names += ["accuracy", *(f"pass@{k}" for k in settings.pass_at if k > 1)]
        names += [f"maj@{k}" for k in settings.maj_at]
        names += ["greedy_accuracy"] if settings.greedy else []
        names += ["reward", "response_length", "truncated_fraction"]
        names += [f"reward/{name}" for name in recipe.reward_components]
    return names + (["loss", "perplexity"] if recipe.measures_loss else [])


def evaluation_lengths(recipe: Sections) -> Iterator[RecipeProblem]:
    """Held-out sequences too long for the learner, which computes each of them in one forward."""
    for number, eval_set in enumerate(recipe.eval.sets):
        if eval_set.max_len > recipe.data.max_len:
            yield (
                ("eval", "sets", number, "max_len"),
                f"{eval_set.max_len} tokens are more than data.max_len = {recipe.data.max_len}, "
                "for which the learner is sized: raise that",
            )


def _following(reference: ReferenceSettings) -> KeyPath:
    """The key that lets a reference follow the policy."""
    return "reference", "refresh_steps" if reference.refresh_steps else "ema_decay"


def moving_reference(
    reference: ReferenceSettings, policy: ModelSettings, algorithm: Algorithm
) -> Iterator[RecipeProblem]:
    """A reference that follows the policy and is not used, or is not the same model."""
    if not reference.moves:
        return
    if policy.lora is not None:
        yield (
            _following(reference),
            "a reference that follows the policy needs all weights to train, and [model.lora] "
            "trains an adapter: leave one of them out",
        )
    if not algorithm.needs().loads_reference:
        unread = "nothing reads it: "
        if isinstance(algorithm, RolloutAlgorithm):
            yield ("reference",), f"{unread}give algorithm.kl_coef above 0"
        else:
            yield _following(reference), f"{unread}this loss has no reference, leave it out"
    path = reference.model.path
    if path is not None and path != policy.path:
        yield (
            ("reference", "model", "path"),
            f"{path!r} cannot follow the policy, which is {policy.path!r}: leave it out",
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
    if not (recipe.evaluates_answers and comparing and recipe.eval.n_samples == 1):
        return
    for place in {*judges(recipe)} & {*comparing}:
        name = recipe.rewards[place].name or recipe.rewards[place].type
        yield (
            ("eval", "component" if recipe.eval.component else "n_samples"),
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
    for place in judges(recipe):
        if place in able:
            continue
        others = ", ".join(repr(names[n]) for n in able) or "another of [[rewards]]"
        yield (
            ("eval", "component" if settings.component else "correct_at"),
            f"{names[place]!r} would judge which answers are right, and its best score, "
            f"{best[place]:g}, is below correct_at = {settings.correct_at:g}: let eval.component "
            f"name {others}, or lower eval.correct_at",
        )


def judges(recipe: AnsweringSections) -> list[int]:
    """The places of the rewards that say which answers of an evaluation are right: the one that
    eval.component names, else the first for each dataset.
    """
    places: set[int] = set()
    for dataset in {dataset_name(eval_set.data) for eval_set in recipe.eval.sets}:
        for place, reward in enumerate(recipe.rewards):
            name = reward.name or reward.type.rpartition(":")[2]
            wanted = recipe.eval.component in (None, name)
            if wanted and dataset in (reward.datasets or (dataset,)):
                places.add(place)
                break
    return sorted(places)


def _batch(recipe: Sections) -> Iterator[RecipeProblem]:
    """Batch numbers that contradict each other."""
    _, problems = derive(recipe.batch, recipe.length(), recipe.parallel)
    for key, text in problems:
        yield tuple(key.split(".")), text


def _data(recipe: Sections) -> Iterator[RecipeProblem]:
    """Training data without a path, or longer than what is sized for it."""
    data = recipe.data
    if not data.sets and not data.path:
        yield ("data", "path"), "nothing to train on: give path, or several [[data.sets]]"
    for number, dataset in enumerate(data.sets):
        if not dataset.path:
            yield ("data", "sets", number, "path"), "a set needs a path, here or in [data]"
        if dataset.max_len > data.max_len:
            yield (
                ("data", "sets", number, "max_len"),
                f"{dataset.max_len} tokens are more than data.max_len = {data.max_len}, for which "
                "everything is sized: raise that",
            )


def _eval_fraction(recipe: Sections) -> Iterator[RecipeProblem]:
    """A part of the training data that no evaluation reads, or that is read otherwise."""
    sources, sets = recipe.data.sources, recipe.eval.sets
    parts = [eval_set.data for eval_set in sets if eval_set.eval_fraction]
    for number, source in enumerate(sources):
        if source.eval_fraction and not any(same_rows(source, part) for part in parts):
            yield (
                (("data", "sets", number) if recipe.data.sets else ("data",)) + ("eval_fraction",),
                "holds out rows to evaluate on, but [eval] names rows of its own: delete path, "
                "split and sets from [eval] to evaluate on the held-out rows, or delete this key",
            )
    for number, eval_set in enumerate(sets):
        if eval_set.eval_fraction and not any(same_rows(eval_set.data, s) for s in sources):
            yield (
                ("eval", "sets", number, "eval_fraction"),
                "is a key of [data]: the part is of the rows that are trained on",
            )


def same_rows(a: RowSettings, b: RowSettings) -> bool:
    """Whether two settings read the same rows and hold out the same part of them."""
    return all(getattr(a, key) == getattr(b, key) for key in (*WHICH_ROWS, "eval_fraction"))


def _model(recipe: Sections) -> Iterator[RecipeProblem]:
    """Frozen weights that would have to train, no weights, or too few positions."""
    for place, trained in recipe.trained_models.items():
        if trained.quantize != "none" and trained.lora is None:
            yield (
                (*place, "quantize"),
                f'"{trained.quantize}" weights are frozen, so there has to be an adapter that '
                f"trains: give [{'.'.join(map(str, place))}.lora]",
            )
            break  # what a critic leaves out is the policy's
    for place, trained in recipe.trained_models.items():
        if trained.lora is not None and ROUTER in {*trained.freeze} & {*trained.lora.targets}:
            yield (
                (*place, "freeze"),
                f'"{ROUTER}" beside "{ROUTER}" in model.lora.targets, whose adapter would change '
                "routers: leave one of them out",
            )
            break
    for place, trained in recipe.trained_models.items():
        if trained.compile is True and trained.quantize != "none":
            yield (
                (*place, "compile"),
                f'true beside quantize = "{trained.quantize}", whose products torch.compile does '
                'not see through: use "auto" or false',
            )
            break
    model = recipe.model
    if model.path is not None:
        return
    if model.init is None:
        yield ("model",), "no weights are named: give path, or [model.init] for a fresh model"
    elif recipe.data.max_len > model.init.max_position_embeddings:
        yield (
            ("data", "max_len"),
            f"{recipe.data.max_len} tokens are more than the model's positions: "
            f"max_position_embeddings = {model.init.max_position_embeddings}",
        )


def _eos_token(recipe: Sections) -> Iterator[RecipeProblem]:
    """Ends of answers of a model that writes none."""
    policy = recipe.model.eos_token if recipe.trained_role == "policy" else ()
    for place, model in recipe.model_tables.items():
        if model.eos_token not in ((), policy):  # what a critic leaves out is the policy's
            yield (*place, "eos_token"), "this model writes no answers: leave it out"


def _not_finite(value: Any, place: KeyPath = ()) -> Iterator[KeyPath]:
    """Places of infinity and NaN, which tables with free keys can hold: of tasks, templates,
    verifiers.
    """
    if isinstance(value, Mapping):
        for key, inner in cast(Mapping[str, Any], value).items():
            yield from _not_finite(inner, (*place, key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(cast(list[Any], value)):
            yield from _not_finite(inner, (*place, number))
    elif isinstance(value, float) and not math.isfinite(value):
        yield place


def played_sets(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
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
