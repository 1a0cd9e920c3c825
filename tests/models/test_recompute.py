"""Layers that are computed again in the backward pass, with their inputs in the host's memory."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.adapters import moved
from helpers.image_models import Scene
from helpers.image_models import fresh as image_model
from helpers.rank_cases import Case, train
from postgrad.layout.layout import lay_out, plain_layout
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.models import recompute
from postgrad.models.adapters import add_adapter
from postgrad.models.attention import layers_of
from postgrad.models.images import ImageTower
from postgrad.models.load import load_model
from postgrad.models.recompute import HostInputs, recompute_activations
from postgrad.models.settings import LoraSettings, Recompute
from postgrad.parallel.ranks import ALONE

CPU = torch.device("cpu")
WAYS: tuple[Recompute, ...] = (False, True, "offload")
Held = list[Any]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """All inputs of layers that were brought to the host's memory."""
    inputs: Held = []
    begin = recompute._KeptInput.__init__

    def noted(self: Any, *arguments: Any) -> None:
        inputs.append(self)
        begin(self, *arguments)

    monkeypatch.setattr(recompute._KeptInput, "__init__", noted)
    return inputs


def require_same_bits(by_way: list[dict[str, Tensor]]) -> None:
    first, *others = by_way
    for other in others:
        assert other.keys() == first.keys()
        for name, tensor in first.items():
            assert torch.equal(tensor.nan_to_num(), other[name].nan_to_num()), name


@pytest.mark.parametrize(
    "case",
    [
        Case("none", beside=True),
        Case("none", kind="reward", lora=True, beside=True),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                Case("none", type="gemma2", dtype="bfloat16"),
                Case("none", type="qwen3_moe", groups=2),
                Case("none", type="gpt_oss", lora=True, targets="experts+router+q_proj"),
                Case("none", type="qwen3_5_text"),  # goes on from the states of prompts
            )
        ),
    ],
    ids=lambda case: f"{case.type} {case.kind}{' LoRA' * case.lora}",
)
def test_a_trained_model_has_the_same_bits_wherever_inputs_were(
    case: Case, tmp_path: Path, held: Held
) -> None:
    cases = [case._replace(checkpointing=way) for way in WAYS]
    train(ALONE, tmp_path, cases)
    assert held
    require_same_bits([load_file(tmp_path / f"{case.name}.safetensors") for case in cases])


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3", "qwen3_vl_moe"])
def test_so_has_one_that_reads_images_whose_tower_trains(kind: str, held: Held) -> None:
    gradients: list[dict[str, Tensor]] = []
    for way in WAYS:
        scene, lm = Scene(kind), image_model(kind)
        if way:
            recompute_activations(lm.train(), way)
        backbone = Backbone(lm, CPU, MicroBatch())
        backbone.tower = ImageTower(lm, scene.pixels.__getitem__)
        logprobs, _ = backbone.logprobs(lay_out(scene.sequences, np.arange(4)), 1.0)
        logprobs.sum().backward()
        gradients.append({n: p.grad for n, p in lm.named_parameters() if p.grad is not None})
    require_same_bits(gradients)
    assert len(held) > len(layers_of(lm))


def test_so_has_an_adapter_over_weights_of_four_bits(
    fresh: Callable[[str], Path], held: Held
) -> None:
    gradients: list[dict[str, Tensor]] = []
    layout = plain_layout(3, 8)
    for way in WAYS:
        how: Any = {"dtype": torch.float32, "quantize": "4bit", "gradient_checkpointing": way}
        lm: Any = load_model(str(fresh("qwen3")), **how).lm
        adapter = moved(add_adapter(lm, LoraSettings(rank=4, alpha=8), seed=0))
        Backbone(lm, CPU, MicroBatch(), adapter=adapter).logprobs(layout, 1.0)[0].sum().backward()
        gradients.append({n: p.grad for n, p in adapter.parameters().items() if p.grad is not None})
    require_same_bits(gradients)
    assert len(held) == 2


class Layers(nn.Module):
    """Six layers, computed again one by one from inputs of [5, 4]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self._again = HostInputs().keeping(
            lambda layer, x: checkpoint(lambda y: torch.tanh(layer(y)), x, use_reentrant=False)
        )
        self.watch: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self._again(layer, x)
            self.watch()
        return x


def test_two_inputs_at_most_are_on_the_device(held: Held) -> None:
    model, seen = Layers(), list[list[int]]()
    model.watch = lambda: seen.append(
        [n for n, held_tensor in enumerate(held) if held_tensor.here is not None]
    )
    for layer in model.layers:  # in the order of the backward pass: the last layer's first
        layer.register_full_backward_hook(lambda *_: model.watch())
    x = torch.ones(5, 4, requires_grad=True)
    model(x).sum().backward()
    assert seen[:6] == [[n] for n in range(6)]  # of the layer that has begun last
    # Each is handed over to its layer as the one before it comes.
    assert seen[6:] == [[4], [3], [2], [1], [0], []]


def test_weights_and_what_else_a_layer_reads_stay_where_they_are(held: Held) -> None:
    weight = nn.Parameter(torch.ones(4))
    around = HostInputs().keeping(lambda weight, x, y: x * weight * y)
    x, y = torch.full((3, 4), 2.0, requires_grad=True), torch.full((3, 4), 3.0)
    around(weight, x, y).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [18.0] * 4
    assert len(held) == 1
    assert held[0].host.tolist() == x.tolist()


def test_a_forward_pass_without_gradients_copies_nothing(held: Held) -> None:
    with torch.no_grad():
        Layers()(torch.ones(5, 4))
    assert held == []


def test_what_a_forward_pass_kept_is_freed_with_its_graph_where_no_backward_pass_comes(
    held: Held,
) -> None:
    out = Layers()(torch.ones(5, 4, requires_grad=True))
    inputs = [weakref.ref(held_tensor) for held_tensor in held]
    held.clear()
    gc.collect()
    assert all(reference() is not None for reference in inputs)
    del out
    gc.collect()
    assert [reference() for reference in inputs] == [None] * 6


def test_a_graph_can_go_back_twice_and_two_graphs_in_any_order() -> None:
    model = Layers()
    inputs = [torch.full((5, 4), value, requires_grad=True) for value in (0.5, 2.0)]
    plain: list[Tensor] = []
    for x in inputs:
        y = x
        for layer in model.layers:
            y = torch.tanh(layer(y))
        plain += torch.autograd.grad(y.sum(), x)
    outputs = [model(x).sum() for x in inputs]
    for number in (0, 1, 0):  # the first before the second, and again
        (gradient,) = torch.autograd.grad(outputs[number], inputs[number], retain_graph=True)
        assert torch.equal(gradient, plain[number])
