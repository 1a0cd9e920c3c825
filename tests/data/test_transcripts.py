"""Conversations written as one string: who said what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.data.answers import is_transcript, question_of, turns_of

HH = ("Human", "Assistant")


def test_turns_begin_with_a_name_after_an_empty_line_and_nowhere_else() -> None:
    text = "\n\nHuman: Who is\nHuman: here?\n\nAssistant: Two.\n\nNote: Assistant: me.\n\nHuman:ok"
    assert turns_of(text, HH) == [
        {"role": "user", "content": "Who is\nHuman: here?"},
        {"role": "assistant", "content": "Two.\n\nNote: Assistant: me."},
        {"role": "user", "content": "ok"},
    ]


def test_a_speaker_may_have_two_turns_in_a_row() -> None:
    turns = turns_of("Human: a\n\nAssistant: b\n\nAssistant: c", HH)
    assert [turn["role"] for turn in turns] == ["user", "assistant", "assistant"]


def test_names_are_text_not_patterns() -> None:
    assert turns_of("Q.: a\n\nA+: b\n\nQx: c", ("Q.", "A+")) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n\nQx: c"},
    ]


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("\n\nHuman: a\n\nAssistant:", ["a"]),
        ("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: ", ["a", "b", "c"]),
        ("Human: a\n\nAssistant: b", None),
        ("Human: a", None),
        ("a\n\nAssistant:", None),
    ],
)
def test_a_question_is_a_transcript_that_ends_where_the_assistant_begins(
    text: str, before: list[str] | None
) -> None:
    question = question_of(text, HH)
    assert (None if question is None else [turn["content"] for turn in question]) == before


SAID = st.text(alphabet="aH: \n", max_size=8).map(str.strip)


@given(texts=st.lists(SAID, min_size=1, max_size=6))
def test_what_was_written_as_a_transcript_is_read_again(texts: list[str]) -> None:
    names = [HH[i % 2] for i in range(len(texts))]
    text = "".join(
        f"\n\n{name}: {text_of_turn}" for name, text_of_turn in zip(names, texts, strict=True)
    )
    assert is_transcript(text, HH)
    assert turns_of(text, HH) == [
        {"role": ("user", "assistant")[i % 2], "content": text_of_turn}
        for i, text_of_turn in enumerate(texts)
    ]
