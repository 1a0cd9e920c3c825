"""Which samples of a run a page shows: evenly over the steps, whole groups, the same prompts again.

A run of a week has more samples than a browser should hold. Within a step the groups whose rows
have the smallest hash are taken, so that a prompt that is drawn again in a later epoch is taken
again: the same prompt over the steps is what a person wants to see.
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
    """How much of a run's samples a page holds. bytes: of their lines in samples.jsonl."""

    samples: float = 10_000
    bytes: float = 256 * 2**20


@dataclass(slots=True)
class Group:
    """The lines of one ticket: where each begins, and its length."""

    step: int
    ticket: int
    order: bytes  # of the row: the same in every epoch
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    @property
    def bytes(self) -> int:
        """Of its lines."""
        return sum(length for _, length in self.spans)


def heads(lines: Iterator[tuple[int, bytes]], unreadable: list[int]) -> Iterator[Group]:
    """The groups that lines of samples.jsonl are, whole or the part that is there.

    Only the head of a line is looked at. unreadable: gets the place of lines that are no samples.
    """
    group: Group | None = None
    for start, line in lines:
        head = _head(line)
        if head is None:
            unreadable.append(start)
            continue
        step, ticket, order = head
        if group is None or (group.step, group.ticket) != (step, ticket):
            if group is not None:
                yield group
            group = Group(step, ticket, order)
        group.spans.append((start, len(line)))
    if group is not None:
        yield group


def _head(line: bytes) -> tuple[int, int, bytes] | None:
    found = HEAD.match(line, 0, HEAD_BYTES)
    if found is not None:
        return int(found[1]), int(found[2]), _order(found[3] + b" " + found[4])
    sample = parse(line)
    if sample is None:
        return None
    step, ticket = sample.get("step"), sample.get("ticket")
    if not isinstance(step, int) or not isinstance(ticket, int):
        return None
    row = f"{json.dumps(sample.get('dataset'), ensure_ascii=False)} {sample.get('row')}"
    return step, ticket, _order(row.encode(errors="backslashreplace"))


def _order(row: bytes) -> bytes:
    return hashlib.blake2b(row, digest_size=8).digest()


class Selection:
    """Takes groups as they come, step by step, within the cap.

    expected_steps: of a run that is under way; so many steps share the cap. What one step leaves
    over goes to the next, so that large groups are taken now and then rather than never.
    """

    def __init__(self, cap: Cap, expected_steps: int = 0) -> None:
        self.seen = 0  # samples
        self.taken = 0
        self._cap = cap
        self._expected = expected_steps
        self._steps: dict[int, int] = {}  # step -> its place
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
            if held > 8 * self._cap.samples:  # of a file larger than memory
                held = self._thin(waiting)
        whole = self._fits_whole(waiting)
        chosen: list[Group] = []
        for step, found in waiting.items():
            # what was there before counts as given out, so that a poll never takes it back
            share = (self._steps[step] + 1) / max(self._expected, len(self._steps))
            chosen += self._of_step(found, 1.0 if whole else share)
        return chosen

    def _fits_whole(self, waiting: dict[int, list[Group]]) -> bool:
        """Whether all there is fits, and no more is expected than these steps."""
        groups = [group for found in waiting.values() for group in found]
        samples = self.taken + sum(len(group.spans) for group in groups)
        size = self._taken_bytes + sum(group.bytes for group in groups)
        fits = samples <= self._cap.samples and size <= self._cap.bytes
        return fits and len(self._steps) >= self._expected

    def _of_step(self, groups: list[Group], share: float) -> list[Group]:
        """Those within a share of the cap, of which some is taken already."""
        chosen: list[Group] = []
        for group in sorted(groups, key=lambda one: one.order):
            samples, size = len(group.spans), group.bytes
            fits = (
                self.taken + samples <= share * self._cap.samples
                and self._taken_bytes + size <= share * self._cap.bytes
            )
            if fits or not self.taken:  # the first is shown whatever the cap
                chosen.append(group)
                self.taken += samples
                self._taken_bytes += size
        return sorted(chosen, key=lambda one: one.spans[0])

    def _thin(self, waiting: dict[int, list[Group]]) -> int:
        """Forgets groups that can never be taken; returns how many samples are left."""
        most = 2 * self._cap.samples / len(self._steps)
        left = 0
        for step, groups in waiting.items():
            kept: list[Group] = []
            samples = 0
            for group in sorted(groups, key=lambda one: one.order):
                if kept and samples > most:
                    break
                kept.append(group)
                samples += len(group.spans)
            waiting[step] = kept
            left += samples
        return left
