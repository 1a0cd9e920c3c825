"""On CUDA: flex attention over trees equals the batched blocks, forward and backward."""

import numpy as np
import pytest
import torch

from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.blocks import plan_blocks
from postgrad.layout.layout import Layout, lay_out
from postgrad.models.tree import FlexAttention, TreeAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HEADS, KV_HEADS, DIM = 4, 2, 32


def layout_of(shared: int) -> Layout:
    """Three groups of four; `shared` prompt tokens in common."""
    rng = np.random.default_rng(0)
    tokens, masks, group = [], [], []
    for number in range(3):
        prompt = rng.integers(0, 50, shared)
        for _ in range(4):
            response = rng.integers(0, 50, rng.integers(5, 40))
            tokens.append(np.concatenate([prompt, response]))
            masks.append([False] * shared + [True] * len(response))
            group.append(number)
    sequences = Sequences(Ragged.of(tokens, np.int32), Ragged.of(masks, bool), np.array(group))
    return lay_out(sequences, np.arange(len(sequences)))


@pytest.mark.parametrize("shared", [16, 130])
@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_flex_attention_equals_the_batched_blocks(
    shared: int, window: int | None, softcap: float | None, sinks: bool
) -> None:
    device, layout = torch.device("cuda"), layout_of(shared)
    torch.manual_seed(0)
    shapes = [(HEADS, layout.n_tokens, DIM)] + [(KV_HEADS, layout.n_tokens, DIM)] * 2
    out_weight = torch.randn(layout.n_tokens, HEADS, DIM, device=device)
    values: list[torch.Tensor] = []
    shapes += [(HEADS,)] * sinks
    inputs = [torch.randn(shape, device=device) for shape in shapes]
    for context in (
        TreeAttention(plan_blocks(layout), device),
        FlexAttention(layout, device),
    ):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        how = {"scale": DIM**-0.5, "window": window, "softcap": softcap}
        out = context.attend(0, *leaves[:3], **how, sinks=leaves[3] if sinks else None)
        (out * out_weight).sum().backward()
        gradients = [leaf.grad.flatten() for leaf in leaves if leaf.grad is not None]
        assert len(gradients) == len(leaves)
        values.append(torch.cat([out.flatten(), *gradients]))
    torch.testing.assert_close(values[1], values[0], atol=2e-3, rtol=2e-3)
