import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.text import composed


@given(st.text(max_size=29), st.sampled_from(["NFC", "NFKC"]))
def test_text_with_short_runs_of_marks_is_composed_as_unicode_says(text, form):
    assert composed(text, form) == unicodedata.normalize(form, text)


def test_of_a_run_of_marks_the_first_30_stay():
    assert composed("e\u0301") == "é"
    assert composed("e" + "\u0323" * 40 + "x") == "ẹ" + "\u0323" * 29 + "x"


@pytest.mark.parametrize("marks", ["\u0301\u0323", "\u0f73\u0f75", "\u0344\u0323"])
def test_a_long_run_of_marks_takes_no_quadratic_time(marks):
    first = composed("a" + marks * 15, "NFKC")
    assert composed("a" + marks * 100_000, "NFKC") == first
    assert composed(("a" + marks * 15) * 1_000, "NFKC") == first * 1_000
