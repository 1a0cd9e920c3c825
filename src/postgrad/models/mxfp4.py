"""Weights in MXFP4, as the checkpoints of the hub's gpt_oss have them, read as bfloat16."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from postgrad.core.errors import RunError
from postgrad.models.stored import Box, ReadBlock, StoredTensor, whole_box
from postgrad.ops.quantization import dequantize_mxfp4

BLOCKS, SCALES = "_blocks", "_scales"  # end the names of what a weight in MXFP4 is stored as


def mxfp4_weights(names: Iterable[str]) -> list[str]:
    """The weights of a checkpoint that are stored in MXFP4, as those of the hub's gpt_oss: `NAME`
    where it has `NAME_blocks` and `NAME_scales`.
    """
    names = set(names)
    weights = (name.removesuffix(BLOCKS) for name in names if name.endswith(BLOCKS))
    return sorted(name for name in weights if f"{name}{SCALES}" in names)


def unpacked_mxfp4(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint; in place of blocks [E, M, G, B] and scales [E, M, G] in MXFP4
    the weight [E, 2 B G, M] itself, in bfloat16, which holds these numbers as they are. A part of
    it is computed from the bytes that it needs.
    """
    weights = dict(tensors)
    for name in mxfp4_weights(tensors):
        blocks, scales = weights.pop(f"{name}{BLOCKS}"), weights.pop(f"{name}{SCALES}")
        if blocks.ndim != 4 or blocks.shape[:-1] != scales.shape:
            raise RunError(
                f"{name}{BLOCKS} is of shape {tuple(blocks.shape)}, and its scales are of "
                f"{tuple(scales.shape)}: the checkpoint is not one of gpt_oss in MXFP4"
            )
        experts, outputs, groups, size = blocks.shape
        shape = experts, 2 * size * groups, outputs
        read = _from_mxfp4(blocks, scales)
        weights[name] = StoredTensor(shape, torch.bfloat16, blocks.device, read)
    return weights


def _from_mxfp4(blocks: StoredTensor, scales: StoredTensor) -> ReadBlock:
    each = 2 * blocks.shape[-1]  # numbers of a group

    def read(box: Box) -> Tensor:
        experts, (first, count), outputs = box
        group = first // each
        groups = group, -(-(first + count) // each) - group
        parts: list[Tensor] = []
        for expert in range(experts[0], sum(experts)):  # a byte takes sixteen times its size
            place = (expert, 1), outputs, groups
            codes, exponents = (
                blocks.block((*place, whole_box(blocks.shape)[-1])),
                scales.block(place),
            )
            numbers = dequantize_mxfp4(codes, exponents, torch.bfloat16)
            parts.append(numbers.narrow(-1, first - group * each, count).transpose(1, 2))
        return torch.cat(parts)

    return read
