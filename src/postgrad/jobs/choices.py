"""What was chosen at the start of a run because the recipe left it open: it decides bits.

Chosen once, kept as run state, used again at resume: two threads or other slots round differently.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from postgrad.parallel import device as placing
from postgrad.parallel.device import Placement
from postgrad.recipe.recipe import Comparing, Recipe
from postgrad.rollout.local.sizes import EngineSizes

# Tokens in one forward where the recipe names no micro-batch. On a CPU the temporaries of more
# leave the cache.
MICRO_TRAIN_TOKENS = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class Choices:
    """micro_train_tokens is None where the recipe counts micro-batches in samples; rollout_dtype
    where nothing is sampled; slots and cache_tokens until a rollout engine was made. frozen: by
    role, what names weights that never change.
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


def choose(recipe: Recipe, recorded: Mapping[str, Any]) -> Choices:
    """What the recipe states; else what was recorded; else what suits this machine.

    recorded: of the checkpoint, less what may change (--allow-change NAME); {} for a new run.
    """
    known = recorded.get
    probed = placing.choose(recipe.learner.threads, recipe.learner.deterministic)
    device = known("device") or probed.device
    dtype = _dtype(recipe.model.dtype, known("dtype"), device)
    sampling = None if isinstance(recipe, Comparing) else recipe.rollout
    return Choices(
        device=device,
        threads=recipe.learner.threads or known("threads") or probed.threads,
        deterministic=recipe.learner.deterministic,
        dtype=dtype,
        rollout_dtype=sampling and _dtype(sampling.dtype, known("rollout_dtype"), device, dtype),
        micro_train_tokens=_micro_train_tokens(recipe, known("micro_train_tokens"), device),
        slots=sampling and (sampling.slots or known("slots")),
        cache_tokens=sampling and (sampling.cache_tokens or known("cache_tokens")),
        frozen=known("frozen") or {},
    )


def _micro_train_tokens(recipe: Recipe, recorded: int | None, device: str) -> int | None:
    if recipe.batch.micro_train_batch_size is not None:
        return None
    stated = recipe.batch.micro_train_tokens or recorded
    longest = recipe.data.max_len * (2 if isinstance(recipe, Comparing) else 1)  # a pair is whole
    return stated or max(longest, MICRO_TRAIN_TOKENS[device])


def _dtype(stated: str, recorded: str | None, device: str, otherwise: str | None = None) -> str:
    if stated != "auto":
        return stated
    if recorded is not None:
        return recorded
    found = placing.compute_dtype("auto", torch.device(device))
    return otherwise or str(found).removeprefix("torch.")
