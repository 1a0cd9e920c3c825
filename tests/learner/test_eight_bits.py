"""AdamW with moments in eight bits: exact steps, convergence, resume, and what ranks may not
change.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from postgrad.algorithms.grpo import GRPO
from postgrad.core.errors import RunError, UsageError
from postgrad.learner import eight_bits
from postgrad.learner.eight_bits import MOMENTS, SCALE, STATE, EightBitAdamW, piece_of_state
from postgrad.learner.optimizer import MasterOptimizer
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.ops.quantization import dequantize_8bit
from postgrad.parallel.sharding import TensorPiece

ALL = np.arange(9)
SMALL = {"optimizer_state": "8bit"}


@pytest.fixture
def every_matrix(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Matrices of the tests' models are small."""
    monkeypatch.setattr(eight_bits, "SMALLEST", 1)
    return


def step(weight: nn.Parameter, optimizer: EightBitAdamW, gradient: Any, number: int) -> None:
    weight.grad = torch.as_tensor(gradient, dtype=torch.float32)
    optimizer.step(0.1, number)


def test_a_step_is_adamw_on_the_moments_as_they_read() -> None:
    """Loshchilov and Hutter 2019, algorithm 2, in float64, with what is stored between steps."""
    settings = LearnerSettings(lr=0.1, weight_decay=0.5, betas=(0.8, 0.9), **SMALL)  # pyright: ignore[reportArgumentType]
    rng = np.random.default_rng(0)
    weight = nn.Parameter(torch.from_numpy(rng.normal(size=(6, 300))).float())
    optimizer = EightBitAdamW({"w": weight}, settings)
    want = weight.detach().double().numpy()
    m, v = np.zeros_like(want), np.zeros_like(want)
    for number in (1, 2, 3):
        g = rng.normal(size=want.shape) * np.geomspace(1e-4, 1, 6)[:, None]
        step(weight, optimizer, g, number)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        hat = (m / (1 - 0.8**number)) / (np.sqrt(v / (1 - 0.9**number)) + 1e-8)
        want = want * (1 - 0.1 * 0.5) - 0.1 * hat
        np.testing.assert_allclose(weight.detach().numpy(), want, rtol=2e-5, atol=1e-5)
        stored = {
            name: dequantize_8bit(
                optimizer.state["w"][name], optimizer.state["w"][name + SCALE], signed=signed
            )
            for name, signed in MOMENTS.items()
        }
        # at most half the widest step of the table in units of a block's largest
        for moment, exact, half in (("exp_avg", m, 0.9 / 128), ("exp_avg_sq", v, 0.9 / 256)):
            error = np.abs(stored[moment].double().numpy() - exact)
            assert (error <= 1.01 * half * np.abs(exact).max(-1, keepdims=True)).all()
        m, v = (stored[name].double().numpy() for name in MOMENTS)


