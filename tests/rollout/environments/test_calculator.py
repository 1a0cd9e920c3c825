"""Exact arithmetic; nothing of an expression is run."""

import contextlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.rollout.environments.calculator import LONGEST, calculator, written


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("1 + 2 * 3", "7"),
        ("(2 + 3) * 4.5", "22.5"),
        ("0.1 + 0.2", "0.3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2 ** 10", "1024"),
        ("2 ** -2", "0.25"),
        ("1 / 3", "1/3 (about 0.333333333333)"),
        ("-2 / 3", "-2/3 (about -0.666666666667)"),
        ("1 / 8 - 1", "-0.875"),
        ("1_000 * 1e3", "1000000"),
        (" 12345678901234567890 * 10 ", "123456789012345678900"),
        ("1 ** 99999999", "1"),
        ("(-1) ** 99999999", "-1"),
        ("0 ** 5000", "0"),
        ("0 ** 0", "1"),
    ],
)
def test_arithmetic_is_exact(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "no arithmetic expression"),
        ("1 +", "no arithmetic expression"),
        ("(" * 150, "no arithmetic expression"),
        ("x + 1", "'x' is not arithmetic"),
        ("__import__('os').getpid()", "is not arithmetic"),
        ("[1][0]", "is not arithmetic"),
        ("1 if 1 else 2", "is not arithmetic"),
        ("2 ^ 3", r"'2 \^ 3' is not arithmetic.*a power is written \*\*"),
        ("1,000 + 1", "is not arithmetic"),
        ("True + 1", "True is no number"),
        ("'a' * 3", "'a' is no number"),
        ("2j", "2j is no number"),
        ("9 ** 9 ** 9", "the power is too large"),
        ("10 ** -5000", "the power is too large"),
        ("2 ** 4000 * 2 ** 4000", "a number on the way is too large"),
        ("2 ** 0.5", "is not exact"),
        ("1e999999999", "1e999999999 is too large or too small"),
        ("1e-999999999", "1e-999999999 is too large or too small"),
        ("1+" * LONGEST + "1", "401 characters, at most 200"),
    ],
)
def test_what_is_no_arithmetic_is_told_with_its_reason(expression, why):
    with pytest.raises(ValueError, match=why):
        calculator(expression)


@pytest.mark.parametrize("expression", ["1 / 0", "1 // 0", "1 % 0", "0 ** -1", "0 ** -9999"])
def test_a_division_by_zero_is_one(expression):
    with pytest.raises(ZeroDivisionError):
        calculator(expression)


@given(st.text(max_size=60))
def test_no_text_does_anything_else(text):
    with contextlib.suppress(ValueError, ZeroDivisionError):
        assert isinstance(calculator(text), str)


@given(st.fractions(max_denominator=10**6))
def test_a_result_reads_back_as_the_number(number):
    assert Fraction(written(number).split(" ")[0]) == number
