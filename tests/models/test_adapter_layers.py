"""Our forward of PEFT's layers gives PEFT's results and gradients, from fewer products."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from postgrad.models import adapter_products
from postgrad.models.adapter_layers import AdaptedLinear
from postgrad.models.adapters import Adapter, add_adapter
from postgrad.models.settings import LoraSettings

WIDTH, INNER, ROWS = 24, 40, 7
# What another order of float64 sums may change: some 20 products in a chain, of up to 40 terms with
# 1.1e-16 each. Processors add in different orders.
EXACT = 20 * 40 * 2.0**-53


class Block(nn.Module):
    """A block of a decoder layer, by the names of its parts."""

    def __init__(self, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        make: Callable[..., nn.Linear] = lambda a, b: nn.Linear(a, b, bias=bias, dtype=dtype)  # noqa: E731
        self.q_proj, self.k_proj = make(WIDTH, WIDTH), make(WIDTH, WIDTH // 2)
        self.v_proj, self.o_proj = make(WIDTH, WIDTH // 2), make(WIDTH, WIDTH)
        self.gate_proj, self.up_proj = make(WIDTH, INNER), make(WIDTH, INNER)
        self.down_proj = make(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value = torch.cat([self.k_proj(x), self.v_proj(x)], -1)
        x = x + self.o_proj(torch.tanh(self.q_proj(x)) * value)
        return x + self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


class Small(nn.Module):
    """Two blocks, as transformers nests them."""

    def __init__(self, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = Qwen3Config()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([Block(dtype, bias) for _ in range(2)])

    def get_decoder(self) -> nn.Module:
        return self.model

    def get_input_embeddings(self) -> None:
        """It has none: its inputs are vectors."""

    get_output_embeddings = get_input_embeddings

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.model.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = layer(x)
        return x


def adapted(dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[Small, Adapter]:
    """B is not zero, so that every part of the result shows."""
    lm = Small(dtype, bias=True)
    adapter = add_adapter(lm, LoraSettings(rank=4, alpha=6, **settings), seed=0)
    fill(adapter, seed=1)
    if dtype == torch.float64:
        lm.double()
    return lm, adapter


def fill(adapter: Adapter, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    adapter.load({
        name: torch.randn(p.shape, generator=generator) / 4
        for name, p in adapter.parameters().items()
    })  # fmt: skip


@contextmanager
def pefts_own(lm: nn.Module) -> Iterator[None]:
    """PEFT's forward, on the same modules."""
    layers: list[Any] = [layer for layer in lm.modules() if type(layer) is AdaptedLinear]
    assert layers
    for layer in layers:
        layer.__class__ = peft.tuners.lora.Linear
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = AdaptedLinear


