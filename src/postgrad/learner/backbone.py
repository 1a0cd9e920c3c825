"""A backbone: one set of weights on one device, or divided over ranks. Roles borrow it; one forward
runs at a time.
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.core.settings import ShardingStage
from postgrad.layout.blocks import plan_blocks
from postgrad.layout.cut import cut, share
from postgrad.layout.layout import (
    Layout,
    ReadPosition,
    empty_layout,
    lay_out,
    plain_layout,
    row_keys,
)
from postgrad.learner.context import RankRows, SharedAttention
from postgrad.learner.experts import cut_experts
from postgrad.learner.tensor import cut_matrices, require_shareable
from postgrad.models import head
from postgrad.models.adapters import Adapter, acting
from postgrad.models.attention import (
    AttentionContext,
    Out,
    PackedForward,
    carries_states,
    layers_of,
    min_shared_of,
    require_embedded,
    to_device,
    windows_of,
)
from postgrad.models.embedding_noise import EmbeddingNoise
from postgrad.models.images import ImageTower, encoder_of
from postgrad.models.routers import Routers, routers_in_float32
from postgrad.models.sampling_mask import LogitMask
from postgrad.models.stored import realise
from postgrad.models.supported import reads_images
from postgrad.models.towers import cut_of
from postgrad.models.tree import FlexAttention, TreeAttention
from postgrad.parallel.ranks import ALONE, Ranks
from postgrad.parallel.sharding import Sharding

if TYPE_CHECKING:
    from postgrad.models.distilled_head import Taught

# Of the forward that layers are compiled in: enough tokens for a usual choice of kernels, in
# sequences that no model is too short for. One sequence more than a power of two has: to torch's
# compiler equal sizes are the same, and no model is as wide as an odd multiple of 16.
COMPILED_TOKENS, COMPILED_LENGTH = 2048, 16


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Limits of one forward/backward pass on one replica; None: no limit."""

    max_tokens: int | None = None  # tokens that are computed, a shared prefix counted once
    max_sequences: int | None = None


