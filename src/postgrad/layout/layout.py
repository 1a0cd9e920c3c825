"""A layout: sequences laid out for one packed forward pass, with their loss entries.

Built by a pure function just before each forward and never earlier, because updates, filters and
ranks cut the batch anew.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from postgrad.core import seeds
from postgrad.core.records import (
    Experts,
    PlacedImage,
    SamplingMask,
    Sequences,
    images_between,
)
from postgrad.layout.cut import groups_of
from postgrad.layout.tree import MIN_SHARED, Segment, grow

ReadPosition = Literal["before", "at"]


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Where an image stands in a layout; in several places where sequences do not share it."""

    digest: str  # SHA-256 of its file
    rows: NDArray[np.int64]  # [tokens]


@dataclass(frozen=True, slots=True)
class Layout:
    """T packed tokens in G segments, and the E loss entries.

    Segments form trees (layout/tree.py), their rows lie in depth-first order. So the token at row q
    sees row k, which is on its path and not after it, where k <= q < subtree_end[k].

    Loss entries are a list of their own: with sharing, one hidden state predicts different tokens
    for different children, and a loss token may lie inside a shared prefix.
    """

    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T] of the token in its sequence, from 0 on
    subtree_end: NDArray[np.int64]  # [T] the row after the last one below the token's segment
    segment_start: NDArray[np.int64]  # [G + 1] first row of each segment; last: T
    parent: NDArray[np.int64]  # [G] the segment above each; -1 for a root
    copies: NDArray[np.float32]  # [T] conversations that it is of; 0 of a layout without any
    hidden_row: NDArray[np.int64]  # [E] row whose hidden state the entry reads
    target: NDArray[np.int64]  # [E] token id that the loss is about
    sequence: NDArray[np.int64]  # [E] number of the entry's sequence, 0 .. n_sequences - 1
    column: NDArray[np.int64]  # [E] index of the entry's token in the batch's flat columns
    n_sequences: int
    experts: Experts | None = None  # [T, layers, k] that tokens are sent to again
    images: tuple[ImageRows, ...] = ()  # in the order of their rows
    # [3, T] what rotary embeddings of three components read: along time, rows and columns of an
    # image; None: `positions` in all of them.
    rotary: NDArray[np.int64] | None = None
    # [2, T] the first and last position that a row sees whatever a window hides, those between
    # among them: of an image that is seen whole, its ends; else the row's own. None: of all rows.
    seen: NDArray[np.int64] | None = None
    sampling_mask: SamplingMask | None = None  # [E] rows, of the entries' tokens
    # [T] index of the row's token in the batch's flat columns; of a shared row in one sequence,
    # without a meaning where `copies` is 0. None: the layout is of no batch.
    flat: NDArray[np.int64] | None = None

    @property
    def rotary_positions(self) -> NDArray[np.int64]:
        """[T] or [3, T] the positions that a model's forward gets."""
        return self.positions if self.rotary is None else self.rotary

    @property
    def n_tokens(self) -> int:
        """T, the tokens that the forward computes."""
        return len(self.token_ids)

    def path_rows(self, segment: int) -> NDArray[np.int64]:
        """Rows of a segment and of all its ancestors, root first."""
        parts: list[NDArray[np.int64]] = []
        while segment >= 0:
            begin, end = int(self.segment_start[segment]), int(self.segment_start[segment + 1])
            parts.append(np.arange(begin, end, dtype=np.int64))
            segment = int(self.parent[segment])
        return np.concatenate(parts[::-1])

    def padded(self, multiple: int) -> "Layout":
        """With so many tokens more that the ranks of a replica have equally many of them: a
        sequence of its own, which repeats the first token, of no sequence and without an entry.
        """
        more, total = -self.n_tokens % multiple, self.n_tokens
        if not more:
            return self
        positions, first = np.arange(more), np.zeros(more, np.int64)
        rotary, seen, experts, flat = self.rotary, self.seen, self.experts, self.flat
        if rotary is not None:
            rotary = np.concatenate([rotary, np.tile(positions, (3, 1))], 1)
        if seen is not None:
            seen = np.concatenate([seen, np.tile(positions, (2, 1))], 1)
        return replace(
            self,
            token_ids=np.append(self.token_ids, self.token_ids[first]),
            positions=np.append(self.positions, positions),
            subtree_end=np.append(self.subtree_end, first + total + more),
            segment_start=np.append(self.segment_start, total + more),
            parent=np.append(self.parent, -1),
            copies=np.append(self.copies, first.astype(np.float32)),
            experts=None if experts is None else np.concatenate([experts, experts[first]]),
            rotary=rotary,
            seen=seen,
            flat=None if flat is None else np.append(flat, flat[first]),
        )


