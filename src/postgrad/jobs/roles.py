"""The roles and the engine of a run, made from its recipe and its choices."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from postgrad.core.batch import BatchGeometry
from postgrad.core.errors import RunError
from postgrad.core.seeds import integer
from postgrad.data.texts import texts
from postgrad.jobs.choices import Choices
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.reference import MovingReference
from postgrad.learner.role import Policy, PolicyLearner
from postgrad.learner.score import ScoreLearner, ScoreRole
from postgrad.models.fresh import make_fresh
from postgrad.models.hashes import directory_hash
from postgrad.models.load import load_model
from postgrad.models.score import load_score_model
from postgrad.models.settings import ModelSettings
from postgrad.parallel.device import compute_dtype
from postgrad.recipe.recipe import (
    Answering,
    PreferenceRecipe,
    Recipe,
    RewardRecipe,
    RLRecipe,
)
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


def policy(
    recipe: Recipe,
    path: str,
    choices: Choices,
    geometry: BatchGeometry,
    temperature: float = 1.0,
) -> PolicyLearner:
    """The policy with its optimizer."""
    assert geometry.total_updates is not None
    backbone = _backbone(recipe, recipe.model, path, choices)
    return PolicyLearner(backbone, recipe.learner, geometry.total_updates, temperature)


def frozen_policy(
    recipe: RLRecipe | PreferenceRecipe, path: str, choices: Choices, temperature: float = 1.0
) -> Policy:
    """A reference that stays as it is."""
    backbone = _backbone(recipe, recipe.reference.model, path, choices)
    backbone.lm.requires_grad_(False)
    return Policy(backbone, temperature)


def reference(
    recipe: RLRecipe, path: str, choices: Choices, policy: PolicyLearner
) -> Policy | MovingReference:
    """The model that KL is measured from: the policy's own start `path` unless another is named."""
    settings = recipe.reference.model
    frozen = frozen_policy(recipe, settings.path or path, choices, policy.temperature)
    if not recipe.reference.moves:
        return frozen
    return MovingReference(
        frozen.backbone,
        policy.temperature,
        refresh_steps=recipe.reference.refresh_steps,
        ema_decay=recipe.reference.ema_decay,
        policy=policy.weights(),
    )


def reward_model(
    recipe: RewardRecipe, path: str, choices: Choices, geometry: BatchGeometry
) -> ScoreLearner:
    """The reward model that is trained, with its optimizer."""
    assert geometry.total_updates is not None
    backbone = _scoring(recipe, recipe.model, path, choices)
    return ScoreLearner("reward_model", backbone, "at", recipe.learner, geometry.total_updates)


def frozen_reward_model(recipe: RewardRecipe, path: str, choices: Choices) -> ScoreRole:
    """A reward model that only scores."""
    return ScoreRole(_scoring(recipe, recipe.model, path, choices, fresh_head=False), "at")


def critic(recipe: RLRecipe, path: str, choices: Choices, geometry: BatchGeometry) -> ScoreLearner:
    """The critic with its optimizer, from a reward model or, with a fresh head, from a policy."""
    assert geometry.total_updates is not None
    settings = recipe.critic
    backbone = _scoring(recipe, settings.model, settings.model.path or path, choices)
    return ScoreLearner("critic", backbone, "before", settings.learner, geometry.total_updates)


def engine(
    recipe: Answering, path: str, choices: Choices, *, sequences: int, max_len: int
) -> tuple[LocalEngine, Choices]:
    """The built-in engine with its own copy of the model, and the choices with its sizes.

    sequences: how many a step or an evaluation samples; max_len: tokens of the longest.
    """
    device = torch.device(choices.device)
    assert choices.rollout_dtype is not None  # of every job that answers
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


def _backbone(recipe: Recipe, settings: ModelSettings, path: str, choices: Choices) -> Backbone:
    """Of a causal model."""
    device = torch.device(choices.device)
    model = load_model(
        path,
        dtype=compute_dtype(choices.dtype, device),
        device=device,
        gradient_checkpointing=settings.gradient_checkpointing,
    )
    return Backbone(model.lm, device, _micro(recipe, choices), settings.attention)


def _scoring(
    recipe: Recipe, settings: ModelSettings, path: str, choices: Choices, fresh_head: bool = True
) -> Backbone:
    """Of a model with a score head."""
    device = torch.device(choices.device)
    model = load_score_model(
        path,
        dtype=compute_dtype(choices.dtype, device),
        device=device,
        gradient_checkpointing=settings.gradient_checkpointing,
        seed=recipe.seed,
        fresh_head=fresh_head,
    )
    return Backbone(model.lm, device, _micro(recipe, choices), settings.attention)


def _micro(recipe: Recipe, choices: Choices) -> MicroBatch:
    """A sample of a pair is two sequences."""
    samples = recipe.batch.micro_train_batch_size
    pairs = isinstance(recipe, RewardRecipe | PreferenceRecipe) and recipe.algorithm.level == "pair"
    return MicroBatch(choices.micro_train_tokens, samples and samples * (2 if pairs else 1))
