"""AdamW with moments in eight bits, a quarter of their memory (Dettmers et al. 2022, 8-bit
Optimizers via Block-wise Quantization, arXiv:2110.02861).

Where the paper's blocks run through a flattened weight, these end with each row of a matrix. So a
moment does not depend on how rows are divided over ranks, and an embedding that is seldom seen does
not share its scale with a frequent one, for which the paper needs a layer of its own. Numbers
computed between two quantisations are float32.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from postgrad.learner.settings import LearnerSettings, rate_ratio
from postgrad.models.matrices import is_matrix
from postgrad.ops.quantization import CHUNK, WIDE_BLOCK, dequantize_8bit, quantize_8bit
from postgrad.parallel.sharding import TensorPiece

SMALLEST = 4096  # numbers of a matrix; the moments of smaller ones stay float32, as in the paper
SCALE = "_scale"  # the end of a moment's name that its scales have
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # by name, whether a moment has a sign
STATE = tuple(name + end for name in MOMENTS for end in ("", SCALE))


def is_quantized(name: str, piece: TensorPiece) -> bool:
    """Whether the moments of a weight are held in eight bits."""
    assert piece.cut is None or piece.cut.dim == 0  # LearnerSettings refuses tensor parallelism
    dimensions = len(piece.shape)
    matrix = dimensions in (2, 3) and is_matrix(name, dimensions)
    return matrix and math.prod(piece.shape) >= SMALLEST


def piece_of_state(name: str, piece: TensorPiece) -> TensorPiece:
    """Where the part of a weight's state `name` (of STATE) lies; piece: of the weight."""
    if not name.endswith(SCALE):
        return piece
    blocks = -(-piece.shape[-1] // WIDE_BLOCK)
    sizes = (*piece.sizes[:-1], blocks) if piece.sizes else ()
    return replace(piece, shape=(*piece.shape[:-1], blocks), sizes=sizes)


def state_type(name: str) -> torch.dtype:
    """The dtype of a weight's state `name` (of STATE)."""
    return torch.float32 if name.endswith(SCALE) else torch.uint8


class EightBitAdamW:
    """AdamW on matrices [rows, columns], or [experts, rows, columns], by name. state: of each, by
    the names of STATE; empty before the first step, or `make_state`.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], settings: LearnerSettings) -> None:
        self.weights = weights
        self.state: dict[str, dict[str, Tensor]] = {}
        self._settings = settings

    def make_state(self) -> None:
        """Makes the zeros of weights that have no state yet."""
        for name, weight in self.weights.items():
            if name not in self.state:
                self.state[name] = _zeros(weight)

    @torch.no_grad()
    def step(self, rate: float, number: int) -> None:
        """Update `number`, from 1; every weight has a gradient. Some rows at a time."""
        self.make_state()
        for name, weight in self.weights.items():
            assert weight.grad is not None
            values, gradient = _rows(weight), weight.grad.flatten(0, -2)
            state = {kept: _rows(tensor) for kept, tensor in self.state[name].items()}
            own_rate = rate * rate_ratio(self._settings, name)
            rows = max(1, CHUNK // weight.shape[-1])
            for start in range(0, len(values), rows):
                part = slice(start, start + rows)
                parts = {kept: tensor[part] for kept, tensor in state.items()}
                self._move(values[part], gradient[part], parts, own_rate, number)

    def _move(
        self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], rate: float, number: int
    ) -> None:
        """torch's AdamW, in its order of operations, on some rows."""
        settings = self._settings
        first, second = settings.betas
        mean, square = (
            dequantize_8bit(state[name], state[name + SCALE], signed=signed)
            for name, signed in MOMENTS.items()
        )
        mean.lerp_(gradient, 1.0 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
        weight.mul_(1.0 - rate * settings.weight_decay)
        spread = (square.sqrt() / math.sqrt(1.0 - second**number)).add_(settings.eps)
        weight.addcdiv_(mean, spread, value=-rate / (1.0 - first**number))
        for (name, signed), moment in zip(MOMENTS.items(), (mean, square), strict=True):
            codes, scales = quantize_8bit(moment, signed=signed)
            state[name].copy_(codes)
            state[name + SCALE].copy_(scales)


def _rows(matrices: Tensor) -> Tensor:
    """[rows, columns], a view."""
    return matrices.view(-1, matrices.shape[-1])


def _zeros(weight: Tensor) -> dict[str, Tensor]:
    *rows, columns = weight.shape
    blocks = -(-columns // WIDE_BLOCK)
    return {
        name: torch.zeros(
            *rows,
            blocks if name.endswith(SCALE) else columns,
            dtype=state_type(name),
            device=weight.device,
        )
        for name in STATE
    }
