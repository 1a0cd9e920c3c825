"""How large the engine is: chosen once at the start of a run, recorded, used again at resume."""

from dataclasses import dataclass

import psutil
import torch
from torch import nn

from postgrad.core.errors import UsageError
from postgrad.rollout.local.cache import bytes_per_token, places_for
from postgrad.rollout.local.prompts import layer_shapes
from postgrad.rollout.settings import RolloutSettings

MAX_SLOTS = 512  # beyond it a CPU decodes no more tokens a second, and the cache only grows
MEMORY_SHARE = 0.25  # of the free memory that the cache may take where the recipe does not say


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """slots: sequences decoded together; cache_tokens: token places for all of them."""

    slots: int
    cache_tokens: int

    def to_json(self) -> dict[str, int]:
        """For the run state."""
        return {"slots": self.slots, "cache_tokens": self.cache_tokens}


def choose_sizes(
    settings: RolloutSettings,
    *,
    sequences: int,
    max_len: int,
    token_bytes: int,
    free_bytes: int,
) -> EngineSizes:
    """As many slots as there are sequences in a step, up to MAX_SLOTS and what memory allows.

    max_len: tokens of the longest sequence, prompt and response. token_bytes: cache bytes of one
    place. Raises UsageError when the recipe's cache holds not even one sequence.
    """
    places = places_for(max_len)
    tokens = settings.cache_tokens or max(places, int(free_bytes * MEMORY_SHARE) // token_bytes)
    if tokens < places:
        raise UsageError(
            f"rollout.cache_tokens = {tokens} is less than one sequence of {max_len} tokens "
            f"needs: give at least {places}"
        )
    slots = settings.slots or min(MAX_SLOTS, sequences, tokens // places)
    return EngineSizes(slots, settings.cache_tokens or min(tokens, slots * places))


def probe_sizes(
    lm: nn.Module, settings: RolloutSettings, *, sequences: int, max_len: int
) -> EngineSizes:
    """choose_sizes for a model and the memory that is free on its device now."""
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
