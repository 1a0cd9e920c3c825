import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from postgrad.models import linear
from postgrad.models.linear import (
    MatrixGradient,
    OneDNNLinear,
    faster_library,
    from_outputs,
    in_order,
    product_name,
    project,
    speed_up,
)

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="only CPUs with AVX-512 take it"
)


def pair(width: int, out: int, *, bias: bool) -> tuple[nn.Sequential, nn.Sequential]:
    """The same layer in float64 and as the fast one."""
    torch.manual_seed(0)
    fast = nn.Sequential(nn.Linear(width, out, bias=bias))
    exact = nn.Sequential(nn.Linear(width, out, bias=bias)).double()
    exact.load_state_dict(fast.state_dict())
    speed_up(fast, torch.device("cpu"))
    assert type(fast[0]) is OneDNNLinear
    return exact, fast


def assert_summed(
    computed: torch.Tensor, exact: torch.Tensor, sizes: torch.Tensor, terms: int
) -> None:
    """Whether float32 sums are within what rounding explains, in any order of their terms: n
    roundings of half a unit, 2^-24, of the sum of sizes (Higham 2002, equation 3.5).

    sizes: the same sums, float64, of the terms' sizes.
    """
    unit = 2.0**-24
    bound = terms * unit / (1 - terms * unit) * sizes
    assert computed.dtype == torch.float32
    assert ((computed.double() - exact).abs() <= bound).all()


def sizes_of(
    layer: nn.Linear, x: torch.Tensor, coming: torch.Tensor
) -> list[tuple[torch.Tensor, int]]:
    """By outputs and the gradients of input, weight and bias: the sums of their terms' sizes, and
    how many terms each sum has.
    """
    weight = layer.weight.detach().double().abs()
    inputs, gradients = x.double().abs(), coming.double().abs()
    rows = gradients.flatten(0, -2)
    outputs, constant = inputs @ weight.T, layer.bias is not None
    if layer.bias is not None:
        outputs = outputs + layer.bias.detach().double().abs()
    return [
        (outputs, weight.size(1) + constant),
        (gradients @ weight, weight.size(0)),
        (rows.T @ inputs.flatten(0, -2), len(rows)),
        *([(rows.sum(0), len(rows))] if constant else []),
    ]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("width", "out"), [(24, 40), (40, 24), (33, 1)])
@pytest.mark.parametrize("rows", [(1,), (7,), (1, 130), (2, 3, 5)])
def test_a_fast_layer_computes_what_float64_does(
    rows: tuple[int, ...], width: int, out: int, bias: bool
) -> None:
    exact, fast = pair(width, out, bias=bias)
    x = torch.randn(*rows, width)
    coming = torch.randn(*rows, out)
    outcomes: list[list[torch.Tensor]] = []
    for layer, dtype in ((exact, torch.float64), (fast, torch.float32)):
        layer_input = x.to(dtype).requires_grad_()
        result = layer(layer_input)
        result.backward(coming.to(dtype))
        assert layer_input.grad is not None
        linear = [p.grad for p in layer.parameters() if p.grad is not None]
        outcomes.append([result.detach(), layer_input.grad, *linear])
    layer = fast[0]
    assert isinstance(layer, nn.Linear)
    for wanted, got, (sizes, terms) in zip(*outcomes, sizes_of(layer, x, coming), strict=True):
        assert got.is_contiguous()
        assert_summed(got, wanted, sizes, terms)


def gradient(layer: nn.Sequential) -> torch.Tensor:
    weight = layer[0].weight
    assert isinstance(weight, nn.Parameter)
    assert weight.grad is not None
    return weight.grad


def test_gradients_of_a_large_weight_are_added_in_place_and_are_those_of_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "LARGE_WEIGHT", 512)  # two rows at a time
    exact, fast = pair(16, 41, bias=True)
    places: set[int] = set()
    sizes = torch.zeros(41, 16, dtype=torch.float64)
    for micro_batch in range(1, 4):
        x, coming = torch.randn(7, 16), torch.randn(7, 41)
        exact(x.double()).backward(coming.double())
        fast(x).backward(coming)
        sizes += coming.double().abs().T @ x.double().abs()
        assert_summed(gradient(fast), gradient(exact), sizes, 7 * micro_batch)
        places.add(gradient(fast).data_ptr())
    assert len(places) == 1


def test_a_large_weight_that_was_computed_gets_its_gradient_from_autograd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "LARGE_WEIGHT", 16)
    exact, fast = pair(16, 8, bias=False)
    for layer, x in ((exact, torch.ones(3, 16).double()), (fast, torch.ones(3, 16))):
        weight = layer[0].weight
        assert isinstance(weight, nn.Parameter)
        computed_weights = {"weight": weight * 2.0}
        torch.func.functional_call(layer[0], computed_weights, x).sum().backward()
    torch.testing.assert_close(gradient(fast).double(), gradient(exact), rtol=1e-5, atol=1e-5)


