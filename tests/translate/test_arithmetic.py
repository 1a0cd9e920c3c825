"""$(( ... )) by hand: the numbers are bash's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.translate.arithmetic import compute

NAMES = {"N": "8", "NODES": "2", "PER": "N / NODES", "EMPTY": "", "LOOP": "LOOP + 1"}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("10 - 4 - 3", 3),
        ("7 / 2", 3),
        ("-7 / 2", -3),  # towards zero
        ("-7 % 3", -1),  # with the sign of the first
        ("2 ** 3 ** 2", 512),  # from the right
        ("-2 ** 2", 4),  # the sign is tighter
        ("2 ** 64", 0),
        ("9223372036854775807 + 1", -9223372036854775808),
        ("3 > 2 && 2 >= 2 || 0", 1),
        ("3 == 4 ? 10 : 20", 20),
        ("1 << 4 | 1", 17),
        ("5 & 6 ^ 1", 5),
        ("!0 + ~0", 0),
        ("0x1F + 010 + 2#101", 44),
        ("N * NODES", 16),
        ("$N * ${NODES}", 16),
        ("PER * 3", 12),
        ("(NODES*N)/4+1", 5),
    ],
)
def test_it_has_bash_s_value(expression: str, value: int) -> None:
    assert compute(expression, NAMES) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "1 +", "1 / 0", "5 % 0", "2 ** -1", "UNSET + 1", "EMPTY", "LOOP", "1; 2", "x = 3",
        "N++", "a[0]", "1.5", "09", "(1", "1)", "1 ? 2", "__import__('os')",
        "(" * 100 + "1" + ")" * 100, "-" * 400 + "1", "2" + "**2" * 150, "1" * 600,
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_of_the_script_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        compute(expression, NAMES)


def test_names_that_stand_for_ever_more_names_are_refused() -> None:
    laughs = {f"A{i}": "+".join([f"A{i + 1}"] * 100) for i in range(20)} | {"A20": "1"}
    with pytest.raises(ValueError, match="too much"):
        compute("A0", laughs)


SMALL = st.integers(-1000, 1000)


@given(SMALL, SMALL, st.integers(1, 50), SMALL)
def test_sums_and_products_are_those_of_whole_numbers(a: int, b: int, c: int, d: int) -> None:
    names = {"a": str(a), "b": str(b)}
    assert compute(f"(a + b) * {c} - $a * ({d})", names) == (a + b) * c - a * d
    assert compute(f"a / {c} * {c} + a % {c}", names) == a
