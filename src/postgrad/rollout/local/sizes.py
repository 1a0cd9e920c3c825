"""The size of the engine: chosen at the start of a run, recorded, used again at resume."""

import psutil
import torch
from torch import nn

from postgrad.rollout.local.budget import EngineSizes, choose_sizes
from postgrad.rollout.local.cache import bytes_per_token
from postgrad.rollout.local.prompts import layer_shapes
from postgrad.rollout.settings import RolloutSettings


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
