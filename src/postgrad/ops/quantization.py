"""Numbers in four and eight bits: NF4 with doubly quantised scales (Dettmers et al. 2023, QLoRA,
arXiv:2305.14314), block-wise dynamic eight bits (Dettmers et al. 2022, arXiv:2110.02861), and MXFP4
(OCP Microscaling Formats, version 1.0), which is only read.

Plain torch on any device, every number by itself: the same input gives the same bits however it is
cut into chunks of blocks. Layout and tables are those of bitsandbytes.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# The quantiles of a normal distribution, scaled to [-1, 1], with an exact zero (QLoRA, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# The magnitudes of E2M1, MXFP4's elements, by code; codes from 8 on are the same, negative.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS = 127  # of MXFP4's scales, which are powers of two
BLOCK = 64  # weights that share a scale in four bits
WIDE_BLOCK = 256  # numbers that share a scale in eight bits: moments, and the scales of four bits
DECADES = 7  # powers of ten that eight bits span
GRAPHS = 64  # most graphs of the kernel that expands four bits
CHUNK = 2**22  # numbers that are quantised at once, so that copies in float32 stay small


class FourBits(NamedTuple):
    """A tensor of N numbers, flat, in blocks of BLOCK, the last one filled up with zeros."""

    codes: Tensor  # [blocks * BLOCK / 2] uint8: the first number of a pair in the high four bits
    scales: Tensor  # [groups, WIDE_BLOCK] uint8: each block's largest magnitude, less `offset`
    maxima: Tensor  # [groups, 1] float32: what `scales` are in units of
    offset: Tensor  # [1] float32: the mean of the blocks' largest magnitudes


@cache
def dynamic_table(*, signed: bool) -> tuple[float, ...]:
    """The 256 values of eight bits, ascending: 0, 1, and per power of ten below 1 the midpoints of
    equal steps from 0.1 to 1, twice as many as in the next lower one; `signed`: on both sides.
    """
    values = [0.0, 1.0]
    for decade in range(DECADES):
        steps = 2 ** (DECADES - 1 - decade) * (1 if signed else 2)
        width = 0.9 / steps
        sizes = [10.0**-decade * (0.1 + width * (step + 0.5)) for step in range(steps)]
        values += sizes
        if signed:
            values += [-size for size in sizes]
    return tuple(sorted(values))


def quantize_8bit(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """x: [R, W] float32, not negative unless `signed`. Codes [R, W] uint8, each the nearest value
    of the table, and scales [R, ceil(W / WIDE_BLOCK)] float32, the largest magnitude of each block
    of a row. What is not negative and not 0 never becomes 0: a moment is divided by.
    """
    blocks = _in_blocks(x)
    scales = blocks.abs().amax(-1)
    shares = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    codes = _nearest(shares, _midpoints(_table(x.device, signed=signed)))
    if not signed:
        codes = torch.maximum(codes, (shares > 0).to(torch.uint8))
    return codes.flatten(1)[:, : x.shape[1]].contiguous(), scales


def dequantize_8bit(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """[R, W] float32 of what `quantize_8bit` gave."""
    values = _table(codes.device, signed=signed)[codes.int()]
    blocks = _in_blocks(values).mul_(scales[..., None])
    return blocks.flatten(1)[:, : codes.shape[1]]


@torch.no_grad()
def quantize_4bit(x: Tensor) -> FourBits:
    """A tensor of any shape and floating dtype in four bits: 4.13 bits a number."""
    flat = x.reshape(-1)
    codes: list[Tensor] = []
    largest: list[Tensor] = []
    midpoints = _midpoints(_nf4(x.device))
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK]
        blocks = functional.pad(part.float(), (0, -len(part) % BLOCK)).view(-1, BLOCK)
        maxima = blocks.abs().amax(-1, keepdim=True)
        shares = blocks / maxima.clamp(min=torch.finfo(torch.float32).tiny)
        pairs = _nearest(shares, midpoints).view(-1, 2)
        codes.append(pairs[:, 0] * 16 + pairs[:, 1])
        largest.append(maxima[:, 0])
    scales = torch.cat(largest)
    offset = scales.mean()[None]
    centred = functional.pad(scales - offset, (0, -len(scales) % WIDE_BLOCK))
    quantized, maxima = quantize_8bit(centred.view(-1, WIDE_BLOCK), signed=True)
    return FourBits(torch.cat(codes), quantized, maxima, offset)


def dequantize_4bit(packed: FourBits, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The tensor of `shape` in `dtype`: each number is computed in float32 and rounded once. On a
    GPU one compiled kernel, which reads half a byte and writes a number for each.
    """
    device = packed.codes.device
    expand = _compiled() if device.type == "cuda" else _expanded
    values = expand(*packed, _pairs(device), _table(device, signed=True), dtype)
    return values[: shape.numel()].view(shape)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks: [..., G, B] uint8, two numbers in each byte, the first in the low four bits; scales:
    [..., G] uint8, of each group of 2 B numbers. Returns [..., G * 2 B] in `dtype`: exact in
    float32 and in bfloat16 above their smallest normal number.
    """
    table = torch.tensor((*E2M1, *(-value for value in E2M1)), dtype=dtype, device=blocks.device)
    codes = torch.stack((blocks & 0x0F, blocks >> 4), -1).flatten(-2).int()
    exponents = scales.int()[..., None] - E8M0_BIAS
    return torch.ldexp(table[codes], exponents).to(dtype).flatten(-2)


def _expanded(
    codes: Tensor, scales: Tensor, maxima: Tensor, offset: Tensor, pairs: Tensor, table: Tensor,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """[blocks * BLOCK] of a FourBits; pairs: [256, 2], the two numbers of each byte."""
    count = codes.shape[0] * 2 // BLOCK
    each = (table[scales.int()] * maxima).view(-1)[:count, None] + offset
    numbers = pairs.index_select(0, codes.int()).view(count, BLOCK)
    return numbers.mul_(each).to(dtype).view(-1)


@cache
def _compiled() -> Callable[..., Tensor]:
    # There is a graph for each dtype, with and without gradients, and for sizes that torch does not
    # take for one: more than its limit, beyond which it refuses.
    settings: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage]
    settings.recompile_limit = max(settings.recompile_limit, GRAPHS)
    return torch.compile(_expanded, fullgraph=True, dynamic=True)  # pyright: ignore[reportUnknownMemberType]


def _nearest(shares: Tensor, midpoints: Tensor) -> Tensor:
    """The code of the nearest value for numbers in [-1, 1]; halfway the lower one."""
    return torch.bucketize(shares, midpoints, out_int32=True).to(torch.uint8)


def _midpoints(table: Tensor) -> Tensor:
    return (table[1:] + table[:-1]) / 2


def _in_blocks(x: Tensor) -> Tensor:
    """[R, W] -> [R, blocks, WIDE_BLOCK], or one block as wide as a narrow row."""
    width = min(WIDE_BLOCK, x.shape[1])
    return functional.pad(x, (0, -x.shape[1] % width)).view(len(x), -1, width)


def _constant(values: Any, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # the learner's backward pass may read it later
        return torch.tensor(values, device=device)


@cache
def _table(device: torch.device, *, signed: bool) -> Tensor:
    return _constant(dynamic_table(signed=signed), device)


@cache
def _nf4(device: torch.device) -> Tensor:
    return _constant(NF4, device)


@cache
def _pairs(device: torch.device) -> Tensor:
    return _constant([[high, low] for high in NF4 for low in NF4], device)
