"""DoRA: rows of W + (alpha / rank) B A with trained lengths, against float64 loops and PEFT."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor, nn

from postgrad.models.adapter_files import merged_state, write_adapter
from postgrad.models.adapter_layers import AdaptedLinear, row_lengths
from postgrad.models.adapter_reader import read_adapter
from postgrad.models.adapters import Adapter, add_adapter
from postgrad.models.load import load_model
from postgrad.models.settings import LoraSettings

SETTINGS = LoraSettings(rank=3, alpha=6, dora=True)
IDS = torch.tensor([[5, 9, 3, 7, 11, 2]])
Fresh = Callable[[str], Path]


def plain(path: Path, **load: Any) -> Any:
    """A model with transformers' own attention."""
    lm: Any = load_model(str(path), dtype=torch.float32, **load).lm
    lm.set_attn_implementation("eager")
    return lm


def adapted(path: Path, settings: LoraSettings = SETTINGS, **load: Any) -> Adapter:
    return add_adapter(plain(path, **load), settings, seed=0)


def shaken(adapter: Adapter) -> dict[str, Tensor]:
    """The parameters with noise, as after training."""
    generator = torch.Generator().manual_seed(1)
    noise = {
        name: 0.2 * torch.randn(p.shape, generator=generator)
        for name, p in adapter.parameters().items()
    }
    weights = {n: p.detach().clone() + noise[n] for n, p in adapter.parameters().items()}
    adapter.load(weights)
    return weights


def in_float64(layer: Any, name: str, x: np.ndarray) -> np.ndarray:
    """m (W + s B A) / lengths x + b, row by row."""
    w, a, b, m = (
        t.detach().double().numpy()
        for t in (
            layer.base_layer.weight,
            layer.lora_A[name].weight,
            layer.lora_B[name].weight,
            layer.lora_magnitude_vector[name].weight,
        )
    )
    changed = w + layer.scaling[name] * b @ a
    out = np.zeros((len(x), len(w)))
    for row, weights in enumerate(changed):
        length = np.sqrt(sum(value * value for value in weights))
        out[:, row] = m[row] / length * (x @ weights)
    bias = layer.base_layer.bias
    return out if bias is None else out + bias.detach().double().numpy()


def layers_of(adapter: Adapter) -> list[tuple[str, AdaptedLinear]]:
    return [(n, m) for n, m in adapter.lm.named_modules() if isinstance(m, AdaptedLinear)]


