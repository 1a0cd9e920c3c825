"""Settings that a run chooses at its start because the recipe leaves them open.

They are chosen once, kept in the run state and used again at resume, because another number of
threads or slots rounds differently. On a CPU threads and dtype are measured (parallel.device) where
neither the recipe nor a checkpoint states them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from postgrad.core.batch import MICRO_TRAIN_TOKENS
from postgrad.core.errors import UsageError
from postgrad.models.config_check import require_config
from postgrad.models.files import CONFIG, read_object, weights_source
from postgrad.models.known_shapes import shape_of_model
from postgrad.models.linear import (
    faster_library,
    has_fast_products,
    product_name,
    project,
    use_libraries,
)
from postgrad.models.settings import ModelSettings
from postgrad.models.shapes import ModelShape, shape_of
from postgrad.models.supported import experts_of, is_tested, may_carry_states
from postgrad.parallel import device as devices
from postgrad.parallel.device import Placement
from postgrad.recipe.recipe import Recipe
from postgrad.rollout.local.budget import EngineSizes


@dataclass(frozen=True, slots=True)
class Choices:
    """The settings that a run chose; part of its state in checkpoints."""

    device: str  # "cpu" or "cuda"
    threads: int  # of torch
    deterministic: bool
    dtype: str  # that the learner computes in: "float32", "bfloat16" or "float16"
    rollout_dtype: str | None  # None where nothing is sampled
    micro_train_tokens: int | None  # None where the recipe counts micro-batches in samples
    slots: int | None = None  # sequences that the engine decodes at a time; None without an engine
    cache_tokens: int | None = None  # of the engine's KV cache; None without an engine
    # by shape of a matrix: the library of its float32 products on a CPU; empty: oneDNN, if there
    products: Mapping[str, str] = field(default_factory=dict[str, str])
    compiled: bool = False  # decoder layers run compiled, where `runs_compiled` says so
    # by role: the hash of weights that never change
    frozen: Mapping[str, str] = field(default_factory=dict[str, str])
    # by recipe key: commit or hash of the models and data that the run reads (training.pinned)
    sources: Mapping[str, str] = field(default_factory=dict[str, str])

    def to_json(self) -> dict[str, Any]:
        """Its part of the run state and of a run's first event."""
        return asdict(self)

    @property
    def placement(self) -> Placement:
        """How torch has to be set up in this process."""
        return Placement(self.device, self.threads, self.deterministic)

    def apply(self) -> torch.device:
        """Sets this process up as chosen. Raises RunError without the device."""
        use_libraries(self.products)
        return devices.apply(self.placement)

    @property
    def sizes(self) -> EngineSizes | None:
        """The rollout engine's sizes; None before they were chosen."""
        if self.slots is None or self.cache_tokens is None:
            return None
        return EngineSizes(self.slots, self.cache_tokens)


def choose(
    recipe: Recipe,
    recorded: Mapping[str, Any],
    *,
    measure: bool = True,
    device: str | None = None,
) -> Choices:
    """Each setting as the recipe states it, else as recorded, else as it suits this machine.

    device: that of the models, where it is not this process's.
    recorded: the choices in the checkpoint, without those that may change (--allow-change NAME); {}
    for a new run. measure: the rest may depend on a measurement. Only runs that record their
    choices may measure, so that two evaluations of a model give the same numbers.
    """
    recorded_value = recorded.get
    probed = devices.choose(recipe.learner.threads, recipe.learner.deterministic)
    device = str(recorded_value("device") or device or probed.device)
    dtype = _dtype(recipe, recorded_value("dtype"), device, measure)
    threads = recipe.learner.threads or recorded_value("threads")
    sampling = recipe.rollout_settings
    rollout_dtype = sampling and _rollout_dtype(
        sampling.dtype, recorded_value("rollout_dtype"), dtype
    )
    in_float32 = "float32" in (dtype, rollout_dtype)
    return Choices(
        device=device,
        threads=threads or _threads(device, probed.threads, measure),
        deterministic=recipe.learner.deterministic,
        dtype=dtype,
        rollout_dtype=rollout_dtype,
        micro_train_tokens=_micro_train_tokens(
            recipe, recorded_value("micro_train_tokens"), device
        ),
        slots=sampling and (sampling.stated_slots or recorded_value("slots")),
        cache_tokens=sampling and (sampling.cache_tokens or recorded_value("cache_tokens")),
        products=_products(recipe, recorded, device, measure and in_float32),
        compiled=_compiled(recipe, recorded, device),
        frozen=recorded_value("frozen") or {},
    )


