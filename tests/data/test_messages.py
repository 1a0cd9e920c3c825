"""Reference answers as text."""

from typing import Any

import pytest

from postgrad.data.messages import answer_of, conversation_of
from postgrad.data.rows import Row
from postgrad.data.settings import DataSettings


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("7", "7"),
        (7, "7"),
        (0.5, "0.5"),
        (None, None),
        (["Paris", "the city of Paris"], '["Paris", "the city of Paris"]'),
        ({"ß": True}, '{"ß": true}'),
    ],
)
def test_lists_and_tables_are_json_that_a_verifier_can_read(value: Any, text: str | None) -> None:
    row = Row(0, {"question": "q", "answer": value}, "rows.jsonl:1")
    assert answer_of(row, DataSettings(path="rows.jsonl")) == text


def test_a_recipe_may_say_that_there_is_no_answer() -> None:
    row = Row(0, {"question": "q"}, "rows.jsonl:1")
    assert answer_of(row, DataSettings(path="rows.jsonl", answer="")) is None


def test_a_system_message_anywhere_is_the_conversations_own() -> None:
    turns = [
        {"role": "user", "content": "q"},
        {"role": "system", "content": "own"},
        {"role": "assistant", "content": "a"},
    ]
    settings = DataSettings(path="rows.jsonl", messages="messages", system="ours")
    assert conversation_of(Row(0, {"messages": turns}, "rows.jsonl:1"), settings) == turns
    added, *_ = conversation_of(Row(0, {"messages": turns[:1]}, "rows.jsonl:1"), settings)
    assert added == {"role": "system", "content": "ours"}
