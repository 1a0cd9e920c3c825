"""Layouts of rows: Alpaca's columns, prompt and completion, plain text; and what is not read."""

import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.chat import with_begin
from postgrad.core.errors import UsageError
from postgrad.data.conversations import load_conversations
from postgrad.data.draws import DrawnSet
from postgrad.data.overlap import HeldOut, Selection, keys
from postgrad.data.prompts import load_prompts
from postgrad.data.settings import DataSettings, PairSettings
from postgrad.models.named_templates import with_template

WriteRows = Callable[..., str]
ALPACA: dict[str, Any] = {"prompt": "instruction", "input": "input", "answer": "output"}
COMPLETION: dict[str, Any] = {"prompt": "prompt", "answer": "completion"}


def load(path: str, tokenizer: Any, **keys: Any) -> DrawnSet[Any]:
    selection = keys.pop("selection", None)
    return load_conversations(DataSettings(path=path, **keys), tokenizer, selection=selection)


def texts(drawn: DrawnSet[Any], tokenizer: Any) -> list[str]:
    return [tokenizer.decode(row.token_ids.tolist()) for row in drawn.all()]


def learned(drawn: DrawnSet[Any], tokenizer: Any) -> list[str]:
    return [tokenizer.decode(row.token_ids[row.loss_mask].tolist()) for row in drawn.all()]


