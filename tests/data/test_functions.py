"""data.filter and data.map: what they drop is counted, what they do wrong is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from postgrad.core.errors import UsageError
from postgrad.data.conversations import load_conversations
from postgrad.data.functions import prepared_rows
from postgrad.data.mixture import dataset_texts
from postgrad.data.overlap import keys
from postgrad.data.prompts import load_prompts
from postgrad.data.settings import DataSettings, PairSettings

WriteRows = Callable[..., str]
HERE = "helpers.row_functions"
ROWS = [
    {"question": "a", "answer": "bc"},
    {"question": "d", "answer": "eee"},
    {"question": "f", "answer": "g"},
]


def test_a_filter_says_which_rows_stay_and_they_keep_their_numbers(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    settings = DataSettings(path=write_rows(ROWS), filter=f"{HERE}:short")
    for loaded in (
        load_conversations(settings, tokenizer),
        load_prompts(settings, tokenizer, max_prompt_tokens=50),
    ):
        assert [row.row for row in loaded.all()] == [0, 2]
        assert loaded.account.fates == {"kept": 2, "filtered": 1}
        assert loaded.account.rows == 3
        assert "left out by data.filter, such as" in loaded.account.lines()[1]


def test_what_a_filter_leaves_out_is_not_lost(write_rows: WriteRows, tokenizer: Any) -> None:
    rows = [*ROWS, *({"question": str(i), "answer": "long"} for i in range(20))]
    settings = DataSettings(path=write_rows(rows), filter=f"{HERE}:short", max_lost_fraction=0.0)
    assert len(load_conversations(settings, tokenizer)) == 2
    none = settings.model_copy(update={"filter": f"{HERE}:nothing"})
    with pytest.raises(UsageError, match=r"no row of 23 is left to use(.|\n)*23  left out by data"):
        load_conversations(none, tokenizer)


def test_a_map_changes_rows_before_anything_reads_them(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    settings = DataSettings(path=write_rows(ROWS), map=f"{HERE}:shouts", filter=f"{HERE}:short")
    prompt = load_prompts(settings, tokenizer, max_prompt_tokens=50).all()[1]
    assert (prompt.question, prompt.row) == ("F", 2)
    assert prompt.metadata == {"shape": [1, 2]}  # as JSON has it
    assert list(dataset_texts(settings)) == ["A", "bc", "F", "g"]
    assert keys(settings) == {"a", "f"}


@pytest.mark.parametrize(
    ("key", "name", "why"),
    [
        ("filter", "says_no_bool", "returned 2 for row 0; True keeps a row, False leaves it out"),
        ("filter", "fails", "raised KeyError: 'level' (row_functions.py:22) at row 0"),
        ("map", "says_no_row", "returned ['question', 'answer'] for row 0; a row is a dict"),
        ("map", "says_no_json", "for row 0; its values have to be JSON: "),
        ("map", "says_half_a_character", "for row 0; its values have to be JSON: 'utf-8' codec"),
    ],
)
def test_a_function_that_fails_or_returns_something_else_is_named_with_the_row(
    key: str, name: str, why: str, write_rows: WriteRows
) -> None:
    path = write_rows(ROWS)
    with pytest.raises(UsageError) as refused:
        list(prepared_rows(DataSettings.model_validate({"path": path, key: f"{HERE}:{name}"})))
    assert str(refused.value).startswith(f"{path}:1: data.{key} '{HERE}:{name}' ")
    assert why in str(refused.value)


def test_a_function_that_is_not_there_is_named(
    write_rows: WriteRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(ROWS)
    for name, why in (
        ("helpers.rowfunctions:short", "module 'helpers.rowfunctions' cannot be imported"),
        (f"{HERE}:shoutz", "has no 'shoutz'; did you mean 'shouts'?"),
        (f"{HERE}:NUMBER", "is int, not a function of a row"),
    ):
        with pytest.raises(UsageError) as refused:
            list(prepared_rows(DataSettings(path=path, filter=name)))
        assert why in str(refused.value)
        assert str(refused.value).startswith(f"data.filter {name!r}")
    (tmp_path / "breaks_when_imported.py").write_text("1 / 0\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="module cannot be imported: ZeroDivisionError"):
        list(prepared_rows(DataSettings(path=path, map="breaks_when_imported:change")))
    with pytest.raises(UsageError, match=r"a function is named as 'package\.module:function'"):
        DataSettings(path=path, map="change")


VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
}


def test_a_column_may_lie_within_another(write_rows: WriteRows, tokenizer: Any) -> None:
    settings = DataSettings(
        path=write_rows([VERL_ROW]), messages="prompt", answer="reward_model.ground_truth"
    )
    prompt = load_prompts(settings, tokenizer, max_prompt_tokens=50).all()[0]
    assert (prompt.question, prompt.answer) == ("1 + 1?", "2")
    assert prompt.metadata["data_source"] == "openai/gsm8k"
    assert prompt.metadata["reward_model"] == VERL_ROW["reward_model"]


def test_a_column_that_has_such_a_name_itself_comes_first(write_rows: WriteRows) -> None:
    rows = [{"a": {"b": 1}, "a.b": 2, "c": {"d": {"e": None}}}]
    settings = DataSettings(path=write_rows(rows), prompt="a.b", answer="c.d.e")
    (row,) = list(prepared_rows(settings))
    assert (row.values["a.b"], row.values["c.d.e"]) == (2, None)


def test_a_template_reads_columns_within_others(write_rows: WriteRows, tokenizer: Any) -> None:
    rows = [{"q": {"text": "Why?"}, "answer": "so"}]
    settings = DataSettings(path=write_rows(rows), template="Q: {q.text}")
    assert list(dataset_texts(settings)) == ["Q: Why?", "so"]


def test_a_place_that_a_column_lacks_is_an_error_with_the_keys_that_it_has(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    settings = DataSettings(
        path=write_rows([{"question": "q", "reward_model": {"style": "rule"}}]),
        answer="reward_model.truth",
    )
    message = r"no column 'reward_model\.truth' \(data\.answer\); the object in 'reward_model' has"
    with pytest.raises(UsageError, match=message + " the keys style"):
        load_prompts(settings, tokenizer, max_prompt_tokens=50)


def test_columns_of_pairs_may_lie_within_others(write_rows: WriteRows) -> None:
    rows = [{"pair": {"good": "a", "bad": "b"}, "prompt": "q"}]
    settings = PairSettings(path=write_rows(rows), chosen="pair.good", rejected="pair.bad")
    (row,) = list(prepared_rows(settings))
    assert (row.values["pair.good"], row.values["pair.bad"]) == ("a", "b")
