"""Rows of any dataset that a recipe can name, in order, each with its place for messages."""

import itertools
import re
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.hub import HUB_ID
from postgrad.data.files import SUFFIXES, RowValues, files_of, read_file
from postgrad.data.gym import PREFIX, is_function, read_function, read_gym
from postgrad.data.hub import read_hub
from postgrad.data.packed import PackedJson, PackedTexts
from postgrad.data.settings import RowSettings, iterated_with_own_keys

GENERATING = ("task", "size", "seed")  # keys of datasets whose rows are generated
_SPLIT = re.compile(r"([\w.-]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a dataset."""

    index: int  # from 0, counted before any slice or filter
    values: RowValues  # column -> JSON value
    place: str  # where it is, for messages: "train.jsonl:7", "openai/gsm8k train row 6"
    folder: Path | None = None  # of the file that it is in, for the names of files in it


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


@iterated_with_own_keys
def read_rows(settings: RowSettings) -> Iterator[Row]:
    """The rows that `settings` names, in the dataset's order, after the split's slice and limit:
    one at a time, but where a slice counts from the end or in percent (`_sliced`).

    A single file or a reasoning-gym task ignores `name` and the split's name, but not its slice.
    Raises UsageError for what is missing, broken or empty, when it is come to.
    """
    split, start, stop = parse_split(settings.split)
    rows = (
        Row(index, values, place, folder)
        for index, (folder, (place, values)) in enumerate(_source(settings, split))
    )
    n = 0

    def counted() -> Iterator[Row]:
        nonlocal n
        for row in rows:
            n += 1
            yield row

    kept = 0
    for row in itertools.islice(_sliced(counted(), start, stop), settings.limit):
        kept += 1
        yield row
    if n and not kept:
        raise UsageError(f"data.split {settings.split!r} of {settings.path} leaves no row of {n}")
    if not kept:
        raise UsageError(f"{settings.path} is empty: there is no row to read (data.path)")


def unread_keys(settings: RowSettings) -> list[str]:
    """A note for people where keys that were given say nothing about rows of this kind."""
    path = _local(settings.path)
    generated = settings.path.startswith(PREFIX) or (path is None and is_function(settings.path))
    defaults = type(settings).model_fields
    stated = [key for key in GENERATING if getattr(settings, key) != defaults[key].default]
    notes: list[str] = []
    if stated and not generated:
        notes.append(
            f"no effect: {', '.join(stated)}, of tasks and functions that generate rows (limit "
            "takes the first rows, split a slice)"
        )
    split = parse_split(settings.split)[0]
    if path is not None and path.is_file() and split not in ("train", path.name.split(".")[0]):
        notes.append(f"a single file has no splits: {split!r} is all of it, as 'train' would be")
    if settings.name is not None and (generated or (path is not None and path.is_file())):
        notes.append(
            f"no effect: name = {settings.name!r}, of hub datasets and folders; this set is called "
            f"{dataset_name(settings)!r}, by its path"
        )
    return notes


def dataset_name(settings: RowSettings) -> str:
    """What a dataset is called in records: the hub id, the task, or the file's or folder's name,
    with as many of the folders above it as tell it from other sets: "gsm8k/train.parquet".
    """
    path = _local(settings.path)
    if path is None:
        return settings.path
    others = [Path(other).expanduser().parts for other in settings.paths_beside]
    parts, length = path.parts, 1
    while length < len(parts) and any(parts[-length:] == other[-length:] for other in others):
        length += 1
    return "/".join(parts[-length:])


def on_hub(path: str) -> bool:
    """Whether a path is a hub id, and neither a task, a function, nor a file or folder."""
    if path.startswith(PREFIX) or is_function(path) or _local(path) is not None:
        return False
    local = path.endswith(SUFFIXES) or path.startswith((".", "/", "~"))
    return not local and HUB_ID.fullmatch(path) is not None


def local_files(path: str, subset: str | None, split: str) -> list[Path]:
    """The local files of a dataset in reading order; [] where its rows are not in local files.
    subset: data.name.
    """
    file = None if path.startswith(PREFIX) else _local(path)
    if file is None:
        return []
    return files_of(file, subset, parse_split(split)[0]) if file.is_dir() else [file]


def parse_split(split: str) -> tuple[str, str | None, str | None]:
    """("train", "10", "-5%") of "train[10:-5%]"; UsageError for anything else."""
    match = _SPLIT.fullmatch(split)
    if match is None:
        raise UsageError(
            f"data.split {split!r}: a split is a name, or a name with a slice such as "
            "'train[:-500]' or 'train[90%:]'"
        )
    return match[1], match[2], match[3]


def _sliced(rows: Iterator[Row], start: str | None, stop: str | None) -> Iterator[Row]:
    """The rows of a slice; behind the end of one that counts from the start nothing is read. Held
    at once are as many as it leaves out at the end; where it begins by counting from there, or in
    percent, all of them, in a file.
    """
    if "-" in (start or "") or "%" in f"{start}{stop}":
        every: PackedJson[list[Any]] = PackedJson()
        for row in rows:
            folder = None if row.folder is None else str(row.folder)
            every.append([row.index, row.values, row.place, folder])
        n = len(every)
        for place in range(*slice(_bound(start, n), _bound(stop, n)).indices(n)):
            index, values, where, folder = every[place]
            yield Row(index, values, where, None if folder is None else Path(folder))
        return
    begin, end = int(start or 0), int(stop or 0)
    waiting: deque[Row] = deque()
    for row in rows:
        if row.index >= begin and (stop is None or end < 0 or row.index < end):
            waiting.append(row)
        if len(waiting) > max(0, -end):
            yield waiting.popleft()
        if stop is not None and begin <= row.index == end - 1:  # no later row is of the slice
            return


def _bound(text: str | None, n: int) -> int | None:
    if text is None:
        return None
    if not text.endswith("%"):
        return int(text)
    place = round(n * int(text[:-1]) / 100)
    return max(n + place, 0) if text.startswith("-") else place  # -1% of 10 rows is none, not all


def _local(path: str) -> Path | None:
    """The file or folder called `path`, or None."""
    try:
        local = Path(path).expanduser()
        return local if local.exists() else None
    except (OSError, RuntimeError):  # a name that no file can have; "~name" of an unknown user
        return None


Placed = tuple[str, RowValues]


def _source(settings: RowSettings, split: str) -> Iterable[tuple[Path | None, Placed]]:
    """The folder of the file that a row is in, if it is in one, its place and its values."""
    if settings.path.startswith(PREFIX):
        task = settings.path.removeprefix(PREFIX)
        return _nowhere(read_gym(task, settings.task, settings.size, settings.seed))
    path = _local(settings.path)
    if path is None and is_function(settings.path):
        rows = read_function(settings.path, settings.task, settings.size, settings.seed)
        return _nowhere(rows)
    if path is not None:
        files = files_of(path, settings.name, split) if path.is_dir() else [path]
        return _all(files, settings.images)
    if not on_hub(settings.path):
        raise UsageError(f"{settings.path}: no such file or folder (data.path)")
    return _nowhere(
        read_hub(settings.path, settings.name, split, settings.revision, images=settings.images)
    )


def _nowhere(rows: Iterable[Placed]) -> Iterator[tuple[None, Placed]]:
    return ((None, row) for row in rows)


def _all(files: list[Path], images: str) -> Iterator[tuple[Path, Placed]]:
    for file in files:
        for row in read_file(file, images=images):
            yield file.parent, row


def shown(value: object) -> str:
    """A value of a row for a message: the first 80 characters of its repr."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
