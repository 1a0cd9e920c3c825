"""Functions of rows, as a recipe names them: `helpers.row_functions:NAME`."""

from typing import Any

Row = dict[str, Any]
NUMBER = 5


def short(row: Row) -> bool:
    return len(row["answer"]) < 3


def nothing(row: Row) -> bool:
    return False


def says_no_bool(row: Row) -> int:
    return len(row["answer"])


def fails(row: Row) -> bool:
    return row["level"] > 3


def shouts(row: Row) -> Row:
    row["question"] = row["question"].upper()
    return {**row, "shape": (1, 2)}


def says_no_row(row: Row) -> list[str]:
    return list(row)


def says_no_json(row: Row) -> Row:
    return {**row, "seen": {1, 2}}


def says_half_a_character(row: Row) -> Row:
    return {**row, "question": "\ud83d"}


def without_dogs(row: Row) -> bool:
    return "dog" not in str(row)


def longer(row: Row) -> Row:
    """Every text that stands in a column of its own has a letter more."""
    return {key: f"{value}s" if isinstance(value, str) else value for key, value in row.items()}
