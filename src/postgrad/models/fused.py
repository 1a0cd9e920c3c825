"""Modules of transformers that become ones with fewer steps, in training on CPUs."""

from typing import Any

import torch

from postgrad.models.norm import FusedRMSNorm
from postgrad.models.settings import LLAMA_TYPES
from postgrad.models.swiglu import FusedMLP


def fuse(lm: Any, device: torch.device) -> None:
    """Norms and feed-forward of a model of LLAMA_TYPES take fewer steps, on a CPU. Parameters,
    their names and what the modules compute stay, up to rounding.
    """
    config = lm.config
    if device.type != "cpu" or config.model_type not in LLAMA_TYPES:
        return
    for module in lm.modules():
        kind: Any = type(module)
        if not kind.__module__.startswith("transformers.models."):
            continue
        if kind.__name__.endswith("RMSNorm"):
            module.__class__ = FusedRMSNorm
        elif kind.__name__.endswith("MLP") and config.hidden_act == "silu":
            module.__class__ = FusedMLP