def test_a_large_weight_gets_its_gradient_where_its_layer_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "LARGE_WEIGHT", 16)
    exact, fast = pair(16, 8, bias=True)
    for layer, x in ((exact, torch.ones(3, 16).double()), (fast, torch.ones(3, 16))):
        checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    torch.testing.assert_close(gradient(fast).double(), gradient(exact), rtol=1e-5, atol=1e-5)


def test_a_row_that_is_no_block_in_memory_is_read_right() -> None:
    exact, fast = pair(16, 8, bias=False)
    x = torch.randn(16, 12).t()
    torch.testing.assert_close(fast(x).double(), exact(x.double()), rtol=1e-5, atol=1e-5)


def test_no_rows_give_no_rows_and_no_gradient() -> None:
    _, fast = pair(16, 8, bias=True)
    result = fast(torch.empty(0, 16))
    assert result.shape == (0, 8)
    result.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in fast.parameters())


def test_names_of_weights_stay() -> None:
    exact, fast = pair(16, 8, bias=True)
    assert list(fast.state_dict()) == list(exact.state_dict())


def test_other_kinds_of_layers_and_other_dtypes_are_left_as_they_are() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(Own(4, 4), nn.Linear(4, 4).bfloat16())
    speed_up(model, torch.device("cpu"))
    assert type(model[0]) is Own
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    assert torch.equal(model[1](x), nn.functional.linear(x, model[1].weight, model[1].bias))  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_a_frozen_weight_gets_no_gradient() -> None:
    _, fast = pair(16, 8, bias=True)
    fast.requires_grad_(False)
    x = torch.randn(3, 16, requires_grad=True)
    fast(x).sum().backward()
    assert x.grad is not None
    assert all(p.grad is None for p in fast.parameters())


def grown(first: int, capacity: str | None) -> int:
    """MiB by which a process grows that multiplies 300 numbers of rows, each once."""
    script = (
        "import sys, torch, psutil\n"
        "from postgrad.models.linear import OneDNNLinear\n"
        "torch.set_num_threads(1)\n"
        "layer, own = OneDNNLinear(64, 64), psutil.Process()\n"
        "for rows in range(int(sys.argv[1]), int(sys.argv[1]) + 360):\n"
        "    layer(torch.ones(rows, 64)).sum().backward()\n"
        "    if rows == int(sys.argv[1]) + 60:\n"
        "        before = own.memory_info().rss\n"
        "print((own.memory_info().rss - before) >> 20)\n"
    )
    environment = {k: v for k, v in os.environ.items() if "CACHE_CAPACITY" not in k}
    if capacity is not None:
        environment |= dict.fromkeys(
            ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), capacity
        )
    command = [sys.executable, "-c", script, str(first)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
def test_a_run_does_not_grow_with_the_number_of_shapes_that_it_has_multiplied() -> None:
    assert grown(100, None) < 20
    assert grown(100, "1024") > 20  # what oneDNN keeps unless told otherwise


def test_a_shape_that_a_run_found_faster_in_mkl_is_multiplied_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(linear._libraries, product_name(40, 24), "mkl")  # pyright: ignore[reportPrivateUsage]
    first = nn.Linear(24, 40)
    model = nn.Sequential(first, nn.Linear(40, 24))
    speed_up(model, torch.device("cpu"))
    assert [type(module) for module in model] == [nn.Linear, OneDNNLinear]
    weight, x, gradient = first.weight.detach(), torch.randn(5, 24), torch.randn(5, 40)
    assert in_order(weight) is weight
    assert torch.equal(project(x, weight, None), x @ weight.t())
    assert torch.equal(from_outputs(gradient, weight), gradient @ weight)
    of_weight = MatrixGradient(weight)
    of_weight.add(gradient, x)
    rest = of_weight.rest()
    assert rest is not None
    assert torch.equal(rest, gradient.t() @ x)


@pytest.mark.parametrize(
    ("onednn", "mkl", "wanted"), [(1.0, 0.9, "onednn"), (1.0, 0.7, "mkl"), (0.4, 1.0, "onednn")]
)
def test_mkl_is_taken_where_it_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, onednn: float, mkl: float, wanted: str
) -> None:
    def measured(works: list[Callable[[], object]]) -> list[float]:
        both = [work() for work in works]
        for ours, theirs in zip(*both, strict=True):  # pyright: ignore[reportArgumentType]
            torch.testing.assert_close(ours, theirs)  # the same three products
        return [onednn, mkl]

    monkeypatch.setattr(linear, "cpu_seconds", measured)
    assert faster_library(48, 32) == wanted
