"""Four and eight bits: tables, the nearest code, error bounds, and what chunks may not change."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from postgrad.ops import quantization
from postgrad.ops.quantization import (
    BLOCK,
    NF4,
    WIDE_BLOCK,
    dequantize_4bit,
    dequantize_8bit,
    dynamic_table,
    quantize_4bit,
    quantize_8bit,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nearest(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """By looking at every value of the table."""
    return table[np.abs(x[..., None] - table).argmin(-1)]


@pytest.mark.parametrize("signed", [True, False])
def test_the_eight_bit_table_has_256_values_over_seven_decades(signed: bool) -> None:
    table = np.array(dynamic_table(signed=signed))
    assert len(set(table)) == 256
    assert (np.diff(table) > 0).all()
    assert (table[-1], 0.0 in table) == (1.0, True)
    # by hand: the lowest decade, 1e-7 to 1e-6, has one step on each side, or two on the only side
    lowest = [5.5e-7] if signed else [3.25e-7, 7.75e-7]
    np.testing.assert_allclose(table[table > 0][: len(lowest)], lowest)
    assert (table < 0).sum() == (127 if signed else 0)


def test_the_four_bit_table_is_that_of_the_paper() -> None:
    """Eight quantiles of a normal distribution below zero and nine above, which share zero."""
    normal = torch.distributions.Normal(0.0, 1.0)
    edge = 0.9677083  # 1 - (1/30 + 1/32) / 2
    high = normal.icdf(torch.linspace(edge, 0.5, 9, dtype=torch.float64))[:-1]
    low = -normal.icdf(torch.linspace(edge, 0.5, 8, dtype=torch.float64))[:-1]
    values = torch.cat((low, torch.zeros(1), high)).sort().values / high.max()
    np.testing.assert_allclose(NF4, values.numpy(), atol=1e-6)


def test_four_bits_by_hand() -> None:
    """A block whose largest number is 2: shares 1, -1, 0.5 and 0.01 are values 15, 0, 12 and 7."""
    x = torch.zeros(BLOCK)
    x[:4] = torch.tensor([2.0, -2.0, 1.0, 0.02])
    packed = quantize_4bit(x)
    assert packed.codes[:2].tolist() == [15 * 16 + 0, 12 * 16 + 7]
    assert packed.offset.item() == 2.0  # of the only block
    back = dequantize_4bit(packed, x.shape, torch.float32)
    np.testing.assert_allclose(back[:4], [2.0, -2.0, 2 * NF4[12], 0.0])


@pytest.mark.parametrize("shape", [(48, 64), (1, 1), (5, 13), (640, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_bits_are_the_nearest_values_of_scaled_blocks(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x = (0.02 * drawn(*shape)).to(dtype)
    packed = quantize_4bit(x)
    back = dequantize_4bit(packed, x.shape, torch.float32)
    assert back.shape == x.shape
    flat = np.zeros(-(-x.numel() // BLOCK) * BLOCK)
    flat[: x.numel()] = x.double().flatten().numpy()
    blocks = flat.reshape(-1, BLOCK)
    scales = np.abs(blocks).max(-1, keepdims=True)
    want = (nearest(blocks / scales, np.array(NF4)) * scales).ravel()[: x.numel()]
    # a scale's own eight bits: at most half the widest step of the table, 0.9 / 128, of the spread
    spread = np.abs(scales - scales.mean()).max()
    off = np.abs(back.flatten().double().numpy() - want).max()
    assert off <= 0.9 / 128 * spread + 1e-7 * scales.max()
    widest = max(b - a for a, b in pairwise(NF4)) / 2
    assert (back - x.float()).abs().max() <= (widest + 0.01) * scales.max()
    assert packed.codes.numel() == len(flat) // 2


def test_normal_weights_lose_less_than_a_tenth_of_their_spread_to_four_bits() -> None:
    x = drawn(512, 512)
    error = dequantize_4bit(quantize_4bit(x), x.shape, torch.float32) - x
    assert 0.08 < error.square().mean().sqrt() < 0.1


def test_a_matrix_takes_4_127_bits_a_weight() -> None:
    packed = quantize_4bit(drawn(1024, 1024))
    assert sum(t.nbytes for t in packed) * 8 / 2**20 == pytest.approx(4.127, abs=2e-3)


def test_zeros_stay_zeros_in_four_and_eight_bits() -> None:
    x = torch.zeros(3, 70)
    assert torch.equal(dequantize_4bit(quantize_4bit(x), x.shape, torch.float32), x)
    for signed in (True, False):
        assert torch.equal(dequantize_8bit(*quantize_8bit(x, signed=signed), signed=signed), x)


def test_chunks_do_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(100, 96)
    packed = quantize_4bit(x)
    monkeypatch.setattr(quantization, "CHUNK", 2 * BLOCK)
    assert all(map(torch.equal, packed, quantize_4bit(x)))


@pytest.mark.parametrize("width", [1, 40, WIDE_BLOCK, 2 * WIDE_BLOCK + 3])
@pytest.mark.parametrize("signed", [True, False])
def test_eight_bits_are_the_nearest_values_of_each_rows_blocks(width: int, signed: bool) -> None:
    x = drawn(7, width) * torch.logspace(-6, 3, 7)[:, None]
    x = x if signed else x.abs()
    codes, scales = quantize_8bit(x, signed=signed)
    assert (codes.dtype, codes.shape) == (torch.uint8, x.shape)
    assert scales.shape == (7, -(-width // WIDE_BLOCK))
    back = dequantize_8bit(codes, scales, signed=signed)
    table = np.array(dynamic_table(signed=signed), np.float32)
    for start in range(0, width, WIDE_BLOCK):
        part = x[:, start : start + WIDE_BLOCK].numpy()
        largest = np.abs(part).max(-1, keepdims=True)
        best = np.abs(nearest(part / largest, table) * largest - part)
        error = np.abs(back[:, start : start + WIDE_BLOCK].numpy() - part)
        np.testing.assert_allclose(error, best, atol=1e-6 * largest.max(), rtol=1e-3)
        # half of the widest step: 0.9 / 64 in the highest decade of a sign, 0.9 / 128 without
        assert (error <= largest * (0.9 / (128 if signed else 256) + 1e-6)).all()


def test_rows_are_quantised_each_by_itself() -> None:
    x = drawn(6, 300)
    codes, scales = quantize_8bit(x, signed=True)
    part, part_scales = quantize_8bit(x[2:5], signed=True)
    assert torch.equal(codes[2:5], part)
    assert torch.equal(scales[2:5], part_scales)


def test_what_is_not_negative_and_not_zero_never_becomes_zero() -> None:
    x = torch.tensor([[1.0, 1e-12, 0.0]])
    back = dequantize_8bit(*quantize_8bit(x, signed=False), signed=False)
    np.testing.assert_allclose(back, [[1.0, 3.25e-7, 0.0]], rtol=1e-6)


def test_tables_first_read_while_sampling_can_be_read_in_a_backward_pass() -> None:
    quantization._pairs.cache_clear()
    packed = quantize_4bit(drawn(64, 64))
    shape = torch.Size((64, 64))
    with torch.inference_mode():
        dequantize_4bit(packed, shape, torch.float32)
    x = drawn(2, 64).requires_grad_()
    (x @ dequantize_4bit(packed, shape, torch.float32)).sum().backward()
    assert x.grad is not None


@pytest.mark.slow
def test_the_kernel_of_four_bits_has_graphs_for_all_sizes_dtypes_and_modes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run meets them all: learner, probe of the engine, decoding, matrices of every width."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    quantization._compiled.cache_clear()
    expand = quantization._compiled()
    cpu = torch.device("cpu")
    pairs, table = quantization._pairs(cpu), quantization._table(cpu, signed=True)
    for rows in (1, 64, 96, 1024):
        weight = torch.randn(rows, BLOCK)
        packed = quantize_4bit(weight)
        for dtype in (torch.float32, torch.bfloat16):
            expected = dequantize_4bit(packed, weight.shape, dtype).view(-1)
            for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                with mode():
                    expanded = expand(*packed, pairs, table, dtype)[: weight.numel()]
                assert torch.equal(expanded, expected)
    quantization._compiled.cache_clear()
