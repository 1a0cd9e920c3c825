"""The roles and the engine of a run, made from its recipe and its choices."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from postgrad.core.batch import BatchGeometry
from postgrad.core.errors import RunError
from postgrad.core.seeds import integer
from postgrad.data.texts import texts
from postgrad.jobs.choices import Choices
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.reference import MovingReference
from postgrad.learner.role import Policy, PolicyLearner
from postgrad.models.fresh import make_fresh
from postgrad.models.hashes import directory_hash
from postgrad.models.load import load_model
from postgrad.models.settings import ModelSettings
from postgrad.parallel.device import compute_dtype
from postgrad.recipe.recipe import Recipe, RLRecipe
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.local.sizes import probe_sizes


def base_model(recipe: Recipe, init: Path) -> str:
    """Where the policy starts from: the recipe's path, or a fresh model, made once in `init`."""
    if recipe.model.path is not None:
        return recipe.model.path
    assert recipe.model.init is not None  # a recipe without either is refused
    if not init.exists():
        make_fresh(
            recipe.model.init,
            chain.from_iterable(map(texts, recipe.data.sources)),
            integer(recipe.seed, "init"),
            init,
        )
    return str(init)


def learner(
    recipe: Recipe, path: str, choices: Choices, geometry: BatchGeometry, temperature: float
) -> tuple[PolicyLearner, Any]:
    """The policy with its optimizer, and its tokenizer."""
    backbone, tokenizer = _backbone(recipe, recipe.model, path, choices)
    assert geometry.total_updates is not None
    role = PolicyLearner(backbone, recipe.learner, geometry.total_updates, temperature)
    return role, tokenizer


def reference(
    recipe: RLRecipe, path: str, choices: Choices, policy: PolicyLearner
) -> Policy | MovingReference:
    """The model that KL is measured from: the policy's own start `path` unless another is named."""
    settings = recipe.reference.model
    backbone, _ = _backbone(recipe, settings, settings.path or path, choices)
    backbone.lm.requires_grad_(False)
    if not recipe.reference.moves:
        return Policy(backbone, policy.temperature)
    return MovingReference(
        backbone,
        policy.temperature,
        refresh_steps=recipe.reference.refresh_steps,
        ema_decay=recipe.reference.ema_decay,
        policy=policy.weights(),
    )


def engine(
    recipe: Recipe, path: str, choices: Choices, *, sequences: int, max_len: int
) -> tuple[LocalEngine, Choices]:
    """The built-in engine with its own copy of the model, and the choices with its sizes.

    sequences: how many a step or an evaluation samples; max_len: tokens of the longest.
    """
    device = torch.device(choices.device)
    dtype = compute_dtype(choices.rollout_dtype, device)
    model = load_model(path, dtype=dtype, device=device)
    sizes = choices.sizes or probe_sizes(
        model.lm, recipe.rollout, sequences=sequences, max_len=max_len
    )
    made = LocalEngine(
        model.lm, model.tokenizer, slots=sizes.slots, cache_tokens=sizes.cache_tokens
    )
    return made, replace(choices, slots=sizes.slots, cache_tokens=sizes.cache_tokens)


def frozen_hash(path: str) -> str:
    """What names a frozen base in a checkpoint: the hash of a local directory, or the hub id."""
    return directory_hash(Path(path)) if Path(path).is_dir() else path


def check_frozen(path: str, recorded: str) -> None:
    """Raises RunError where a frozen base is not the one that the run was started with."""
    if frozen_hash(path) != recorded:
        raise RunError(
            f"the frozen model {path} is not the one that this run was started with: "
            "its files have changed; put them back, or start a new run"
        )


def _backbone(
    recipe: Recipe, settings: ModelSettings, path: str, choices: Choices
) -> tuple[Backbone, Any]:
    device = torch.device(choices.device)
    model = load_model(
        path,
        dtype=compute_dtype(choices.dtype, device),
        device=device,
        gradient_checkpointing=settings.gradient_checkpointing,
    )
    micro = MicroBatch(choices.micro_train_tokens, recipe.batch.micro_train_batch_size)
    return Backbone(model.lm, device, micro, settings.attention), model.tokenizer
