"""Pairs from a spreadsheet that was saved as CSV."""

import csv
from collections.abc import Iterator
from pathlib import Path


def pairs(size: int, seed: int, file: str = "answers.csv") -> Iterator[dict[str, str]]:
    """A row of the table is a question, two answers, and which of them is better: A, B or a tie."""
    with Path(file).open(encoding="utf-8-sig", newline="") as lines:
        for row in csv.DictReader(lines):
            if row["better"] == "tie":
                continue
            a, b = row["answer A"], row["answer B"]
            chosen, rejected = (a, b) if row["better"] == "A" else (b, a)
            yield {"prompt": row["question"], "chosen": chosen, "rejected": rejected}