def empty_layout() -> Layout:
    """The layout of a rank that has no sequences left while others still compute: one token and one
    entry, so that forward and backward use every weight and take part in all collectives.
    """
    zero = np.zeros(1, np.int64)
    return Layout(
        token_ids=zero,
        positions=zero,
        subtree_end=zero + 1,
        segment_start=np.arange(2),
        parent=zero - 1,
        copies=np.zeros(1, np.float32),
        hidden_row=zero,
        target=zero,
        sequence=zero,
        column=zero,
        n_sequences=0,
    )


def plain_layout(count: int, length: int) -> Layout:
    """`count` unrelated sequences of `length` tokens, all of them token 0, with one entry."""
    n = count * length
    starts = np.arange(0, n + 1, length)
    return replace(
        empty_layout(),
        token_ids=np.zeros(n, np.int64),
        positions=np.tile(np.arange(length), count),
        subtree_end=np.repeat(starts[1:], length),
        segment_start=starts,
        parent=np.full(count, -1),
        copies=np.zeros(n, np.float32),
    )


def lay_out(
    sequences: Sequences,
    rows: NDArray[np.int64],
    *,
    reads: ReadPosition = "before",
    min_shared: int = MIN_SHARED,
) -> Layout:
    """The layout of the sequences `rows`. Those of one group lie in one tree: each conversation of
    a sequence is a path of its own, and entries of all of them are the sequence's.

    reads: the hidden state that an entry reads. "before": that of the previous token, which
    predicts it (policy) or whose value is estimated (critic). "at": that of the token itself (a
    reward model's last token). No sequence in `rows` may be empty. With "before", loss on a first
    token is a ValueError.
    """
    numbers = {row: number for number, row in enumerate(rows.tolist())}
    builder = _Builder(sequences, numbers, back=1 if reads == "before" else 0)
    for members in groups_of(sequences, rows):
        builder.add_tree(members, min_shared)
    return builder.finish()


class _Builder:
    def __init__(self, sequences: Sequences, number: dict[int, int], back: int) -> None:
        self.sequences = sequences
        self.number = number  # batch row -> number of the sequence in this layout
        self.back = back  # rows from an entry's token back to the hidden state that it reads
        self.tokens: list[NDArray[np.int32]] = []
        self.positions: list[NDArray[np.int64]] = []
        self.starts = [0]
        self.parents: list[int] = []
        self.entries: list[tuple[NDArray[np.int64], ...]] = []
        self.shared_by = sequences.shared_by
        self.flat: list[
            NDArray[np.int64]
        ] = []  # of each segment, its tokens in the batch's columns
        self.paths: list[NDArray[np.int64]] = []  # of each conversation, its rows
        self.images: list[ImageRows] = []
        self.rotary: list[NDArray[np.int64]] = []  # of each segment
        self.seen: list[NDArray[np.int64]] = []

    def add_tree(self, members: list[int], min_shared: int) -> None:
        conversations = [
            (row, *part) for row in members for part in self.sequences.conversations(row)
        ]
        tree = grow(
            [self.shared_by.row(row)[begin:end] for row, begin, end in conversations], min_shared
        )
        first = len(self.parents)
        for segment in tree.segments:
            row, begin, _ = conversations[segment.owner]
            start = self.sequences.tokens.offsets[row] + begin
            self.flat.append(start + np.arange(segment.begin, segment.end))
            if self.sequences.images:
                self._add_images(*conversations[segment.owner], segment)
            tokens = self.sequences.tokens.row(row)[begin:]
            self.tokens.append(tokens[segment.begin : segment.end])
            self.positions.append(np.arange(segment.begin, segment.end))
            self.starts.append(self.starts[-1] + segment.end - segment.begin)
            self.parents.append(segment.parent + first if segment.parent >= 0 else -1)
        for (row, begin, end), path in zip(conversations, tree.paths, strict=True):
            spans = [np.arange(self.starts[first + s], self.starts[first + s + 1]) for s in path]
            self.paths.append(np.concatenate(spans))
            self._add_entries(row, begin, end, self.paths[-1])

    def _add_images(self, row: int, begin: int, end: int, segment: Segment) -> None:
        images = images_between(self.sequences.images_of(row), begin, end)
        part, length = slice(segment.begin, segment.end), end - begin
        self.rotary.append(rotary_positions(length, images)[:, part])
        self.seen.append(seen_positions(length, images)[:, part])
        for image in images:
            inside = image.at[(image.at >= segment.begin) & (image.at < segment.end)]
            if len(inside) == len(image.at):
                self.images.append(
                    ImageRows(image.digest, inside - segment.begin + self.starts[-1])
                )
            elif len(inside):
                raise ValueError(f"sequence {row}: an image is divided between two segments")

    def _add_entries(self, row: int, begin: int, end: int, hidden: NDArray[np.int64]) -> None:
        targets = np.flatnonzero(self.sequences.loss_mask.row(row)[begin:end])
        if len(targets) and targets[0] < self.back:
            raise ValueError(
                f"sequence {row} has loss on the first token of a conversation, which nothing "
                "predicts"
            )
        tokens = self.sequences.tokens
        self.entries.append((
            hidden[targets - self.back],
            tokens.row(row)[begin:end][targets].astype(np.int64),
            np.full(len(targets), self.number[row]),
            tokens.offsets[row] + begin + targets,
        ))  # fmt: skip

    def finish(self) -> Layout:
        starts = np.array(self.starts, np.int64)
        ends = starts[1:].copy()
        for segment in range(len(ends) - 1, -1, -1):  # children stand after their parents
            parent = self.parents[segment]
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[segment])
        hidden, target, sequence, column = (
            np.concatenate(part) for part in zip(*self.entries, strict=True)
        )
        experts, sampling_mask = self.sequences.experts, self.sequences.sampling_mask
        flat = np.concatenate(self.flat)
        return Layout(
            token_ids=np.concatenate(self.tokens).astype(np.int64),
            positions=np.concatenate(self.positions),
            subtree_end=np.repeat(ends, np.diff(starts)),
            segment_start=starts,
            parent=np.array(self.parents, np.int64),
            copies=np.bincount(np.concatenate(self.paths)).astype(np.float32),
            hidden_row=hidden,
            target=target,
            sequence=sequence,
            column=column,
            n_sequences=len(self.number),
            experts=None if experts is None else experts.values[flat],
            images=tuple(self.images),
            rotary=self._joined(self.rotary, any(i.grid for i in self._placed())),
            seen=self._joined(self.seen, any(i.mutual for i in self._placed())),
            sampling_mask=None if sampling_mask is None else sampling_mask.take_many(column),
            flat=flat,
        )

    def _placed(self) -> Iterator[PlacedImage]:
        return (image for row in self.number for image in self.sequences.images_of(row))

    def _joined(self, parts: list[NDArray[np.int64]], differ: bool) -> NDArray[np.int64] | None:
        """[k, T] of all segments; None where they do not differ from the positions."""
        return np.concatenate(parts, axis=1) if differ else None


