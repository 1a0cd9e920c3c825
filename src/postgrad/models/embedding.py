"""Embeddings whose gradient touches only the rows of tokens that occur."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from postgrad.models.gradients import adds_in_place, gradient_of


class WordEmbedding(nn.Embedding):
    """nn.Embedding; a large one adds its gradient in place, with the same bits (see gradients)."""

    def forward(self, input: Tensor) -> Tensor:
        """input: token ids [...]; returns [..., hidden]."""
        plain = self.max_norm is None and not self.scale_grad_by_freq and not self.sparse
        if not plain or not adds_in_place(self.weight):
            return super().forward(input)
        return _EmbeddingRows.apply(input, self.weight, self.padding_idx)  # pyright: ignore[reportReturnType]


class _EmbeddingRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.adds_to, ctx.padding = weight, padding
        return nn.functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        words, place = ids.unique(return_inverse=True)
        rows = torch.ops.aten.embedding_dense_backward(gradients[0], place, len(words), -1, False)
        if ctx.padding is not None:
            rows[words == ctx.padding] = 0.0
        # each token id once, so that the order of additions does not matter
        gradient_of(ctx.adds_to).index_add_(0, words, rows)
        return None, None, None