def test_the_input_of_alpaca_is_a_new_line_of_the_question(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    rows = [
        {"instruction": "Add.", "input": "1 + 1", "output": "2"},
        {"instruction": "Say hi.", "input": "", "output": "hi"},
        {"instruction": "Say ho.", "input": None, "output": "ho"},
    ]
    drawn = load(write_rows(rows), tokenizer, **ALPACA)
    asked = [
        text.partition("user\n")[2].partition("<|im_end|>")[0] for text in texts(drawn, tokenizer)
    ]
    assert asked == ["Add.\n1 + 1", "Say hi.", "Say ho."]
    assert learned(drawn, tokenizer) == ["2<|im_end|>", "hi<|im_end|>", "ho<|im_end|>"]


def test_a_row_without_its_input_column_is_refused_with_row_and_key(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows([{"instruction": "a", "inputs": "b", "output": "c"}])
    with pytest.raises(
        UsageError, match=r"row 0 has no column 'input' \(data.input\); did you mean"
    ):
        load(path, tokenizer, **ALPACA)


def test_the_question_of_a_verifier_has_the_input_and_its_metadata_does_not(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows([{"instruction": "Add.", "input": "1 + 1", "output": "2", "level": 1}])
    settings = DataSettings(path=path, **ALPACA)
    (prompt,) = load_prompts(settings, tokenizer, max_prompt_tokens=500).all()
    assert (prompt.question, prompt.answer) == ("Add.\n1 + 1", "2")
    assert prompt.metadata == {"level": 1}


def test_prompt_and_completion_are_text_or_messages(write_rows: WriteRows, tokenizer: Any) -> None:
    history = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    rows = [
        {"prompt": "a", "completion": "b"},
        {"prompt": history, "completion": "d"},
        {"prompt": history, "completion": [{"role": "assistant", "content": "e"}]},
    ]
    drawn = load(write_rows(rows), tokenizer, **COMPLETION)
    assert learned(drawn, tokenizer) == ["b<|im_end|>", "d<|im_end|>", "e<|im_end|>"]
    assert texts(drawn, tokenizer)[1].startswith("<|im_start|>user\na<|im_end|>\n<|im_start|>assi")


def test_plain_text_with_the_completion_alone_learned(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    rows = [{"prompt": "1 + 1 = ", "completion": "2"}, {"prompt": "Hi", "completion": " ho"}]
    plain = with_template(copy.deepcopy(tokenizer), "plain")
    drawn = load(write_rows(rows), plain, **COMPLETION)
    eos = tokenizer.eos_token
    assert texts(drawn, tokenizer) == [f"1 + 1 = 2{eos}", f"Hi ho{eos}"]
    assert learned(drawn, tokenizer) == [f"2{eos}", f" ho{eos}"]


def test_a_prompt_that_is_no_conversation_is_refused_with_row_and_key(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows([{"prompt": [{"role": "user"}], "completion": "b"}])
    with pytest.raises(UsageError, match=r"column 'prompt' of row 0 is no conv.*\(data.prompt\)"):
        load(path, tokenizer, **COMPLETION)
    path = write_rows([{"prompt": "a", "completion": 3}])
    with pytest.raises(
        UsageError, match=r"'completion' of row 0 is int, not text \(data.answer\); leave"
    ):
        load(path, tokenizer, **COMPLETION)


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"text": "a"}, 'read with data.text = "text"'),
        (
            {"messages": [], "prompt": "a", "completion": "b"},
            'data.messages = "messages", or with data.prompt = "prompt", data.answer = ',
        ),
    ],
)
def test_the_error_for_a_missing_question_names_the_keys_of_a_known_layout(
    row: dict[str, Any], keys: str, write_rows: WriteRows, tokenizer: Any
) -> None:
    with pytest.raises(UsageError) as refused:
        load(write_rows([row]), tokenizer)
    assert keys in str(refused.value)


SAID: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
]


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"messages": SAID}, {"messages": "messages"}),
        ({"messages": SAID, "source": "x", "id": 3}, {"messages": "messages"}),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            {"messages": "conversations"},
        ),
        ({"instruction": "a", "input": "", "output": "b"}, ALPACA),
        ({"instruction": "a", "output": "b"}, {"prompt": "instruction", "answer": "output"}),
        ({"prompt": "a", "completion": "b"}, COMPLETION),
        ({"prompt": SAID[:1], "completion": SAID[1:]}, COMPLETION),
    ],
)
def test_a_known_layout_is_read_without_naming_it(
    row: dict[str, Any], keys: dict[str, Any], write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows([row, row])
    named, unnamed = load(path, tokenizer, **keys), load(path, tokenizer)
    assert texts(unnamed, tokenizer) == texts(named, tokenizer)
    assert learned(unnamed, tokenizer) == learned(named, tokenizer)
    stated = ", ".join(f'data.{key} = "{name}"' for key, name in keys.items())
    assert f"2 rows read with {stated}" in unnamed.account.notes
    rest = [note for note in unnamed.account.notes if "read with data." not in note]
    assert rest == list(named.account.notes)


def test_a_column_that_is_named_is_never_replaced_by_a_layout(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    row = {"messages": SAID, "question": "q", "answer": "r"}
    assert "q" in texts(load(write_rows([row]), tokenizer), tokenizer)[0]
    with pytest.raises(UsageError, match="has no column 'ask'"):
        load(write_rows([{"messages": SAID}]), tokenizer, prompt="ask")


def test_the_prompts_of_a_known_layout_are_read_without_naming_it(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    rows = [{"prompt": "a", "completion": "b", "level": 3}, {"messages": SAID}]
    settings = DataSettings(path=write_rows(rows))
    first, second = load_prompts(settings, tokenizer, max_prompt_tokens=50).all()
    assert (first.question, first.answer, first.metadata) == ("a", "b", {"level": 3})
    assert (second.question, second.answer, second.metadata) == ("a", None, {})


def test_plain_text_is_learned_whole_and_closed_by_the_end_of_text(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    drawn = load(write_rows([{"text": "abc"}, {"text": "de"}]), tokenizer, text="text")
    end = tokenizer.eos_token
    assert texts(drawn, tokenizer) == [f"abc{end}", f"de{end}"]
    assert [row.loss_mask.tolist() for row in drawn.all()] == [
        [False, True, True, True],
        [False, True, True],
    ]


@pytest.mark.parametrize("ends", [False, True])
def test_plain_text_that_a_template_wrote_begins_and_ends_once(
    ends: bool, write_rows: WriteRows, make_tokenizer: Callable[..., Any]
) -> None:
    begins = with_begin(make_tokenizer(), ends=ends)
    end = begins.eos_token
    rows = [{"text": "ab"}, {"text": f"<s>ab{end}"}]
    drawn = load(write_rows(rows), begins, text="text")
    assert texts(drawn, begins) == [f"<s>ab{end}"] * 2


def test_plain_text_needs_no_chat_template(
    write_rows: WriteRows, make_tokenizer: Callable[..., Any]
) -> None:
    bare = make_tokenizer("")
    bare.chat_template = None
    assert len(load(write_rows([{"text": "abc"}]), bare, text="text")) == 1


def test_blank_text_has_nothing_to_learn_from(write_rows: WriteRows, tokenizer: Any) -> None:
    drawn = load(write_rows([{"text": " "}, {"text": "a"}, {"text": "bc"}]), tokenizer, text="text")
    assert drawn.account.fates == {"kept": 2, "no_loss": 1}


@given(length=st.integers(1, 40), limit=st.integers(2, 12))
def test_a_split_text_has_each_token_but_the_first_in_one_loss(
    length: int, limit: int, tokenizer: Any
) -> None:
    rows = [{"text": "abcdefgh"[: 1 + length % 8] * length}]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text(json.dumps(rows[0]))
        drawn = load(str(path), tokenizer, text="text", max_len=limit, on_too_long="split")
    pieces = drawn.all()
    assert all(len(piece.token_ids) <= limit for piece in pieces)
    text_ids = tokenizer(rows[0]["text"], add_special_tokens=False)["input_ids"]
    joined = np.concatenate([piece.token_ids[piece.loss_mask] for piece in pieces])
    assert joined.tolist() == [*text_ids[1:], tokenizer.eos_token_id]
    for piece, following in itertools.pairwise(pieces):
        assert piece.token_ids[-1] == following.token_ids[0]
    assert drawn.account.fates == {"kept": 1}


def test_a_text_that_an_evaluation_has_too_is_held_out(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows([{"text": "the same"}, {"text": "another"}])
    held = keys(DataSettings(path=write_rows([{"text": "The  same"}], "held.jsonl"), text="text"))
    drawn = load(path, tokenizer, text="text", selection=Selection(HeldOut(held)))
    assert drawn.account.fates == {"kept": 1, "excluded": 1}


def test_columns_that_are_not_read_are_counted(write_rows: WriteRows, tokenizer: Any) -> None:
    rows = [
        {"instruction": "a", "input": "", "output": "b", "history": [["c", "d"]], "id": 1},
        {"instruction": "e", "input": "", "output": "f", "history": [], "id": 2},
    ]
    account = load(write_rows(rows), tokenizer, **ALPACA).account
    assert account.notes == ("columns that are not trained on: 'id' (2 rows), 'history' (1 row)",)


@pytest.mark.parametrize(
    "keys",
    [
        {"text": "text", "messages": "messages"},
        {"text": "text", "template": "{a}"},
        {"input": "input", "messages": "messages"},
        {"input": "input", "template": "{a}"},
        {"on_too_long": "split"},
    ],
)
def test_layouts_exclude_each_other(keys: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"exclude each other|split"):
        DataSettings(path="rows.jsonl", **keys)


def test_pairs_are_not_split() -> None:
    with pytest.raises(UsageError, match="split"):
        PairSettings(path="rows.jsonl", on_too_long="split")
