"""How mixers that carry a state (models/states.py) run in a forward pass: over the segments of a
layout, or over one new token of each row of the rollout engine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from postgrad.layout.layout import Layout
from postgrad.models.attention import to_device
from postgrad.models.states import MixerState, Run

MAX_PADDED = 1.3  # tokens of a batch of segments, padding included, over those of the segments
# With a single token types take their way of decoding, which writes over the state that it gets and
# has no gradient.
MIN_CONTINUING = 2


@dataclass(frozen=True, slots=True)
class _Batch:
    """Segments that a mixer runs over at once."""

    members: NDArray[np.int64]  # [B] their numbers
    width: int  # tokens of each, padding included
    hands_on: bool  # whether the states behind them are kept
    above: Tensor | None  # [B] which of the kept states each goes on from; None: an empty one

    @property
    def n_tokens(self) -> int:
        """Tokens that are computed."""
        return len(self.members) * self.width


@dataclass(frozen=True, slots=True)
class Continued:
    """What a forward pass computes of a layout of roots, and the states that these go on from.

    starts: [G + 1] where each segment begins among the computed rows. above: [G] which of the P
    states a segment goes on from, each at least once; -1: an empty one. states: of each mixer by
    name, [P, ...].
    """

    starts: NDArray[np.int64]
    above: NDArray[np.int64]
    states: list[dict[str, Tensor]]


class SegmentMixing:
    """Runs mixers over the segments of a layout, each on from the state behind the segment above
    it, with gradients through it; roots from an empty state on, or from one that is given.

    Segments of similar lengths are one batch, padded behind their last token: a mixer's output
    does not depend on what follows, and nothing reads the padding's. The state behind a segment
    does: where it is handed on, segments of equal lengths alone are one batch.

    states: for each mixer that ran, in order, its state behind each segment by name, [G, ...];
    empty unless they are kept.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        *,
        keep: bool = False,
        continued: Continued | None = None,
    ) -> None:
        """keep: the states behind all segments are kept. continued: with `keep` alone; None: all
        rows are computed, roots from empty states on. Raises ValueError for a segment of a single
        token that goes on from a state and hands one on.
        """
        if continued is None:
            continued = Continued(layout.segment_start, np.full(len(layout.parent), -1), [])
        self.states: list[dict[str, Tensor]] = []
        self._keep = keep
        self._starts, self._parent = continued.starts, layout.parent
        self._lengths: NDArray[np.int64] = np.diff(self._starts)
        self._states_before, self._above_roots = continued.states, continued.above
        self._device = device
        # Of each segment among the kept states, behind those that are given.
        self._place = np.full(len(self._parent), -1)
        self._places = int(continued.above.max(initial=-1)) + 1
        self._levels = self._planned()
        source_row = np.empty(int(self._starts[-1]), np.int64)
        gathered: list[NDArray[np.int64]] = []
        done = 0
        for batch in (batch for level in self._levels for batch in level):
            for segment in batch.members:
                start, length = int(self._starts[segment]), int(self._lengths[segment])
                source_row[start : start + length] = done + np.arange(length)
                gathered.append(start + np.minimum(np.arange(batch.width), length - 1))
                done += batch.width
        self._rows = to_device(np.concatenate(gathered), device)
        self._source_row = to_device(source_row, device)
        self._kept_of = to_device(self._place, device) if keep else None

    def _planned(self) -> list[list[_Batch]]:
        """Batches by level: those of one need the states behind earlier ones alone. Last of all
        come the segments that nothing stands below.
        """
        parent = self._parent
        depth = np.zeros(len(parent), np.int64)
        for segment in np.flatnonzero(parent >= 0):  # children stand after their parents
            depth[segment] = depth[parent[segment]] + 1
        handed = np.isin(np.arange(len(parent)), parent) | self._keep
        levels: list[list[_Batch]] = []
        for level in range(int(depth.max(initial=0, where=handed)) + 1):
            inner = np.flatnonzero(handed & (depth == level))
            continues = self._above_roots[inner] >= 0
            batches = self._batches(inner[~continues], hands_on=True)
            levels.append(batches + self._batches(inner[continues], hands_on=True))
        levels[0] += self._batches(np.flatnonzero(~handed & (depth == 0)), hands_on=False)
        levels.append(self._batches(np.flatnonzero(~handed & (depth > 0)), hands_on=False))
        return levels

    def _batches(self, segments: NDArray[np.int64], *, hands_on: bool) -> list[_Batch]:
        """Segments of one level in batches; all of them go on from a state, or none."""
        order = segments[np.argsort(-self._lengths[segments], kind="stable")]
        batches: list[_Batch] = []
        done = 0
        for count in _counts(self._lengths[order], equal=hands_on):
            members = order[done : done + count]
            parent, width = self._parent[members], int(self._lengths[members[0]])
            above = np.where(parent < 0, self._above_roots[members], self._place[parent])
            begins = bool(above[0] < 0)
            if not begins and width < MIN_CONTINUING:
                if hands_on:
                    raise ValueError("a shared segment of one token below another: lay out with "
                                     f"min_shared of at least {MIN_CONTINUING}")  # fmt: skip
                width = MIN_CONTINUING
            if hands_on:
                self._place[members] = self._places + np.arange(count)
                self._places += count
            places = None if begins else to_device(above, self._device)
            batches.append(_Batch(members, width, hands_on, places))
            done += count
        return batches

    def mix(self, mixer: int, run: Run, hidden: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        sizes = [batch.n_tokens for level in self._levels for batch in level]
        inputs = iter(hidden.index_select(0, self._rows).split(sizes))
        # The kept states of all levels so far.
        behind: dict[str, Tensor] = self._states_before[mixer] if self._states_before else {}
        outputs: list[Tensor] = []
        for level in self._levels:
            kept = [behind] if behind else []
            for batch in level:
                state = MixerState() if batch.hands_on else None
                if batch.above is not None:
                    of_batch = {n: t.index_select(0, batch.above) for n, t in behind.items()}
                    state = MixerState(of_batch)
                tokens = next(inputs).view(len(batch.members), batch.width, -1)
                outputs.append(run(tokens, state).flatten(0, 1))
                if batch.hands_on and state is not None:
                    kept.append(state.tensors)
            if kept:
                behind = {name: torch.cat([tensors[name] for tensors in kept]) for name in kept[0]}
        if self._kept_of is not None:
            self.states.append({n: t.index_select(0, self._kept_of) for n, t in behind.items()})
        return torch.cat(outputs).index_select(0, self._source_row)


class TokenMixing:
    """Runs mixers over one new token of each of N rows, on from the states that they have."""

    def __init__(self, states: Callable[[int], Mapping[str, Tensor]], goes_on: Tensor) -> None:
        """states: of a mixer number, [slots, ...] by name with N or more slots; what they hold
        changes. goes_on: [N] bool; the states of other rows stay as they are.
        """
        self._states = states
        self._goes_on = goes_on

    def mix(self, mixer: int, run: Run, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, hidden]."""
        count, stored = len(hidden), self._states(mixer)
        # copies, since some types write over a state, also of rows that do not go on
        state = MixerState({name: tensor[:count].clone() for name, tensor in stored.items()})
        mixed = run(hidden.unsqueeze(1), state).squeeze(1)
        for name, after in state.tensors.items():
            chosen = self._goes_on.view(-1, *[1] * (after.ndim - 1))
            stored[name][:count] = torch.where(chosen, after, stored[name][:count])
        return mixed


def _counts(lengths: NDArray[np.int64], *, equal: bool) -> list[int]:
    """How many of the segments, whose lengths fall, are in each batch: those of equal lengths, or
    as many as add at most MAX_PADDED - 1 of padding.
    """
    counts: list[int] = []
    widest = tokens = 0
    for length in lengths.tolist():
        padded = (counts[-1] + 1) * widest if counts else 0
        limit = tokens + length if equal else MAX_PADDED * (tokens + length)
        if counts and padded <= limit:
            counts[-1] += 1
            tokens += length
        else:
            counts.append(1)
            widest = tokens = length
    return counts