class Outputs:
    """The outputs of several layouts, which stay on their device until all are read at once."""

    def __init__(self) -> None:
        self._columns: list[NDArray[np.int64]] = []
        self._outputs: list[Tensor] = []

    def add(self, layout: Layout, outputs: Tensor) -> None:
        """outputs: [E] at the layout's loss entries."""
        self._columns.append(layout.column)
        self._outputs.append(outputs.detach())

    def write(self, values: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Writes them into `values` [N, ...], by flat token; returns where there were any."""
        computed = np.zeros(len(values), np.bool_)
        if self._columns:
            column = np.concatenate(self._columns)
            values[column] = torch.cat(self._outputs).cpu().numpy()
            computed[column] = True
        return computed


class Backbone:
    """Runs layouts through a model.

    `lm` is a transformers model loaded with our attention, on `device`: a causal one, or a body
    with a `score` head. `attention` is the recipe's choice: "sdpa", "flex", or "auto" (flex on
    CUDA). adapter: the adapter on `lm`, whose own weights are frozen then. compiler: the backend of
    torch.compile for decoder layers and output head (models/compiled.py); None: without.

    On several ranks (`divide`) each gets all sequences, runs its share and has all results.
    """

    def __init__(
        self,
        lm: nn.Module,
        device: torch.device,
        micro: MicroBatch,
        attention: str = "auto",
        adapter: Adapter | None = None,
        compiler: str | None = None,
    ) -> None:
        self.lm, self.half = lm, lm.dtype == torch.float16  # divided weights are float32
        self.device = device
        self.micro = micro
        self.adapter = adapter
        self.routers: Routers | None = None  # of a mixture of experts that is trained
        self.tower: ImageTower | None = None  # of a model that reads images
        self.noise: EmbeddingNoise | None = None  # that acts in updates
        self.drawn_head = False  # whether it scores with a head that its files do not have
        config: Any = lm.config
        # Whether it reads images whose tokens see each other (Layout.seen).
        self._mutual = reads_images(config) and cut_of(config.to_dict()) == "square"
        self.ranks = ALONE
        self.sharding: Sharding | None = None
        self.reload: Callable[[], None] = lambda: None  # offloaded weights (learner.offload)
        self._forward = PackedForward(lm)
        self._flex = attention == "flex" or (attention == "auto" and device.type == "cuda")
        self._windows = windows_of(lm) if self._flex else ()
        self._stateful = carries_states(lm)
        self.min_shared = min_shared_of(lm)  # tokens of the shortest prefix that layouts share
        self.compiler = compiler
        self._compiled_modes: set[tuple[bool, str | None, bool, bool]] = set()
        if compiler is not None and self._stateful:
            raise UsageError(
                f"model.compile: layers of a {lm.config.model_type} model, which carry a state "  # pyright: ignore[reportAttributeAccessIssue]
                "along the sequence, are not compiled: leave it out"
            )

    def divide(
        self,
        ranks: Ranks,
        stage: ShardingStage,
        *,
        offload: bool = False,
        undivided: Collection[str] = (),
    ) -> None:
        """From now on runs on `ranks`, with weights divided as their grid and `stage` say. offload:
        divided weights are held in the host's memory. Of weights that are still in files
        (models.stored) this rank's part is read, and all of those that are not divided. To be
        called after an adapter was added and before an optimizer takes the weights. undivided:
        names of weights that `stage` is not to divide.
        """
        lm: Any = self.lm
        require_shareable(lm.config, ranks.grid, stateful=self._stateful)
        self.ranks = ranks
        cut_matrices(lm, ranks)
        experts = cut_experts(lm, ranks)
        heads = [lm.score] if hasattr(lm, "score") and self.adapter is None else []
        named = lm.named_parameters()
        self.sharding = Sharding(
            self._forward, layers_of(lm), [*heads, *routers_in_float32(lm)], stage, ranks, lm.dtype,
            offload=offload, experts=experts, undivided=[w for n, w in named if n in undivided],
        )  # fmt: skip
        realise(lm)

    def micro_batches(
        self,
        sequences: Sequences,
        rows: NDArray[np.int64],
        *,
        reads: ReadPosition = "before",
        whole_groups: bool = False,
    ) -> Iterator[Layout]:
        """`rows` cut into micro-batches, one layout for each forward. On several ranks this rank's
        share of them, filled up with empty layouts to the number of the rank with most.
        """
        ranks = self.ranks
        shares = share(
            sequences, rows, ranks.replicas, whole_groups=whole_groups, min_shared=self.min_shared
        )
        runs = cut(
            sequences,
            shares[ranks.replica],
            max_tokens=self.micro.max_tokens,
            max_sequences=self.micro.max_sequences,
            whole_groups=whole_groups,
            min_shared=self.min_shared,
        )
        return self._layouts(sequences, runs, ranks.most(len(runs)), reads)

    def _layouts(
        self, sequences: Sequences, runs: list[NDArray[np.int64]], count: int, reads: ReadPosition
    ) -> Iterator[Layout]:
        for number in range(count):
            if self.sharding is not None:
                self.sharding.before_micro_batch(number == count - 1)
            layout = empty_layout()
            if number < len(runs):
                layout = lay_out(sequences, runs[number], reads=reads, min_shared=self.min_shared)
            yield layout.padded(self.ranks.grid.sharers)

    def free_gathered(self) -> None:
        """Drops gathered copies of divided weights: after an update, or before a long pause."""
        if self.sharding is not None:
            self.sharding.free_gathered()

    def logprobs(
        self, layout: Layout, temperature: float, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Logprobs [E] of a layout's loss entries, and their entropies if asked, float32."""
        rank_rows = self.rows_of_rank(layout)
        targets, mask = layout.target, layout.sampling_mask
        if rank_rows is not None:
            targets, mask = rank_rows.targets(layout), rank_rows.sampling_mask(layout)
        if mask is not None:
            require_embedded(self.lm, mask.values)
        read = partial(
            head.target_logprobs,
            targets=to_device(targets, self.device),
            temperature=temperature,
            with_entropy=with_entropy,
            compiler=self.compiler,
            mask=None if mask is None else LogitMask(mask, self.device),
        )
        token_logprobs, entropy = self._run(layout, rank_rows, read)
        if rank_rows is not None:
            token_logprobs = rank_rows.outputs(token_logprobs, layout, self.ranks)
            entropy = None if entropy is None else rank_rows.outputs(entropy, layout, self.ranks)
        return token_logprobs, entropy

    def divergences(
        self, layout: Layout, taught: Callable[[RankRows | None], "Taught"]
    ) -> tuple[Tensor, Tensor]:
        """Logprobs [E] of a layout's loss entries at a temperature of 1, and the divergences of
        their distributions from a teacher's, float32. taught: what it says at this rank's entries.
        """
        from postgrad.models.distilled_head import divergences  # few runs have a teacher

        rank_rows = self.rows_of_rank(layout)
        targets = layout.target if rank_rows is None else rank_rows.targets(layout)
        compare = partial(
            divergences, targets=to_device(targets, self.device), taught=taught(rank_rows)
        )
        read = self._run(layout, rank_rows, compare)
        if rank_rows is None:
            return read
        logprobs, apart = (rank_rows.outputs(column, layout, self.ranks) for column in read)
        return logprobs, apart

    @torch.no_grad()
    def hidden(self, layout: Layout, rank_rows: RankRows | None) -> Tensor:
        """[E, hidden] the hidden states that a layout's loss entries read, or this rank's [e + 1].
        The output head stays gathered until the next forward pass or `free_gathered`.
        """
        hidden = self._run(layout, rank_rows, lambda _, states: states)
        if self.sharding is not None:
            self.sharding.gather_root()
        return hidden

    def read(self, layout: Layout, of_hidden: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        """[E] or [E, k] float32: of_hidden(lm, hidden states) at a layout's loss entries."""
        rank_rows = self.rows_of_rank(layout)
        outputs = self._run(layout, rank_rows, of_hidden)
        return outputs if rank_rows is None else rank_rows.outputs(outputs, layout, self.ranks)

    def scores(self, layout: Layout) -> Tensor:
        """The score head's outputs at a layout's loss entries: [E] float32."""
        return self.read(layout, head.scores)

    def copies(self, layout: Layout) -> Tensor:
        """[L] how many sequences each of this rank's rows of a layout is of: Layout.copies."""
        rank_rows = self.rows_of_rank(layout)
        copies = layout.copies if rank_rows is None else rank_rows.part(layout.copies)
        return to_device(copies, self.device)

    def as_base(self) -> AbstractContextManager[None]:
        """Inside, the adapter is off and the frozen weights give their own bits: a reference beside
        its policy, or a reward model beside its critic, on one copy of the weights.
        """
        return nullcontext() if self.adapter is None else self.adapter.disabled()

    def dropping(self, layout: Layout, update: int) -> AbstractContextManager[None]:
        """Inside, the adapter's dropout acts on this layout, forward and backward. update: the
        number of the update, of which masks are drawn; see Adapter.dropping.
        """
        if self.adapter is None or not self.adapter.settings.dropout:
            return nullcontext()
        keys = row_keys(layout.token_ids, layout.positions, layout.segment_start, layout.parent)
        if (rank_rows := self.rows_of_rank(layout)) is not None:
            keys = keys[rank_rows.inner]
        return self.adapter.dropping(to_device(keys, self.device), update)

    def rows_of_rank(self, layout: Layout) -> RankRows | None:
        """This rank's rows of a layout, where several ranks share it; else None."""
        return RankRows.of(layout, self.ranks) if self.ranks.grid.sharers > 1 else None

    def _run(
        self, layout: Layout, rank_rows: RankRows | None, read: Callable[[nn.Module, Tensor], Out]
    ) -> Out:
        self.reload()
        require_embedded(self.lm, layout.token_ids)
        if self.compiler is not None:
            self._compile_mode(self.compiler, layout)
        arrays = layout.token_ids, layout.rotary_positions, layout.hidden_row
        context, run = self._context(layout), None
        if rank_rows is not None:
            arrays = rank_rows.inputs(layout)
            run = rank_rows.rows
            if self.ranks.grid.context > 1:
                context = SharedAttention(context, self.ranks)
        tensors = (to_device(array, self.device) for array in arrays)
        encode = None
        if self.tower or layout.images:
            encode = encoder_of(layout, self.tower, on_ranks=self.ranks.size > 1, run=run)
        with nullcontext() if self.noise is None else self.noise.over(layout, run):
            return self._forward(*tensors, context, read, encode)

    def _compile_mode(self, compiler: str, like: Layout) -> None:
        """Compiles what the next forward needs, if it is the first one of its kind, in a forward
        over a layout that is always the same: torch chooses kernels for the size that it sees
        first, and a run that goes on from a checkpoint sees another one. The backward pass is
        compiled with it. Ranks that divide weights gather them in this forward too: all of them
        need the same modes in the same order. like: the layout of the next forward. Images whose
        tokens see each other (Gemma 3) are attended to outside of a layer's graph.
        """
        drops = self.adapter is not None and self.adapter.dropout_acts
        seen = (like.seen is not None,)
        if self.ranks.size > 1 and self._mutual:
            seen = False, True  # another rank may have images now
        for outside in seen:
            self._compile_for(compiler, drops=drops, seen=outside)

    def _compile_for(self, compiler: str, *, drops: bool, seen: bool) -> None:
        mode = torch.is_grad_enabled(), acting(self.lm), drops, seen
        if mode in self._compiled_modes:
            return
        if not self._compiled_modes:  # adapters are there, and weights are where they stay
            from postgrad.models.compiled import compile_layers  # torch's compiler takes seconds

            compile_layers(self.lm, compiler)
        self._compiled_modes.add(mode)
        if self.adapter is not None and not (self.sharding and self.sharding.divides):
            self.adapter.join_frozen()
        tokens = min(self.micro.max_tokens or COMPILED_TOKENS, COMPILED_TOKENS)
        count = max(1, tokens // 256) * (256 // COMPILED_LENGTH) + 1  # an odd number of squares
        layout = plain_layout(count, COMPILED_LENGTH).padded(self.ranks.grid.sharers)
        if seen:
            layout = replace(layout, seen=np.tile(layout.positions, (2, 1)))
        unwatched = nullcontext() if self.routers is None else self.routers.unwatched()
        with unwatched, self.dropping(layout, 0) if drops else nullcontext():
            self._run(layout, self.rows_of_rank(layout), lambda _, hidden: hidden)

    def _context(self, layout: Layout) -> AttentionContext:
        attention = self._attention(layout)
        if not self._stateful:
            return attention
        from postgrad.models.mixing import SegmentMixing
        from postgrad.models.states import StateContext

        return StateContext(attention, SegmentMixing(layout, self.device))

    def _attention(self, layout: Layout) -> AttentionContext:
        if self._flex and layout.seen is None:  # its masks know no images that are seen whole
            return FlexAttention(layout, self.device, self._windows)
        blocks = TreeAttention(plan_blocks(layout), self.device)
        if self.compiler is None:
            return blocks
        from postgrad.models.compiled import OutsideGraph

        outside: Any = OutsideGraph(blocks)  # torch's decorator has no type
        return outside  # other blocks in every layout: each would need a graph

    @torch.no_grad()
    def column(
        self,
        sequences: Sequences,
        read: Callable[[Layout], Tensor],
        reads: ReadPosition = "before",
        width: tuple[int, ...] = (),
    ) -> Ragged:
        """The outputs [E, *width] that `read` gives for each layout, as a column over all tokens:
        float32, zeros at tokens without loss.
        """
        outputs = Outputs()
        for layout in self.micro_batches(sequences, np.arange(len(sequences)), reads=reads):
            of_layout = read(layout)
            if layout.n_sequences:
                outputs.add(layout, of_layout)
        values = np.zeros((len(sequences.tokens.values), *width), np.float32)
        computed = np.repeat(outputs.write(values), math.prod(width))
        self.free_gathered()
        merged = self.ranks.merged(values.reshape(-1), computed)[0]
        return sequences.tokens.like(merged.reshape(values.shape))
