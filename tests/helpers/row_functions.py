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
