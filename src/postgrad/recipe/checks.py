"""Checks across the sections of a recipe: each yields (place in the recipe, what is wrong).

Whatever can be wrong before a row or a weight is read is reported here, not after half an hour
(NeMo RL#2783).
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, cast

from postgrad.algorithms.base import Algorithm, RolloutAlgorithm
from postgrad.cluster.settings import POLICY
from postgrad.core.geometry import derive
from postgrad.models.settings import OF_LOADING, ROUTER, ModelSettings
from postgrad.recipe.arrangement import rank_problems
from postgrad.recipe.eval_checks import (
    eval_fraction_problems,
    evaluation_lengths,
    evaluation_problems,
)
from postgrad.recipe.hub_sources import revision_problems
from postgrad.recipe.lines import KeyPath, RecipeProblem
from postgrad.recipe.placement import placement_problems
from postgrad.recipe.settings import ComparingSections, ReferenceSettings, Sections

# Keys of [model] that nothing reads of a model that is not trained.
OF_TRAINING = (
    *("gradient_checkpointing", "lora", "freeze"),
    *("router_aux_loss_coef", "router_z_loss_coef"),
)


def as_json(values: Mapping[str, Any]) -> str:
    """Values of a TOML file, or of Python, as JSON text: numbers of NumPy become plain ones, dates
    strings.
    """
    return json.dumps(values, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else str(value)


def common(recipe: Sections, job: str) -> Iterator[RecipeProblem]:
    """Problems that every job can have."""
    yield from _batch(recipe)
    yield from _model(recipe)
    yield from _eos_token(recipe)
    yield from _unread_by_roles(recipe)
    yield from _of_the_policy(recipe)
    yield from rank_problems(recipe)
    yield from placement_problems(recipe, job)
    yield from _data(recipe)
    yield from _mirror(recipe)
    yield from eval_fraction_problems(recipe)
    yield from revision_problems(recipe)
    yield from evaluation_problems(recipe)
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
    if reference.model.quantize != "none":
        yield (
            ("reference", "model", "quantize"),
            f'"{reference.model.quantize}" weights are frozen, and this reference follows the '
            "policy: leave it out",
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


def other_answers(recipe: Sections, algorithm: Algorithm) -> Iterator[RecipeProblem]:
    """An update of one sample, of a loss that pairs prompts with the answers of other samples."""
    geometry, _ = derive(recipe.batch, recipe.length(), recipe.parallel)
    if algorithm.needs().mismatched and geometry is not None and geometry.train_batch_size == 1:
        yield (
            ("batch", "train_batch_size"),
            "1: the reference point of an update is measured on prompts with the answer of another "
            "sample, and the only answer would be measured against itself: at least 2, better 32, "
            'or algorithm.loss = "apo_zero", which has no such point',
        )


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


def _mirror(recipe: Sections) -> Iterator[RecipeProblem]:
    """A mirror among the files that it is to hold: each upload would copy what it has already."""
    checkpoint, mirror = recipe.checkpoint, recipe.checkpoint.mirror_folder
    folders = {"run_dir": recipe.run_dir, "checkpoint.ckpt_path": checkpoint.ckpt_path}
    for key, folder in folders.items():
        if mirror and folder and mirror.is_relative_to(Path(folder).resolve()):
            yield (
                ("checkpoint", "mirror"),
                f"{checkpoint.mirror!r} lies in {key} = {folder!r}: it would hold copies of "
                "itself, and be lost with that folder: name a folder on another disk, or in an "
                "object store",
            )
            break


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
    yield from _adapter_rate(recipe)
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


def _adapter_rate(recipe: Sections) -> Iterator[RecipeProblem]:
    """A learning rate of B where no adapter has one."""
    ratios = {learner.loraplus_lr_ratio for learner in recipe.learner_tables.values()}
    if ratios != {1.0} and all(model.lora is None for model in recipe.trained_models.values()):
        yield (
            ("learner", "loraplus_lr_ratio"),
            "is of an adapter's B, and nothing trains as an adapter: give [model.lora], or leave "
            "it out",
        )


def _eos_token(recipe: Sections) -> Iterator[RecipeProblem]:
    """Ends of answers of a model that writes none."""
    policy = recipe.model.eos_token if recipe.trained_role == "policy" else ()
    for place, model in recipe.model_tables.items():
        if model.eos_token not in ((), policy):  # what a critic leaves out is the policy's
            yield (*place, "eos_token"), "this model writes no answers: leave it out"


def _unread_by_roles(recipe: Sections) -> Iterator[RecipeProblem]:
    """Keys of the [model] of another role that nothing would read: a dtype of its own, and of a
    frozen model what only training reads. What a reference leaves out is the policy's.
    """
    policy, trained, default = recipe.model, recipe.trained_models, ModelSettings()
    for place, model in recipe.model_tables.items():
        if model.dtype not in (default.dtype, policy.dtype):
            yield (
                (*place, "dtype"),
                f'"{model.dtype}": all models of a run compute in model.dtype = "{policy.dtype}": '
                "leave it out",
            )
        if place in trained:
            continue
        unread = (default, policy) if place == ("reference", "model") else (default,)
        for key in OF_TRAINING:
            if getattr(model, key) not in [getattr(settings, key) for settings in unread]:
                yield (
                    (*place, key),
                    "is of models that are trained, and this one is not: leave it out",
                )


def _of_the_policy(recipe: Sections) -> Iterator[RecipeProblem]:
    """Keys of a reference that is the policy's own weights, which are loaded once: what is under an
    adapter, and in a job that is no RL what the policy was before its first update.
    """
    policy, reference = recipe.model, recipe.model_tables.get(("reference", "model"))
    if reference is None or reference.source != policy.source or recipe.reference_moves:
        return
    loaded = policy.lora is None and recipe.trains_on_rollouts
    if loaded or recipe.cluster.home("reference") != POLICY:
        return
    for key in OF_LOADING:
        if getattr(reference, key) != getattr(policy, key):
            yield (
                ("reference", "model", key),
                f'"{getattr(reference, key)}": the reference is the weights that the policy begins '
                f'with, which are loaded once, with model.{key} = "{getattr(policy, key)}": leave '
                "it out",
            )


def _not_finite(value: Any, place: KeyPath = ()) -> Iterator[KeyPath]:
    """Places of infinity and NaN, which tables with free keys can hold: of tasks, templates,
    verifiers.
    """
    entries: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, Mapping):
        entries = cast(Mapping[str, Any], value).items()
    elif isinstance(value, list | tuple):
        entries = enumerate(cast(list[Any], value))
    for key, inner in entries:
        if isinstance(inner, float):
            if not math.isfinite(inner):
                yield (*place, key)
        elif inner is not None and not isinstance(inner, (str, int)):
            yield from _not_finite(inner, (*place, key))
