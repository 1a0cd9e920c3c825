import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from postgrad.models.linear import FusedRMSNorm, fuse_norms

CPU = torch.device("cpu")


class Model(nn.Module):
    """A model of which only the norm and its type count."""

    def __init__(self, model_type: str, norm: nn.Module) -> None:
        super().__init__()
        self.config = type("Config", (), {"model_type": model_type})
        self.norm = norm


def norm(width: int) -> nn.Module:
    fused_norm = Qwen2RMSNorm(width, eps=1e-5)
    with torch.no_grad():
        fused_norm.weight.add_(torch.randn(width) * 0.3)
    return fused_norm


def exact(rows: Tensor, weight: Tensor, coming: Tensor) -> list[Tensor]:
    """The norm of float64, and its gradients by autograd."""
    rows, weight = (each.double().detach().requires_grad_() for each in (rows, weight))
    result = weight * rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return [result.detach(), *torch.autograd.grad(result, (rows, weight), coming.double())]


@pytest.mark.parametrize("shape", [(24,), (1, 7, 24), (1, 3, 5, 24)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_fused_norm_computes_what_float64_does(shape: tuple[int, ...], scale: float) -> None:
    torch.manual_seed(0)
    model = Model("qwen2", norm(24))
    fuse_norms(model, CPU)
    assert type(model.norm) is FusedRMSNorm
    rows = (torch.randn(shape) * scale).requires_grad_()
    coming = torch.randn(shape)
    result = model.norm(rows)
    gradients = torch.autograd.grad(result, (rows, model.norm.weight), coming)
    wanted = exact(rows, model.norm.weight, coming)
    for actual, expected_tensor in zip([result, *gradients], wanted, strict=True):
        torch.testing.assert_close(
            actual.double(), expected_tensor, rtol=2e-5, atol=2e-5 / min(scale, 1.0)
        )


def test_in_bfloat16_it_rounds_no_worse_than_the_module() -> None:
    torch.manual_seed(0)
    plain = norm(64)
    rows, coming = torch.randn(200, 64), torch.randn(200, 64)
    wanted = exact(rows, plain.weight, coming)
    plain.to(torch.bfloat16)

    def errors(module: nn.Module) -> list[float]:
        norm_input = rows.bfloat16().requires_grad_()
        result = module(norm_input)
        assert result.dtype == torch.bfloat16
        got = [result, *torch.autograd.grad(result, (norm_input, module.weight), coming.bfloat16())]
        return [float((a.detach().double() - b).norm()) for a, b in zip(got, wanted, strict=True)]

    of_module = errors(plain)
    model = Model("llama", plain)
    fuse_norms(model, CPU)
    for ours, theirs in zip(errors(model.norm), of_module, strict=True):
        assert ours < 1.1 * theirs


def test_a_row_that_is_no_block_in_memory_is_read_right() -> None:
    torch.manual_seed(0)
    model = Model("qwen3", norm(16))
    rows = torch.randn(2, 16, 5).transpose(1, 2)
    expected = model.norm(rows)
    fuse_norms(model, CPU)
    torch.testing.assert_close(model.norm(rows), expected, rtol=1e-6, atol=1e-6)


def test_norms_of_other_families_stay_as_they_are() -> None:
    model = Model("gemma2", norm(8))
    fuse_norms(model, CPU)
    assert type(model.norm) is Qwen2RMSNorm
    fuse_norms(Model("qwen2", model.norm), torch.device("cuda"))
    assert type(model.norm) is Qwen2RMSNorm


def test_a_frozen_norm_gets_no_gradient() -> None:
    model = Model("qwen2", norm(8).requires_grad_(False))
    fuse_norms(model, CPU)
    rows = torch.randn(3, 8, requires_grad=True)
    model.norm(rows).sum().backward()
    assert rows.grad is not None
    assert model.norm.weight.grad is None
