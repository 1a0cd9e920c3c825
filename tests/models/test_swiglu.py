"""The feed-forward that keeps less, against transformers' own."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from postgrad.models.fused import fuse
from postgrad.models.swiglu import FusedMLP

CPU = torch.device("cpu")


class Model(nn.Module):
    """A model of which only the feed-forward and the config count."""

    def __init__(self, **changes: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 2}
        self.config = LlamaConfig(**sizes, mlp_bias=True, **changes)  # pyright: ignore[reportCallIssue]
        self.mlp = LlamaMLP(self.config)


def computed(mlp: nn.Module, x: Tensor, coming: Tensor) -> list[Tensor]:
    """What comes out, and all gradients."""
    given = x.clone().requires_grad_()
    out = mlp(given)
    return [out.detach(), *torch.autograd.grad(out, [given, *mlp.parameters()], coming)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_the_bits_of_transformers_module(dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    x, coming = torch.randn(1, 7, 12).to(dtype), torch.randn(1, 7, 12).to(dtype)
    wanted = computed(model.mlp, x, coming)
    fuse(model, CPU)
    assert type(model.mlp) is FusedMLP
    for found, one in zip(computed(model.mlp, x, coming), wanted, strict=True):
        assert torch.equal(found, one)


def test_its_gradients_are_those_of_differences_in_float64() -> None:
    model = Model().double()
    fuse(model, CPU)
    x = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model.mlp, (x,))


def test_it_keeps_gate_and_up_and_what_down_reads() -> None:
    def kept(mlp: nn.Module) -> int:
        found: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.shape[-1] == 20 and not isinstance(tensor, nn.Parameter):
                found[tensor.data_ptr()] = tensor.numel()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = mlp(torch.randn(7, 12))
        assert out.requires_grad
        return sum(found.values())

    model = Model()
    whole = kept(model.mlp)
    fuse(model, CPU)
    assert (whole, kept(model.mlp)) == (4 * 7 * 20, 3 * 7 * 20)


def test_another_activation_is_left_as_it_is() -> None:
    model = Model(hidden_act="gelu")
    fuse(model, CPU)
    assert type(model.mlp) is LlamaMLP
