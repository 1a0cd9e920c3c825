"""The roles and the engine of a run, made from its recipe and its choices."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Protocol

import psutil
import torch
from torch import nn

from postgrad.core.batch import BatchGeometry
from postgrad.core.errors import RunError
from postgrad.core.seeds import integer
from postgrad.data.mixture import dataset_texts
from postgrad.fleet.choices import Choices
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.reference import MovingReference
from postgrad.learner.role import Policy, PolicyLearner
from postgrad.learner.score import ScoreLearner, ScoreRole
from postgrad.learner.settings import LearnerSettings, horizon
from postgrad.learner.tensor import require_divisible
from postgrad.models.adapters import add_adapter
from postgrad.models.fresh import make_fresh
from postgrad.models.load import load_model
from postgrad.models.rope import require_length
from postgrad.models.save import model_hash
from postgrad.models.score import load_score_model
from postgrad.models.settings import ModelSettings
from postgrad.parallel.device import compute_dtype
from postgrad.parallel.ranks import Ranks
from postgrad.parallel.sharding import Stage
from postgrad.recipe.recipe import (
    Answering,
    PreferenceRecipe,
    Recipe,
    RewardRecipe,
    RLRecipe,
)
from postgrad.rollout.local.budget import EngineSizes, choose_sizes
from postgrad.rollout.local.cache import bytes_per_token
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.local.prompts import layer_shapes
from postgrad.rollout.settings import RolloutSettings


class Place(Protocol):
    """Where a run's roles are made: its own process, or one of several ranks."""

    @property
    def recipe(self) -> Recipe: ...
    @property
    def geometry(self) -> BatchGeometry: ...
    @property
    def ranks(self) -> Ranks: ...

    choices: Choices


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


def policy(run: Place, path: str, temperature: float = 1.0) -> PolicyLearner:
    """The policy with its optimizer."""
    recipe = run.recipe
    backbone = _trained(run, "policy", recipe.model, recipe.learner, path, _causal)
    updates = horizon(recipe.algorithm, run.geometry)
    assert updates is not None  # known once the data is read
    return PolicyLearner(backbone, recipe.learner, updates, temperature)


def reward_model(run: Place, path: str) -> ScoreLearner:
    """The reward model that a job trains, with its optimizer."""
    recipe = run.recipe
    backbone = _trained(run, "reward_model", recipe.model, recipe.learner, path, _scoring)
    return ScoreLearner("reward_model", backbone, "at", recipe.learner, _updates(run))


def critic(run: Place, recipe: RLRecipe, path: str) -> ScoreLearner:
    """The critic with its optimizer, from a reward model or, with a fresh head, from a policy."""
    settings = recipe.critic
    start = settings.model.source or path
    backbone = _trained(run, "critic", settings.model, settings.learner, start, _scoring)
    return ScoreLearner("critic", backbone, "before", settings.learner, _updates(run))


def reference(
    run: Place, recipe: RLRecipe | PreferenceRecipe, path: str, policy: PolicyLearner
) -> Policy:
    """The model that KL is measured from: the policy's own start `path` unless another is named.

    The start of a policy with an adapter is there already, under the adapter.
    """
    start = recipe.reference.model.source or path
    hold_to(run, "reference", start)
    if start == path and (under := policy.under_adapter()) is not None:
        return under
    backbone = _causal(run.recipe, recipe.reference.model, start, run.choices)
    _freeze(backbone, run)
    return Policy(backbone, policy.temperature)


def moving_reference(
    run: Place, recipe: RLRecipe, path: str, policy: PolicyLearner
) -> MovingReference:
    """A reference that starts where the policy does, and follows it."""
    start = recipe.reference.model.source or path
    hold_to(run, "reference", start)
    backbone = _causal(run.recipe, recipe.reference.model, start, run.choices)
    backbone.lm.requires_grad_(False)
    _divide(backbone, run, recipe.learner)  # as the policy's, row for row
    return MovingReference(
        backbone,
        policy.temperature,
        refresh_steps=recipe.reference.refresh_steps,
        ema_decay=recipe.reference.ema_decay,
        policy=policy.weights(),
    )


def scorer(run: Place, recipe: RLRecipe, path: str, critic: ScoreLearner | None) -> ScoreRole:
    """The frozen reward model at `path`. Where the critic's adapter lies on the same weights the
    two share them.
    """
    hold_to(run, "reward_model", path)
    frozen = run.choices.frozen  # has the critic's base where that is under an adapter
    if critic is not None and frozen.get("critic") == frozen["reward_model"]:
        return critic.under_adapter()
    backbone = _scoring(recipe, recipe.reward_model.model, path, run.choices, fresh_head=False)
    _freeze(backbone, run)
    return ScoreRole(backbone, "at")


def frozen_policy(recipe: Recipe, settings: ModelSettings, path: str, choices: Choices) -> Policy:
    """A policy that only scores, at a temperature of 1."""
    backbone = _causal(recipe, settings, path, choices)
    backbone.lm.requires_grad_(False)
    return Policy(backbone)


def frozen_reward_model(
    recipe: Recipe, settings: ModelSettings, path: str, choices: Choices
) -> ScoreRole:
    """A reward model that only scores."""
    backbone = _scoring(recipe, settings, path, choices, fresh_head=False)
    backbone.lm.requires_grad_(False)
    return ScoreRole(backbone, "at")


