"""The rows of a dataset as a recipe's Python functions leave them: data.filter, then data.map."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from postgrad.core.errors import PostgradError, UsageError
from postgrad.core.progress import tracked
from postgrad.core.text import resolve
from postgrad.data.account import Bookkeeper
from postgrad.data.rows import Row, read_rows, shown, unread_keys
from postgrad.data.settings import RowSettings, with_own_keys

Function = Callable[[dict[str, Any]], Any]
_ABSENT = object()


@with_own_keys
def prepared_rows(settings: RowSettings, book: Bookkeeper | None = None) -> list[Row]:
    """The rows that data.filter keeps, each as data.map returns it, with the columns that the
    recipe names within others. book: counts the filtered ones.

    Both functions get a copy of the row as a dict. Raises UsageError that names row and function
    where one raises, or returns what is no bool or no row of JSON values.
    """
    keep = _function(settings.filter, "data.filter")
    change = _function(settings.map, "data.map")
    rows = read_rows(settings)
    if book is not None:
        book.read = len(rows)
        book.notes += unread_keys(settings)
    prepared: list[Row] = []
    within = settings.columns_within()
    for row in tracked("rows read", rows, len(rows)):
        if keep is not None and not _keeps(keep, row, settings.filter):
            if book is not None:
                book.add("filtered", row)
            continue
        changed = row if change is None else _mapped(change, row, settings.map)
        prepared.append(_with_columns(changed, within) if within else changed)
    if book is not None and prepared:
        book.notes += _no_images(prepared, settings)
    return prepared


def _no_images(rows: Sequence[Row], settings: RowSettings) -> list[str]:
    """A note where the recipe names a column of images, and no row has it: a name may be wrong, or
    [data] gives it to a set that has none.
    """
    stated = settings.images not in ("", type(settings).model_fields["images"].default)
    if not stated or any(settings.images in row.values for row in rows):
        return []
    return [f"no row has the column {settings.images!r} (data.images), so none has an image of it"]


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
    try:
        function = resolve(name, {}, key)
    except PostgradError:
        raise
    except Exception as error:  # importing runs the module
        raise UsageError(
            f"{key} {name!r}: its module cannot be imported: {_described(error)}"
        ) from error
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
            f"{row.place}: {title} raised {_described(error)} at row {row.index}"
        ) from error


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
