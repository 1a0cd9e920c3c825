"""Conversations for SFT: whole, cut or refused, and every row accounted for."""

from collections.abc import Callable
from typing import Any

import pytest

from postgrad.core.errors import UsageError
from postgrad.data.conversations import load_conversations
from postgrad.data.mixture import dataset_texts
from postgrad.data.overlap import HeldOut, Selection
from postgrad.data.settings import DataSettings

WriteRows = Callable[..., str]
ROWS = [
    {"question": "a", "answer": "bc"},
    {"question": "d", "answer": "e" * 30},
    {"question": "f", "answer": "g"},
]


def load(path: str, tokenizer: Any, **more: Any) -> Any:
    selection = more.pop("selection", None)
    return load_conversations(DataSettings(path=path, **more), tokenizer, selection=selection)


def test_a_conversation_has_its_tokens_and_loss_on_the_answer(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    conversation = load(write_rows(ROWS), tokenizer).all()[0]
    assert (conversation.ticket, conversation.row) == (0, 0)
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nbc<|im_end|>\n"
    assert tokenizer.decode(conversation.token_ids.tolist()) == text
    assert (
        tokenizer.decode(conversation.token_ids[conversation.loss_mask].tolist()) == "bc<|im_end|>"
    )


CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "b?"},
]


def test_all_of_a_conversation_may_bear_loss(write_rows: WriteRows, tokenizer: Any) -> None:
    rows = [{"messages": CHAT}, {"messages": CHAT[:3]}]
    loaded = load(write_rows(rows), tokenizer, messages="messages", loss_turns="everything")
    assert loaded.account.fates == {"kept": 2}
    assert not loaded.account.notes
    for conversation, messages in zip(loaded.all(), (CHAT, CHAT[:3]), strict=True):
        all_ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert conversation.token_ids.tolist() == all_ids
        assert conversation.loss_mask.tolist() == [False, *[True] * (len(all_ids) - 1)]
    (asked, _, _) = load(write_rows(ROWS), tokenizer, loss_turns="everything").all()
    assert tokenizer.decode(asked.token_ids[asked.loss_mask].tolist()) == (
        "user\na<|im_end|>\n<|im_start|>assistant\nbc<|im_end|>\n"
    )


