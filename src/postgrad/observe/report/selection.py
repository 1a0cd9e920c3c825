"""Selects the samples of a run that a page shows: whole groups, evenly over the steps.

A run of a week has more samples than a browser should hold. Within a step the groups whose rows
have the smallest hash are taken, so that a prompt that comes again in a later epoch is taken again:
people want to compare answers to one prompt over the steps.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from postgrad.observe.follow import parse

HEAD = re.compile(
    rb'\{"step": ?(\d{1,15}), ?"ticket": ?(\d{1,18}), ?"sample": ?\d+, ?'
    rb'"dataset": ?("(?:[^"\\]|\\.)*"), ?"row": ?(-?\d+)'
)
HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Cap:
    """How many of a run's samples a page may hold."""

    samples: float = 10_000
    bytes: float = 256 * 2**20  # of their lines in samples.jsonl


@dataclass(slots=True)
class Group:
    """Where the samples of one ticket are in samples.jsonl."""

    step: int
    ticket: int
    order: bytes  # hash of the row, the same in every epoch
    # (offset, length) in bytes of each line
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    @property
    def bytes(self) -> int:
        """The size of its lines."""
        return sum(length for _, length in self.spans)


def heads(lines: Iterator[tuple[int, bytes]], unreadable: list[int]) -> Iterator[Group]:
    """Groups the (offset, line) pairs of samples.jsonl; the last group may be incomplete.

    Only the head of a line is parsed. unreadable: gets the offsets of lines that are no samples.
    """
    group: Group | None = None
    for start, line in lines:
        head = _head(line)
        if head is None:
            unreadable.append(start)
            continue
        step, ticket, order = head
        if group is None or (group.step, group.ticket, group.order) != (step, ticket, order):
            if group is not None:
                yield group
            group = Group(step, ticket, order)
        group.spans.append((start, len(line)))
    if group is not None:
        yield group


def _head(line: bytes) -> tuple[int, int, bytes] | None:
    match = HEAD.match(line, 0, HEAD_BYTES)
    if match is not None:
        return int(match[1]), int(match[2]), row_hash(match[3] + b" " + match[4])
    sample = parse(line)
    if sample is None:
        return None
    step, ticket = sample.get("step"), sample.get("ticket")
    if not isinstance(step, int) or not isinstance(ticket, int):
        return None
    row = f"{json.dumps(sample.get('dataset'), ensure_ascii=False)} {sample.get('row')}"
    return step, ticket, row_hash(row.encode(errors="backslashreplace"))


def row_hash(row: bytes) -> bytes:
    """The order of rows in a selection, the same in every epoch. row: dataset as JSON, a space, and
    the row's number.
    """
    return hashlib.blake2b(row, digest_size=8).digest()


class SampleSelection:
    """Takes groups as they arrive, step by step, within the cap.

    expected_steps: of a run that is under way; that many steps share the cap. What a step leaves
    unused goes to the next one, so that large groups are taken now and then rather than never.
    """

    def __init__(self, cap: Cap, expected_steps: int = 0) -> None:
        self.seen = 0  # samples that have arrived
        self.taken = 0  # samples that were selected
        self._cap = cap
        self._expected = expected_steps
        self._steps: dict[int, int] = {}  # step -> its index in the order of arrival
        self._taken_bytes = 0

    def take(self, groups: Iterator[Group]) -> list[Group]:
        """The groups to show, in the order of the file."""
        waiting: dict[int, list[Group]] = {}
        held = 0
        for group in groups:
            self.seen += len(group.spans)
            self._steps.setdefault(group.step, len(self._steps))
            waiting.setdefault(group.step, []).append(group)
            held += len(group.spans)
            if held > 8 * self._cap.samples:  # the file may be larger than memory
                held = self._thin(waiting)
        takes_all = self._fits_whole(waiting)
        chosen: list[Group] = []
        for step, step_groups in waiting.items():
            # Earlier steps count as used, so that a later poll never takes a selection back.
            share = (self._steps[step] + 1) / max(self._expected, len(self._steps))
            chosen += self._of_step(step_groups, 1.0 if takes_all else share)
        return chosen

    def _fits_whole(self, waiting: dict[int, list[Group]]) -> bool:
        """Whether all groups fit the cap and no further steps are expected."""
        groups = [group for step_groups in waiting.values() for group in step_groups]
        samples = self.taken + sum(len(group.spans) for group in groups)
        size = self._taken_bytes + sum(group.bytes for group in groups)
        fits = samples <= self._cap.samples and size <= self._cap.bytes
        return fits and len(self._steps) >= self._expected

    def _of_step(self, groups: list[Group], share: float) -> list[Group]:
        """The groups of a step that fit `share` of the cap beside what is taken already."""
        chosen: list[Group] = []
        for group in sorted(groups, key=lambda candidate: candidate.order):
            samples, size = len(group.spans), group.bytes
            fits = (
                self.taken + samples <= share * self._cap.samples
                and self._taken_bytes + size <= share * self._cap.bytes
            )
            if fits or not self.taken:  # the first is shown whatever the cap
                chosen.append(group)
                self.taken += samples
                self._taken_bytes += size
        return sorted(chosen, key=lambda candidate: candidate.spans[0])

    def _thin(self, waiting: dict[int, list[Group]]) -> int:
        """Drops groups that can never be taken; returns how many samples are left."""
        most = 2 * self._cap.samples / len(self._steps)
        remaining = 0
        for step, groups in waiting.items():
            kept: list[Group] = []
            samples = 0
            for group in sorted(groups, key=lambda candidate: candidate.order):
                if kept and samples > most:
                    break
                kept.append(group)
                samples += len(group.spans)
            waiting[step] = kept
            remaining += samples
        return remaining
