"""What is held out is never trained on, whatever its case or white space."""

from collections.abc import Iterable

from postgrad.data.messages import prompt_of, questions_of
from postgrad.data.rows import read_rows
from postgrad.data.settings import DataSettings


def question_key(text: str) -> str:
    """Two questions with one key are the same problem: case and white space do not count."""
    return " ".join(text.casefold().split())


def keys(settings: DataSettings) -> frozenset[str]:
    """The keys of all questions of a dataset."""
    return frozenset(
        question_key(question)
        for row in read_rows(settings)
        for question in questions_of(prompt_of(row, settings))
    )


def overlaps(questions: Iterable[str], excluded: frozenset[str]) -> bool:
    """True where any of the questions is held out."""
    return bool(excluded) and any(question_key(one) in excluded for one in questions)
