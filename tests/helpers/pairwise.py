"""Tables in which every two values of different factors meet at least once."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Pair = tuple[str, Any, str, Any]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    return {(a, row[a], b, row[b]) for a, b in combinations(row, 2)}


def pairwise(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]
) -> tuple[list[Row], set[Pair]]:
    """Few rows of the product that have every pair which any allowed row has, and those pairs. The
    one with most new pairs is taken each time, the first of equals: always the same table.
    """
    rows = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    possible = [(row, pairs_of(row)) for row in rows if allowed(row)]
    wanted = set[Pair]().union(*(pairs for _, pairs in possible))
    missing, taken = set(wanted), list[Row]()
    while missing:
        best, pairs = max(possible, key=lambda row: len(row[1] & missing))
        missing -= pairs
        taken.append(best)
    return taken, wanted