def rotary_positions(length: int, images: Iterable[PlacedImage]) -> NDArray[np.int64]:
    """[3, length] the positions of a sequence's tokens along time, rows and columns.

    Text counts up in all three. An image with a grid stands at one time and counts its rows and
    columns from there on; the text behind it goes on after the larger of the two (Qwen2-VL,
    arXiv:2409.12191, section 2.1).
    """
    positions = np.empty((3, length), np.int64)
    done = following = 0  # tokens so far, and the position of the next one
    for image in images:
        if image.grid is None:
            continue
        rows, columns = image.grid
        begin, end = int(image.at[0]), int(image.at[-1]) + 1
        if end - begin != rows * columns:
            raise ValueError(f"an image of {rows} x {columns} tokens stands at {end - begin}")
        positions[:, done:begin] = following + np.arange(begin - done)
        following += begin - done
        row, column = np.divmod(np.arange(end - begin), columns)
        positions[:, begin:end] = following + np.stack([np.zeros_like(row), row, column])
        done, following = end, following + max(rows, columns)
    positions[:, done:] = following + np.arange(length - done)
    return positions


def seen_positions(length: int, images: Iterable[PlacedImage]) -> NDArray[np.int64]:
    """[2, length] Layout.seen of one sequence."""
    seen = np.tile(np.arange(length), (2, 1))
    for image in images:
        if image.mutual:
            seen[0, image.at], seen[1, image.at] = image.at[0], image.at[-1]
    return seen


def row_keys(
    token_ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    segment_start: NDArray[np.int64],
    parent: NDArray[np.int64],
) -> NDArray[np.int64]:
    """[T] a key for each row of a Layout: a hash of the tokens on its path, the row's own included.

    A prefix has the same keys whether sequences share it or each has a copy, and whatever else is
    in the layout: dropout masks drawn from them (models/adapter_dropout.py) do not change with
    packing, sharing, order or the cut into micro-batches. Sequences that begin with the same tokens
    have the same keys there, also in different groups.
    """
    # A term depends on its position too, so that their sums modulo 2**64 depend on the order.
    terms = seeds.bits(0, "row key", token_ids, positions)
    keys = np.empty(len(terms), np.uint64)
    for segment, (begin, end) in enumerate(pairwise(segment_start.tolist())):
        above = int(parent[segment])
        before = keys[segment_start[above + 1] - 1] if above >= 0 else np.uint64(0)
        keys[begin:end] = np.cumsum(terms[begin:end], dtype=np.uint64)
        keys[begin:end] += before  # wraps; NumPy does not warn for in-place addition to an array
    return keys.view(np.int64)
