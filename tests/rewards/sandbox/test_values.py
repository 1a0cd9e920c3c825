import json
import math
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.rewards.sandbox.values import NoPlainValue, decode, encode

KEYS = (
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.fractions()
    | st.decimals(allow_nan=False) | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
)  # fmt: skip
VALUES = st.recursive(
    KEYS | st.sets(st.integers()) | st.frozensets(st.text()),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner),
    max_leaves=10,
)


def types(value):
    if isinstance(value, dict):
        return {(types(k), repr(types(v))) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [types(item) for item in value]
    return type(value)


@given(VALUES)
def test_a_plain_value_comes_back_with_its_type(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value
    assert types(back) == types(value)


def test_a_subclass_is_its_base_and_an_object_of_a_class_is_refused():
    class Sly(int):
        def __eq__(self, other):
            return True

    back = decode(encode(Sly(3)))
    assert (type(back), back) == (int, 3)
    assert math.isnan(decode(encode(math.nan)))
    with pytest.raises(NoPlainValue, match="object is no plain value"):
        encode([object()])
    assert encode([object()], lambda stranger: "?") == ["?"]


@pytest.mark.parametrize(
    "data",
    [{"a": 1, "b": 2}, {"what": 1}, {"dict": 3}, {"set": [[1]]}, {"fraction": "1e9"}, {}],
)
def test_what_is_never_written_is_refused(data):
    with pytest.raises((ValueError, TypeError)):
        decode(data)


def test_numbers_that_would_be_endless_to_build_are_not_built():
    with pytest.raises(ValueError):
        decode({"fraction": "1e999999999"})
    assert decode({"fraction": "-1/3"}) == Fraction(-1, 3)
    assert decode({"decimal": "1.50"}) == Decimal("1.50")