def test_all_of_a_long_conversation_is_dropped_cut_or_an_error(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path, about = write_rows(ROWS), {"max_len": 30, "loss_turns": "everything"}
    assert load(path, tokenizer, **about).account.fates == {"kept": 2, "too_long": 1}
    cut = load(path, tokenizer, on_too_long="truncate", **about).all()[1]
    assert (len(cut.token_ids), int(cut.loss_mask.sum())) == (30, 29)
    huge = write_rows([*ROWS, {"question": "q" * 2**18, "answer": "a"}])
    assert load(huge, tokenizer, **about).account.fates == {"kept": 2, "too_long": 2}


@pytest.mark.parametrize("weight", [0, 0.5])
def test_a_weight_is_refused_where_all_of_a_conversation_bears_loss(
    weight: float, write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows([{"messages": [*CHAT[:2], {**CHAT[2], "weight": weight}, *CHAT[3:]]}])
    with pytest.raises(UsageError, match=rf":1: row 0 has a message with a weight of {weight}, "):
        load(path, tokenizer, messages="messages", loss_turns="everything")


def test_a_row_that_the_template_does_not_write_whole_is_shown_where_all_of_it_bears_loss(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    path = write_rows([{"messages": CHAT}, {"messages": [*CHAT[:2], message]}])
    with pytest.raises(UsageError, match=r":2: row 1 cannot be rendered: .* drops a call"):
        load(path, tokenizer, messages="messages", loss_turns="everything")


def test_tickets_draw_every_row_once_an_epoch(write_rows: WriteRows, tokenizer: Any) -> None:
    conversations = load(write_rows(ROWS), tokenizer)
    for epoch in range(3):
        assert sorted(conversations.draw(3 * epoch + i, seed=0).row for i in range(3)) == [0, 1, 2]


def test_long_conversations_are_dropped_cut_at_their_end_or_an_error(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows(ROWS)
    dropped = load(path, tokenizer, max_len=30)
    assert dropped.account.fates == {"kept": 2, "too_long": 1}
    cut = load(path, tokenizer, max_len=30, on_too_long="truncate")
    assert cut.account.fates == {"kept": 2, "truncated": 1}
    long = cut.all()[1]
    assert len(long.token_ids) == 30
    assert set(tokenizer.decode(long.token_ids[long.loss_mask].tolist())) == {"e"}
    with pytest.raises(UsageError, match=f"{path}:2: row 1 has .* tokens, data.max_len is 30"):
        load(path, tokenizer, max_len=30, on_too_long="error")


def test_a_conversation_cut_before_its_answer_has_no_loss_and_is_dropped(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    rows = [{"question": "q" * 30, "answer": "a"}, ROWS[0], ROWS[2]]
    conversations = load(write_rows(rows), tokenizer, max_len=30, on_too_long="truncate")
    assert conversations.account.fates == {"kept": 2, "no_loss": 1}


def test_rows_whose_answers_say_nothing_are_dropped_and_counted(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    rows = [ROWS[0], {"question": "q", "answer": ""}, {"question": "r", "answer": " \n"}]
    loaded = load(write_rows(rows), tokenizer, max_lost_fraction=1.0)
    assert loaded.account.fates == {"kept": 1, "empty": 2}


def test_a_last_answer_that_says_nothing_is_empty_where_the_loss_is_on_it_alone(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    turns = ["a?", "A", "b?", ""]
    chat = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
    unlearned = [chat[0], {**chat[1], "weight": 0}, *chat[2:]]
    path = write_rows([{"messages": chat}, {"messages": chat[:2]}, {"messages": unlearned}])
    last = load(path, tokenizer, messages="messages", loss_turns="last", max_lost_fraction=1.0)
    assert last.account.fates == {"kept": 1, "empty": 2}
    every = load(path, tokenizer, messages="messages")
    assert every.account.fates == {"kept": 2, "empty": 1}
    assert "1 row with an empty answer beside others: its end is learned" in every.account.notes


def test_a_template_that_ends_no_answer_is_told(write_rows: WriteRows, tokenizer: Any) -> None:
    """Nothing would teach the policy to stop."""
    path = write_rows(ROWS[:2])
    assert not any("learn to stop" in note for note in load(path, tokenizer).account.notes)
    endless = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    (note, *_) = load(path, tokenizer, chat_template=endless).account.notes
    assert note.startswith("2 training rows end without a special token, so the policy does not")


def test_a_row_that_cannot_be_marked_is_shown(
    write_rows: WriteRows, make_tokenizer: Callable[..., Any]
) -> None:
    template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'][:3] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    path = write_rows(ROWS)
    with pytest.raises(UsageError) as refused:
        load(path, make_tokenizer(template))
    message = str(refused.value)
    assert message.startswith(f"{path}:2: the learned tokens of row 1 cannot be marked")
    assert "drops text of message 1: 'eeeee" in message


def test_a_held_out_question_anywhere_in_a_chat_leaves_it_out(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    chat = [
        {"role": "user", "content": "Held out?"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "and this"},
        {"role": "assistant", "content": "no"},
    ]
    path = write_rows([{"messages": chat}, {"messages": chat[2:]}])
    held = HeldOut(frozenset({"held out?"}))
    conversations = load(path, tokenizer, messages="messages", selection=Selection(held))
    assert conversations.account.fates == {"kept": 1, "excluded": 1}


def test_only_the_last_turn_bears_loss_where_the_recipe_says_so(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b "},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    path = write_rows([{"messages": chat}])
    conversation = load(path, tokenizer, messages="messages", loss_turns="last", strip=True).all()[
        0
    ]
    assert (
        tokenizer.decode(conversation.token_ids[conversation.loss_mask].tolist()) == "d<|im_end|>"
    )
    assert "\nb<|im_end|>" in tokenizer.decode(conversation.token_ids.tolist())


def test_the_texts_of_a_dataset_are_all_its_messages(write_rows: WriteRows) -> None:
    path = write_rows(ROWS[:1])
    assert list(dataset_texts(DataSettings(path=path))) == ["a", "bc"]
    assert list(dataset_texts(DataSettings(path=path, answer="", system="s"))) == ["s", "a"]
    path = write_rows([{"question": "a", "answer": {"age": 3}}])  # what a verifier compares with
    assert list(dataset_texts(DataSettings(path=path))) == ["a", '{"age": 3}']
