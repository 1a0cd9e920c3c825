"""An update: the samples of one optimizer step, over which its denominators count; how a step's
experience is cut into updates; the columns of an update on the device, by token; and what the
routers of a mixture of experts do in it.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from postgrad.core import seeds
from postgrad.core.batch import BatchGeometry
from postgrad.core.errors import RunError
from postgrad.core.process import Handle
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.layout.layout import Layout
from postgrad.learner.backbone import Backbone
from postgrad.models.attention import to_device
from postgrad.models.routers import Routed, chosen_of, loss_of, sums_of
from postgrad.rollout.settings import RolloutSettings


@dataclass(frozen=True, slots=True)
class Update:
    """Sequences `rows` of `experience`, trained on in one optimizer step.

    Denominators count all of `rows`, also those without gradient, however they are cut into
    micro-batches and divided over ranks.
    """

    experience: Experience
    rows: NDArray[np.int64]  # [sequences of this update] indices into the experience

    @property
    def rows_with_gradient(self) -> NDArray[np.int64]:
        """The part of `rows` that can move a weight: only these are computed."""
        return self.rows[self.experience.has_gradient[self.rows]]

    @property
    def unmasked(self) -> "Update":
        """This one without sampling masks, for a critic."""
        experience = self.experience
        return replace(
            self, experience=replace(experience, sequences=experience.sequences.unmasked)
        )

    @property
    def loss_tokens(self) -> int:
        """Loss-bearing tokens of all rows."""
        return int(self.experience.sequences.loss_mask.sums()[self.rows].sum())


def updates(
    experience: Experience,
    train_batch_size: int,
    per_pass: int,
    epochs: int,
    seed: int,
    step: int,
    *,
    whole_groups: bool = False,
) -> Iterator[Update]:
    """The updates of a step: `epochs` passes over the experience, `per_pass` updates each.

    Where samples were dropped, the rest is divided evenly: a small remainder would move the weights
    as far as a full update. There are fewer updates where each would get less than half of
    `train_batch_size` samples. whole_groups: all samples of a group are in the same update, and
    sizes as even as that allows; else sizes differ by at most one sample.

    With one update a pass the order is kept. Otherwise groups are shuffled (drawn from seed, step
    and epoch) and stay together, so that their prompt is computed once. All of it follows from the
    arguments: a step that is repeated after a resume is cut in the same way.
    """
    groups = experience.sequences.group
    _, place = np.unique(groups, return_inverse=True)
    for epoch in range(epochs if len(experience) else 0):
        order = np.arange(len(experience))
        if per_pass > 1:
            rank = seeds.permutation(int(place.max()) + 1, seed, "updates", step, epoch)
            order = np.argsort(rank[place], kind="stable")
        ends = np.arange(1, len(order) + 1)
        if whole_groups:
            ends = ends[np.diff(place[order], append=-1) != 0]
        cuts = even_cuts(ends, per_pass, -(-train_batch_size // 2))
        for start, end in pairwise(cuts):
            yield Update(experience, order[start:end])


def even_cuts(ends: NDArray[np.int64], most: int, least: int) -> list[int]:
    """Cut points [0, ..., n] of at most `most` parts, as even as possible.

    ends: the places where a cut may be, ascending, the last of them n. least: size of the smallest
    part, unless there is only one part.
    """
    n = int(ends[-1])
    for parts in range(min(most, len(ends)), 1, -1):
        wanted = n * np.arange(1, parts)  # times `parts`: whole numbers have no rounding
        after = np.searchsorted(ends * parts, wanted)
        before = np.maximum(after - 1, 0)
        nearer = wanted - ends[before] * parts <= ends[after] * parts - wanted
        cuts = [0, *ends[np.where(nearer, before, after)].tolist(), n]
        if min(b - a for a, b in pairwise(cuts)) >= least:
            return cuts
    return [0, n]


class Entries(TypedDict):
    """The fields that LossInputs and ScoreInputs have in common; see there."""

    columns: Mapping[str, Tensor]
    sequence: Tensor
    n_sequences: int
    weight: Tensor
    token_weight: Tensor


class FlatColumns:
    """An update's columns and loss weights on the device, by flat token number. weights: what every
    token counts for in the loss of the update.
    """

    def __init__(self, update: Update, weights: Ragged, device: torch.device) -> None:
        experience = update.experience
        self._device = device
        self._columns = {
            name: to_device(column.values.astype(np.float32), device)
            for name, column in experience.columns.items()
        }
        self._weight = to_device(weights.values, device)
        lengths = experience.sequences.loss_mask.sums()
        # Means over the computed tokens: skipping does not dilute metrics.
        tokens = max(1.0, float(lengths[update.rows_with_gradient].sum()))
        self._token_weight = to_device(np.array([1.0 / tokens], np.float32), device)
        self._replies, count = experience.replies, 0
        if self._replies is not None:
            count = np.count_nonzero(self._replies.take(update.rows).values)
        self._each_reply = 1.0 / count if count else 0.0

    def at(self, layout: Layout) -> Entries:
        """The columns at a layout's entries, as LossInputs and ScoreInputs want them."""
        column = to_device(layout.column, self._device)
        at_entries = {name: flat.index_select(0, column) for name, flat in self._columns.items()}
        return {
            "columns": at_entries,
            "sequence": to_device(layout.sequence, self._device),
            "n_sequences": layout.n_sequences,
            "weight": self._weight.index_select(0, column),
            "token_weight": self._token_weight.expand(len(column)),
        }

    def replies(self, layout: Layout) -> "Replies | None":
        """Which of a layout's entries an environment wrote; None where none of the update are."""
        if self._replies is None or not self._each_reply:
            return None
        weight = self._replies.values[layout.column]
        read = np.flatnonzero(weight)
        return Replies(
            written=to_device(np.flatnonzero(weight == 0), self._device),
            read=to_device(read, self._device),
            weight=to_device(weight[read], self._device),
            each=self._each_reply,
        )


