"""Rows that repeat others, within a set and across the sets of a run."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.data.conversations import load_conversations
from postgrad.data.mixture import training_prompts, training_rows
from postgrad.data.overlap import HeldOut, Selection
from postgrad.data.settings import MixedSet, MixSettings

WriteRows = Callable[..., str]
ONE = [
    {"question": "a b", "answer": "1"},
    {"question": "A  b", "answer": "1"},
    {"question": "a b", "answer": "1"},
    {"question": "a b", "answer": "2"},
]
TWO = [{"question": "a b", "answer": "1"}, {"question": "c", "answer": "1"}]


@pytest.mark.parametrize(
    ("dedup", "conversations", "prompts"),
    [
        ("none", ([0, 1, 2, 3], [0, 1]), ([0, 1, 2, 3], [0, 1])),
        ("exact", ([0, 1, 3], [1]), ([0, 1], [1])),
        ("normalised", ([0, 3], [1]), ([0], [1])),
    ],
)
def test_the_first_of_equal_rows_stays_within_a_set_and_across_sets(
    dedup: Any,
    conversations: tuple[list[int], list[int]],
    prompts: tuple[list[int], list[int]],
    write_rows: WriteRows,
    tokenizer: Any,
) -> None:
    """SFT learns answers, so two answers to a question are two rows; RL asks a question once."""
    first_path, second_path = write_rows(ONE, "one.jsonl"), write_rows(TWO, "two.jsonl")
    data = MixSettings(sets=(MixedSet(path=first_path), MixedSet(path=second_path)), dedup=dedup)
    nothing = HeldOut()
    loaded_conversations = training_rows(load_conversations, data, tokenizer, exclude=nothing)
    asked = training_prompts(data, tokenizer, max_new_tokens=9, exclude=nothing)
    for loaded, wanted in ((loaded_conversations, conversations), (asked, prompts)):
        assert [row.row for row in loaded.all()] == [*wanted[0], *wanted[1]]
        for account, kept, rows in zip(loaded.accounts, wanted, (4, 2), strict=True):
            assert account.fates.get("kept", 0) == len(kept)
            assert account.fates.get("duplicate", 0) == rows - len(kept)


def test_a_row_that_was_dropped_takes_the_place_of_none(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    rows = [{"question": "q" * 20, "answer": "1"}, {"question": "c", "answer": "1"}]
    path = write_rows(rows)
    sets = (MixedSet(path=path, max_len=30), MixedSet(path=path, max_len=60))
    training_set = training_rows(
        load_conversations, MixSettings(sets=sets, dedup="exact"), tokenizer, exclude=HeldOut()
    )
    assert training_set.accounts[0].fates == {"kept": 1, "too_long": 1}
    assert training_set.accounts[1].fates == {"kept": 1, "duplicate": 1}
    assert [row.row for row in training_set.all()] == [1, 0]


@given(texts=st.lists(st.text(alphabet="aA b", max_size=3)))
def test_exactly_the_different_texts_are_left(texts: list[str]) -> None:
    exact, normalised = Selection(dedup="exact"), Selection(dedup="normalised")
    rows = [[{"role": "user", "content": text}] for text in texts]
    assert sum(not exact.repeats(row) for row in rows) == len(set(texts))
    keys = {" ".join(text.lower().split()) for text in texts}
    assert sum(not normalised.repeats(row) for row in rows) == len(keys)


def test_the_same_words_by_another_speaker_are_another_row() -> None:
    selection = Selection(dedup="normalised")
    assert not selection.repeats([{"role": "user", "content": "a"}])
    assert not selection.repeats([{"role": "assistant", "content": "a"}])
    assert selection.repeats([{"role": "user", "content": "A"}])


def test_conversations_held_out_for_one_of_several_messages_are_counted_with_the_commonest(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    def chat(*asked: str) -> dict[str, Any]:
        turns = [({"role": "user", "content": text}, {"role": "assistant", "content": "y"})
                 for text in asked]  # fmt: skip
        return {"messages": [message for turn in turns for message in turn]}

    rows = [chat("a", "why"), chat("b", "Why"), chat("q"), chat("c", "go on"), chat("d")]
    data = MixSettings(sets=(MixedSet(path=write_rows(rows), messages="messages"),))
    held = HeldOut(questions=frozenset({"q", "why", "go on"}))
    (account,) = training_rows(load_conversations, data, tokenizer, exclude=held).accounts
    assert account.fates["excluded"] == 4  # the row "q" shares all that its user says
    (note,) = [note for note in account.notes if "held out" in note]
    assert note.startswith("3 of the rows held out share only a part of the user's messages")
    assert "(1 of them 'why')" in note


def test_a_role_that_is_none_of_the_chat_format_is_counted_and_named(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    def chat(*roles: str) -> dict[str, Any]:
        return {"messages": [{"role": role, "content": "y"} for role in roles]}

    rows = [chat("User", "assistant"), chat("system", "user", "assistant"), chat("User", "user",
            "assistant")]  # fmt: skip
    data = MixSettings(sets=(MixedSet(path=write_rows(rows), messages="messages"),))
    (account,) = training_rows(load_conversations, data, tokenizer, exclude=HeldOut()).accounts
    (note,) = [note for note in account.notes if "role" in note]
    assert note.startswith("2 rows have a message of the role 'User'")
