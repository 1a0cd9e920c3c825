"""A tensor file in parts: each rank writes its own, and the reader puts them together.

    policy.weights.rank-0000-of-0004.safetensors    rows of every tensor that this rank has
    ...
    policy.weights.rank-0003-of-0004.safetensors

Tensors are divided by rows, and under tensor parallelism some by columns before that. The header of
each file has under "parts", as JSON, the complete shape of each of its tensors, the first of its
rows ("start"), and the first of its columns ("column") where that is not 0. So a reader needs
neither the ranks nor their number.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from postgrad.core.errors import RunError
from postgrad.core.files import sync_file
from postgrad.core.untrusted import parse_json
from postgrad.models.stored import stored_tensors

CPU = torch.device("cpu")
PARTS = "parts"  # the key in a header's metadata
WITH_RANK = re.compile(r"\.rank-(\d+)-of-(\d+)", re.ASCII)  # in a file's name, after its stem


class Divided(Mapping[str, Tensor], ABC):
    """The tensors of a file whose rows lie on several ranks. Reading one by name gathers it in this
    process; `write` has each rank write its own rows.
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes of all tensors."""

    @abstractmethod
    def copied(self) -> "Divided":
        """A snapshot on the ranks' CPUs, which later steps do not change."""

    @abstractmethod
    def write(self, folder: Path, stem: str) -> list[str]:
        """Writes the files of `stem`, synced, into a folder that all ranks reach; returns the names
        of all ranks' files.
        """


def part_name(stem: str, rank: int, ranks: int) -> str:
    """The name of one rank's file."""
    return f"{stem}.rank-{rank:04d}-of-{ranks:04d}.safetensors"


class Part(NamedTuple):
    """The block of a tensor that one rank has."""

    held: Tensor
    shape: tuple[int, ...]  # of the complete tensor; (): a number
    offsets: tuple[int, ...]  # where the block begins in it, by dimension