@pytest.mark.parametrize("kind", ["qwen2", "llama"])  # qwen2's q, k and v have biases
def test_it_starts_from_the_base_to_the_bit(kind: str, fresh: Fresh) -> None:
    base = plain(fresh(kind))
    adapter = adapted(fresh(kind))
    assert torch.equal(adapter.lm(IDS).logits, base(IDS).logits)
    for _, layer in layers_of(adapter):
        lengths = layer.lora_magnitude_vector["policy"].weight
        torch.testing.assert_close(lengths, layer.base_layer.weight.square().sum(1).sqrt())
        assert lengths.requires_grad
    shaken(adapter)
    with adapter.disabled():
        assert torch.equal(adapter.lm(IDS).logits, base(IDS).logits)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_layer_computes_what_a_loop_in_float64_does(kind: str, fresh: Fresh) -> None:
    adapter = adapted(fresh(kind))
    shaken(adapter)
    rng = np.random.default_rng(0)
    for _, layer in layers_of(adapter):
        x = rng.normal(size=(4, layer.in_features)).astype(np.float32)
        ours = layer(torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(ours, in_float64(layer, "policy", x), rtol=2e-4, atol=2e-5)


def both(width: int, height: int, *, bias: bool) -> tuple[AdaptedLinear, Any]:
    """Our layer and PEFT's, float64, with the same numbers."""
    torch.manual_seed(3)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"], use_dora=True)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = type("Config", (), {"model_type": ""})()
            self.q_proj = nn.Linear(width, height, bias=bias, dtype=torch.float64)

    theirs: Any = peft.inject_adapter_in_model(config, Block(), "policy").double()
    ours: Any = peft.inject_adapter_in_model(config, Block(), "policy").double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    ours.load_state_dict(theirs.state_dict())
    from postgrad.models.adapter_layers import own_layers

    own_layers(ours)
    assert isinstance(ours.q_proj, AdaptedLinear)
    return ours.q_proj, theirs.q_proj


@pytest.mark.parametrize("bias", [False, True])
def test_results_and_gradients_are_peft_s(bias: bool) -> None:
    ours, theirs = both(7, 5, bias=bias)
    x = torch.randn(4, 7, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for layer, leaf in zip((ours, theirs), inputs, strict=True):
        layer(leaf).sin().sum().backward()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-12, atol=1e-12)
    for kind in ("lora_A", "lora_B", "lora_magnitude_vector"):
        ours_gradient, other = (
            getattr(layer, kind)["policy"].weight.grad for layer in (ours, theirs)
        )
        assert float(ours_gradient.abs().max()) > 1e-3
        torch.testing.assert_close(ours_gradient, other, rtol=1e-12, atol=1e-12)


def test_rows_of_zeros_stay_finite() -> None:
    ours, _ = both(7, 5, bias=True)
    with torch.no_grad():
        ours.base_layer.weight[2] = 0
        ours.lora_B["policy"].weight[2] = 0
    out = ours(torch.randn(4, 7, dtype=torch.float64))
    assert bool(out.isfinite().all())
    torch.testing.assert_close(out[:, 2], ours.base_layer.bias[2].expand(4))


@torch.no_grad()
def test_the_merged_model_computes_the_same(fresh: Fresh) -> None:
    adapter = adapted(fresh("qwen2"))
    shaken(adapter)
    logits = adapter.lm(IDS).logits
    other = plain(fresh("qwen2"))
    assert float((other(IDS).logits - logits).abs().max()) > 0.01
    weights = dict(adapter.hub_weights())
    other.load_state_dict(weights, strict=False)
    assert set(dict(other.named_parameters())) == set(weights)
    assert float((other(IDS).logits - logits).abs().max()) < 1e-4


@torch.no_grad()
def test_it_is_written_as_peft_reads_it_and_read_back(fresh: Fresh, tmp_path: Path) -> None:
    adapter = adapted(fresh("llama"))
    weights = shaken(adapter)
    write_adapter(weights, SETTINGS, str(fresh("llama")), tmp_path / "adapter")  # PEFT's logits
    back = read_adapter(tmp_path / "adapter")
    assert back.settings.dora
    assert len(back.magnitudes) == len(layers_of(adapter))
    read = plain(tmp_path / "adapter")
    assert float((read(IDS).logits - adapter.lm(IDS).logits).abs().max()) < 1e-4
    merged = merged_state(str(fresh("llama")), back.weights, back.settings)
    for name, tensor in adapter.merged():
        torch.testing.assert_close(torch.as_tensor(merged[name].real()), tensor)


@torch.no_grad()
def test_weights_that_lie_in_files_give_the_same_lengths(fresh: Fresh) -> None:
    held = adapted(fresh("llama")).parameters()
    stored = adapted(fresh("llama"), in_files=True).parameters()
    assert held.keys() == stored.keys()
    names = [name for name in held if name.endswith("lora_magnitude_vector")]
    assert len(names) == 14
    for name in names:
        tensor: Any = stored[name]
        assert torch.equal(tensor.real(), held[name])
        part = tensor.block(((2, 3),))
        assert torch.equal(part, held[name][2:5])


def test_lengths_are_float32_of_halves() -> None:
    halves = torch.full((2, 4), 300.0, dtype=torch.float16)  # their squares are above its range
    assert row_lengths(halves).tolist() == [600.0, 600.0]