def engine(
    recipe: Answering,
    path: str,
    choices: Choices,
    *,
    sequences: int,
    max_len: int,
    borrows: bool = False,
) -> tuple[LocalEngine, Choices]:
    """The built-in engine with its own copy of the model, and the choices with its sizes.

    sequences: how many a step or an evaluation samples; max_len: tokens of the longest. borrows:
    see LocalEngine.
    """
    device = torch.device(choices.device)
    assert choices.rollout_dtype is not None  # of every job that answers
    dtype = compute_dtype(choices.rollout_dtype, device)
    model = load_model(path, dtype=dtype, device=device)
    require_length(model.config, max_len, path)
    sizes = choices.sizes or probe_sizes(
        model.lm, recipe.rollout, sequences=sequences, max_len=max_len
    )
    made = LocalEngine(
        model.lm,
        model.tokenizer,
        slots=sizes.slots,
        cache_tokens=sizes.cache_tokens,
        borrows=borrows,
    )
    return made, replace(choices, slots=sizes.slots, cache_tokens=sizes.cache_tokens)


def frozen_hash(path: str) -> str:
    """What names a frozen base in a checkpoint: the hash of a local directory, or the hub id. Of an
    adapter's directory the hash covers its base.
    """
    return model_hash(Path(path)) if Path(path).is_dir() else path


def hold_to(run: Place, role: str, path: str) -> None:
    """Frozen weights are named in checkpoints, not copied: a run goes on from the same ones only.

    Raises RunError where those of `role` are not what the run was started with.
    """
    digest = frozen_hash(path)
    if run.choices.frozen.get(role, digest) != digest:
        raise RunError(
            f"the frozen model {path} ({role}) is not the one that this run was started with: its "
            "files have changed; put them back, or start a new run"
        )
    run.choices = replace(run.choices, frozen={**run.choices.frozen, role: digest})


def _updates(run: Place) -> int:
    assert run.geometry.total_updates is not None  # known once the data is read
    return run.geometry.total_updates


Loaded = Callable[[Recipe, ModelSettings, str, Choices], Backbone]


def _freeze(backbone: Backbone, run: Place) -> None:
    """Weights that never change need no optimizer: they are divided only where computing weights
    are.
    """
    backbone.lm.requires_grad_(False)
    learner = run.recipe.learner
    _divide(backbone, run, learner, "zero3" if learner.sharding == "zero3" else "none")


def _divide(
    backbone: Backbone, run: Place, learner: LearnerSettings, stage: Stage | None = None
) -> None:
    backbone.divide(run.ranks, stage or learner.sharding, offload=learner.offload)


def _trained(
    run: Place,
    role: str,
    settings: ModelSettings,
    learner: LearnerSettings,
    path: str,
    load: Loaded,
) -> Backbone:
    """With an adapter where the settings say so: the weights under it never change."""
    backbone = load(run.recipe, settings, path, run.choices)
    if settings.lora is not None:
        hold_to(run, role, path)
        seed = integer(run.recipe.seed, "adapter")
        backbone.adapter = add_adapter(backbone.lm, settings.lora, seed=seed, name=role)
    _divide(backbone, run, learner)
    return backbone


def _causal(recipe: Recipe, settings: ModelSettings, path: str, choices: Choices) -> Backbone:
    require_divisible(recipe.learner, path)
    device = torch.device(choices.device)
    model = load_model(
        path,
        dtype=compute_dtype(choices.dtype, device),
        device=device,
        gradient_checkpointing=settings.gradient_checkpointing,
        quantize=settings.quantize,
    )
    require_length(model.config, recipe.data.max_len, path)
    return Backbone(model.lm, device, _micro(recipe, choices), settings.attention)


def _scoring(
    recipe: Recipe,
    settings: ModelSettings,
    path: str,
    choices: Choices,
    *,
    fresh_head: bool = True,
) -> Backbone:
    require_divisible(recipe.learner, path)
    device = torch.device(choices.device)
    model = load_score_model(
        path,
        dtype=compute_dtype(choices.dtype, device),
        device=device,
        gradient_checkpointing=settings.gradient_checkpointing,
        quantize=settings.quantize,
        seed=recipe.seed,
        fresh_head=fresh_head,
    )
    require_length(model.config, recipe.data.max_len, path)
    return Backbone(model.lm, device, _micro(recipe, choices), settings.attention)


def _micro(recipe: Recipe, choices: Choices) -> MicroBatch:
    """A sample of a pair is two sequences."""
    samples = recipe.batch.micro_train_batch_size
    pairs = isinstance(recipe, RewardRecipe | PreferenceRecipe) and recipe.algorithm.level == "pair"
    return MicroBatch(choices.micro_train_tokens, samples and samples * (2 if pairs else 1))


def probe_sizes(
    lm: nn.Module, settings: RolloutSettings, *, sequences: int, max_len: int
) -> EngineSizes:
    """choose_sizes for a model, with the memory that is free on its device now."""
    parameter = next(lm.parameters())
    device = parameter.device
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available
    token_bytes = bytes_per_token(layer_shapes(lm, device), parameter.dtype)
    return choose_sizes(
        settings, sequences=sequences, max_len=max_len, token_bytes=token_bytes, free_bytes=free
    )
