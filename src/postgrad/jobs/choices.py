"""What was chosen at the start of a run because the recipe left it open: it decides bits.

Chosen once, kept as run state, used again at resume: two threads or other slots round differently.
On a CPU threads and dtype are measured (parallel.probe) where neither recipe nor record says them.
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
from postgrad.models.linear import project
from postgrad.parallel import device as placing
from postgrad.parallel import probe
from postgrad.parallel.device import Placement
from postgrad.recipe.recipe import Comparing, Recipe
from postgrad.rollout.local.budget import EngineSizes


@dataclass(frozen=True, slots=True)
class Choices:
    """micro_train_tokens is None where the recipe counts micro-batches in samples; rollout_dtype
    where nothing is sampled; slots and cache_tokens until a rollout engine was made. frozen: by
    role, what names weights that never change. sources: by recipe key, what names the models and
    data that the run reads (jobs.sources).
    """

    device: str
    threads: int
    deterministic: bool
    dtype: str
    rollout_dtype: str | None
    micro_train_tokens: int | None
    slots: int | None = None
    cache_tokens: int | None = None
    frozen: Mapping[str, str] = field(default_factory=dict[str, str])
    sources: Mapping[str, str] = field(default_factory=dict[str, str])

    def to_json(self) -> dict[str, Any]:
        """For the run state and the first event of a run."""
        return asdict(self)

    @property
    def placement(self) -> Placement:
        """What this process has to be set up as."""
        return Placement(self.device, self.threads, self.deterministic)

    @property
    def sizes(self) -> EngineSizes | None:
        """The rollout engine's sizes, once they were probed."""
        if self.slots is None or self.cache_tokens is None:
            return None
        return EngineSizes(self.slots, self.cache_tokens)


def choose(recipe: Recipe, recorded: Mapping[str, Any], *, measure: bool = True) -> Choices:
    """What the recipe states; else what was recorded; else what suits this machine.

    recorded: of the checkpoint, less what may change (--allow-change NAME); {} for a new run.
    measure: whether what is left may depend on a measurement. What keeps no record must not: two
    evaluations of a model give the same numbers.
    """
    known = recorded.get
    probed = placing.choose(recipe.learner.threads, recipe.learner.deterministic)
    device = known("device") or probed.device
    dtype = _dtype(recipe, known("dtype"), device, measure)
    threads = recipe.learner.threads or known("threads")
    sampling = None if isinstance(recipe, Comparing) else recipe.rollout
    return Choices(
        device=device,
        threads=threads or _threads(device, probed.threads, measure),
        deterministic=recipe.learner.deterministic,
        dtype=dtype,
        rollout_dtype=sampling and _rollout_dtype(sampling.dtype, known("rollout_dtype"), dtype),
        micro_train_tokens=_micro_train_tokens(recipe, known("micro_train_tokens"), device),
        slots=sampling and (sampling.stated_slots or known("slots")),
        cache_tokens=sampling and (sampling.cache_tokens or known("cache_tokens")),
        frozen=known("frozen") or {},
    )


def _micro_train_tokens(recipe: Recipe, recorded: int | None, device: str) -> int | None:
    """Where it is "auto" and not recorded this is only where jobs.auto_sizes begins."""
    if recipe.batch.micro_train_batch_size is not None:
        return None
    stated = recipe.batch.stated_tokens
    longest = recipe.data.max_len * (2 if isinstance(recipe, Comparing) else 1)  # a pair is whole
    if stated is None and recorded is not None and recorded < longest:
        raise UsageError(
            f"the run was started with micro_train_tokens = {recorded}, which cannot hold a row of "
            f"{longest} tokens: choose it anew with --allow-change micro_train_tokens"
        )
    return stated or recorded or max(longest, MICRO_TRAIN_TOKENS[device])


def _threads(device: str, most: int, measure: bool) -> int:
    return probe.useful_threads(most) if device == "cpu" and measure else most


def _dtype(recipe: Recipe, recorded: str | None, device: str, measure: bool) -> str:
    """Where nothing says it: bfloat16 on CUDA, and on a CPU that multiplies it clearly faster."""
    if recipe.model.dtype != "auto":
        return recipe.model.dtype
    if recorded is not None:
        return recorded
    multiply = partial(project, bias=None)
    if device == "cpu" and measure and probe.bfloat16_pays(*_layer(recipe), multiply):
        return "bfloat16"
    return str(placing.compute_dtype("auto", torch.device(device))).removeprefix("torch.")


def _rollout_dtype(stated: str, recorded: str | None, learner: str) -> str:
    return stated if stated != "auto" else recorded or learner


def _layer(recipe: Recipe) -> tuple[int, int]:
    """The hidden and the intermediate size of the policy; of one on the hub, that of a large one:
    what is wrong with a model is told where it is loaded.
    """
    if recipe.model.path is None:
        init = recipe.model.init
        return (init.hidden_size, init.intermediate_size) if init else (0, 0)
    try:
        config = Path(weights_source(recipe.model.path)) / CONFIG
        said = read_object(config)
        require_config(said, config)
        sizes = said["hidden_size"], said.get("intermediate_size") or said["hidden_size"]
        return min(int(sizes[0]), probe.WIDEST), min(int(sizes[1]), probe.WIDEST)
    except (UsageError, KeyError, TypeError):
        return probe.WIDEST, probe.WIDEST
