"""Nested configs as options with dotted names, and references between them."""

import pytest

from postgrad.core.errors import UsageError
from postgrad.translate.nested import flattened, nested, overlaid, resolved


def test_tables_become_dotted_names_and_entries_of_lists_are_numbered() -> None:
    table = {"a": {"b": {"c": 1}, "d": [2, 3]}, "e": [{"f": 4}, {"f": 5}], "g": {}, "h": []}
    flat = {"a.b.c": 1, "a.d": [2, 3], "e.0.f": 4, "e.1.f": 5, "g": {}, "h": []}
    assert flattened(table) == flat
    assert nested({"a.b.c": 1, "a.d": 2}) == {"a": {"b": {"c": 1}, "d": 2}}


def test_a_value_replaces_the_table_of_its_name_and_an_entry_the_value() -> None:
    below = {"a.b": 1, "a.c": 2, "ab": 3, "d": None}
    assert overlaid(below, {"a": None}) == {"ab": 3, "d": None, "a": None}
    assert overlaid(below, {"d.e": 4, "a.b": 5}) == {"a.b": 5, "a.c": 2, "ab": 3, "d.e": 4}


def test_references_have_the_type_of_what_they_refer_to() -> None:
    options = {
        "a.size": 6,
        "a.same": "${.size}",
        "b.product": "${mul:${a.same}, 7}",
        "b.text": "runs/${a.size}-${b.product}",
        "b.largest": ["${max:2, 3}", "${add:1, 1.5}", "${div:9, 2}"],
        "b.home": "${oc.env:HOME,nowhere}",
    }
    assert resolved(options) == {
        "a.size": 6, "a.same": 6, "b.product": 42, "b.text": "runs/6-42",
        "b.largest": [3, 2.5, 4.5], "b.home": "nowhere",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["${c.absent}", "${oc.env:HOME}", "${sub:1,2}", "${div:1,0}"])
def test_a_reference_without_a_value_stays_as_it_is(text: str) -> None:
    assert resolved({"a": text, "b": f"x {text}"}) == {"a": text, "b": f"x {text}"}


def test_references_in_a_circle_are_refused() -> None:
    with pytest.raises(UsageError, match="refers to itself"):
        resolved({"a": "${b}", "b": "${a}"})
