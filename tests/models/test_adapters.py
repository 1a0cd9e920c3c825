"""LoRA on a frozen model: the base's bits, exact gradients, merged weights, several by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from postgrad.models.adapters import Adapter, add_adapter
from postgrad.models.load import load_model
from postgrad.models.settings import LoraSettings, ModelType

SMALL = LoraSettings(rank=4, alpha=8)
IDS = torch.tensor([[5, 17, 40, 8, 66, 23, 9, 31]])


@pytest.fixture
def model(fresh: Callable[[str], Path]) -> Callable[..., Any]:
    def read(kind: str = "qwen3", dtype: torch.dtype = torch.float32) -> Any:
        lm: Any = load_model(str(fresh(kind)), dtype=dtype).lm
        lm.set_attn_implementation("eager")
        return lm

    return read


def moved(adapter: Adapter, size: float = 0.1) -> Adapter:
    """Off its start, where B is zero."""
    generator = torch.Generator().manual_seed(1)
    adapter.load(
        {
            name: p.detach() + size * torch.randn(p.shape, generator=generator)
            for name, p in adapter.parameters().items()
        }
    )
    return adapter


@pytest.mark.parametrize("kind", ModelType.__args__)
@torch.no_grad()
def test_an_adapter_starts_as_the_base_and_disabled_is_the_base(
    kind: str, model: Callable[..., Any]
) -> None:
    lm = model(kind)
    base = lm(IDS).logits
    adapter = add_adapter(lm, SMALL, seed=0)
    assert torch.equal(lm(IDS).logits, base)
    moved(adapter)
    assert (lm(IDS).logits - base).abs().max() > 0.01
    with adapter.disabled():
        assert torch.equal(lm(IDS).logits, base)
    assert (lm(IDS).logits - base).abs().max() > 0.01
