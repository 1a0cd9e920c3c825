"""What vLLM's workers do with weights that arrive, beside a vLLM that has only the names."""

import sys
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

TRANSFER = "postgrad.rollout.vllm.transfer"


class Engine:
    """vLLM's base class of transfer engines."""

    def __class_getitem__(cls, names: Any) -> type:
        return cls


class RoutedExperts(nn.Module):
    """Of 5 experts: their kernel reads a packed copy, here the weight negated."""

    def __init__(self, transposed: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.is_fused_checkpoint_transposed = transposed
        self.moe_config = SimpleNamespace(hidden_dim_unpadded=4)
        kernel = SimpleNamespace(process_weights_after_loading=pack)
        self.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=kernel))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[Any]:
        return [(name, tuple(weight.shape)) for name, weight in weights]


def pack(experts: RoutedExperts) -> None:
    experts.weight.data.neg_()


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, imported by a worker of that vLLM."""
    names: dict[str, dict[str, Any]] = {
        "vllm.distributed": {"get_tensor_model_parallel_rank": None},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": Engine,
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
        "vllm.distributed.weight_transfer.factory": {
            "WeightTransferEngineFactory": SimpleNamespace(
                register_engine=lambda name, weights: None
            )
        },
        "vllm.model_executor.layers.fused_moe.routed_experts": {
            "RoutedExperts": type("RoutedExperts", (RoutedExperts,), {})
        },
        "vllm.model_executor.layers.vocab_parallel_embedding": {"ParallelLMHead": nn.Identity},
        "vllm.model_executor.model_loader.reload": {
            "finalize_layerwise_reload": lambda model, config: None,
            "initialize_layerwise_reload": lambda model: None,
        },
    }
    for name, contents in names.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, TRANSFER, raising=False)
    module = import_module(TRANSFER)
    monkeypatch.delitem(sys.modules, TRANSFER)
    return module


# Experts [5, outputs, inputs] between 4 numbers and 3: gate and up side by side are 6 outputs.
@pytest.mark.parametrize(
    ("name", "came", "taken"),
    [
        ("gate_up_proj", (5, 4, 6), (5, 4, 6)),  # as on the hub
        ("gate_up_proj", (5, 6, 4), (5, 4, 6)),  # as transformers 5 writes it
        ("down_proj", (5, 3, 4), (5, 3, 4)),
        ("down_proj", (5, 4, 3), (5, 3, 4)),
        ("3.down_proj", (4, 3), (4, 3)),  # of one expert
        ("gate_up_proj_bias", (5, 6, 4), (5, 6, 4)),
    ],
)
def test_weights_of_experts_are_read_in_either_layout(
    transfer: Any, name: str, came: tuple[int, ...], taken: tuple[int, ...]
) -> None:
    weights = [(name, torch.zeros(came))]
    assert transfer.RoutedExperts().load_weights(weights) == [(name, taken)]
    assert transfer.RoutedExperts(transposed=False).load_weights(weights) == [(name, came)]


def test_a_weight_that_fits_both_layouts_is_transformers_own(transfer: Any) -> None:
    square = torch.arange(32.0).reshape(2, 4, 4)
    for name in ("gate_up_proj", "down_proj"):
        _, hub_weight = transfer.as_on_the_hub(name, square, 4)
        assert torch.equal(hub_weight, square.transpose(1, 2))


@pytest.mark.parametrize(("device", "packed"), [("cpu", -7.0), ("cuda", 7.0)])
def test_experts_are_packed_on_cpus_once_all_weights_are_placed(
    transfer: Any, monkeypatch: pytest.MonkeyPatch, device: str, packed: float
) -> None:
    experts = [transfer.RoutedExperts() for _ in range(2)]
    model = nn.ModuleList([experts[0], nn.Linear(1, 1), experts[1]])

    def place(model: Any, config: Any) -> None:
        for expert in experts:
            expert.weight.data.fill_(7.0)

    monkeypatch.setattr(transfer, "finalize_layerwise_reload", place)
    engine: Any = transfer.ParcelTransfer()
    engine.model, engine.model_config, engine.device = model, None, torch.device(device)
    begun: list[str] = []
    engine.inlet = SimpleNamespace(receiver=SimpleNamespace(begin=lambda: begun.append("begun")))
    for _ in range(2):
        engine.start_weight_update()
        engine.finish_weight_update()
        assert [expert.weight.item() for expert in experts] == [packed] * 2
    assert len(begun) == 2
