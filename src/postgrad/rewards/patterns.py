"""Regular expressions in a recipe. One that backtracks without end exceeds the CPU limit."""

import re
from typing import Annotated

from pydantic import AfterValidator


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]


def extract(pattern: str, text: str) -> str | None:
    """The first group (or whole match) of the pattern's last match; None without a match."""
    last = None
    for match in re.finditer(pattern, text, re.DOTALL):
        last = match
    return None if last is None else last[1 if last.re.groups else 0]
