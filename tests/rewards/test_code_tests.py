"""Comparisons with a tolerance: numbers that no float holds, and words that are no numbers."""

import json
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.rewards.code_tests import CallTest, read_tests, same_text, same_value
from postgrad.rewards.sandbox.values import encode

HUGE = 10**400


def kind(value):  # the name of a case: not every number can be written
    return type(value).__name__


@pytest.mark.parametrize(
    ("wanted", "got", "same"),
    [
        (HUGE, 1.0, False),
        (1, HUGE, False),
        (0.5, HUGE, False),
        (HUGE, HUGE + 1, True),
        (HUGE, 2 * HUGE, False),
        (HUGE, math.inf, False),
        (-HUGE, -math.inf, False),
        (1, math.nan, False),
        (math.inf, math.inf, True),
        (math.inf, -math.inf, False),
        (1, 10**9000, False),
        (10**4000, 10**4000, True),
        (1.0, 1 + 5e-7, True),
        (1.0, 1 + 2e-6, False),
        (0, 5e-7, True),
        (1e300, 1e300 + 1e290, True),
    ],
    ids=kind,
)
def test_within_a_tolerance_every_number_is_compared_and_none_is_an_error(wanted, got, same):
    assert same_value(wanted, encode(got), 1e-6) is same
    assert same_value([wanted], encode([got]), 1e-6) is same


@pytest.mark.parametrize(
    ("wanted", "got", "same"),
    [
        ("x 1" + "0" * 399, "x 2" + "0" * 399, False),  # both past the largest float
        ("x 1" + "0" * 399, "x 1" + "0" * 398 + "1", True),
        ("x 1e999", "x 2e999", False),
        ("x 1e999", "x inf", False),
        ("x inf", "x Infinity", True),
        ("x nan", "x NaN", False),
        ("x snan", "x sNaN", False),
        ("x 1", "x 1e999999999", False),
        ("x 1", "x 1e99999999999999999999999999", False),
        ("x 1e-999999999", "x 0", True),
        ("x 1", "x " + "9" * 10**6, False),
        ("x 0.3", "x 0.3000001", True),
        ("x 1", "x 1_0", False),
        ("x 1", "x \u0661", True),  # a digit one of another script
        ("x 1", "x one", False),
    ],
    ids=kind,
)
def test_within_a_tolerance_every_word_is_compared_and_none_is_an_error(wanted, got, same):
    assert same_text(wanted, got, 1e-6) is same


NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.just(HUGE)


@given(NUMBERS, NUMBERS, st.floats(1e-12, 0.5))
def test_numbers_are_close_as_exact_fractions_are(a, b, tolerance):
    x, y, share = Fraction(a), Fraction(b), Fraction(repr(tolerance))
    close = abs(x - y) <= share * max(abs(x), abs(y), 1)
    assert same_value(a, encode(b), tolerance) is close


def test_an_integer_of_many_digits_equals_itself_and_no_other():
    assert same_value(10**4299, encode(10**4299))
    assert same_value(2**14282, encode(2**14282))
    assert not same_value(2**14282, encode(2**14282 + 1))
    assert same_value(3, {"integer": "0x3"})
    for nothing in ("x", "", 7, None):
        with pytest.raises((ValueError, TypeError)):
            same_value(3, {"integer": nothing})


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_an_argument_may_hold_any_character_that_ends_lines_elsewhere(separator):
    text = json.dumps(f"a{separator}b", ensure_ascii=False)
    case = {"input": f"{text}\r\n7\n", "output": text, "testtype": "functional"}
    wanted = f"a{separator}b"
    assert read_tests([case], "f") == [CallTest("f", (wanted, 7), wanted)]
