"""The output heads of a student and its teacher together: how far their distributions are apart,
never all of [T, V] of either at once.

Both heads are computed for a few rows at a time, and again in the backward pass, where the gradient
of these rows goes on to hidden states and output matrix at once. So memory is some copies of one
chunk's [chunk, V], whatever the batch.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from postgrad.models.head import (
    InputGradients,
    chunk_rows,
    finished_logits,
    full_logits,
    is_plain,
    output_head,
    row_runs,
)
from postgrad.models.linear import project
from postgrad.ops.distillation import TeacherDivergence, with_rest

PARTS = 4  # of a chunk of the plain head: so many more copies of a row's logits are there at a time


class Taught(Protocol):
    """What a teacher says at the loss entries of a layout."""

    def apart(self, logits: Tensor, rows: slice) -> Tensor:
        """[n] the divergence of the student's logits [n, V] of these entries from the teacher's."""
        ...


@dataclass(frozen=True, slots=True)
class LiveTeacher:
    """A teacher's hidden states [E, its hidden] beside its model. A vocabulary that is padded
    further than the student's is read up to the shorter one: both have the same tokens.
    """

    lm: nn.Module
    hidden: Tensor
    divergence: TeacherDivergence

    def apart(self, logits: Tensor, rows: slice) -> Tensor:
        with torch.no_grad():
            of_teacher = full_logits(self.lm, self.hidden[rows])
        both = min(logits.shape[-1], of_teacher.shape[-1])
        return self.divergence.of(logits[:, :both], of_teacher[:, :both])


@dataclass(frozen=True, slots=True)
class StoredTeacher:
    """What `top_logprobs` gave, [E, 2 k + 1], of the first `vocabulary` tokens."""

    stored: Tensor
    vocabulary: int
    divergence: TeacherDivergence

    def apart(self, logits: Tensor, rows: slice) -> Tensor:
        stored = self.stored[rows]
        k = stored.shape[-1] // 2
        ids = stored[:, :k].long()
        return self.divergence.of_top(logits[:, : self.vocabulary], ids, stored[:, k:])


def divergences(
    lm: nn.Module, hidden: Tensor, *, targets: Tensor, taught: Taught
) -> tuple[Tensor, Tensor]:
    """The student's logprobs of `targets`, at a temperature of 1, and its divergence from the
    teacher: both [E] float32.

    hidden: [E, hidden] of the student, with gradient; targets: [E] int64; taught: of the same
    entries.
    """
    if not len(targets):
        empty = hidden.sum() * 0.0  # keeps the graph: all ranks take part in every collective
        return empty.expand(0), empty.expand(0)
    config: Any = lm.config
    size = _rows_at_once(config, hidden)
    matrix = output_head(lm)
    if is_plain(matrix):
        return _HeadDivergences.apply(
            hidden, matrix.weight, matrix.bias, targets, taught, config, size
        )  # pyright: ignore[reportReturnType]
    parts = [
        checkpoint(
            _chunk, lm, hidden[run], targets[run], taught, run,
            use_reentrant=False, preserve_rng_state=False,
        )
        for run in row_runs(len(targets), size)
    ]  # fmt: skip
    logprobs, apart = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(apart)


@torch.no_grad()
def top_logprobs(
    lm: nn.Module, hidden: Tensor, *, top_k: int, temperature: float, vocabulary: int
) -> Tensor:
    """[E, 2 k + 1] float32 of the teacher's distributions of logits / temperature, over the first
    `vocabulary` tokens: the ids of the k most likely ones, their log-probabilities, and that of all
    others together.
    """
    parts = [hidden.new_zeros((0, 2 * top_k + 1), dtype=torch.float32)]
    for run in row_runs(len(hidden), _rows_at_once(lm.config, hidden)):
        logits = full_logits(lm, hidden[run])[:, :vocabulary] / temperature
        ids = logits.topk(top_k, -1).indices
        parts.append(torch.cat([ids.float(), with_rest(logits, ids)], -1))
    return torch.cat(parts)


def _rows_at_once(config: Any, hidden: Tensor) -> int:
    vocabulary = config.get_text_config().vocab_size  # also of a model that reads images
    return max(1, chunk_rows(vocabulary, cpu=hidden.device.type == "cpu") // PARTS)


def _compared(
    logits: Tensor, targets: Tensor, taught: Taught, rows: slice
) -> tuple[Tensor, Tensor]:
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)
    return logprobs, taught.apart(logits, rows)


def _chunk(
    lm: nn.Module, hidden: Tensor, targets: Tensor, taught: Taught, rows: slice
) -> tuple[Tensor, Tensor]:
    """For a head that is more than a matrix and a bias (an adapter)."""
    return _compared(full_logits(lm, hidden), targets, taught, rows)


class _HeadDivergences(torch.autograd.Function):
    """Logprobs and divergences from hidden states and the output matrix, `size` rows at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        taught: Taught,
        config: Any,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        parts: list[tuple[Tensor, Tensor]] = []
        for rows in row_runs(len(hidden), size):
            logits = finished_logits(project(hidden[rows], weight, bias), config)
            parts.append(_compared(logits, targets[rows], taught, rows))
            del logits  # before the next ones are there
        ctx.inputs = InputGradients(ctx.needs_input_grad[:3], len(hidden), weight)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.config, ctx.taught, ctx.size = config, taught, size
        logprobs, apart = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(apart)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        for rows in reversed(list(row_runs(len(targets), ctx.size))):
            products = project(hidden[rows], weight, bias).detach().requires_grad_()
            with torch.enable_grad():
                logits = finished_logits(products, ctx.config)
                read = _compared(logits, targets[rows], ctx.taught, rows)
            of_read = [gradient[rows] for gradient in gradients]
            gradient = torch.autograd.grad(read, products, of_read)[0]
            del products, logits, read
            ctx.inputs.add(rows, gradient.float(), hidden, weight)
            del gradient
        return *ctx.inputs.rest(weight, bias), *[None] * 4