@dataclass(frozen=True, slots=True)
class Replies:
    """The entries of a layout that the policy wrote, and the R that an environment wrote."""

    written: Tensor  # int64 numbers of entries
    read: Tensor  # [R] likewise
    weight: Tensor  # [R] of each, Experience.replies
    each: float  # 1 / such tokens of the update

    def loss(self, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """The cross-entropy of the replies as a part of the update's loss; its mean without their
        weights, detached. logprobs: [E] of the layout.
        """
        missed = -logprobs.index_select(0, self.read)
        return (self.weight * missed).sum() * self.each, missed.detach().sum() * self.each


@torch.no_grad()
def added(sums: Mapping[str, Tensor], terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums of metrics with the terms of one more micro-batch, by name, in one kernel. A metric
    that has no sum yet begins with its term.
    """
    summed = [name for name in terms if name in sums]
    totals = torch._foreach_add([sums[name] for name in summed], [terms[name] for name in summed])  # pyright: ignore[reportPrivateImportUsage]
    fresh = {name: term.detach() for name, term in terms.items()}
    return fresh | dict(zip(summed, totals, strict=True))


class Routes(Protocol):
    """A policy that says which experts its routers choose."""

    def experts(self, sequences: Sequences) -> Handle[Ragged]:
        """int16 [N, layers, k], for every token."""
        ...


def replayed(
    batch: RolloutBatch, sampling: RolloutSettings, policy: Routes, geometry: BatchGeometry
) -> RolloutBatch:
    """The batch with the experts that the policy uses again: those that the sampler chose, or that
    the policy chooses before the step, or none. In a step of a single update nothing can differ
    from what was chosen before it. And with the sampling masks, where they are kept.

    Raises RunError where the sampler's are asked for and samples come without.
    """
    sequences = batch.sequences
    if not sampling.keep_sampling_mask:
        sequences = sequences.unmasked  # of a replay
        batch = replace(batch, sequences=sequences)
    elif len(batch) and sequences.sampling_mask is None:
        raise RunError(
            "rollout.keep_sampling_mask: samples came without their masks; record the run that is "
            "replayed with the same setting"
        )
    replay = sampling.router_replay
    if replay == "sampled":
        if len(batch) and sequences.experts is None:
            raise RunError(
                'rollout.router_replay = "sampled": samples came without their experts; record the '
                "run that is replayed with the same setting"
            )
        return batch
    experts = None
    if replay == "old" and geometry.updates_per_step > 1 and len(batch):
        experts = policy.experts(sequences).result()
    return replace(batch, sequences=replace(sequences, experts=experts))


def replaying(backbone: Backbone, layout: Layout) -> AbstractContextManager[None]:
    """Inside, forward and backward, the tokens of a layout go to the experts that came with them,
    where the backbone's routers replay.
    """
    routers = backbone.routers
    if routers is None or not routers.replays or layout.experts is None:
        return nullcontext()
    rank_rows = backbone.rows_of_rank(layout)
    experts = layout.experts if rank_rows is None else rank_rows.part(layout.experts)
    return routers.replaying(to_device(experts, backbone.device))


@torch.no_grad()
def chosen_experts(backbone: Backbone, sequences: Sequences) -> Ragged:
    """int16 [N, layers, k]: the experts that a backbone's routers choose now, for every token, by a
    forward pass. No ranks share a layout.
    """
    routers = backbone.routers
    assert routers is not None  # a replay without routers is refused
    everywhere = np.ones(len(sequences.tokens.values), np.bool_)
    read = replace(sequences, loss_mask=sequences.tokens.like(everywhere), experts=None)
    chosen: list[tuple[NDArray[np.int64], Tensor]] = []
    shape: tuple[int, ...] = (0, 0)
    for layout in backbone.micro_batches(read, np.arange(len(read)), reads="at"):
        with routers.recording() as routed:
            backbone.hidden(layout, None)
        experts = chosen_of(routed)
        shape = tuple(experts.shape[1:])
        if layout.n_sequences:
            chosen.append((layout.column, experts.cpu()[layout.hidden_row]))
    values = np.zeros((len(everywhere), *shape), np.float32)
    computed = np.zeros(values.shape, np.bool_)
    for column, experts in chosen:
        values[column], computed[column] = experts.numpy(), True
    backbone.free_gathered()
    merged, _ = backbone.ranks.merged(values.ravel(), computed.ravel())
    return sequences.tokens.like(merged.reshape(values.shape).astype(np.int16))


class Routing:
    """The load of every expert in an update, and the losses of routers; of a dense model nothing.

    The balance loss (models/routers.py) multiplies two sums over every row of the update, so it is
    no sum over micro-batches. But its gradient is that of one, sum_e (E f_e) p_e / rows, once the
    choices f_e are known: a forward pass without gradients counts them first. Rows are those of
    sequences without padding or sharing: a token that n sequences share counts n times. So neither
    the cut into micro-batches nor ranks change the losses.
    """

    def __init__(self, backbone: Backbone, update: Update) -> None:
        self._backbone = backbone
        self._routers = backbone.routers if len(update.rows_with_gradient) else None
        lengths = update.experience.sequences.tokens.lengths
        self._tokens = float(lengths[update.rows_with_gradient].sum())
        self._recorded: list[Routed] = []
        self._sums: Tensor | None = None  # sums_of this rank's micro-batches so far
        self._shares: Tensor | None = None  # see loss_of

    @property
    def counts_first(self) -> bool:
        """Whether a pass over all micro-batches has to count choices before the first loss."""
        return self._routers is not None and self._routers.balance > 0

    @contextmanager
    def watching(self, layout: Layout) -> Generator[None]:
        """Inside is one forward pass over a layout, and no backward pass."""
        if self._routers is None:
            yield
            return
        with self._routers.recording() as self._recorded:
            yield
        sums = sums_of(self._recorded, self._backbone.copies(layout))
        self._sums = sums if self._sums is None else self._sums + sums

    def have_counted(self) -> None:
        """The pass that counts has ended: now `loss` can be asked for, and sums begin again."""
        assert self._routers is not None
        choices = self._over_ranks()[0].sum(0)
        factor = self._routers.balance * len(choices) / self._rows**2
        self._shares, self._sums = choices * factor, None

    def loss(self, layout: Layout) -> Tensor | float:
        """The losses of the layout that was last watched, times their coefficients."""
        if self._routers is None or not (self._routers.balance or self._routers.z):
            return 0.0
        copies = self._backbone.copies(layout)
        return loss_of(self._recorded, copies, self._shares, self._routers.z, self._rows)

    def metrics(self, name: str) -> dict[str, float]:
        """Of the role `name`, over all ranks: both losses without coefficients, the load of the
        busiest expert of any layer as a multiple of an even share, and the share of experts that
        got no token.
        """
        if self._routers is None:
            return {}
        choices, probabilities, squares = self._over_ranks().unbind(0)
        experts, rows = choices.shape[1], self._rows
        busiest = choices.amax(1) * experts / choices.sum(1)
        return {
            f"{name}/router_balance": experts
            * float(choices.sum(0) @ probabilities.sum(0))
            / rows**2,
            f"{name}/router_z": float(squares.sum()) / rows,
            f"{name}/router_max_load": float(busiest.max()),
            f"{name}/router_unused": float((choices == 0).double().mean()),
        }

    @property
    def _rows(self) -> float:
        """Tokens of the update times layers with routers."""
        assert self._routers is not None
        return self._tokens * self._routers.layers

    def _over_ranks(self) -> Tensor:
        assert self._sums is not None  # every rank computes layouts, if only empty ones
        total = self._sums.clone()
        with torch.no_grad():
            self._backbone.ranks.sum_([total])
        return total
