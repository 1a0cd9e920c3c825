"""The rows of a dataset as a recipe's Python functions leave them: data.filter, then data.map."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from postgrad.core.errors import UsageError, described
from postgrad.core.progress import tracked
from postgrad.core.text import resolve
from postgrad.data.account import Bookkeeper
from postgrad.data.rows import Row, read_rows, shown, unread_keys
from postgrad.data.settings import RowSettings, iterated_with_own_keys

Function = Callable[[dict[str, Any]], Any]
_ABSENT = object()


@iterated_with_own_keys
def prepared_rows(settings: RowSettings, book: Bookkeeper | None = None) -> Iterator[Row]:
    """The rows that data.filter keeps, each as data.map returns it, with the columns that the
    recipe names within others, one at a time. book: counts the filtered ones.

    Both functions get a copy of the row as a dict. Raises UsageError that names row and function
    where one raises, or returns what is no bool or no row of JSON values.
    """
    keep = _function(settings.filter, "data.filter")
    change = _function(settings.map, "data.map")
    book = book or Bookkeeper("rows that nobody counts")
    book.notes += unread_keys(settings)
    within = settings.columns_within()
    images, missing = settings.images, 0  # rows without the column of images
    kept = 0
    for row in tracked("rows read", read_rows(settings)):
        book.read += 1
        if keep is not None and not _keeps(keep, row, settings.filter):
            book.add("filtered", row)
            continue
        changed = row if change is None else _mapped(change, row, settings.map)
        changed = _with_columns(changed, within) if within else changed
        kept += 1
        missing += images not in changed.values
        yield changed
    stated = images not in ("", type(settings).model_fields["images"].default)
    if stated and kept and missing == kept:  # the name may be wrong, or of another set of [data]
        note = f"no row has the column {images!r} (data.images), so none has an image of it"
        book.notes.append(note)


def _with_columns(row: Row, names: Sequence[str]) -> Row:
    """The row with the values of `names` ("reward_model.ground_truth") as columns of their own,
    where it has them and no column is called so.
    """
    values = dict(row.values)
    for name in names:
        inner: Any = row.values
        for part in name.split("."):
            inner = inner.get(part, _ABSENT) if isinstance(inner, dict) else _ABSENT
        if inner is not _ABSENT:
            values.setdefault(name, inner)
    return replace(row, values=values)


def _function(name: str, key: str) -> Function | None:
    if not name:
        return None
    function = resolve(name, {}, key)
    if not callable(function):
        raise UsageError(f"{key} {name!r} is {type(function).__name__}, not a function of a row")
    return function


def _keeps(function: Function, row: Row, name: str) -> bool:
    value = _call(function, row, f"data.filter {name!r}")
    if not isinstance(value, bool | np.bool_):
        raise UsageError(
            f"{row.place}: data.filter {name!r} returned {shown(value)} for row {row.index}; "
            "True keeps a row, False leaves it out"
        )
    return bool(value)


def _mapped(function: Function, row: Row, name: str) -> Row:
    """The row that data.map returns, passed through JSON so that its values are those of a file."""
    value = _call(function, row, f"data.map {name!r}")
    problem = "a row is a dict" if not isinstance(value, dict) else None
    if problem is None and not all(isinstance(key, str) for key in value):
        problem = "column names are text"
    if problem is None:
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            text.encode()  # half a surrogate pair is no text that a tokenizer reads
            return replace(row, values=json.loads(text))
        except (TypeError, ValueError, RecursionError) as error:
            problem = f"its values have to be JSON: {error}"
    raise UsageError(
        f"{row.place}: data.map {name!r} returned {shown(value)} for row {row.index}; {problem}"
    )


def _call(function: Function, row: Row, title: str) -> Any:
    try:
        return function(dict(row.values))
    except Exception as error:
        raise UsageError(
            f"{row.place}: {title} raised {described(error)} at row {row.index}"
        ) from error
