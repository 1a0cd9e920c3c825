"""The engine's budget: how many sequences it decodes together, and the size of its cache. And its
shared prompts: which rows read which stretch of the cache.

Stretches 0..count-1 are in use; when the last row of one ends, the last stretches move into the
holes. For attention the rows of a stretch are its *lanes*. All stretches have equally many, some of
them empty, so that one batch of products serves all.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.rollout.settings import RolloutSettings

# Prompt tokens computed in one forward, at least one prompt. With more, a CPU's activations lie in
# fresh pages, which cost more time than the larger products save.
PREFILL_TOKENS = {"cpu": 512, "cuda": 4096}
# Tokens kept from earlier turns that count as one of them: attention alone gathers them, in one
# layer at a time, which takes about the memory that their keys and values in all layers would.
KEPT_AS_ONE = 8
# Places are multiples of it: every stretch begins on a cache line, and bits do not depend on the
# row. A decode step computes multiples of it in rows and places: oneDNN compiles code for every new
# shape, which takes 0.7 ms; rows that end at different lengths would give a new shape every step.
ALIGN = 16
LANES = 16  # most rows of a stretch: bounds the empty lanes of stretches with few rows
MAX_SLOTS = 512  # beyond it a CPU decodes no more tokens a second, and the cache only grows
MEMORY_SHARE = 0.25  # of the free memory that the cache may take where the recipe does not say


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """The size of an engine, chosen once and kept as run state."""

    slots: int  # sequences decoded together
    cache_tokens: int  # token places of the key-value cache, for all slots together

    def to_json(self) -> dict[str, int]:
        """The sizes as the run state stores them."""
        return {"slots": self.slots, "cache_tokens": self.cache_tokens}


def choose_sizes(
    settings: RolloutSettings,
    *,
    sequences: int,
    max_len: int,
    token_bytes: int,
    free_bytes: int,
    row_bytes: int = 0,
) -> EngineSizes:
    """As many slots as there are sequences in a step, up to MAX_SLOTS and what memory allows.

    max_len: tokens of the longest sequence, prompt and response. token_bytes: cache bytes of one
    place. free_bytes: of the device. row_bytes: of a slot, whatever its length (states of
    recurrent layers). Raises UsageError where the recipe's cache cannot hold one sequence.
    """
    places = places_for(max_len)
    token_bytes = max(1, token_bytes + -(-row_bytes // places))
    tokens = settings.cache_tokens or max(places, int(free_bytes * MEMORY_SHARE) // token_bytes)
    if tokens < places:
        raise UsageError(
            f"rollout.cache_tokens = {tokens} is less than one sequence of {max_len} tokens "
            f"needs: give at least {places}"
        )
    slots = settings.stated_slots or min(MAX_SLOTS, sequences, tokens // places)
    return EngineSizes(slots, settings.cache_tokens or min(tokens, slots * places))


def align(tokens: int) -> int:
    """A number of tokens or rows, rounded up to a multiple of ALIGN."""
    return -(-tokens // ALIGN) * ALIGN


def rows_computed(count: int, capacity: int, device: str) -> int:
    """How many rows a step computes for `count` rows, idle ones included, so that few shapes occur.

    On a CPU a multiple of ALIGN, or a power of two for the last few rows, which may go on long. On
    CUDA, where each number of rows is a graph, a power of two or one and a half times that.
    """
    few = 1 << (count - 1).bit_length()
    if device == "cpu":
        return min(few, align(count), capacity)
    between = few // 4 * 3
    return min(max(ALIGN, between if between >= count else few), capacity)


def places_for(max_len: int) -> int:
    """The most places that a prompt and a response of together `max_len` tokens take."""
    return align(max_len) + ALIGN


def close_gaps(
    count: int, gone: NDArray[np.int64]
) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    """How the numbers 0..count-1 become dense again without `gone`, which ascends.

    Returns (how many are left, to, source): source[i], from the end, moves to to[i].
    """
    left = count - len(gone)
    tail = np.arange(left, count)
    return left, gone[gone < left], tail[~np.isin(tail, gone)]


@dataclass(frozen=True, slots=True)
class PromptLanes:
    """N rows arranged by the prompts that they read: A stretches of `width` lanes."""

    lengths: NDArray[np.int64]  # [A] tokens of each stretch's prompt
    used: NDArray[np.int64]  # [A] lanes of each stretch that have a row: the first ones
    width: int  # lanes of each stretch
    row_of_lane: NDArray[np.int64]  # [A * width]; any row, here 0, where a lane is empty
    lane_of_row: NDArray[np.int64]  # [N] in [0, A * width)


class SharedPrompts:
    """State of the prompts' stretches, at most `capacity` of them.

    length: [stretches] tokens of the prompt. name: [stretches] number of the computed prompt, by
    which later rows of it join the stretch.
    """

    def __init__(self, capacity: int) -> None:
        self.count = 0
        self.length = np.zeros(capacity, np.int64)
        self.name = np.zeros(capacity, np.int64)
        self._rows = np.zeros(capacity, np.int64)

    def join(self, name: int, length: int, rows: int) -> tuple[NDArray[np.int64], list[int]]:
        """Stretches for `rows` new rows of the prompt `name`: [rows], and the numbers of those that
        are new and have to be filled.
        """
        joined: list[int] = []
        opened: list[int] = []
        for number in np.flatnonzero(self.name[: self.count] == name):
            room = min(LANES - int(self._rows[number]), rows - len(joined))
            joined += [int(number)] * room
        while len(joined) < rows:
            opened.append(self.count)
            joined += [self.count] * min(LANES, rows - len(joined))
            self.length[self.count], self.name[self.count] = length, name
            self._rows[self.count] = 0
            self.count += 1
        stretches = np.array(joined, np.int64)
        np.add.at(self._rows, stretches, 1)
        return stretches, opened

    def keep(self, stretches: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Free stretches that no row reads any more. Returns (to, source): stretch source[i] became
        to[i].

        stretches: [rows] the stretch that each row reads, renumbered in place.
        """
        used = np.bincount(stretches, minlength=self.count)
        left, to, source = close_gaps(self.count, np.flatnonzero(used == 0))
        new_number = np.arange(self.count)
        new_number[source] = to
        stretches[:] = new_number[stretches]
        self.length[to], self.name[to] = self.length[source], self.name[source]
        self.count = left
        self._rows[:left] = np.bincount(stretches, minlength=left)
        return to, source

    def lanes(self, stretches: NDArray[np.int64], width: int | None = None) -> PromptLanes:
        """The lanes of a step. stretches: what each row reads. width: lanes of a stretch; None: as
        many as the most used one needs.
        """
        count = int(stretches.max()) + 1
        rows = np.bincount(stretches, minlength=count)
        width = width or int(rows.max())
        order = np.argsort(stretches, kind="stable")
        first = np.cumsum(rows) - rows
        lane = np.empty(len(stretches), np.int64)
        lane[order] = np.arange(len(stretches)) - first[stretches[order]]
        lane += stretches * width
        row_of_lane = np.zeros(count * width, np.int64)
        row_of_lane[lane] = np.arange(len(stretches))
        return PromptLanes(self.length[:count], rows, width, row_of_lane, lane)