def distances(state: str) -> list[float]:
    """From the minimum of a quadratic whose curvature spans four decades, with noisy gradients."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(64, 320, generator=generator)
    curvature = torch.logspace(-2, 2, 320)
    layer = nn.Linear(320, 64, bias=False)
    nn.init.zeros_(layer.weight)
    settings = LearnerSettings(lr=0.05, max_grad_norm=0.0, optimizer_state=state)  # pyright: ignore[reportArgumentType]
    optimizer = MasterOptimizer(layer, settings)
    losses: list[float] = []
    for number in range(300):
        off = layer.weight.detach() - target
        noise = torch.randn(64, 320, generator=generator)
        layer.weight.grad = curvature * (off + 0.1 * noise)
        optimizer.step(0.05 * (1 - number / 300))
        losses.append(float((layer.weight.detach() - target).square().mean()))
    return losses


@pytest.mark.slow
def test_a_noisy_quadratic_converges_as_with_float32() -> None:
    small, plain = distances("8bit"), distances("float32")
    assert plain[-1] < 2e-3 * plain[0]
    assert small[-1] == pytest.approx(plain[-1], rel=0.2)  # both at a 5000th of their start
    half = [np.argmax(np.array(losses) < losses[0] / 2) for losses in (small, plain)]
    assert abs(half[0] - half[1]) <= 2


def test_a_gradient_that_stops_leaves_no_leap() -> None:
    """A second moment that became 0 beside a first one that did not would divide by eps alone."""
    settings = LearnerSettings(lr=0.1, **SMALL)  # pyright: ignore[reportArgumentType]
    weight = nn.Parameter(torch.zeros(1, 256))
    optimizer = EightBitAdamW({"w": weight}, settings)
    gradient = torch.full((1, 256), 1e-5)
    gradient[0, 0] = 1.0
    for number in range(1, 40):
        before = weight.detach().clone()
        step(weight, optimizer, gradient if number == 1 else torch.zeros(1, 256), number)
        assert (weight.detach() - before).abs().max() <= 0.11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("every_matrix")
def test_a_loaded_optimizer_goes_on_with_the_same_bits(
    make_learner: Any, experience: Any, dtype: torch.dtype
) -> None:
    settings = {"weight_decay": 0.1, "dtype": dtype, **SMALL}
    straight, first, second = (make_learner(**settings) for _ in range(3))
    for _ in range(4):
        straight.update(Update(experience, ALL), GRPO()).result()
    for _ in range(2):
        first.update(Update(experience, ALL), GRPO()).result()
    files = {
        stem: {name: tensor.clone() for name, tensor in named.items()}
        for stem, named in first.tensors().items()
    }
    second.load(files.__getitem__)
    for _ in range(2):
        second.update(Update(experience, ALL), GRPO()).result()
    for stem, named in straight.tensors().items():
        for name, tensor in named.items():
            assert torch.equal(tensor, second.tensors()[stem][name]), name
    codes = [t for t in straight.optimizer.state().values() if t.dtype == torch.uint8]
    assert len(codes) > 20


@pytest.mark.usefixtures("every_matrix")
def test_the_estimated_bytes_of_the_state_are_those_that_it_takes(
    make_learner: Any, experience: Any
) -> None:
    learner = make_learner(**SMALL)
    estimated = learner.state_bytes()
    learner.update(Update(experience, ALL), GRPO()).result()
    held = [t for named in learner.tensors().values() for t in named.values()]
    assert estimated == sum(tensor.nbytes for tensor in held)


def test_small_matrices_and_vectors_keep_float32() -> None:
    lm = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 63))
    optimizer = MasterOptimizer(lm, LearnerSettings(**SMALL))  # pyright: ignore[reportArgumentType]
    for parameter in lm.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1e-3)
    state = optimizer.state()
    assert {name for name in state if "scale" in name or state[name].dtype == torch.uint8} == {
        f"0.weight.{part}" for part in STATE
    }
    assert state["1.weight.exp_avg"].dtype == state["0.bias.exp_avg"].dtype == torch.float32


@pytest.mark.usefixtures("every_matrix")
@pytest.mark.parametrize("here", ["8bit", "float32"])
def test_the_state_of_the_other_kind_is_refused(
    make_learner: Any, experience: Any, here: str
) -> None:
    there = make_learner(optimizer_state="float32" if here == "8bit" else "8bit")
    there.update(Update(experience, ALL), GRPO()).result()
    with pytest.raises(RunError, match="of another model or optimizer"):
        make_learner(optimizer_state=here).load(there.tensors().__getitem__)


def test_the_rows_of_a_rank_are_what_one_rank_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts of a matrix, and the whole of it in one go or a few rows at a time: the same bits,
    and the parts of the state lie where their pieces say.
    """
    settings = LearnerSettings(lr=0.1, **SMALL)  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(7, 300, generator=generator) for _ in range(2))
    run: dict[str, EightBitAdamW] = {}
    parts = {"whole": slice(0, 7), "rows": slice(0, 7), "first": slice(0, 4), "last": slice(4, 7)}
    for name, part in parts.items():
        monkeypatch.setattr(eight_bits, "CHUNK", 600 if name == "rows" else 2**22)
        run[name] = EightBitAdamW({"w": nn.Parameter(start[part].clone())}, settings)
        for number in (1, 2, 3):
            step(run[name].weights["w"], run[name], gradient[part] / number, number)
    single = run["whole"]
    for name, part in parts.items():
        assert torch.equal(run[name].weights["w"], single.weights["w"][part])
        rows = part.stop - part.start
        piece = TensorPiece((7, 300), (part.start, 0), (rows, 300), sharded=True)
        for state, tensor in run[name].state["w"].items():
            there = piece_of_state(state, piece).of(single.state["w"][state])
            assert torch.equal(tensor, there), (name, state)


def test_experts_of_a_layer_have_the_bits_of_each_as_a_matrix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights [experts, rows, columns], which ranks may divide by experts."""
    settings = LearnerSettings(lr=0.1, **SMALL)  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(3, 5, 300, generator=generator) for _ in range(2))
    assert eight_bits.is_quantized("layers.0.experts.down_proj", TensorPiece((3, 5, 300)))
    assert not eight_bits.is_quantized("layers.0.experts.down_proj_bias", TensorPiece((3, 5000)))
    assert not eight_bits.is_quantized("patches.proj.weight", TensorPiece((64, 3, 16, 16)))
    monkeypatch.setattr(eight_bits, "CHUNK", 1200)  # four rows at a time, across experts
    experts = EightBitAdamW({"w": nn.Parameter(start.clone())}, settings)
    each = [EightBitAdamW({"w": nn.Parameter(part.clone())}, settings) for part in start]
    for number in (1, 2, 3):
        step(experts.weights["w"], experts, gradient / number, number)
        for expert, part in zip(each, gradient, strict=True):
            step(expert.weights["w"], expert, part / number, number)
    for index, expert in enumerate(each):
        assert torch.equal(expert.weights["w"], experts.weights["w"][index])
        piece = TensorPiece((3, 5, 300), (index, 0, 0), (1, 5, 300), sharded=True)
        for name, tensor in expert.state["w"].items():
            there = piece_of_state(name, piece).of(experts.state["w"][name])
            assert torch.equal(tensor, there[0]), name


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"optimizer": "muon"}, "is of AdamW's moments"),
        ({"tensor_parallel": 2, "ranks": 2}, "quantises rows of matrices, which tensor_parallel"),
    ],
)
def test_what_it_does_not_go_with_is_refused(other: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LearnerSettings(**SMALL, **other)  # pyright: ignore[reportArgumentType]


def test_moments_take_little_more_than_a_quarter_of_their_memory() -> None:
    weight = nn.Parameter(torch.zeros(512, 1024))
    optimizer = EightBitAdamW({"w": weight}, LearnerSettings(**SMALL))  # pyright: ignore[reportArgumentType]
    step(weight, optimizer, torch.ones(512, 1024), 1)
    held = sum(tensor.nbytes for tensor in optimizer.state["w"].values())
    assert held / (2 * weight.nbytes) == pytest.approx(0.254, abs=1e-3)
    assert math.prod(weight.shape) == optimizer.state["w"]["exp_avg"].nbytes
