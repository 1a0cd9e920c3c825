"""One table in which every row that was read has its place."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postgrad.data.account import RowAccount, table
from postgrad.data.conversations import load_conversations
from postgrad.data.mixture import training_rows
from postgrad.data.overlap import HeldOut, ngrams
from postgrad.data.settings import MixedSet, MixSettings

WriteRows = Callable[..., str]


def test_a_table_has_a_line_a_dataset_their_sum_and_a_column_for_each_fate_that_occurred() -> None:
    account = RowAccount("a", 5, {"kept": 3, "duplicate": 2}, {"duplicate": "a:2"})
    other_account = RowAccount("b", 4, {"truncated": 1, "too_long": 3}, {"too_long": "b:1"})
    assert table([account, other_account]) == (
        ["dataset", "rows", "kept whole", "kept, cut", "duplicate", "too long"],
        [
            ["a", "5", "3", "0", "2", "0"],
            ["b", "4", "0", "1", "0", "3"],
            ["together", "9", "3", "1", "2", "3"],
        ],
    )
    assert table([account])[1] == [["a", "5", "3", "2"]]


def test_an_account_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(AssertionError, match="a: 5 rows, accounted for"):
        RowAccount("a", 5, {"kept": 4}, {})


def test_an_account_says_where_to_look_and_goes_to_the_events_as_json() -> None:
    account = RowAccount("a", 2, {"kept": 1, "duplicate": 1}, {"duplicate": "a:2"}, ("noted",))
    assert account.lines() == [
        "a: 2 rows, 1 kept",
        "        1  left out: repeats a row before it, such as a:2",
        "  noted",
    ]
    assert account.to_json() == {
        "dataset": "a", "rows": 2, "kept": 1, "duplicate": 1, "notes": ["noted"]
    }  # fmt: skip


ROW = st.fixed_dictionaries(
    {
        "question": st.sampled_from(["a", "A", "held", "b c d e", "x b c d", "z" * 40]),
        "answer": st.sampled_from(["1", "22", "four"]),
    }
)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sets=st.lists(st.lists(ROW, min_size=1, max_size=8), min_size=1, max_size=3),
    data=st.data(),
)
def test_every_row_of_every_set_has_one_fate(
    sets: list[list[dict[str, str]]], data: st.DataObject, write_rows: WriteRows, tokenizer: Any
) -> None:
    """Against a count by hand; a first row that is always kept lets no set end empty."""
    how: Any = data.draw(st.sampled_from(["drop", "truncate"]))
    dedup: Any = data.draw(st.sampled_from(["none", "exact", "normalised"]))
    paths = [
        write_rows([{"question": f"first {i}", "answer": "1"}, *rows], f"{i}.jsonl")
        for i, rows in enumerate(sets)
    ]
    recipe = MixSettings(
        sets=tuple(
            MixedSet(
                path=path,
                filter="helpers.row_functions:short",
                on_too_long=how,
                max_len=50,
                max_lost_fraction=1.0,
            )
            for path in paths
        ),
        dedup=dedup,
    )
    held = HeldOut(frozenset({"held"}), 3, frozenset(ngrams("b c d", 3)))
    training_set = training_rows(load_conversations, recipe, tokenizer, exclude=held)
    seen: set[tuple[str, str]] = set()
    for account, rows in zip(training_set.accounts, sets, strict=True):
        wanted = {"kept": 1}
        for row in rows:
            fate = fate_of(row, how)
            question_and_answer = (row["question"], row["answer"])
            if dedup == "normalised":
                question_and_answer = (row["question"].lower(), row["answer"])
            if dedup != "none" and fate == "kept":
                fate = "duplicate" if question_and_answer in seen else fate
                seen.add(question_and_answer)
            wanted[fate] = wanted.get(fate, 0) + 1
        assert account.fates == wanted
        assert sum(account.fates.values()) == account.rows == len(rows) + 1
    assert table(training_set.accounts)[1][-1][1] == str(sum(map(len, sets)) + len(sets))


def fate_of(row: dict[str, str], how: str) -> str:
    if len(row["answer"]) > 2:
        return "filtered"
    if row["question"] == "held":
        return "excluded"
    if "b c d" in row["question"]:
        return "contaminated"
    if len(row["question"]) == 40:  # 61 tokens; what is cut off is all of the answer
        return "too_long" if how == "drop" else "no_loss"
    return "kept"
