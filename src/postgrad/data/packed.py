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
import orjson
from numpy.typing import NDArray

from postgrad.data.rows import Row

JsonValue = TypeVar("JsonValue")


class PackedTexts:
    """Texts in one buffer of UTF-8, a line for each."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self._ends = array("q")

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, text: bytes) -> None:
        """Adds a text without line breaks."""
        self.buffer += text
        self.buffer += b"\n"
        self._ends.append(len(self.buffer))

    def text(self, place: int) -> bytes:
        """The text at `place`, from 0 on."""
        begin = self._ends[place - 1] if place else 0
        return bytes(self.buffer[begin : self._ends[place] - 1])


class PackedJson(PackedTexts, Sequence[JsonValue], Generic[JsonValue]):
    """JSON values, as many as there are rows. They are read as they were added."""

    def __init__(self) -> None:
        super().__init__()
        self._by_json: set[int] = set()  # places of what json has written

    def append(self, value: JsonValue) -> None:
        """Adds a value behind the others."""
        # json takes twenty times as long; but orjson writes 1e400 as null, and refuses half a
        # surrogate pair and integers of more than 64 bits
        try:
            text = orjson.dumps(value)
            same = orjson.loads(text) == value
        except orjson.JSONEncodeError:
            text, same = b"", False
        if not same:
            self._by_json.add(len(self))
            text = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
        self.add(text)

    @overload
    def __getitem__(self, place: int) -> JsonValue: ...
    @overload
    def __getitem__(self, place: slice) -> "list[JsonValue]": ...
    def __getitem__(self, place: int | slice) -> "JsonValue | list[JsonValue]":
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        text = self.text(place)
        if place in self._by_json:
            return json.loads(text.decode("utf-8", "surrogatepass"))
        return orjson.loads(text)

    def take(self, places: NDArray[np.int64]) -> "PackedJson[JsonValue]":
        """The values at `places`, which rise; itself where they are all."""
        if len(places) == len(self):
            return self
        taken: PackedJson[JsonValue] = PackedJson()
        for place in places.tolist():
            if place in self._by_json:
                taken._by_json.add(len(taken))
            taken.add(self.text(place))
        return taken


class PackedRows(Sequence[Row]):
    """Where rows are: without their values and folders."""

    def __init__(self) -> None:
        self._index = array("q")
        self._places = PackedTexts()

    def append(self, row: Row) -> None:
        """Adds a row behind the others."""
        self._index.append(row.index)
        self._places.add(row.place.encode("utf-8", "surrogateescape"))

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        where = self._places.text(place).decode("utf-8", "surrogateescape")
        return Row(self._index[place], {}, where)

    @property
    def index(self) -> NDArray[np.int64]:
        """[R] the index of each row in its dataset."""
        return np.array(self._index, np.int64)
