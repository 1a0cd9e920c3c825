"""The output heads of a student and its teacher together: how far their distributions are apart,
never all of [T, V] of either at once.

Both heads are computed for a few rows at a time, and again in the backward pass, where the gradient
of these rows goes on to hidden states and output matrix at once. So memory is some copies of one
chunk's [chunk, V], whatever the batch.
"""

from collections.abc import Callable
from typing import Any

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
    row_runs,
)
from postgrad.models.linear import project
from postgrad.ops.distillation import TeacherDivergence

PARTS = 4  # of a chunk of the plain head: so many more copies of a row's logits are there at a time

# (student's logits, teacher's logits, targets) -> (logprobs, divergences) [N]
Compare = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def divergences(
    lm: nn.Module,
    hidden: Tensor,
    *,
    targets: Tensor,
    teacher: nn.Module,
    taught: Tensor,
    divergence: TeacherDivergence,
) -> tuple[Tensor, Tensor]:
    """The student's logprobs of `targets`, at a temperature of 1, and its divergence from the
    teacher: both [E] float32.

    hidden: [E, hidden] of the student, with gradient; taught: [E, its hidden] of the teacher, for
    the same entries; targets: [E] int64. A vocabulary that is padded further than the other is read
    up to the shorter one: both have the same tokens.
    """
    if not len(targets):
        empty = hidden.sum() * 0.0  # keeps the graph: all ranks take part in every collective
        return empty.expand(0), empty.expand(0)
    config: Any = lm.config
    compare = _comparing(config.vocab_size, teacher, divergence)
    rows = chunk_rows(config.vocab_size, cpu=hidden.device.type == "cpu")
    size = max(1, rows // PARTS)
    matrix: Any = lm.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    if is_plain(matrix):
        return _HeadDivergences.apply(
            hidden, matrix.weight, matrix.bias, targets, taught, config, teacher, compare, size
        )  # pyright: ignore[reportReturnType]
    parts = [
        checkpoint(
            _chunk, lm, hidden[run], targets[run], teacher, taught[run], compare,
            use_reentrant=False, preserve_rng_state=False,
        )
        for run in row_runs(len(targets), size)
    ]  # fmt: skip
    logprobs, apart = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(apart)


def _comparing(vocabulary: int, teacher: Any, divergence: TeacherDivergence) -> Compare:
    """Compares logits over the tokens that both have."""
    both = min(vocabulary, teacher.config.vocab_size)

    def compare(student: Tensor, taught: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = student.gather(-1, targets[:, None])[:, 0] - student.logsumexp(-1)
        return logprobs, divergence.of(student[:, :both], taught[:, :both])

    return compare


def _chunk(
    lm: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    teacher: nn.Module,
    taught: Tensor,
    compare: Compare,
) -> tuple[Tensor, Tensor]:
    """For a head that is more than a matrix and a bias (an adapter)."""
    with torch.no_grad():
        of_teacher = full_logits(teacher, taught)
    return compare(full_logits(lm, hidden), of_teacher, targets)


class _HeadDivergences(torch.autograd.Function):
    """Logprobs and divergences from hidden states and the output matrix, `size` rows at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        taught: Tensor,
        config: Any,
        teacher: nn.Module,
        compare: Compare,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        parts: list[tuple[Tensor, Tensor]] = []
        for rows in row_runs(len(hidden), size):
            logits = finished_logits(project(hidden[rows], weight, bias), config)
            parts.append(compare(logits, full_logits(teacher, taught[rows]), targets[rows]))
            del logits  # before the next ones are there
        ctx.inputs = InputGradients(ctx.needs_input_grad[:3], len(hidden), weight)
        ctx.save_for_backward(hidden, weight, bias, targets, taught)
        ctx.config, ctx.teacher, ctx.compare, ctx.size = config, teacher, compare, size
        logprobs, apart = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(apart)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, taught = ctx.saved_tensors
        for rows in reversed(list(row_runs(len(targets), ctx.size))):
            products = project(hidden[rows], weight, bias).detach().requires_grad_()
            of_teacher = full_logits(ctx.teacher, taught[rows])
            with torch.enable_grad():
                logits = finished_logits(products, ctx.config)
                read = ctx.compare(logits, of_teacher, targets[rows])
            of_read = [gradient[rows] for gradient in gradients]
            gradient = torch.autograd.grad(read, products, of_read)[0]
            del products, logits, of_teacher, read
            ctx.inputs.add(rows, gradient.float(), hidden, weight)
            del gradient
        return *ctx.inputs.rest(weight, bias), *[None] * 6
