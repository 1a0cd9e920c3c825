"""A base in four bits: what is read is what the files say, quantised; products, adapters, twins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from helpers.adapters import moved
from postgrad.core.errors import UsageError
from postgrad.models.adapter_files import merged_state, write_adapter
from postgrad.models.adapters import add_adapter
from postgrad.models.four_bits import FourBitLinear, base_weight, in_four_bits, twin
from postgrad.models.load import load_model
from postgrad.models.score import load_score_model
from postgrad.models.settings import LoraSettings, ModelType
from postgrad.ops.quantization import dequantize_4bit, quantize_4bit

SMALL = LoraSettings(rank=4, alpha=8)
IDS = torch.tensor([[5, 17, 40, 8, 66, 23, 9, 31]])
Fresh = Callable[[str], Path]


def read(path: Path, *, dtype: torch.dtype = torch.float32, score: bool = False) -> Any:
    load = load_score_model if score else load_model
    lm: Any = load(str(path), dtype=dtype, quantize="4bit").lm
    lm.set_attn_implementation("eager")
    return lm


def expanded(lm: Any, path: Path, dtype: torch.dtype) -> Any:
    """The model of `path` with the weights that `lm` computes with."""
    plain: Any = load_model(str(path), dtype=dtype).lm
    plain.set_attn_implementation("eager")
    for name, module in lm.named_modules():
        if isinstance(module, FourBitLinear):
            plain.get_submodule(name).weight.data = module.expanded(dtype)
    return plain


@pytest.mark.parametrize("kind", ModelType.__args__)
def test_the_layers_matrices_are_those_of_the_files_in_four_bits(kind: str, fresh: Fresh) -> None:
    lm = read(fresh(kind))
    stored = load_file(fresh(kind) / "model.safetensors")
    packed = {n: m for n, m in lm.named_modules() if isinstance(m, FourBitLinear)}
    assert len(packed) == 14  # 7 linear layers in each of 2
    for name, module in packed.items():
        want = quantize_4bit(stored[f"{name}.weight"])
        assert torch.equal(module.weight, want.codes)
        shape = stored[f"{name}.weight"].shape
        assert torch.equal(
            module.expanded(torch.float32), dequantize_4bit(want, shape, torch.float32)
        )
        assert not module.weight.requires_grad
    for name, parameter in lm.named_parameters():
        if name.removesuffix(".weight") not in packed:
            assert torch.equal(parameter, stored[name]), name


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_logits_and_gradients_are_those_of_the_expanded_weights(
    kind: str, dtype: torch.dtype, fresh: Fresh
) -> None:
    lm = read(fresh(kind), dtype=dtype)
    plain = expanded(lm, fresh(kind), dtype)
    adapters = [moved(add_adapter(model, SMALL, seed=0)) for model in (lm, plain)]
    outputs = [model(IDS).logits.float() for model in (lm, plain)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-6)
    for out in outputs:
        (out * torch.arange(out.shape[-1])).sum().backward()
    ours, theirs = (adapter.parameters() for adapter in adapters)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for name, parameter in ours.items():
        gradient, want = parameter.grad, theirs[name].grad
        assert gradient is not None
        assert want is not None
        assert (gradient - want).norm() <= tolerance * want.norm(), name


def test_a_product_and_its_gradient_agree_with_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(96, 40)
    layer = FourBitLinear(linear)
    packed = quantize_4bit(linear.weight)
    layer.weight = nn.Parameter(packed.codes, requires_grad=False)
    layer.scales, layer.maxima, layer.offset = packed[1:]
    rows = torch.randn(3, 5, 96, generator=generator, requires_grad=True)
    out = layer(rows)
    sent = torch.randn(out.shape, generator=generator)
    out.backward(sent)
    matrix = dequantize_4bit(packed, linear.weight.shape, torch.float32).double()
    want = rows.detach().double() @ matrix.T + linear.bias.detach().double()
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad.double(), sent.double() @ matrix, rtol=0, atol=1e-5)


def test_with_the_adapter_off_it_is_the_base_bit_for_bit(fresh: Fresh) -> None:
    lm = read(fresh("qwen3"))
    base = lm(IDS).logits
    adapter = moved(add_adapter(lm, SMALL, seed=0))
    assert (lm(IDS).logits - base).abs().max() > 0.01
    with adapter.disabled():
        assert torch.equal(lm(IDS).logits, base)


@pytest.mark.parametrize("targets", [(), ("q_proj",)])
def test_merged_weights_are_a_plain_model_with_the_same_logits(
    targets: tuple[str, ...], fresh: Fresh
) -> None:
    """Layers without an adapter are expanded too."""
    lm = read(fresh("qwen3"))
    adapter = moved(add_adapter(lm, SMALL.model_copy(update={"targets": targets}), seed=0))
    weights = dict(adapter.hub_weights())
    plain: Any = load_model(str(fresh("qwen3")), dtype=torch.float32).lm
    plain.set_attn_implementation("eager")
    assert weights.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(weights, strict=False)
    torch.testing.assert_close(plain(IDS).logits, lm(IDS).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_merges_into_what_four_bits_read_not_into_the_files(
    dtype: torch.dtype, fresh: Fresh
) -> None:
    lm = read(fresh("qwen3"), dtype=dtype)
    adapter = moved(add_adapter(lm, SMALL, seed=0))
    weights = {name: p.detach() for name, p in adapter.parameters().items()}
    state = merged_state(str(fresh("qwen3")), weights, SMALL, quantize="4bit", dtype=dtype)
    for name, tensor in adapter.merged():
        assert torch.equal(state[name], tensor), name
    merged = merged_state(str(fresh("qwen3")), weights, SMALL)
    assert any((state[name] - merged[name].float()).abs().max() > 0.01 for name in state)


def test_the_adapter_alone_can_be_written_and_read_by_peft(fresh: Fresh, tmp_path: Path) -> None:
    adapter = moved(add_adapter(read(fresh("qwen3")), SMALL, seed=0))
    write_adapter(adapter.parameters(), SMALL, str(fresh("qwen3")), tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_a_score_model_keeps_its_head_in_float32(fresh: Fresh) -> None:
    lm = read(fresh("qwen3"), dtype=torch.bfloat16, score=True)
    assert in_four_bits(lm)
    assert lm.score.weight.dtype == torch.float32


def test_a_twin_shares_every_tensor_and_follows_what_changes_in_place(fresh: Fresh) -> None:
    lm = read(fresh("qwen3"))
    adapter = add_adapter(lm, SMALL, seed=0)
    lm.train()
    other: Any = twin(lm)
    assert not other.training
    assert lm.training
    ours, theirs = (dict(m.named_parameters()) | dict(m.named_buffers()) for m in (lm, other))
    assert all(tensor is theirs[name] for name, tensor in ours.items())
    before = other(IDS).logits
    moved(adapter)
    after = other(IDS).logits
    assert (after - before).abs().max() > 0.01
    assert torch.equal(after, lm(IDS).logits)
    with adapter.disabled():  # of the first one only
        assert torch.equal(other(IDS).logits, after)
        assert not torch.equal(lm(IDS).logits, after)
    assert all(p.requires_grad for p in adapter.parameters().values())


def test_an_adapters_directory_is_refused_as_a_base(fresh: Fresh, tmp_path: Path) -> None:
    adapter = moved(
        add_adapter(load_model(str(fresh("qwen3")), dtype=torch.float32).lm, SMALL, seed=0)
    )
    write_adapter(adapter.parameters(), SMALL, str(fresh("qwen3")), tmp_path / "adapter")
    with pytest.raises(UsageError, match="cannot be merged into weights of four bits"):
        load_model(str(tmp_path / "adapter"), dtype=torch.float32, quantize="4bit")


def test_base_weight_is_the_weight_of_any_linear_layer() -> None:
    linear = nn.Linear(3, 2)
    weight: Tensor = base_weight(linear)
    assert weight is linear.weight
