"""Adapters that differ from their base, for tests of what they compute and how they are stored."""

import torch

from postgrad.models.adapters import Adapter


def moved(adapter: Adapter, seed: int = 1) -> Adapter:
    """Off its start, where B is zero."""
    generator = torch.Generator().manual_seed(seed)
    adapter.load({
        name: p.detach() + 0.1 * torch.randn(p.shape, generator=generator)
        for name, p in adapter.parameters().items()
    })  # fmt: skip
    return adapter