def outcome(lm: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The result, and the gradients of all that trains and of the input."""
    x = torch.randn(1, ROWS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x = x.to(dtype).requires_grad_()
    out = lm(x)
    (out * torch.linspace(-1.0, 1.0, out.numel(), dtype=dtype).view_as(out)).sum().backward()
    assert x.grad is not None
    every = {"out": out.detach(), "x": x.grad}
    for name, parameter in lm.named_parameters():
        if parameter.grad is not None:
            every[name] = parameter.grad.clone()
    lm.zero_grad()
    return every


def require_same(lm: nn.Module, dtype: torch.dtype, tolerance: float) -> int:
    """Gives the number of gradients."""
    ours = outcome(lm, dtype)
    with pefts_own(lm):
        theirs = outcome(lm, dtype)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        distance = (tensor - theirs[name]).double().norm()
        assert distance <= tolerance * theirs[name].double().norm(), name
        assert tensor.any()
    return len(ours) - 1


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, EXACT), (torch.float32, 5e-6)])
def test_results_and_gradients_are_pefts(dtype: torch.dtype, tolerance: float) -> None:
    lm, _ = adapted(dtype)
    assert require_same(lm, dtype, tolerance) == 1 + 2 * 2 * 7


def test_in_bfloat16_float32_weights_are_rounded_and_lose_less_than_pefts_in_bfloat16() -> None:
    lm, adapter = adapted(torch.bfloat16)
    assert {p.dtype for p in adapter.parameters().values()} == {torch.float32}
    ours = outcome(lm, torch.bfloat16)
    assert {name: t.dtype for name, t in ours.items() if name in ("out", "x")} == {
        "out": torch.bfloat16, "x": torch.bfloat16
    }  # fmt: skip
    assert {t.dtype for name, t in ours.items() if "lora" in name} == {torch.float32}
    halves, _ = adapted(torch.bfloat16)
    with pefts_own(halves.bfloat16()):
        theirs = outcome(halves, torch.bfloat16)
    exact = outcome(lm.double(), torch.float64)
    of_ours, of_theirs = (
        [float((t.double() - exact[name]).norm() / exact[name].norm()) for name, t in each.items()]
        for each in (ours, theirs)
    )
    assert sum(of_ours) < 0.8 * sum(of_theirs)
    assert max(of_ours) < 0.06


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("k_proj",), ("up_proj", "o_proj")])
def test_so_are_those_of_some_layers_alone(targets: tuple[str, ...]) -> None:
    lm, _ = adapted(targets=targets)
    assert require_same(lm, torch.float64, EXACT) == 1 + 2 * 2 * len(targets)


@pytest.mark.parametrize("joined", [False, True])
def test_so_are_those_of_siblings_with_ranks_and_alphas_of_their_own(joined: bool) -> None:
    lm, adapter = adapted(
        targets=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
        rank_pattern={"k_proj": 2, "layers.0.v_proj": 7}, alpha_pattern={"v_proj": 1, "up_proj": 9},
        exclude_modules=("layers.1.q_proj",), layers_to_transform=(1, 0),
    )  # fmt: skip
    if joined:
        adapter.join_frozen()
    assert require_same(lm, torch.float64, EXACT) == 1 + 2 * 9
    layers: Any = lm.get_submodule("model.layers")
    assert [layers[n].v_proj.lora_A["policy"].weight.shape[0] for n in (0, 1)] == [7, 4]
    assert [layers[n].v_proj.scaling["policy"] for n in (0, 1)] == [1 / 7, 1 / 4]
    assert type(layers[1].q_proj) is nn.Linear


def test_so_are_those_of_several_adapters_on_other_layers() -> None:
    lm, first = adapted(targets=("v_proj",))
    settings = LoraSettings(rank=3, alpha=3, targets=("q_proj", "v_proj", "gate_proj"))
    second = add_adapter(lm, settings, seed=0, name="second")
    fill(second, seed=3)
    lm.double()
    alone = outcome(lm, torch.float64)
    assert require_same(lm, torch.float64, EXACT) == 1 + 2 * 2
    with second.active():
        assert require_same(lm, torch.float64, EXACT) == 1 + 2 * 2 * 3
        assert not torch.equal(outcome(lm, torch.float64)["out"], alone["out"])
        with first.disabled():
            assert require_same_base(lm)
    assert torch.equal(outcome(lm, torch.float64)["out"], alone["out"])


def require_same_base(lm: Small) -> bool:
    return torch.equal(outcome_alone(lm), outcome_alone(Small(torch.float64, bias=True).double()))


@torch.no_grad()
def outcome_alone(lm: Small) -> Tensor:
    return lm(torch.ones(1, ROWS, WIDTH, dtype=torch.float64))


def test_dropout_acts_in_each_layer_and_is_pefts_without_keys() -> None:
    lm, adapter = adapted(dropout=0.5)
    assert require_same(lm, torch.float64, EXACT) == 1 + 2 * 2 * 7
    without = outcome(lm, torch.float64)
    with adapter.dropping(torch.arange(ROWS), 3):
        assert require_same(lm, torch.float64, EXACT) == 1 + 2 * 2 * 7
        assert not torch.equal(outcome(lm, torch.float64)["out"], without["out"])


def test_a_layer_is_w_x_and_alpha_over_rank_times_b_a_x_by_hand() -> None:
    lm = Small(torch.float32)
    adapter = add_adapter(lm, LoraSettings(rank=1, alpha=3, targets=("q_proj", "k_proj")), seed=0)
    block: Any = lm.model.layers[0]  # pyright: ignore[reportIndexIssue]
    with torch.no_grad():
        for number, layer in enumerate((block.q_proj, block.k_proj)):
            layer.base_layer.weight.zero_()
            layer.lora_A[adapter.name].weight.zero_()[0, number] = 2.0
            layer.lora_B[adapter.name].weight.zero_()[number] = 0.5
    x = torch.zeros(1, 1, WIDTH)
    x[0, 0, :2] = torch.tensor([10.0, 100.0])
    q, k = block.q_proj(x)[0, 0], block.k_proj(x)[0, 0]
    assert q.tolist() == [30.0] + [0.0] * (WIDTH - 1)  # 3 * 0.5 * 2 * 10
    assert k.tolist() == [0.0, 300.0] + [0.0] * (WIDTH // 2 - 2)


def test_siblings_with_other_inputs_do_not_share_products() -> None:
    lm, _ = adapted()
    block: Any = lm.model.layers[0]  # pyright: ignore[reportIndexIssue]
    x, y = torch.randn(2, 1, ROWS, WIDTH, dtype=torch.float64).unbind()
    calls = [(block.q_proj, x), (block.k_proj, y), (block.v_proj, x), (block.q_proj, x)]
    ours = [layer(rows) for layer, rows in calls]
    with pefts_own(lm):
        theirs = [layer(rows) for layer, rows in calls]
    for out, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)


def test_siblings_share_one_product_and_keep_nothing_after_a_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm, _ = adapted()
    shapes: list[tuple[int, ...]] = []
    multiply = adapter_products.multiply

    def noted(x: Tensor, weight: Tensor) -> Tensor:
        shapes.append(tuple(weight.shape))
        return multiply(x, weight)

    monkeypatch.setattr(adapter_products, "multiply", noted)
    outcome(lm, torch.float64)
    of_a = [shape for shape in shapes if shape[1] in (WIDTH, INNER)]
    assert of_a == 2 * [(12, WIDTH), (4, WIDTH), (8, WIDTH), (4, INNER)]
    for layer in lm.modules():
        if isinstance(layer, AdaptedLinear):
            for shared in (layer.siblings._rows, layer.siblings._results, layer.siblings._changed):
                assert shared._input is None
                assert not any(part is not None for part in shared._parts)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("k_proj",), ("up_proj", "o_proj")])
@pytest.mark.parametrize("dora", [False, True])
def test_joined_layers_of_which_some_are_adapted_give_pefts_results(
    targets: tuple[str, ...], dora: bool
) -> None:
    lm, adapter = adapted(targets=targets, dora=dora)
    if dora:
        apart = outcome(lm, torch.float64)
    second = add_adapter(lm, LoraSettings(rank=3, alpha=5), seed=0, name="second")
    fill(second, seed=3)
    lm.double()
    adapter.join_frozen()
    with second.active():
        require_same(lm, torch.float64, EXACT)
    if not dora:
        assert require_same(lm, torch.float64, EXACT) == 1 + 2 * 2 * len(targets)
        return
    for name, tensor in outcome(lm, torch.float64).items():
        torch.testing.assert_close(tensor, apart[name], rtol=1e-12, atol=1e-12)


def test_joined_layers_in_bfloat16_are_as_near_to_float64_as_layers_apart() -> None:
    """Over scales and biases: where each is rounded differs, and so do the distances of a case."""
    distances = {False: 0.0, True: 0.0}
    for alpha, bias, join in product((4, 6), (True, False), distances):
        lm = Small(torch.bfloat16, bias)
        adapter = add_adapter(lm, LoraSettings(rank=4, alpha=alpha), seed=0)
        fill(adapter, seed=1)
        if join:
            adapter.join_frozen()
        of_lm = outcome(lm, torch.bfloat16)
        assert {t.dtype for name, t in of_lm.items() if "lora" in name} == {torch.float32}
        lm.double()
        if join:
            adapter.join_frozen()  # the matrices are other ones
        exact = outcome(lm, torch.float64)
        distances[join] += sum(
            float((t.double() - exact[name]).norm() / exact[name].norm())
            for name, t in of_lm.items()
        )
    assert distances[True] < 1.05 * distances[False]


@pytest.mark.parametrize("bias", [True, False])
def test_frozen_matrices_that_are_joined_give_pefts_results_and_stay_the_models_own(
    bias: bool,
) -> None:
    lm = Small(torch.float64, bias)
    adapter = add_adapter(lm, LoraSettings(rank=4, alpha=6), seed=0)
    fill(adapter, seed=1)
    lm.double()
    before = {name: p.detach().clone() for name, p in lm.named_parameters()}
    plain_outcome = outcome(lm, torch.float64)
    products: list[tuple[int, ...]] = []
    adapter.join_frozen()
    add = adapter_products._with_product

    def noted(total: Tensor, rows: Tensor, matrix: Tensor) -> Tensor:
        products.append(tuple(matrix.shape))
        return add(total, rows, matrix)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_products, "_with_product", noted)
        joined = outcome(lm, torch.float64)
    forward = [(12, 2 * WIDTH), (4, WIDTH), (8, 2 * INNER), (4, WIDTH)]
    backward = [(4, INNER), (8, WIDTH), (4, WIDTH), (12, WIDTH)]
    assert products == 2 * forward + 2 * backward
    assert require_same(lm, torch.float64, EXACT) == 1 + 2 * 2 * 7
    for name, tensor in joined.items():
        assert (tensor - plain_outcome[name]).norm() <= 2 * EXACT * plain_outcome[name].norm(), (
            name
        )  # of PEFT's each
    assert {n: p.shape for n, p in lm.named_parameters()} == {n: p.shape for n, p in before.items()}
    assert all(torch.equal(p, before[name]) for name, p in lm.named_parameters())
    block: Any = lm.model.layers[0]  # pyright: ignore[reportIndexIssue]
    with torch.no_grad():  # what is written into a parameter arrives in the product
        block.k_proj.base_layer.weight.zero_()
    changed = outcome(lm, torch.float64)["out"]
    assert not torch.equal(changed, joined["out"])
