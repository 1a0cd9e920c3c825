"""Checks across the sections of a recipe: each yields (place in the recipe, what is wrong).

Everything that can be known before a row or a weight is read is said here, not after half an hour
(NeMo RL#2783).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from postgrad.algorithms.behaviour_correction import BehaviourCorrection
from postgrad.core.geometry import derive
from postgrad.recipe import engines, placed, ranks, scored, sources
from postgrad.rollout.settings import TOTAL

if TYPE_CHECKING:
    from postgrad.learner.settings import LearnerSettings
    from postgrad.recipe.recipe import Answering, Comparing, Recipe, RLRecipe
    from postgrad.recipe.settings import ReferenceSettings
    from postgrad.rollout.settings import RolloutSettings

Problem = tuple[tuple[str | int, ...], str]
LOWER_IS_BETTER = ("/loss", "/perplexity")  # ends of the names of such metrics


def as_json(values: Mapping[str, Any]) -> str:
    """Values of a TOML file as JSON text; dates become strings."""
    return json.dumps(values, default=str)


def common(recipe: Recipe) -> Iterator[Problem]:
    """What holds for every job."""
    yield from _batch(recipe)
    yield from _model(recipe)
    yield from ranks.problems(recipe)
    yield from placed.problems(recipe)
    yield from _data(recipe)
    yield from sources.problems(recipe)
    yield from _evaluated(recipe)
    for place in _not_finite(recipe.model_dump()):
        yield place, "infinity and NaN are no values for a recipe"


def comparisons(recipe: Comparing) -> Iterator[Problem]:
    """What jobs on pairs need."""
    yield from _budget(recipe, whole=2, what="a pair of sequences")
    yield from _sized(recipe)
    reference = getattr(recipe, "reference", None)
    if reference is not None and reference.moves:
        yield (
            _following(reference),
            "the reference's logprobs are computed once, before the first step: only that of an RL "
            "job can follow the policy",
        )


def _budget(recipe: Recipe, whole: int, what: str) -> Iterator[Problem]:
    """whole: how many sequences have to lie in one forward."""
    budget, needed = recipe.batch.stated_tokens, whole * recipe.data.max_len
    if budget is not None and budget < needed:
        yield (
            ("batch", "micro_train_tokens"),
            f"{budget} tokens cannot hold {what} of data.max_len = {recipe.data.max_len}: "
            f"at least {needed}",
        )


def _evaluated(recipe: Recipe) -> Iterator[Problem]:
    """What any evaluation needs."""
    settings = recipe.eval
    if recipe.checkpoint.early_stop and recipe.checkpoint.best_metric is None:
        yield (
            ("checkpoint", "early_stop"),
            'needs to know what better is: give checkpoint.best_metric, such as "eval/accuracy"',
        )
    metric, mode = recipe.checkpoint.best_metric or "", recipe.checkpoint.best_mode
    if metric.startswith("eval/") and metric.endswith(LOWER_IS_BETTER) and mode == "max":
        yield (
            ("checkpoint", "best_mode"),
            f'"max" would keep the worst {metric}: lower is better, say best_mode = "min"',
        )
    if not settings.sets:
        if settings.every or settings.at_start:
            yield ("eval",), "there is nothing to evaluate on: give path, or [[eval.sets]]"
        if (recipe.checkpoint.best_metric or "").startswith("eval/"):
            yield (
                ("checkpoint", "best_metric"),
                f"{recipe.checkpoint.best_metric!r} needs an evaluation: give [eval] a path",
            )
        return
    init = recipe.model.init if recipe.model.path is None else None
    for place, one in enumerate(settings.sets):
        if init is not None and recipe.data.max_len < one.max_len > init.max_position_embeddings:
            yield (
                ("eval", "sets", place, "max_len"),
                f"{one.max_len} tokens are more than the model's positions: "
                f"max_position_embeddings = {init.max_position_embeddings}",
            )


def answering(recipe: Answering) -> Iterator[Problem]:
    """What jobs need whose policy answers questions."""
    yield from _budget(recipe, whole=1, what="a sequence")
    yield from scored.problems(recipe)
    yield from engines.problems(recipe)
    settings = recipe.eval
    if not settings.sets:
        return
    yield from _held_out(recipe)
    if not scored.samples_answers(recipe):
        return
    names = scored.components(recipe)
    new = settings.max_new_tokens or recipe.rollout.max_new_tokens
    for place, one in enumerate(settings.sets):
        if new >= one.max_len:
            yield (
                ("eval", "sets", place, "max_len"),
                f"max_new_tokens = {new} leaves no room for a prompt in {one.max_len} tokens",
            )
    if settings.component is not None and names and settings.component not in names:
        yield (
            ("eval", "component"),
            f"no reward is called {settings.component!r}; known: {', '.join(names)}",
        )


def _held_out(recipe: Answering) -> Iterator[Problem]:
    """What an evaluation by loss cannot do, and what of [eval] it would not read."""
    settings = recipe.eval
    if settings.loss and recipe.job == "rl":
        yield ("eval", "loss"), "is of SFT jobs: an RL job has no answers to take the loss of"
    if scored.measures_loss(recipe):
        yield from _sized(recipe)
    if scored.samples_answers(recipe):
        return
    kind = type(settings)
    for key in ("n_samples", "pass_at", "greedy", "component", "correct_at", "max_new_tokens"):
        if getattr(settings, key) != kind.model_fields[key].default:
            yield (
                ("eval", key),
                "is of sampled answers, and nothing says which are right: give [[rewards]] with a "
                "type, or leave this out for the loss alone",
            )
    for place, one in enumerate(settings.sets):
        if one.by is not None:
            yield (
                ("eval", "sets", place, "by"),
                "divides the rates of sampled answers: for losses give each part a set of its own",
            )


def _sized(recipe: Recipe) -> Iterator[Problem]:
    """Held-out sequences lie whole in the learner's forwards."""
    for place, one in enumerate(recipe.eval.sets):
        if one.max_len > recipe.data.max_len:
            yield (
                ("eval", "sets", place, "max_len"),
                f"{one.max_len} tokens are more than data.max_len = {recipe.data.max_len}, for "
                "which the learner is sized: raise that",
            )


