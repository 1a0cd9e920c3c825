"""Prompts by ticket; the same for conversations where both behave alike."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.image_directories import row, write_model
from postgrad.core.errors import UsageError
from postgrad.core.media import images_kept_in
from postgrad.core.records import Prompt
from postgrad.data.cache import TokenCache
from postgrad.data.conversations import load_conversations
from postgrad.data.messages import answer_of
from postgrad.data.overlap import HeldOut, Selection, keys, question_key
from postgrad.data.prompts import load_prompts
from postgrad.data.rows import Row
from postgrad.data.settings import DataSettings
from postgrad.models.config import load_config
from postgrad.models.image_reader import ImageReader
from postgrad.models.tokenizer import load_tokenizer

WriteRows = Callable[..., str]
FRAME = len("user\n") + len("assistant\n") + 4  # template tokens around a question


def rows_of(lengths: list[int]) -> list[dict[str, Any]]:
    return [{"question": "x" * n, "answer": str(i), "level": i} for i, n in enumerate(lengths)]


def load(path: str, tokenizer: Any, limit: int = 100, **more: Any) -> Any:
    selection = more.pop("selection", None)
    return load_prompts(
        DataSettings(path=path, **more), tokenizer, max_prompt_tokens=limit, selection=selection
    )


def test_a_prompt_has_its_tokens_its_answer_and_its_rows_other_columns(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    prompt = load(write_rows(rows_of([2, 3])), tokenizer, shuffle=False).draw(1, seed=0)
    text = "<|im_start|>user\nxxx<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.token_ids.tolist()) == text
    assert len(prompt.token_ids) == FRAME + 3
    assert (prompt.ticket, prompt.row, prompt.dataset) == (1, 1, "rows.jsonl")
    assert (prompt.question, prompt.answer) == ("xxx", "1")
    assert prompt.metadata == {"level": 1}


def test_a_token_may_stand_before_what_the_tokenizer_s_own_template_writes(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows(rows_of([2, 3]))
    template = '{{ eos_token }}{% include "tokenizer" %}'
    begun = load(path, tokenizer, shuffle=False, chat_template=template).draw(1, seed=0)
    plain = load(path, tokenizer, shuffle=False).draw(1, seed=0)
    assert begun.token_ids.tolist() == [tokenizer.eos_token_id, *plain.token_ids.tolist()]


def test_dropped_prompts_leave_no_gap_among_tickets(write_rows: WriteRows, tokenizer: Any) -> None:
    asked: list[int] = []

    def unreadable(prompts: Sequence[Prompt]) -> set[int]:
        asked.extend(prompt.ticket for prompt in prompts)
        return {prompt.ticket for prompt in prompts if prompt.answer in ("1", "4")}

    path = write_rows(rows_of([1, 1, 200, 1, 1, 1]))
    settings = DataSettings(path=path, on_unreadable="drop")
    prompts = load_prompts(settings, tokenizer, max_prompt_tokens=60, unreadable=unreadable)
    assert asked == [0, 1, 2, 3, 4]
    assert [(prompt.ticket, prompt.row) for prompt in prompts.all()] == [(0, 0), (1, 3), (2, 5)]
    assert prompts.account.fates == {"kept": 3, "too_long": 1, "unreadable": 2}
    assert prompts.account.examples["unreadable"].endswith("rows.jsonl:2")


def test_every_epoch_draws_every_row_once_in_another_order(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    prompts = load(write_rows(rows_of([1] * 20)), tokenizer)
    epochs = [[prompts.draw(20 * e + i, seed=3).row for i in range(20)] for e in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [prompts.draw(i, seed=4).row for i in range(20)] != epochs[0]
    assert [prompts.draw(i, seed=3).row for i in range(20)] == epochs[0]
    assert prompts.draw(47, seed=3).ticket == 47


def test_evaluation_takes_rows_in_their_order(write_rows: WriteRows, tokenizer: Any) -> None:
    prompts = load(write_rows(rows_of([1] * 5)), tokenizer).all()
    assert [(p.ticket, p.row) for p in prompts] == [(i, i) for i in range(5)]


def test_long_prompts_are_dropped_cut_at_their_beginning_or_an_error(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows(rows_of([1, 9, 2, 8]))
    limit = FRAME + 5
    dropped = load(path, tokenizer, limit)
    assert sorted(prompt.row for prompt in dropped.all()) == [0, 2]
    assert dropped.account.fates == {"kept": 2, "too_long": 2}
    cut = load(path, tokenizer, limit, on_too_long="truncate")
    assert cut.account.fates == {"kept": 2, "truncated": 2}
    uncut_prompt = load(path, tokenizer).all()[1]
    assert cut.all()[1].token_ids.tolist() == uncut_prompt.token_ids[-limit:].tolist()
    with pytest.raises(UsageError) as refused:
        load(path, tokenizer, limit, on_too_long="error")
    assert f"{path}:2: the prompt of row 1 has {FRAME + 9} tokens, the limit is {limit}" in str(
        refused.value
    )


@pytest.mark.parametrize("how", ["drop", "truncate", "error"])
def test_a_limit_that_leaves_no_room_for_a_prompt_is_refused(
    how: str, write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows(rows_of([1]))
    for limit in (0, -5):
        with pytest.raises(UsageError, match=rf"{path}: max_len = 32 tokens.* leaves no room"):
            load(path, tokenizer, limit, on_too_long=how, max_len=32)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "the tokenizer has no chat template"),
        ("{% if not add_generation_prompt %}x{% endif %}", "the chat template writes nothing"),
        ("{{ raise_exception('alternate!') }}", "the chat template refuses it: alternate!"),
    ],
    ids=["none", "empty", "refuses"],
)
def test_a_template_that_writes_no_prompt_is_named_with_the_row(
    template: str | None, why: str, write_rows: WriteRows, make_tokenizer: Callable[..., Any]
) -> None:
    path = write_rows(rows_of([1]))
    with pytest.raises(UsageError, match=rf"{path}:1: row 0: .*{why}"):
        load(path, make_tokenizer(template))


def test_variables_that_the_template_call_refuses_are_named_with_the_row(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows(rows_of([1]))
    with pytest.raises(UsageError, match=rf"{path}:1: row 0: .*continue_final_message"):
        load(path, tokenizer, chat_template_kwargs={"continue_final_message": True})


def test_too_many_lost_rows_stop_the_run(write_rows: WriteRows, tokenizer: Any) -> None:
    path = write_rows(rows_of([1, 9, 9, 9]))
    with pytest.raises(UsageError, match=r"3 of 4 rows are lost, more than data\.max_lost"):
        load(path, tokenizer, FRAME + 5)
    assert len(load(path, tokenizer, FRAME + 5, max_lost_fraction=0.75)) == 1
    with pytest.raises(UsageError, match="no row of 4 is left to use"):
        load(path, tokenizer, FRAME, max_lost_fraction=1.0)


def test_held_out_questions_are_left_out_whatever_their_case_and_spaces(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    rows = [{"question": q, "answer": ""} for q in ("Spell Sun", "spell  sun ", "spell moon")]
    held_out = write_rows([{"question": "SPELL SUN", "answer": ""}], "eval.jsonl")
    selection = Selection(HeldOut(keys(DataSettings(path=held_out))))
    prompts = load(write_rows(rows), tokenizer, selection=selection)
    assert [prompt.question for prompt in prompts.all()] == ["spell moon"]
    assert prompts.account.fates == {"kept": 1, "excluded": 2}
    assert prompts.account.lines()[1].endswith("rows.jsonl:1")
    assert question_key(" Straße\n") == question_key("STRASSE")


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12), data=st.data())
def test_every_row_is_accounted_for(
    lengths: list[int], data: st.DataObject, write_rows: WriteRows, tokenizer: Any
) -> None:
    how = data.draw(st.sampled_from(["drop", "truncate"]))
    held_out = data.draw(st.sets(st.sampled_from([question_key("x" * n) for n in range(13)])))
    path = write_rows(rows_of(lengths))
    selection = Selection(HeldOut(frozenset(held_out)))
    more = {"on_too_long": how, "max_lost_fraction": 1.0, "selection": selection}
    left = [n for n in lengths if question_key("x" * n) not in held_out]
    if how == "drop":
        left = [n for n in left if n <= 6]
    if not left:
        with pytest.raises(UsageError, match="is left to use"):
            load(path, tokenizer, FRAME + 6, **more)
        return
    prompts = load(path, tokenizer, FRAME + 6, **more)
    assert len(prompts) == len(left)
    account = prompts.account
    assert sum(account.fates.values()) == account.rows == len(lengths)
    assert account.kept == len(prompts)
    assert account.to_json()["rows"] == len(lengths)


def test_a_missing_column_is_named_with_the_row_and_the_nearest(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows([*rows_of([1]), {"qestion": "?", "answer": "1"}])
    with pytest.raises(UsageError) as refused:
        load(path, tokenizer)
    message = str(refused.value)
    assert f"{path}:2: row 1 has no column 'question' (data.prompt)" in message
    assert "did you mean 'qestion'?" in message


def test_a_question_that_is_no_text_is_named(write_rows: WriteRows, tokenizer: Any) -> None:
    path = write_rows([{"question": 5, "answer": "1"}])
    with pytest.raises(UsageError, match="column 'question' of row 0 is int, not text"):
        load(path, tokenizer)


def test_reference_answers_become_text_and_may_be_none(write_rows: WriteRows) -> None:
    row = Row(0, {"answer": 12, "none": None}, "rows:1")
    assert answer_of(row, DataSettings(path="x")) == "12"
    assert answer_of(row, DataSettings(path="x", answer="none")) is None
    assert answer_of(row, DataSettings(path="x", answer="")) is None


@pytest.mark.parametrize(
    ("value", "text"), [(0.00001, "0.00001"), (1e16, "10000000000000000"), (-7.5, "-7.5")]
)
def test_a_number_as_answer_is_written_without_an_exponent(value: float, text: str) -> None:
    row = Row(0, {"question": "?", "answer": value}, "x:1")
    assert answer_of(row, DataSettings(path="x")) == text


def test_a_chat_is_asked_up_to_its_last_user(write_rows: WriteRows, tokenizer: Any) -> None:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    path = write_rows([{"messages": chat, "id": 7}])
    prompt = load(path, tokenizer, messages="messages", system="be brief").all()[0]
    assert tokenizer.decode(prompt.token_ids.tolist()) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert (prompt.question, prompt.answer, prompt.metadata) == ("c", None, {"id": 7})


@pytest.mark.parametrize("chat", [[], "a", [{"role": "user"}], [{"role": "user", "content": 1}]])
def test_what_is_no_conversation_is_named(chat: Any, write_rows: WriteRows, tokenizer: Any) -> None:
    path = write_rows([{"messages": chat}])
    with pytest.raises(UsageError, match=r"row 0 is no conversation.*\(data\.messages\)"):
        load(path, tokenizer, messages="messages")


def test_a_character_that_the_tokenizer_lacks_is_named_with_its_row(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows([{"question": "a", "answer": "b"}, {"question": "naïve", "answer": "c"}])
    for read in (load, load_conversations_of):
        with pytest.raises(
            UsageError, match=rf"{path}:2: row 1 has a character that the tokenizer"
        ):
            read(path, tokenizer)


def load_conversations_of(path: str, tokenizer: Any) -> Any:
    return load_conversations(DataSettings(path=path), tokenizer)


def test_a_template_makes_the_question_from_columns(write_rows: WriteRows, tokenizer: Any) -> None:
    rows = [{"a": "x", "b": 3, "answer": "1", "left": True}, {"a": "y", "b": 0.5, "answer": "2"}]
    path = write_rows(rows)
    prompts = load(path, tokenizer, template="{{Q}}: {a} + {b}\nA:").all()
    texts = [tokenizer.decode(prompt.token_ids.tolist()) for prompt in prompts]
    assert texts[0] == "<|im_start|>user\n{Q}: x + 3\nA:<|im_end|>\n<|im_start|>assistant\n"
    assert "{Q}: y + 0.5\nA:" in texts[1]
    assert [prompt.question for prompt in prompts] == ["x\n3", "y\n0.5"]
    assert prompts[0].metadata == {"a": "x", "b": 3, "left": True}
    assert load(path, tokenizer, template="{a}?").all()[0].metadata == {"b": 3, "left": True}
    conversation = load_conversations(DataSettings(path=path, template="{a}?"), tokenizer).all()[0]
    assert "user\nx?<|im_end|>" in tokenizer.decode(conversation.token_ids.tolist())


def test_a_template_that_names_no_text_is_refused(write_rows: WriteRows, tokenizer: Any) -> None:
    path = write_rows([{"question": "a", "list": ["b"], "answer": "1"}])
    with pytest.raises(UsageError, match=r"no column 'qestion' \(data\.template\); did you mean"):
        load(path, tokenizer, template="{qestion}")
    with pytest.raises(UsageError, match=r"'list' of row 0 is list, not text \(data\.template\)"):
        load(path, tokenizer, template="{list}")
    for template, why in (
        ("no column", "it names no column"),
        ("{}", "braces hold the name of a column"),
        ("{question:>3}", "braces hold the name of a column"),
        ("{question", "expected '}'"),
        ("question}", "Single '}'"),
    ):
        with pytest.raises(UsageError, match=why):
            DataSettings(path=path, template=template)
    with pytest.raises(UsageError, match="template makes a question from columns, messages"):
        DataSettings(path=path, template="{question}", messages="chat")


def test_a_dataset_may_have_a_chat_template_of_its_own_as_text_or_file(
    write_rows: WriteRows, tokenizer: Any, tmp_path: Path
) -> None:
    chat_template = (
        "{% for m in messages %}{{ m['role'][0] + '>' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a>' }}{% endif %}"
    )
    path = write_rows([{"question": "q", "answer": "r"}])
    (tmp_path / "own.jinja").write_text(chat_template, "utf-8")
    for template in (chat_template, str(tmp_path / "own.jinja")):
        prompt = load(path, tokenizer, chat_template=template).all()[0]
        assert tokenizer.decode(prompt.token_ids.tolist()) == "u>q\na>"
        settings = DataSettings(path=path, chat_template=template)
        conversation = load_conversations(settings, tokenizer).all()[0]
        assert tokenizer.decode(conversation.token_ids.tolist()) == "u>q\na>r\n"
        assert tokenizer.decode(conversation.token_ids[conversation.loss_mask].tolist()) == "r\n"
    with pytest.raises(UsageError, match=r"data\.chat_template 'none\.jinja' cannot be read: "):
        load(path, tokenizer, chat_template="none.jinja")
    with pytest.raises(UsageError, match=rf"{path}:1: row 0: the chat template refuses it"):
        load(path, tokenizer, chat_template="{{ 1 / 0 }}")


def test_a_cut_prompt_keeps_whole_images_and_never_half_of_one(
    write_rows: WriteRows, tmp_path: Path
) -> None:
    path = write_model("smolvlm", tmp_path / "model")
    tokenizer = load_tokenizer(path)
    with images_kept_in(tmp_path / "images"):
        reader = ImageReader(path, load_config(path), tokenizer)
        rows = [{**row(n, "yes", ((16, 16), (16, 16))), "answer": "yes"} for n in range(2)]
        settings = DataSettings(
            path=write_rows(rows), messages="messages", on_too_long="truncate", shuffle=False
        )

        def prompts(limit: int) -> list[Any]:
            return load_prompts(settings, tokenizer, max_prompt_tokens=limit, reader=reader).all()

        prompt = prompts(200)[0]
        first, second = prompt.images
        for image in (first, second):
            assert len(image.at) == 20  # four tiles and all of it
            assert set(prompt.token_ids[image.at]) == {reader.token_id}
        left = len(prompt.token_ids) - int(first.at[-1]) - 1  # all behind the first image
        cut = prompts(left)[0]
        assert cut.token_ids.tolist() == prompt.token_ids[-left:].tolist()
        assert [image.digest for image in cut.images] == [second.digest]
        assert cut.images[0].at.tolist() == (second.at - int(first.at[-1]) - 1).tolist()
        with pytest.raises(UsageError, match="dropped: over the limit"):
            prompts(left + 1)  # its last token would be left


def test_a_grader_s_prompt_has_the_hint_behind_the_user_s_last_text(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows(rows_of([2, 3]))
    prompt = load(path, tokenizer, shuffle=False, hint="{level} {{ {answer}").draw(1, seed=0)
    text = "<|im_start|>user\nxxx\n\n1 { 1<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.hinted.token_ids.tolist()) == text
    plain = load(path, tokenizer, shuffle=False).draw(1, seed=0)
    assert prompt.hinted.answer_at is None
    assert plain.hinted is None
    assert prompt.token_ids.tolist() == plain.token_ids.tolist()  # the policy does not see it
    assert (prompt.question, prompt.metadata) == (plain.question, plain.metadata)


@pytest.mark.parametrize("cached", [False, True])
def test_a_hint_has_a_place_for_a_right_answer_of_the_group(
    cached: bool, write_rows: WriteRows, tokenizer: Any, tmp_path: Path
) -> None:
    path = write_rows(rows_of([2, 3]))
    cache = TokenCache(tokenizer, tmp_path / "cache") if cached else None
    hint = "{level} see {group.answer}!"
    for _ in range(2):  # written, and read where there is a cache
        settings = DataSettings(path=path, shuffle=False, hint=hint)
        prompts: Any = load_prompts(settings, tokenizer, max_prompt_tokens=90, cache=cache)
        hinted = prompts.draw(1, seed=0).hinted
        before, behind = hinted.token_ids[: hinted.answer_at], hinted.token_ids[hinted.answer_at :]
        assert tokenizer.decode(before.tolist()) == "<|im_start|>user\nxxx\n\n1 see "
        assert tokenizer.decode(behind.tolist()) == "!<|im_end|>\n<|im_start|>assistant\n"
        assert hinted.room == 90 - len(hinted.token_ids) > 0


def test_a_prompt_that_is_cut_has_no_room_for_a_right_answer(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows([{**rows_of([9])[0], "help": "y" * 60}])
    (prompt,) = load(path, tokenizer, 30, hint="{help}{group.answer}", on_too_long="truncate").all()
    assert (len(prompt.hinted.token_ids), prompt.hinted.room) == (30, 0)
    assert 0 <= prompt.hinted.answer_at <= 30


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x", "answer": "1", "group": {"answer": "2"}}, r"column 'group\.answer'"),
        ({"question": "x", "answer": "1\ufdd0"}, r"2 places for \{group\.answer\}.*U\+FDD0"),
    ],
)
def test_a_row_in_which_the_place_of_a_right_answer_is_not_clear_is_an_error(
    row: Any, message: str, write_rows: WriteRows, tokenizer: Any
) -> None:
    with pytest.raises(UsageError, match=message):
        load(write_rows([row]), tokenizer, hint="{answer}{group.answer}")


@pytest.mark.parametrize(("policy", "left"), [("drop", ["0"]), ("truncate", ["0", "1"])])
def test_a_prompt_whose_hint_is_too_long_is_too_long(
    policy: str, left: list[str], write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows([{**row, "help": "y" * 40 * n} for n, row in enumerate(rows_of([2, 3]))])
    prompts = load(path, tokenizer, 40, hint="{help}", on_too_long=policy, max_lost_fraction=1.0)
    assert [prompt.answer for prompt in prompts.all()] == left
    assert all(len(prompt.hinted.token_ids) <= 40 for prompt in prompts.all())
    if policy == "truncate":
        assert tokenizer.decode(prompts.all()[1].hinted.token_ids.tolist()).endswith("assistant\n")


@pytest.mark.parametrize(
    ("row_", "message"),
    [
        ({"question": "a", "answer": "b", "help": None}, r"column 'help' of row 0 .*data\.hint"),
        ({"question": "a", "answer": "b"}, r"no column 'help'.*data\.hint"),
        (
            {"messages": [{"role": "system", "content": "a"}], "help": "b", "answer": "c"},
            r"row 0 has no message of a user, and data\.hint stands behind",
        ),
    ],
)
def test_a_row_without_what_its_hint_names_is_an_error(
    row_: dict[str, Any], message: str, write_rows: WriteRows, tokenizer: Any
) -> None:
    with pytest.raises(UsageError, match=message):
        load(write_rows([row_]), tokenizer, hint="{help}")