def _micro_train_tokens(recipe: Recipe, recorded: int | None, device: str) -> int | None:
    """The token budget of a micro-batch; None where micro-batches are counted in samples. Where it
    is "auto" and not recorded, `training.auto_sizes` still replaces it.
    """
    if recipe.batch.micro_train_batch_size is not None:
        return None
    stated = recipe.batch.stated_tokens
    longest = recipe.min_micro_tokens
    if stated is None and recorded is not None and recorded < longest:
        raise UsageError(
            f"the run was started with micro_train_tokens = {recorded}, which cannot hold a row of "
            f"{longest} tokens: choose it anew with --allow-change micro_train_tokens"
        )
    return stated or recorded or max(longest, MICRO_TRAIN_TOKENS[device])


def _compiled(recipe: Recipe, recorded: Mapping[str, Any], device: str) -> bool:
    """Whether decoder layers run compiled. Where the recipe leaves it open: on CUDA with flex
    attention, which lies in the same graph; but a run whose record does not say goes on without, as
    it began.
    """
    model = recipe.model
    if model.compile is True and device == "cpu":
        raise UsageError(
            "model.compile = true: on a CPU layers run oneDNN's products and our own norms, which "
            'torch.compile would replace by slower ones: use "auto" or false'
        )
    if model.compile != "auto":
        return model.compile
    if "device" in recorded:
        return device == "cuda" and bool(recorded.get("compiled"))
    return device == "cuda" and model.attention != "sdpa"


def runs_compiled(choices: Choices, settings: ModelSettings, config: Any) -> bool:
    """Whether a model of `config` runs compiled: by "auto" only types that tests compile, without
    experts and states, and no weights in four bits.
    """
    if settings.compile != "auto":
        return choices.compiled and settings.compile
    tested = is_tested(config) and not experts_of(config) and not may_carry_states(config)
    return choices.compiled and settings.quantize == "none" and tested


def _threads(device: str, most: int, measure: bool) -> int:
    return devices.useful_threads(most) if device == "cpu" and measure else most


def _dtype(recipe: Recipe, recorded: str | None, device: str, measure: bool) -> str:
    """The learner's dtype. Where neither recipe nor record states it: bfloat16 on CUDA and on a CPU
    that multiplies it clearly faster, else float32.
    """
    if recipe.model.dtype != "auto":
        return recipe.model.dtype
    if recorded is not None:
        return recorded
    multiply = partial(project, bias=None)
    if device == "cpu" and measure and devices.bfloat16_pays(*_layer(recipe), multiply):
        return "bfloat16"
    return str(devices.compute_dtype("auto", torch.device(device))).removeprefix("torch.")


def _products(
    recipe: Recipe, recorded: Mapping[str, Any], device: str, measure: bool
) -> Mapping[str, str]:
    """The library of the policy's float32 products on a CPU, by shape, measured at a run's start. A
    run whose record does not say goes on with oneDNN, as it began.
    """
    if "device" in recorded:
        return recorded.get("products") or {}
    if device != "cpu" or not measure or not has_fast_products():
        return {}
    shape = _shape(recipe)
    if shape is None or shape.hidden_size < devices.NARROWEST:
        return {}
    return {product_name(*each): faster_library(*each) for each in shape.matrices}


def _shape(recipe: Recipe) -> ModelShape | None:
    """The policy's shape; None where its config is not on this machine, or is one that loading the
    model refuses.
    """
    path = recipe.model.path
    try:
        if path is None:
            return shape_of_model(recipe.model)
        file = Path(weights_source(path)) / CONFIG
        config = read_object(file)
        require_config(config, file)
        return shape_of(config, path)
    except UsageError:
        return None


def _rollout_dtype(stated: str, recorded: str | None, learner: str) -> str:
    return stated if stated != "auto" else recorded or learner


def _layer(recipe: Recipe) -> tuple[int, int]:
    """The hidden and the intermediate size of the policy, for a measurement. A large model's where
    the config is not on this machine or is wrong: loading the model reports that.
    """
    if recipe.model.path is None:
        init = recipe.model.init
        return (init.hidden_size, init.intermediate_size) if init else (0, 0)
    try:
        path = Path(weights_source(recipe.model.path)) / CONFIG
        config = read_object(path)
        require_config(config, path)
        sizes = config["hidden_size"], config.get("intermediate_size") or config["hidden_size"]
        return min(int(sizes[0]), devices.WIDEST), min(int(sizes[1]), devices.WIDEST)
    except (UsageError, KeyError, TypeError):
        return devices.WIDEST, devices.WIDEST