def sampling(recipe: RLRecipe) -> Iterator[Problem]:
    """What sampling and its algorithm need."""
    if scored.components(recipe) == []:
        yield ("rewards",), "nothing scores the samples: give at least one [[rewards]] with a type"
    rollout, data = recipe.rollout, recipe.data
    if rollout.max_new_tokens >= data.max_len:
        yield (
            ("rollout", "max_new_tokens"),
            f"{rollout.max_new_tokens} leaves no room for a prompt in data.max_len = "
            f"{data.max_len} tokens, which count prompt and response",
        )
    if rollout.temperature == 0.0:
        yield (
            ("rollout", "temperature"),
            "greedy samples of a prompt are all the same: there is nothing to learn from",
        )
    if rollout.source == "replay" and rollout.replay_path is None:
        yield (
            ("rollout", "replay_path"),
            'source = "replay" needs the run directory whose samples are read',
        )
    if rollout.source == "live" and rollout.replay_path is not None:
        yield ("rollout", "replay_path"), 'is read only where source = "replay"'
    yield from _replay(rollout)
    yield from _filter(recipe)
    yield from _correction(recipe)
    yield from _reference(recipe)
    least, n = recipe.algorithm.min_group_size, recipe.batch.n_samples_per_prompt
    if n < least:
        yield (
            ("batch", "n_samples_per_prompt"),
            f"{n} is too few for a baseline among a prompt's samples: at least {least}",
        )


def _replay(rollout: RolloutSettings) -> Iterator[Problem]:
    """What chooses prompts or refills a step has nothing to choose from in a replay."""
    if rollout.source != "replay":
        return
    for key in ("dynamic_sampling", "curriculum"):
        if getattr(rollout, key) != type(rollout).model_fields[key].default:
            yield (
                ("rollout", key),
                "samples nothing in a replay, which takes the groups that the recorded run kept: "
                'leave this out, or take source = "live"',
            )


