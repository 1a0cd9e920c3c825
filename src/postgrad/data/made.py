"""Rows made by a Python function: games, synthetic problems."""

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.core.names import resolve
from postgrad.data.files import Values


def is_function(path: str) -> bool:
    """Whether a recipe's data.path is "package.module:function"."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", path) is not None


def read_function(
    path: str, task: dict[str, Any], size: int, seed: int
) -> Iterator[tuple[str, Values]]:
    """(place, values) of the rows that `path`(size, seed, **task) yields: JSON values by column.

    The same arguments must give the same rows. Raises UsageError where there is no such function,
    it does not take `task`, or a row is no JSON object.
    """
    function = resolve(path, {}, "function of rows")
    try:
        inspect.signature(function).bind(size, seed, **task)
    except TypeError as error:
        raise UsageError(
            f"data.task: {path} cannot be called with (size, seed"
            f"{''.join(f', {key}=' for key in task)}): {error}"
        ) from error
    for number, row in enumerate(function(size, seed, **task)):
        place = f"{path} row {number}"
        try:
            values = json.loads(json.dumps(row, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UsageError(f"{place}: not JSON: {error}; mend the function") from error
        if not isinstance(values, dict):
            raise UsageError(f"{place}: a row is a JSON object, this is {type(row).__name__}")
        yield place, values
