"""Held-out questions: equal ones, and runs of words that a row shares with one."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.errors import UsageError
from postgrad.data.conversations import load_conversations
from postgrad.data.mixture import training_prompts, training_rows
from postgrad.data.overlap import HeldOut, held_out, ngrams, words
from postgrad.data.settings import DataSettings, MixSettings

WriteRows = Callable[..., str]
ASKED = "Kenny played 3 hours of tennis, then ran for 2 hours. How long did he play?"


def test_words_know_no_case_no_punctuation_and_no_width() -> None:
    assert words("It's 3.5 kg -- STRASSE, straße!") == [
        *("it", "s", "3", "5", "kg", "strasse", "strasse")
    ]
    assert words("ｆｕｌｌ　ｗｉｄｔｈ，ﬁne") == ["full", "width", "fine"]
    assert words("हिन्दी में कितने?") == ["हिन्दी", "में", "कितने"]
    assert words("小明有3个苹果。") == ["小", "明", "有", "3", "个", "苹", "果"]


def test_ngrams_are_all_runs_of_n_words() -> None:
    assert list(ngrams("a b, c D", 3)) == [("a", "b", "c"), ("b", "c", "d")]
    assert list(ngrams("a b", 3)) == []


@given(
    question=st.lists(st.sampled_from("abc"), min_size=1, max_size=12),
    text=st.lists(st.sampled_from("abc"), max_size=12),
    n=st.integers(1, 6),
)
def test_a_text_shares_words_exactly_where_n_of_them_stand_in_the_question(
    question: list[str], text: list[str], n: int
) -> None:
    grams = frozenset(ngrams(" ".join(question), n))
    spelled, text_letters = "".join(question), "".join(text)
    wanted = any(text_letters[i : i + n] in spelled for i in range(len(text_letters) - n + 1))
    assert HeldOut(frozenset({"x"}), n, grams).shares_words([" ".join(text)]) == wanted


@pytest.fixture
def held(write_rows: WriteRows) -> DataSettings:
    return DataSettings(path=write_rows([{"question": ASKED, "answer": ""}], "eval.jsonl"))


def test_a_row_that_shares_n_words_with_a_held_out_question_is_left_out(
    held: DataSettings, write_rows: WriteRows, tokenizer: Any
) -> None:
    rows = [
        {"question": "kenny PLAYED 3 hours of tennis then ran. How far?", "answer": "1"},  # 8 words
        {"question": "Kenny played 4 hours of tennis then ran.", "answer": "2"},  # 5 words
        {"question": ASKED.upper(), "answer": "3"},  # the question itself
        {"question": "Ask me", "answer": "then ran for 2 hours how long did"},  # 8, in the answer
        {"question": "Ask me", "answer": "no"},
    ]
    data = MixSettings(path=write_rows(rows))
    prompts = training_prompts(data, tokenizer, max_new_tokens=9, exclude=held_out([held], 8))
    assert prompts.accounts[0].fates == {"kept": 3, "excluded": 1, "contaminated": 1}
    conversations = training_rows(load_conversations, data, tokenizer, exclude=held_out([held], 8))
    assert [conversation.row for conversation in conversations.all()] == [1, 4]
    assert conversations.accounts[0].fates == {"kept": 2, "excluded": 1, "contaminated": 2}
    without = training_rows(load_conversations, data, tokenizer, exclude=held_out([held]))
    assert without.accounts[0].fates == {"kept": 4, "excluded": 1}


def test_a_templates_own_words_hide_no_held_out_question_and_share_none(
    held: DataSettings, write_rows: WriteRows, tokenizer: Any
) -> None:
    rows = [{"question": ASKED, "answer": "3"}, {"question": "Another one", "answer": "3"}]
    template = "Solve this problem and think well before you say a number: {question}"
    data = MixSettings(path=write_rows(rows), template=template)
    asked = held.model_copy(update={"template": template})
    for dataset in (held, asked):
        prompts = training_prompts(
            data, tokenizer, max_new_tokens=9, exclude=held_out([dataset], 8)
        )
        assert prompts.accounts[0].fates == {"kept": 1, "excluded": 1}


def test_rows_with_the_same_instruction_are_held_out_by_all_of_their_columns(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    rows = [{"question": "Guess!", "answer": "", "secret": secret} for secret in range(4)]
    held = DataSettings(path=write_rows(rows[:1], "eval.jsonl"))
    data = MixSettings(path=write_rows(rows))
    fates = {
        by: training_prompts(data, tokenizer, max_new_tokens=9, exclude=held_out([held], 0, by))
        .accounts[0]
        .fates
        for by in ("row", "none")
    }
    assert fates == {"row": {"kept": 3, "excluded": 1}, "none": {"kept": 4}}
    same = r"Do \[data\] and \[eval\] name the same rows\?(.|\n)*compares all columns"
    with pytest.raises(UsageError, match=same):
        training_prompts(data, tokenizer, max_new_tokens=9, exclude=held_out([held]))
