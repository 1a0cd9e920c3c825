"""A tensor file in parts: each rank writes its own, and whoever reads puts them together.

    policy.weights.rank-0000-of-0004.safetensors    rows of every tensor that this rank has
    ...
    policy.weights.rank-0003-of-0004.safetensors

Tensors are divided by rows. The header of each file says under "parts", as JSON, the whole shape of
each of its tensors and the first of its rows, so that the files name their own places, and a reader
needs neither the ranks nor their number.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from postgrad.core.errors import RunError
from postgrad.core.files import sync_file

PARTS = "parts"  # the key in a header's metadata
WITH_RANK = re.compile(r"\.rank-(\d+)-of-(\d+)", re.ASCII)  # in a file's name, after its stem


class Divided(Mapping[str, Tensor], ABC):
    """The tensors of a file whose rows lie on several ranks. A tensor that is asked for by name is
    put together here; to be saved, each rank writes what it has.
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes of all tensors."""

    @abstractmethod
    def copied(self) -> "Divided":
        """As they are now, whatever the ranks do next; on their CPUs."""

    @abstractmethod
    def write(self, folder: Path, stem: str) -> None:
        """Files of `stem` into a folder that all ranks can reach, on the disk when this returns."""


def part_name(stem: str, rank: int, ranks: int) -> str:
    """The file of one rank."""
    return f"{stem}.rank-{rank:04d}-of-{ranks:04d}.safetensors"


def write_part(path: Path, tensors: Mapping[str, tuple[Tensor, tuple[int, ...], int]]) -> None:
    """tensors: by name, the rows that are here, the whole shape, and the first row's number.

    Raises OSError or SafetensorError where the disk does not take it.
    """
    places = {name: {"shape": list(shape), "start": at} for name, (_, shape, at) in tensors.items()}
    held = {name: rows.contiguous() for name, (rows, _, _) in tensors.items()}
    save_file(held, path, {PARTS: json.dumps(places)})
    sync_file(path)


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads tensor files of a verified checkpoint; it can be sent to where they are wanted.

    files: those whose hashes were checked. The folder has to be reachable under the same path.
    """

    path: Path
    files: frozenset[str]

    def __call__(self, stem: str) -> Mapping[str, Tensor]:
        """The tensors of STEM.safetensors, or of its parts, on the CPU. RunError where there are
        none, or they cannot be read.
        """
        path = self.path / f"{stem}.safetensors"
        parts = re.compile(rf"{re.escape(stem)}{WITH_RANK.pattern}\.safetensors", re.ASCII)
        found = {int(match[1]): match for name in self.files if (match := parts.fullmatch(name))}
        try:
            if path.name in self.files:
                return load_file(path)
            if found:
                _require_all(path, found)
                return Joined([self.path / found[rank].string for rank in sorted(found)])
        except (OSError, SafetensorError) as error:
            raise RunError(f"{path} cannot be read: {error}") from error
        known = ", ".join(sorted(self.files))
        raise RunError(f"{path} is no file of this checkpoint, which has {known}")


class Joined(Mapping[str, Tensor]):
    """Tensors from files of parts, each put together when it is asked for."""

    def __init__(self, paths: list[Path]) -> None:
        self._places: dict[str, list[tuple[int, Path]]] = {}
        self._shapes: dict[str, list[int]] = {}
        for path in paths:
            for name, place in _places(path).items():
                shape = self._shapes.setdefault(name, place["shape"])
                if place["shape"] != shape:
                    raise RunError(f"{path}: {name!r} has another shape than in the other parts")
                self._places.setdefault(name, []).append((place["start"], path))

    def __getitem__(self, name: str) -> Tensor:
        shape, found, end = self._shapes[name], None, 0
        if not shape:  # a number, which one rank has
            (_, path), *more = self._places[name]
            with safe_open(path, "pt") as file:
                return _number(path, name, file.get_tensor(name), more)
        for start, path in sorted(self._places[name]):
            with safe_open(path, "pt") as file:
                rows = file.get_tensor(name)
            follow = rows.ndim and [start, *rows.shape[1:]] == [end, *shape[1:]]
            if not follow or end + len(rows) > shape[0]:
                raise RunError(f"{path}: the rows of {name!r} do not follow those of other parts")
            found = rows.new_empty(shape) if found is None else found
            found[start : start + len(rows)] = rows
            end += len(rows)
        if found is None or end != shape[0]:
            raise RunError(f"the parts of {name!r} hold {end} of its {shape[0]} rows")
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _number(path: Path, name: str, found: Tensor, more: list[Any]) -> Tensor:
    if found.ndim or more:
        raise RunError(f"{path}: {name!r} is no number, or several ranks have one")
    return found


def _require_all(path: Path, found: Mapping[int, re.Match[str]]) -> None:
    sizes = {int(match[2]) for match in found.values()}
    if len(sizes) > 1 or sorted(found) != list(range(max(sizes))):
        raise RunError(f"{path}: of its parts there are only {sorted(found)} of {sorted(sizes)}")


def _places(path: Path) -> dict[str, Any]:
    """What a header says of its tensors. It is a file's word: all of it is checked."""
    with safe_open(path, "pt") as file:
        names, said = set(file.keys()), (file.metadata() or {}).get(PARTS, "")
    try:
        places = json.loads(said)
        for place in places.values():
            whole = [*place["shape"], place["start"]]
            if not all(type(number) is int and number >= 0 for number in whole):
                raise ValueError("shapes and starts are whole numbers")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{path} does not say where its tensors belong: {error!r}") from error
    if set(places) != names:
        raise RunError(f"{path} has other tensors than its header places")
    return places