def _filter(recipe: RLRecipe) -> Iterator[Problem]:
    """What dynamic sampling and a curriculum ask has to be a reward of the recipe."""
    component, names = recipe.rollout.filter_on, scored.components(recipe)
    if component is None or not names:
        return
    place = ("rollout", "filter_on")
    if component != TOTAL and component not in names:
        known = ", ".join([*names, TOTAL])
        yield place, f"no reward is called {component!r}; known: {known}"
    if component == TOTAL and TOTAL in names:
        yield (
            place,
            f"{TOTAL!r} is the whole reward, and one of [[rewards]] too: `name` it otherwise",
        )


def _following(reference: ReferenceSettings) -> tuple[str | int, ...]:
    """The key that lets a reference follow the policy."""
    return "reference", "refresh_steps" if reference.refresh_steps else "ema_decay"


def _reference(recipe: RLRecipe) -> Iterator[Problem]:
    """A reference that follows the policy has to be used, and to be the same model."""
    reference = recipe.reference
    if not reference.moves:
        return
    if recipe.model.lora is not None:
        yield (
            _following(reference),
            "a reference that follows takes whole weights, and [model.lora] trains an adapter: "
            "leave one of them out",
        )
    if not recipe.algorithm.needs().reference:
        yield ("reference",), "nothing reads it: give algorithm.kl_coef above 0"
    path = reference.model.path
    if path is not None and path != recipe.model.path:
        yield (
            ("reference", "model", "path"),
            f"{path!r} cannot follow the policy, which is {recipe.model.path!r}: leave it out",
        )


def _correction(recipe: RLRecipe) -> Iterator[Problem]:
    algorithm, rollout = recipe.algorithm, recipe.rollout
    if not isinstance(algorithm, BehaviourCorrection) or algorithm.correction_with_filters:
        return
    filters = {"top_p": rollout.top_p < 1.0, "top_k": rollout.top_k, "min_p": rollout.min_p}
    if algorithm.correction not in ("off", "metrics") and any(filters.values()):
        said = " and ".join(f"rollout.{name}" for name, on in filters.items() if on)
        yield (
            ("algorithm", "correction"),
            f"with {said} samples come from another distribution than the policy's, which biases "
            "importance weights: sample without, or say correction_with_filters = true",
        )


def _batch(recipe: Recipe) -> Iterator[Problem]:
    found, problems = derive(recipe.batch, recipe.length(), recipe.parallel)
    for key, text in problems:
        yield tuple(key.split(".")), text
    critic = getattr(recipe, "critic", None)
    learners: dict[tuple[str, ...], LearnerSettings] = {("learner",): recipe.learner}
    if critic is not None and critic.learner.warmup_updates != recipe.learner.warmup_updates:
        learners["critic", "learner"] = critic.learner
    for place, learner in learners.items():
        warmup = learner.warmup_updates
        if found and found.total_updates is not None and warmup > found.total_updates:
            yield (
                (*place, "warmup_updates"),
                f"{warmup} is more than the {found.total_updates} updates of the whole run",
            )


def _data(recipe: Recipe) -> Iterator[Problem]:
    data = recipe.data
    if not data.sets and not data.path:
        yield ("data", "path"), "nothing to train on: give path, or several [[data.sets]]"
    for place, one in enumerate(data.sets):
        if not one.path:
            yield ("data", "sets", place, "path"), "a set needs a path, here or in [data]"
        if one.max_len > data.max_len:
            yield (
                ("data", "sets", place, "max_len"),
                f"{one.max_len} tokens are more than data.max_len = {data.max_len}, for which "
                "everything is sized: raise that",
            )


def _model(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    critic = getattr(recipe, "critic", None)
    trained = {("model",): model, ("critic", "model"): critic.model if critic else model}
    for place, one in trained.items():
        if one.quantize != "none" and one.lora is None:
            yield (
                (*place, "quantize"),
                f'"{one.quantize}" weights are frozen, so there has to be an adapter that trains: '
                f"give [{'.'.join(place)}.lora]",
            )
            break  # what a critic leaves out is the policy's
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


def _not_finite(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Places of such numbers in tables whose keys are free: of tasks, templates, verifiers."""
    if isinstance(value, Mapping):
        for key, inner in cast(Mapping[str, Any], value).items():
            yield from _not_finite(inner, (*place, key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(cast(list[Any], value)):
            yield from _not_finite(inner, (*place, number))
    elif isinstance(value, float) and not math.isfinite(value):
        yield place