def write_part(path: Path, tensors: Mapping[str, Part]) -> None:
    """Writes one rank's file, synced. tensors: by name.

    Raises OSError or SafetensorError where the disk does not take it.
    """
    places: dict[str, dict[str, Any]] = {}
    for name, part in tensors.items():
        start, column, *others = (*part.offsets, 0, 0)
        assert not any(others), f"{name} is divided in a third dimension"
        places[name] = {"shape": list(part.shape), "start": start}
        places[name] |= {"column": column} if column else {}
    held = {name: part.held.contiguous() for name, part in tensors.items()}
    save_file(held, path, {PARTS: json.dumps(places)})
    sync_file(path)


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads tensor files of a verified checkpoint. It can be sent to another process or machine
    that reaches the folder under the same path.
    """

    path: Path  # of the checkpoint's folder
    files: frozenset[str]  # names of the files whose hashes were checked

    def __call__(self, stem: str) -> Mapping[str, Tensor]:
        """The tensors of STEM.safetensors, or of its parts, on the CPU. They are StoredTensors:
        what takes a part of one reads that part alone. RunError where there are none, or they
        cannot be read.
        """
        path = self.path / f"{stem}.safetensors"
        parts = re.compile(rf"{re.escape(stem)}{WITH_RANK.pattern}\.safetensors", re.ASCII)
        by_rank = {int(match[1]): match for name in self.files if (match := parts.fullmatch(name))}
        try:
            if path.name in self.files:
                return stored_tensors([path], CPU)
            if by_rank:
                _require_all(path, by_rank)
                return Joined([self.path / by_rank[rank].string for rank in sorted(by_rank)])
        except (OSError, SafetensorError) as error:
            raise RunError(f"{path} cannot be read: {error}") from error
        names = ", ".join(sorted(self.files))
        raise RunError(f"{path} is no file of this checkpoint, which has {names}")


class Joined(Mapping[str, Tensor]):
    """Tensors from files of parts, each put together of StoredTensors when it is asked for."""

    def __init__(self, paths: list[Path]) -> None:
        self._places: dict[str, list[tuple[int, int, Path, Tensor]]] = {}
        self._shapes: dict[str, list[int]] = {}
        for path in paths:
            held = stored_tensors([path], CPU)
            for name, place in _places(path, held).items():
                shape = self._shapes.setdefault(name, place["shape"])
                if place["shape"] != shape:
                    raise RunError(f"{path}: {name!r} has another shape than in the other parts")
                at = place.get("column", 0), place["start"], path, held[name]
                self._places.setdefault(name, []).append(at)

    def __getitem__(self, name: str) -> Tensor:
        shape, places = self._shapes[name], sorted(self._places[name], key=lambda at: at[:2])
        if not shape:  # a number, which one rank has
            (_, _, path, number), *more = places
            if number.ndim or more:
                raise RunError(f"{path}: {name!r} has to be a single number, of one rank")
            return number
        tensor = _JoinedTensor(name, shape)
        for column, start, path, held in places:
            tensor.add(held, start, column, path)
        return tensor.finished(places[-1][2])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class _JoinedTensor:
    """Puts a tensor together from its parts, which have to come in order of columns, those of the
    same columns in order of rows.
    """

    def __init__(self, name: str, shape: list[int]) -> None:
        self._name = name
        self._shape = shape
        self._rows: list[list[Tensor]] = [[]]  # parts in order of rows, for each run of columns
        self._row = self._column = 0  # where the next part has to begin
        self._width = 0  # columns of the last part

    def add(self, held: Tensor, start: int, column: int, path: Path) -> None:
        """Takes a part at row `start` and `column`. path: of its file, for the message."""
        if held.shape[:1] == (0,):  # of more ranks than rows
            return
        if self._row == self._shape[0]:  # these columns are whole: the next ones
            self._row, self._column, self._width = 0, self._column + self._width, 0
            self._rows.append([])
        columns = _columns(held.shape)
        alike = held.ndim == len(self._shape) and list(held.shape[2:]) == self._shape[2:]
        follows = (start, column) == (self._row, self._column) and self._width in (0, columns)
        if not alike or not follows or not self._inside(start + len(held), column + columns):
            raise RunError(f"{path}: the rows of {self._name!r} do not follow those of other parts")
        self._rows[-1].append(held)
        self._row, self._width = start + len(held), columns

    def finished(self, last: Path) -> Tensor:
        """The complete tensor. Raises RunError where a part is missing. last: the file of the last
        part, for the message.
        """
        width = self._column + self._width
        if not self._rows[0] or (self._row, width) != (self._shape[0], _columns(self._shape)):
            raise RunError(
                f"{last}: the parts of {self._name!r} up to this one hold {self._row} of its "
                f"{self._shape[0]} rows, in {width} of {_columns(self._shape)} columns"
            )
        columns = [torch.cat(parts) for parts in self._rows]
        return torch.cat(columns, 1) if len(columns) > 1 else columns[0]

    def _inside(self, row: int, column: int) -> bool:
        return row <= self._shape[0] and column <= _columns(self._shape)


def _columns(shape: Sequence[int]) -> int:
    """How many columns a tensor has; a vector has one."""
    return shape[1] if len(shape) > 1 else 1


def _require_all(path: Path, by_rank: Mapping[int, re.Match[str]]) -> None:
    sizes = {int(match[2]) for match in by_rank.values()}
    if len(sizes) > 1 or sorted(by_rank) != list(range(max(sizes))):
        raise RunError(
            f"{path}: parts are missing: there are only {sorted(by_rank)} of {sorted(sizes)}"
        )


def _places(path: Path, held: Mapping[str, Tensor]) -> dict[str, Any]:
    """{"shape", "start", "column"} of each tensor, from the file's header. The file is not trusted:
    all of it is checked. held: its tensors.
    """
    with safe_open(path, "pt") as file:
        text = (file.metadata() or {}).get(PARTS, "")
    try:
        places = parse_json(text)
        for place in places.values():
            numbers = [*place["shape"], place["start"], place.get("column", 0)]
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise ValueError("shapes and starts are whole numbers")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} does not say where its tensors belong: {error!r}") from error
    if places.keys() != held.keys():
        raise RunError(f"{path} has other tensors than those that its header names under {PARTS!r}")
    return places
