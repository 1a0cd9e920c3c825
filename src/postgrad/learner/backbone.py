"""A backbone: one set of weights on one device. Roles borrow it; one forward runs at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.blocks import plan_blocks
from postgrad.layout.cut import cut
from postgrad.layout.layout import Layout, lay_out
from postgrad.models.attention import AttentionContext
from postgrad.models.head import target_logprobs
from postgrad.models.packed import hidden_states
from postgrad.models.tree import TreeAttention


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward/backward may hold: computed tokens, sequences, or both."""

    max_tokens: int | None = None
    max_sequences: int | None = None


class PackedForward(nn.Module):
    """Body and output head in one forward: under sharding, whatever uses a weight has to run inside
    the wrapped module.
    """

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        hidden_row: Tensor,
        target: Tensor,
        context: AttentionContext,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Logprobs [E] of the loss entries and their entropies, float32."""
        hidden = hidden_states(self.lm, token_ids, positions, context)
        return target_logprobs(
            self.lm,
            hidden.index_select(0, hidden_row),
            target,
            temperature=temperature,
            with_entropy=with_entropy,
        )


class Backbone:
    """Runs layouts through a model.

    `lm` is a transformers causal model loaded with our attention, on `device`. `attention` is the
    recipe's choice: "sdpa", "flex", or "auto" (flex on CUDA).
    """

    def __init__(
        self, lm: nn.Module, device: torch.device, micro: MicroBatch, attention: str = "auto"
    ) -> None:
        self.lm = lm
        self.device = device
        self.micro = micro
        self._forward = PackedForward(lm)
        self._flex = attention == "flex" or (attention == "auto" and device.type == "cuda")

    def micro_batches(
        self, sequences: Sequences, rows: NDArray[np.int64], *, whole_groups: bool = False
    ) -> Iterator[Layout]:
        """`rows` cut to fit and laid out, one layout for each forward."""
        runs = cut(
            sequences,
            rows,
            max_tokens=self.micro.max_tokens,
            max_sequences=self.micro.max_sequences,
            whole_groups=whole_groups,
        )
        return (lay_out(sequences, run) for run in runs)

    def forward(
        self, layout: Layout, temperature: float, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Logprobs [E] of a layout's loss entries, and their entropies if asked."""
        return self._forward(
            *(
                torch.from_numpy(array).to(self.device)
                for array in (
                    layout.token_ids,
                    layout.positions,
                    layout.hidden_row,
                    layout.target,
                )
            ),
            self._context(layout),
            temperature,
            with_entropy,
        )

    def _context(self, layout: Layout) -> AttentionContext:
        if self._flex:
            from postgrad.models.flex import (
                FlexAttention,
            )  # its import compiles nothing but is slow

            return FlexAttention(layout, self.device)
        return TreeAttention(plan_blocks(layout), self.device)

    @torch.no_grad()
    def logprobs(self, sequences: Sequences, temperature: float) -> Ragged:
        """The logprob of every loss token, float32; zeros at other tokens."""
        values = np.zeros(len(sequences.tokens.values), np.float32)
        for layout in self.micro_batches(sequences, np.arange(len(sequences))):
            logprobs, _ = self.forward(layout, temperature)
            values[layout.column] = logprobs.cpu().numpy()
        return sequences.tokens.like(values)
