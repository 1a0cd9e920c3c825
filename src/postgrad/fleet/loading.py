"""How a recipe's models are loaded: device, dtype and parts, as the run chose them."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from postgrad.core.errors import RunError
from postgrad.core.seeds import integer
from postgrad.data.mixture import dataset_texts
from postgrad.fleet.choices import Choices, runs_compiled
from postgrad.fleet.fleet import RunContext
from postgrad.layout.tree import MIN_SHARED
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.policy import Policy
from postgrad.learner.score import ScoreRole
from postgrad.learner.tensor import require_divisible
from postgrad.models.fresh import make_fresh
from postgrad.models.image_reader import tower_of
from postgrad.models.known_shapes import find_shape
from postgrad.models.load import LoadedModel, load_model
from postgrad.models.rope import require_length
from postgrad.models.routers import give_dtype
from postgrad.models.save import model_hash
from postgrad.models.score import load_score_model
from postgrad.models.settings import ModelSettings, looks_local
from postgrad.parallel.device import compute_dtype
from postgrad.parallel.ranks import ALONE, Ranks
from postgrad.recipe.recipe import Recipe


def base_model(recipe: Recipe, init: Path) -> str:
    """Where the policy starts from: the recipe's path, or a fresh model, made once in `init`."""
    if recipe.model.source is not None:
        return recipe.model.source
    assert recipe.model.init is not None  # a recipe without either is refused
    if not init.exists():
        make_fresh(
            recipe.model.init,
            chain.from_iterable(map(dataset_texts, recipe.data.sources)),
            integer(recipe.seed, "init"),
            init,
        )
    return str(init)


def least_shared(recipe: Recipe, path: str | None) -> int:
    """Tokens of the shortest beginning that sequences share in the layouts of all models that are
    read here. path: of the policy; None: a fresh one.
    """
    stated = {str(model.source) for model in recipe.loaded_models.values() if model.source}
    sources = [source for source in stated if looks_local(source)]
    every = {*sources, path} if path else {*sources}
    return max((find_shape(source).min_shared for source in every), default=MIN_SHARED)


def frozen_policy(recipe: Recipe, settings: ModelSettings, path: str, choices: Choices) -> Policy:
    """A policy that only scores, at a temperature of 1."""
    backbone = causal(recipe, settings, path, choices)
    backbone.lm.requires_grad_(False)
    return Policy(backbone)


def frozen_reward_model(
    recipe: Recipe, settings: ModelSettings, path: str, choices: Choices
) -> ScoreRole:
    """A reward model that only scores."""
    backbone = scoring(recipe, settings, path, choices, fresh_head=False)
    backbone.lm.requires_grad_(False)
    return ScoreRole(backbone, "at")


def frozen_hash(path: str) -> str:
    """What names a frozen base in a checkpoint: its hub id, or the hash of a directory (also of an
    adapter's base).
    """
    return model_hash(Path(path)) if Path(path).is_dir() else path


def require_same_frozen_weights(context: RunContext, role: str, path: str) -> None:
    """Frozen weights are named in checkpoints, not copied: a run goes on from the same ones only.

    Raises RunError where those of `role` are not what the run was started with.
    """
    digest = frozen_hash(path)
    if context.choices.frozen.get(role, digest) != digest:
        raise RunError(
            f"the frozen model {path} ({role}) is not the one that this run was started with: its "
            "files have changed; put them back, or start a new run"
        )
    context.choices = replace(context.choices, frozen={**context.choices.frozen, role: digest})


def causal(
    recipe: Recipe, settings: ModelSettings, path: str, choices: Choices, ranks: Ranks = ALONE
) -> Backbone:
    model = load_model(path, **_how(recipe, settings, path, choices, ranks))
    return _backbone(model, recipe, settings, choices)


def scoring(
    recipe: Recipe,
    settings: ModelSettings,
    path: str,
    choices: Choices,
    ranks: Ranks = ALONE,
    *,
    fresh_head: bool = True,
) -> Backbone:
    how = _how(recipe, settings, path, choices, ranks)
    model = load_score_model(path, **how, seed=recipe.seed, fresh_head=fresh_head)
    return _backbone(model, recipe, settings, choices)


def _how(
    recipe: Recipe, settings: ModelSettings, path: str, choices: Choices, ranks: Ranks
) -> dict[str, Any]:
    """How a model is loaded: arguments of load_model and load_score_model."""
    require_divisible(recipe.learner, path)
    device = torch.device(choices.device)
    return {
        "dtype": compute_dtype(choices.dtype, device),
        "device": device,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "quantize": settings.quantize,
        "together": choices.compiled and settings.lora is not None,  # Adapter.join_frozen
        "ranks": ranks,
        "images": True,
    }


def _backbone(
    model: LoadedModel, recipe: Recipe, settings: ModelSettings, choices: Choices
) -> Backbone:
    require_length(model.config.get_text_config(), recipe.data.max_len, model.source)
    compiler = "inductor" if runs_compiled(choices, settings, model.config) else None
    device, micro = torch.device(choices.device), _micro(recipe, choices)
    backbone = Backbone(model.lm, device, micro, settings.attention, compiler=compiler)
    backbone.tower, backbone.drawn_head = tower_of(model), model.drawn_head
    tables = [place for place, table in recipe.model_tables.items() if table is settings]
    role = ".".join(map(str, tables[0] if tables else ("model",)))
    give_dtype(model.lm, settings.router_dtype, f"{role}.router_dtype")
    return backbone


def _micro(recipe: Recipe, choices: Choices) -> MicroBatch:
    samples = recipe.batch.micro_train_batch_size
    return MicroBatch(choices.micro_train_tokens, samples and samples * recipe.sequences_per_sample)
