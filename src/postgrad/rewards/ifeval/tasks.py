"""IFBench's instructions that are whole tasks: lists, tables, questions with one right answer."""

import csv
import re
import unicodedata
from datetime import date
from itertools import pairwise

from postgrad.rewards.ifeval.instruction import Instruction, bare, plain

_MULTIPLES = ["14", "21", "28", "35", "42", "49"]
_QUESTION = re.compile(r"Question \d+[.):;]?")
_OPTION = re.compile(r"[A-Ea-e][.)]\s*\w")
_COUNTRIES = 52  # of Africa, at least
_CAPITALS = """
    Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin
    Amsterdam Warsaw London Brussels Kyiv Prague Luxembourg Paris Vienna Bratislava Budapest Vaduz
    Chisinau Bern Ljubljana Zagreb
"""
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_NAPOLEON = (1769, 1821)
_CITIES = ["ID", "Country", "City", "Year", "Count"]
_PRODUCTS = ["ProductID", "Category", "Brand", "Price", "Stock"]
_GRADES = ["StudentID", "Subject", "Grade", "Semester", "Score"]
_QUOTED_FIELD = re.compile(r'"([^"\n]*+)"')


class Multiples(Instruction):
    """The numbers are the multiples of 7 from 10 to 50, in order."""

    def follows(self, text: str) -> bool:
        return re.findall(r"\d+", text) == _MULTIPLES


class LongerQuestions(Instruction):
    """Four questions, each headed `Question 1` and so on and longer than the one before it, have
    five options each.
    """

    def follows(self, text: str) -> bool:
        if not text.startswith("Question"):
            return False
        parts = [part.strip() for part in _QUESTION.split(text) if part.strip()]
        asked = [_question(part) for part in parts]
        lengths = [length for length, _ in asked]
        return [options for _, options in asked] == [5] * 4 and all(
            a < b for a, b in pairwise(lengths)
        )


class CountriesBackwards(Instruction):
    """From the line with Zimbabwe on come 52 lines or more, in reverse order of the alphabet."""

    def follows(self, text: str) -> bool:
        lines = [" ".join(plain(line).split()) for line in _ascii(text).split("\n")]
        lines = [line for line in lines if line]
        start = next((n for n, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
        listed = lines[start:]
        return len(listed) >= _COUNTRIES and listed == sorted(listed, reverse=True)


class WordsBackwards(Instruction):
    """The bald eagle stands in it with its words in reverse order."""

    def follows(self, text: str) -> bool:
        return "eagle bald" in " ".join(plain(text).lower().split())


class CharactersBackwards(Instruction):
    """The bald eagle stands in it letter by letter backwards."""

    def follows(self, text: str) -> bool:
        return "bald eagle"[::-1] in text.lower()


class CapitalsByLatitude(Instruction):
    """The European capitals above 45 degrees, from the north to the south, with commas."""

    def follows(self, text: str) -> bool:
        named = [part.strip() for part in _ascii(text).split(",") if part.strip()]
        capitals = _CAPITALS.split()
        return named in (capitals, [city for city in capitals if city != "Kyiv"])


class CityTable(Instruction):
    """A header and seven rows of five fields with commas."""

    def follows(self, text: str) -> bool:
        rows = _table(text, ",")
        return len(rows) == 8 and rows[0] == _CITIES and _are_of_five(rows)


class ProductTable(Instruction):
    """A header and 14 rows of five fields with commas; one field that has a special character is
    in quotation marks.
    """

    def follows(self, text: str) -> bool:
        rows = _table(text, ",")
        body = text.strip().partition("\n")[2]
        special = any(map(_has_special, _QUOTED_FIELD.findall(body)))
        return special and len(rows) == 15 and rows[0] == _PRODUCTS and _are_of_five(rows)


class GradeTable(Instruction):
    """A header and three rows of five fields with tabs, each field in quotation marks."""

    def follows(self, text: str) -> bool:
        rows = [line.split("\t") for line in text.strip().splitlines()]
        fields = [field.strip() for row in rows for field in row]
        quoted = all(len(field) > 1 and field[0] == field[-1] == '"' for field in fields)
        header = [field.strip('"') for field in fields[:5]]
        return quoted and len(rows) == 4 and _are_of_five(rows) and header == _GRADES


class BattleDates(Instruction):
    """Dates of Napoleon's life as YYYY-MM-DD, with commas and nothing else."""

    def follows(self, text: str) -> bool:
        return all(map(_is_of_his_life, text.split(",")))


def _question(part: str) -> tuple[int, int]:
    """(length of the text before its options, number of options)."""
    lines = [line.strip() for line in part.split("\n")]
    options = [n for n, line in enumerate(lines) if _OPTION.match(line)]
    return len(" ".join(lines[: options[0] if options else len(lines)])), len(options)


def _ascii(text: str) -> str:
    """Without accents, and without characters that ASCII lacks."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def _table(text: str, delimiter: str) -> list[list[str]]:
    """The fields of each row; no rows where the text is no table."""
    try:
        rows = list(csv.reader(text.strip().splitlines(), delimiter=delimiter))
    except csv.Error:  # a field of over a hundred thousand characters
        return []
    return [[field.strip() for field in row] for row in rows]


def _are_of_five(rows: list[list[str]]) -> bool:
    return all(len(row) == 5 for row in rows)


def _has_special(field: str) -> bool:
    """Whether a field has a character that is no letter, digit or white space."""
    return bare(field) != "".join(field.split()).lower()


def _is_of_his_life(written: str) -> bool:
    written = written.strip()
    if not _DATE.fullmatch(written):
        return False
    try:
        day = date.fromisoformat(written)
    except ValueError:  # no such day
        return False
    return _NAPOLEON[0] <= day.year <= _NAPOLEON[1]


KINDS: dict[str, type[Instruction]] = {
    "custom:multiples": Multiples,
    "custom:mcq_count_length": LongerQuestions,
    "custom:reverse_newline": CountriesBackwards,
    "custom:word_reverse": WordsBackwards,
    "custom:character_reverse": CharactersBackwards,
    "custom:european_capitals_sort": CapitalsByLatitude,
    "custom:csv_city": CityTable,
    "custom:csv_special_character": ProductTable,
    "custom:csv_quotes": GradeTable,
    "custom:date_format_list": BattleDates,
}
