"""Data inside HTML comes back equal and can be nothing but data."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helpers.made_run import unpacked
from postgrad.observe.report.page import packed, to_json

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec=None)),  # halves of surrogate pairs too
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(anything)
@example("</script><script>alert(1)</script>")
@example("<!--<script>")
@example("\u2028\u2029\ud800 \udfff & ]]>")
def test_any_value_comes_back_equal_and_no_markup_stands_raw(value: Any) -> None:
    text = to_json(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert text.isascii()
    assert json.loads(text) == value
    block = packed(value)
    assert not set("<>&") & set(block)
    assert unpacked(block) == value


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_cannot_say_are_null(number: float) -> None:
    assert json.loads(to_json({"a": [number, 1.0]})) == {"a": [None, 1.0]}
    assert unpacked(packed({"a": [number, 1.0]})) == {"a": [None, 1.0]}


def test_the_same_value_gives_the_same_text() -> None:
    assert packed({"a": 1}) == packed({"a": 1})
