"""Conversations of several answers: one text, or one for each where the template rewrites."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.chat_families import FAMILIES, PHI3, QWEN3
from postgrad.core.errors import UsageError
from postgrad.data import cache as caching
from postgrad.data.cache import TokenCache
from postgrad.data.conversations import load_conversations
from postgrad.data.pairs import load_pairs
from postgrad.data.settings import DataSettings, PairSettings
from postgrad.tools.dry_run.data import key_of

WriteRows = Callable[..., str]
Make = Callable[..., Any]
CHAT = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "<think>\nto add\n</think>\n\n2"},
    {"role": "user", "content": "and 2 + 2?"},
    {"role": "assistant", "content": "<think>\nagain\n</think>\n\n4"},
]


def load(path: str, tokenizer: Any, cache: TokenCache | None = None, **more: Any) -> Any:
    wanted = DataSettings(path=path, messages="messages", **more)
    return load_conversations(wanted, tokenizer, cache=cache)


def told(tokenizer: Any, one: Any) -> tuple[str, str]:
    """(what is read, what is learned)."""
    ids, mask = one.token_ids, one.loss_mask
    return tokenizer.decode(ids[~mask].tolist()), tokenizer.decode(ids[mask].tolist())


def test_qwen3_is_unrolled_into_what_the_model_reads_and_writes_at_each_turn(
    write_rows: WriteRows, make_tokenizer: Make
) -> None:
    tokenizer = make_tokenizer(QWEN3.template, QWEN3.special)
    found = load(write_rows([{"messages": CHAT}]), tokenizer)
    first, second = found.all()
    start = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert told(tokenizer, first) == (
        f"{start}\n",
        "<think>\nto add\n</think>\n\n2<|im_end|>",
    )
    assert told(tokenizer, second) == (
        f"{start}2<|im_end|>\n<|im_start|>user\nand 2 + 2?<|im_end|>\n<|im_start|>assistant\n\n",
        "<think>\nagain\n</think>\n\n4<|im_end|>",
    )
    assert [(one.ticket, one.row, one.text) for one in (first, second)] == [(0, 0, 0), (1, 0, 1)]
    assert len({key_of(one) for one in (first, second)}) == 2


def test_an_unrolled_row_is_one_row_and_its_answers_are_counted_beside(
    write_rows: WriteRows, make_tokenizer: Make
) -> None:
    tokenizer = make_tokenizer(QWEN3.template, QWEN3.special)
    path = write_rows([{"messages": CHAT}, {"messages": CHAT[:2]}, {"messages": CHAT * 2}])
    found = load(path, tokenizer)
    assert found.account.fates == {"kept": 3}
    assert len(found) == 2 + 1 + 4
    (note,) = found.account.notes
    assert note.startswith("2 rows are unrolled into 6 training rows, one for each answer")
    assert sorted(found.draw(i, seed=0).ticket for i in range(7)) == list(range(7))
    assert len({key_of(found.draw(i, seed=0)) for i in range(7)}) == 7


def test_of_an_unrolled_row_only_the_answers_that_fit_are_used(
    write_rows: WriteRows, make_tokenizer: Make
) -> None:
    tokenizer = make_tokenizer(QWEN3.template, QWEN3.special)
    path = write_rows([{"messages": CHAT}])
    first, second = load(path, tokenizer).all()
    between = len(first.token_ids)
    assert between < len(second.token_ids)
    short = load(path, tokenizer, max_len=between)
    assert short.account.fates == {"truncated": 1}
    assert [one.text for one in short.all()] == [0]
    with pytest.raises(UsageError, match="no row of 1 is left"):
        load(path, tokenizer, max_len=between - 1)
    with pytest.raises(UsageError, match=f"row 0 has {len(second.token_ids)} tokens"):
        load(path, tokenizer, max_len=between, on_too_long="error")


def test_the_last_answer_alone_is_one_row_as_before(
    write_rows: WriteRows, make_tokenizer: Make
) -> None:
    tokenizer = make_tokenizer(QWEN3.template, QWEN3.special)
    path = write_rows([{"messages": CHAT}])
    (last,) = load(path, tokenizer, loss_turns="last").all()
    assert np.array_equal(last.token_ids, load(path, tokenizer).all()[1].token_ids)


def test_phi3_appends_its_end_of_text_and_is_one_row(
    write_rows: WriteRows, make_tokenizer: Make
) -> None:
    tokenizer = make_tokenizer(PHI3.template, PHI3.special)
    found = load(write_rows([{"messages": CHAT}]), tokenizer)
    (one,) = found.all()
    assert found.account.notes == ()
    said = "<think>\nto add\n</think>\n\n2<|end|><think>\nagain\n</think>\n\n4<|end|>"
    assert told(tokenizer, one)[1] == said
    assert tokenizer.decode(one.token_ids.tolist()).endswith("4<|end|>\n<|endoftext|>")


TEXT = st.text("abc \n1?", min_size=1, max_size=8).map(str.strip).filter(bool)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4))
def test_every_answer_of_every_family_is_learned_once_behind_its_prompt(
    name: str, said: list[tuple[str, str]], tmp_path: Path, write_rows: WriteRows,
    make_tokenizer: Make,
) -> None:  # fmt: skip
    family = FAMILIES[name]
    tokenizer = make_tokenizer(family.template, family.special)
    messages = [
        {"role": role, "content": text}
        for pair in said
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    learned: list[str] = []
    for one in load(write_rows([{"messages": messages}]), tokenizer).all():
        ids, mask = one.token_ids, one.loss_mask
        edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            learned.append(tokenizer.decode(ids[start:end].tolist()))
            before = tokenizer.apply_chat_template(
                messages[: 2 * len(learned) - 1], tokenize=False, add_generation_prompt=True
            )
            assert tokenizer.decode(ids[:start].tolist()) == before
    empty = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    lead = " " if name == "mistral" else empty
    assert learned == [f"{lead}{answer}{family.ends}" for _, answer in said]


def test_unrolled_rows_are_the_same_bits_from_the_cache(
    write_rows: WriteRows, make_tokenizer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caching, "SMALLEST", 1)
    tokenizer = make_tokenizer(QWEN3.template, QWEN3.special)
    path = write_rows([{"messages": CHAT}, {"messages": CHAT[:2]}])
    made, read = (load(path, tokenizer, TokenCache(tokenizer, tmp_path)) for _ in range(2))
    assert "tokens from the cache (data.cache)" in read.account.notes
    assert len(made) == len(read) == 3
    for one, other in zip(made.all(), read.all(), strict=True):
        assert (one.row, one.text) == (other.row, other.text)
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.loss_mask, other.loss_mask)


def test_a_pair_whose_answers_are_rewritten_is_refused_with_its_row(
    write_rows: WriteRows, make_tokenizer: Make
) -> None:
    tokenizer = make_tokenizer(QWEN3.template, QWEN3.special)
    other = [CHAT[0], {"role": "assistant", "content": "3"}, *CHAT[2:]]
    path = write_rows([{"chosen": CHAT, "rejected": other}])
    with pytest.raises(UsageError, match=r"row 0 .*differently when more messages follow"):
        load_pairs(PairSettings(path=path), tokenizer)


def test_an_answer_may_begin_with_what_the_generation_prompt_ends_with(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows([{"question": "1?", "answer": "<think>one</think> 1"}])
    wanted = DataSettings(path=path, chat_template="tulu_thinker")
    (one,) = load_conversations(wanted, tokenizer).all()
    assert told(tokenizer, one) == (
        "<|user|>\n1?\n<|assistant|>\n<think>",
        "one</think> 1<|im_end|>",
    )


# Drops thoughts in every turn of the assistant, the newest too, as DeepSeek-R1-Distill's does.
DROPS_THOUGHTS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content }}"
    "{% else %}{{ '<|assistant|>' + m.content.split('</think>')[-1] + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>OPENING' }}{% endif %}"
)
MARKS = ("<|user|>", "<|assistant|>", "<|end|>")


@pytest.mark.parametrize("opening", ["<think>\\n", ""])
def test_thoughts_that_a_template_drops_everywhere_are_learned_as_the_policy_writes_them(
    opening: str, write_rows: WriteRows, make_tokenizer: Make
) -> None:
    tokenizer = make_tokenizer(DROPS_THOUGHTS.replace("OPENING", opening), MARKS)
    first, second = load(write_rows([{"messages": CHAT}]), tokenizer).all()
    opened, thought = ("<think>\n", "") if opening else ("", "<think>\n")
    assert told(tokenizer, first) == (
        f"<|user|>1 + 1?<|assistant|>{opened}",
        f"{thought}to add\n</think>\n\n2<|end|>",
    )
    assert told(tokenizer, second) == (
        f"<|user|>1 + 1?<|assistant|>\n\n2<|end|><|user|>and 2 + 2?<|assistant|>{opened}",
        f"{thought}again\n</think>\n\n4<|end|>",
    )
    (last,) = load(write_rows([{"messages": CHAT}]), tokenizer, loss_turns="last").all()
    assert told(tokenizer, last) == told(tokenizer, second)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_thoughts_in_a_key_of_their_own_are_written_where_the_prompt_opens_them(
    key: str, write_rows: WriteRows, make_tokenizer: Make
) -> None:
    tokenizer = make_tokenizer(DROPS_THOUGHTS.replace("OPENING", "<think>\\n"), MARKS)
    said = {"role": "assistant", "content": "2", key: "to add\n"}
    again = {"role": "assistant", "content": "4", key: "again"}
    path = write_rows([{"messages": [CHAT[0], said, CHAT[2], again]}])
    first, second = load(path, tokenizer).all()
    assert told(tokenizer, first) == (
        "<|user|>1 + 1?<|assistant|><think>\n",
        "to add\n</think>\n\n2<|end|>",
    )
    assert told(tokenizer, second) == (
        "<|user|>1 + 1?<|assistant|>2<|end|><|user|>and 2 + 2?<|assistant|><think>\n",
        "again\n</think>\n\n4<|end|>",
    )


@pytest.mark.parametrize("opening", ["<think>", ""])
def test_thoughts_in_a_key_of_their_own_are_refused_where_their_form_is_not_known(
    opening: str, write_rows: WriteRows, make_tokenizer: Make
) -> None:
    tokenizer = make_tokenizer(DROPS_THOUGHTS.replace("OPENING", opening), MARKS)
    said = {"role": "assistant", "content": "2", "reasoning_content": "to add"}
    path = write_rows([{"messages": [CHAT[0], said]}])
    with pytest.raises(UsageError, match=r"drops reasoning_content|which opens thoughts"):
        load(path, tokenizer)


def test_an_opening_tag_is_written_once_whatever_follows_it(
    write_rows: WriteRows, make_tokenizer: Make
) -> None:
    tokenizer = make_tokenizer(DROPS_THOUGHTS.replace("OPENING", "<think>\\n"), MARKS)
    rows = [
        {"question": "1?", "answer": f"{begin}one</think>1"}
        for begin in ("<think>", "<think>\n", "")
    ]
    found = load_conversations(DataSettings(path=write_rows(rows)), tokenizer).all()
    assert {told(tokenizer, one) for one in found} == {
        ("<|user|>1?<|assistant|><think>\n", "one</think>1<|end|>")
    }


def test_an_answer_without_thoughts_behind_a_prompt_that_opens_them_is_refused_with_what_to_do(
    write_rows: WriteRows, make_tokenizer: Make
) -> None:
    tokenizer = make_tokenizer(DROPS_THOUGHTS.replace("OPENING", "<think>\\n"), MARKS)
    path = write_rows([{"question": "1?", "answer": "1"}])
    with pytest.raises(UsageError, match=r"which opens thoughts: begin the message's content with"):
        load_conversations(DataSettings(path=path), tokenizer)
