"""A backbone: one set of weights on one device. Roles borrow it; one forward runs at a time."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.blocks import plan_blocks
from postgrad.layout.cut import cut
from postgrad.layout.keys import row_keys
from postgrad.layout.layout import Layout, Reads, lay_out
from postgrad.models import head
from postgrad.models.adapters import Adapter
from postgrad.models.attention import AttentionContext
from postgrad.models.packed import hidden_states
from postgrad.models.tree import TreeAttention

Out = TypeVar("Out")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward/backward may hold: computed tokens, sequences, or both."""

    max_tokens: int | None = None
    max_sequences: int | None = None


class PackedForward(nn.Module):
    """Body and head in one forward: under sharding, whatever uses a weight has to run inside the
    wrapped module.
    """

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        hidden_row: Tensor,
        context: AttentionContext,
        read: Callable[[nn.Module, Tensor], Out],
    ) -> Out:
        """What `read` makes of the model and the hidden states [E, hidden] of the loss entries."""
        hidden = hidden_states(self.lm, token_ids, positions, context)
        return read(self.lm, hidden.index_select(0, hidden_row))


class Backbone:
    """Runs layouts through a model.

    `lm` is a transformers model loaded with our attention, on `device`: a causal one, or a body
    with a `score` head. `attention` is the recipe's choice: "sdpa", "flex", or "auto" (flex on
    CUDA). adapter: what lies on `lm`, whose own weights are frozen then.
    """

    def __init__(
        self,
        lm: nn.Module,
        device: torch.device,
        micro: MicroBatch,
        attention: str = "auto",
        adapter: Adapter | None = None,
    ) -> None:
        self.lm = lm
        self.device = device
        self.micro = micro
        self.adapter = adapter
        self._forward = PackedForward(lm)
        self._flex = attention == "flex" or (attention == "auto" and device.type == "cuda")

    def micro_batches(
        self,
        sequences: Sequences,
        rows: NDArray[np.int64],
        *,
        reads: Reads = "before",
        whole_groups: bool = False,
    ) -> Iterator[Layout]:
        """`rows` cut to fit and laid out, one layout for each forward."""
        runs = cut(
            sequences,
            rows,
            max_tokens=self.micro.max_tokens,
            max_sequences=self.micro.max_sequences,
            whole_groups=whole_groups,
        )
        return (lay_out(sequences, run, reads=reads) for run in runs)

    def logprobs(
        self, layout: Layout, temperature: float, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Logprobs [E] of a layout's loss entries, and their entropies if asked, float32."""
        target = torch.from_numpy(layout.target).to(self.device)
        return self._run(
            layout,
            partial(
                head.target_logprobs,
                targets=target,
                temperature=temperature,
                with_entropy=with_entropy,
            ),
        )

    def scores(self, layout: Layout) -> Tensor:
        """What the score head says at a layout's loss entries: [E] float32."""
        return self._run(layout, head.scores)

    def as_base(self) -> AbstractContextManager[None]:
        """The frozen weights under the adapter act, bit for bit: a reference beside its policy, a
        reward model beside its critic, on one copy.
        """
        return nullcontext() if self.adapter is None else self.adapter.disabled()

    def dropping(self, layout: Layout, update: int) -> AbstractContextManager[None]:
        """The adapter's dropout acts on this layout, forward and backward; see Adapter.dropping."""
        if self.adapter is None or not self.adapter.settings.dropout:
            return nullcontext()
        keys = row_keys(layout.token_ids, layout.positions, layout.segment_start, layout.parent)
        return self.adapter.dropping(torch.from_numpy(keys).to(self.device), update)

    def _run(self, layout: Layout, read: Callable[[nn.Module, Tensor], Out]) -> Out:
        arrays = layout.token_ids, layout.positions, layout.hidden_row
        tensors = (torch.from_numpy(array).to(self.device) for array in arrays)
        return self._forward(*tensors, self._context(layout), read)

    def _context(self, layout: Layout) -> AttentionContext:
        if self._flex:
            from postgrad.models.flex import (
                FlexAttention,
            )  # its import compiles nothing but is slow

            return FlexAttention(layout, self.device)
        return TreeAttention(plan_blocks(layout), self.device)

    @torch.no_grad()
    def column(
        self, sequences: Sequences, read: Callable[[Layout], Tensor], reads: Reads = "before"
    ) -> Ragged:
        """What `read` says at every loss token, float32; zeros at other tokens."""
        values = np.zeros(len(sequences.tokens.values), np.float32)
        for layout in self.micro_batches(sequences, np.arange(len(sequences)), reads=reads):
            values[layout.column] = read(layout).cpu().numpy()
        return sequences.tokens.like(values)
