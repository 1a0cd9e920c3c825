"""Rows of a dataset while it is loaded, a few bytes beyond their text each.

A row as Python objects takes several times the memory of its text. So what is needed of a row once
it has been read lies as JSON in one buffer: its messages until they are tokens, and what verifiers
get of it.
"""

import json
from array import array
from collections.abc import Sequence
from typing import Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from postgrad.data.rows import Row

Packed = TypeVar("Packed")
# json and not orjson, which writes 1e400 as null and refuses half a surrogate pair
_written = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


class PackedJson(Sequence[Packed], Generic[Packed]):
    """JSON values, as many as there are rows, in one buffer of UTF-8: a line for each."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self._ends = array("q")

    def append(self, value: Packed) -> None:
        """Adds a JSON value."""
        # surrogatepass: a row of a Python function may have half a pair, and is refused later
        self.buffer += _written(value).encode("utf-8", "surrogatepass") + b"\n"
        self._ends.append(len(self.buffer))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, place: int) -> Packed: ...
    @overload
    def __getitem__(self, place: slice) -> "list[Packed]": ...
    def __getitem__(self, place: int | slice) -> "Packed | list[Packed]":
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        text = self.buffer[self._ends[place - 1] if place else 0 : self._ends[place]]
        return json.loads(text.decode("utf-8", "surrogatepass"))

    def take(self, places: NDArray[np.int64]) -> "PackedJson[Packed]":
        """The values at `places`, which rise; itself where they are all."""
        if len(places) == len(self):
            return self
        taken: PackedJson[Packed] = PackedJson()
        for place in places.tolist():
            taken.buffer += self.buffer[self._ends[place - 1] if place else 0 : self._ends[place]]
            taken._ends.append(len(taken.buffer))
        return taken


class PackedRows(Sequence[Row]):
    """Where rows are: without their values and folders."""

    def __init__(self) -> None:
        self._index = array("q")
        self._places: PackedJson[str] = PackedJson()

    def append(self, row: Row) -> None:
        """Adds a row."""
        self._index.append(row.index)
        self._places.append(row.place)

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        return Row(self._index[place], {}, self._places[place])

    @property
    def index(self) -> NDArray[np.int64]:
        """[R] the index of each row in its dataset."""
        return np.array(self._index, np.int64)
