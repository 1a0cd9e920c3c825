"""Conversations of several answers: one text, or one for each where the template rewrites."""

from collections.abc import Callable
from itertools import pairwise
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
from postgrad.data.pairs import load_labelled, load_pairs
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


def decoded(tokenizer: Any, text_row: Any) -> tuple[str, str]:
    """(what is read, what is learned)."""
    ids, mask = text_row.token_ids, text_row.loss_mask
    return tokenizer.decode(ids[~mask].tolist()), tokenizer.decode(ids[mask].tolist())


def test_qwen3_is_unrolled_into_what_the_model_reads_and_writes_at_each_turn(
    write_rows: WriteRows, make_tokenizer: Make
) -> None:
    tokenizer = make_tokenizer(QWEN3.template, QWEN3.special)
    conversations = load(write_rows([{"messages": CHAT}]), tokenizer)
    first, second = conversations.all()
    start = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert decoded(tokenizer, first) == (
        f"{start}\n",
        "<think>\nto add\n</think>\n\n2<|im_end|>",
    )
    assert decoded(tokenizer, second) == (
        f"{start}2<|im_end|>\n<|im_start|>user\nand 2 + 2?<|im_end|>\n<|im_start|>assistant\n\n",
        "<think>\nagain\n</think>\n\n4<|im_end|>",
    )
    assert [(each.ticket, each.row, each.text) for each in (first, second)] == [
        (0, 0, 0),
        (1, 0, 1),
    ]
    assert len({key_of(each) for each in (first, second)}) == 2


def test_an_unrolled_row_is_one_row_and_its_answers_are_counted_beside(
    write_rows: WriteRows, make_tokenizer: Make
) -> None:
    tokenizer = make_tokenizer(QWEN3.template, QWEN3.special)
    path = write_rows([{"messages": CHAT}, {"messages": CHAT[:2]}, {"messages": CHAT * 2}])
    conversations = load(path, tokenizer)
    assert conversations.account.fates == {"kept": 3}
    assert len(conversations) == 2 + 1 + 4
    (note,) = conversations.account.notes
    assert note.startswith("2 rows are unrolled into 6 training rows, one for each answer")
    assert sorted(conversations.draw(i, seed=0).ticket for i in range(7)) == list(range(7))
    assert len({key_of(conversations.draw(i, seed=0)) for i in range(7)}) == 7


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
    assert [conversation.text for conversation in short.all()] == [0]
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
    conversations = load(write_rows([{"messages": CHAT}]), tokenizer)
    (conversation,) = conversations.all()
    assert conversations.account.notes == ()
    learned_text = "<think>\nto add\n</think>\n\n2<|end|><think>\nagain\n</think>\n\n4<|end|>"
    assert decoded(tokenizer, conversation)[1] == learned_text
    assert tokenizer.decode(conversation.token_ids.tolist()).endswith("4<|end|>\n<|endoftext|>")


TEXT = st.text("abc \n1?", min_size=1, max_size=8).map(str.strip).filter(bool)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(exchanges=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4))
def test_every_answer_of_every_family_is_learned_once_behind_its_prompt(
    name: str, exchanges: list[tuple[str, str]], tmp_path: Path, write_rows: WriteRows,
    make_tokenizer: Make,
) -> None:  # fmt: skip
    family = FAMILIES[name]
    tokenizer = make_tokenizer(family.template, family.special)
    messages = [
        {"role": role, "content": text}
        for pair in exchanges
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    learned: list[str] = []
    for conversation in load(write_rows([{"messages": messages}]), tokenizer).all():
        ids, mask = conversation.token_ids, conversation.loss_mask
        edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            learned.append(tokenizer.decode(ids[start:end].tolist()))
            before = tokenizer.apply_chat_template(
                messages[: 2 * len(learned) - 1], tokenize=False, add_generation_prompt=True
            )
            assert tokenizer.decode(ids[:start].tolist()) == before
    empty = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    lead = " " if name == "mistral" else empty
    assert learned == [f"{lead}{answer}{family.ends}" for _, answer in exchanges]


def test_unrolled_rows_are_the_same_bits_from_the_cache(
    write_rows: WriteRows, make_tokenizer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caching, "SMALLEST", 1)
    tokenizer = make_tokenizer(QWEN3.template, QWEN3.special)
    path = write_rows([{"messages": CHAT}, {"messages": CHAT[:2]}])
    fresh, read = (load(path, tokenizer, TokenCache(tokenizer, tmp_path)) for _ in range(2))
    assert "tokens from the cache (data.cache)" in read.account.notes
    assert len(fresh) == len(read) == 3
    for conversation, other in zip(fresh.all(), read.all(), strict=True):
        assert (conversation.row, conversation.text) == (other.row, other.text)
        assert np.array_equal(conversation.token_ids, other.token_ids)
        assert np.array_equal(conversation.loss_mask, other.loss_mask)


OTHER = [CHAT[0], {"role": "assistant", "content": "3"}, *CHAT[2:]]
READ = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"


def sides(pair: Any) -> list[tuple[Any, Any, list[tuple[int, int]]]]:
    """(ids, mask, begin and end of each text) of both sides of a pair."""
    return [
        (ids, mask, list(pairwise([0, *openings, len(ids)])))
        for ids, mask, openings in (
            (pair.chosen, pair.chosen_mask, pair.chosen_openings),
            (pair.rejected, pair.rejected_mask, pair.rejected_openings),
        )
    ]


def test_a_side_of_a_pair_whose_answers_are_rewritten_is_a_text_for_each(
    write_rows: WriteRows, make_tokenizer: Make
) -> None:
    tokenizer = make_tokenizer(QWEN3.template, QWEN3.special)
    path = write_rows([{"chosen": CHAT, "rejected": OTHER}])
    pairs = load_pairs(PairSettings(path=path), tokenizer)
    (pair,) = pairs.all()
    assert pairs.account.notes[-1].startswith("2 sides of pairs with a text for each answer")
    decoded_sides: list[list[tuple[str, str]]] = [
        [
            (
                tokenizer.decode(ids[begin:end][~mask[begin:end]].tolist()),
                tokenizer.decode(ids[begin:end][mask[begin:end]].tolist()),
            )
            for begin, end in texts
        ]
        for ids, mask, texts in sides(pair)
    ]
    asked = "<|im_end|>\n<|im_start|>user\nand 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    last = "<think>\nagain\n</think>\n\n4<|im_end|>"
    assert decoded_sides == [
        [(READ, "<think>\nto add\n</think>\n\n2<|im_end|>"), (f"{READ}2{asked}", last)],
        [(READ, "<think>\n\n</think>\n\n3<|im_end|>"), (f"{READ}3{asked}", last)],
    ]


def test_a_model_that_scores_a_pair_reads_the_last_text_alone(
    write_rows: WriteRows, make_tokenizer: Make
) -> None:
    tokenizer = make_tokenizer(QWEN3.template, QWEN3.special)
    settings = PairSettings(path=write_rows([{"chosen": CHAT, "rejected": OTHER}]))
    (pair,), (scored,) = (load_pairs(settings, tokenizer, scored=s).all() for s in (False, True))
    assert scored.chosen_openings == scored.rejected_openings == ()
    for (ids, mask, texts), (last, learned, _) in zip(sides(pair), sides(scored), strict=True):
        begin, _ = texts[-1]
        assert last.tolist() == ids[begin:].tolist()
        assert learned.tolist() == mask[begin:].tolist()


def test_what_the_texts_of_a_side_begin_with_alike_counts_once_against_max_len(
    write_rows: WriteRows, make_tokenizer: Make
) -> None:
    tokenizer = make_tokenizer(QWEN3.template, QWEN3.special)
    long = [{"role": "user", "content": "1 + 1?" + " " * 60}]
    row = {"chosen": long + CHAT[1:], "rejected": long + OTHER[1:]}
    path = write_rows([row, {"prompt": "q", "chosen": "a", "rejected": "b"}])
    pair, _ = load_pairs(PairSettings(path=path), tokenizer).all()
    counts: list[int] = []
    for ids, _, ((_, first), (second, end)) in sides(pair):
        texts = ids[:first], ids[second:end]
        shortest = min(map(len, texts))
        shared = int(np.flatnonzero(texts[0][:shortest] != texts[1][:shortest])[0])
        assert shared > 60
        counts.append(len(ids) - shared)
    for how in ("drop", "truncate"):  # several texts are not cut
        most = max(counts)
        for limit, fates in ((most, {"kept": 2}), (most - 1, {"kept": 1, "too_long": 1})):
            settings = PairSettings(path=path, max_len=limit, on_too_long=how)
            assert load_pairs(settings, tokenizer).account.fates == fates
    with pytest.raises(UsageError, match=f"has {max(counts)} tokens, data.max_len is 20"):
        load_pairs(PairSettings(path=path, max_len=20, on_too_long="error"), tokenizer)


def test_pairs_of_several_texts_are_the_same_bits_from_the_cache(
    write_rows: WriteRows, make_tokenizer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caching, "SMALLEST", 1)
    tokenizer = make_tokenizer(QWEN3.template, QWEN3.special)
    rows = [{"chosen": CHAT, "rejected": OTHER}, {"chosen": CHAT[:2], "rejected": OTHER[:2]}]
    settings = PairSettings(path=write_rows(rows))
    for scored in (False, True):
        fresh, read = (
            load_pairs(settings, tokenizer, cache=TokenCache(tokenizer, tmp_path), scored=scored)
            for _ in range(2)
        )
        assert "tokens from the cache (data.cache)" in read.account.notes
        for pair, other in zip(fresh.all(), read.all(), strict=True):
            for (ids, mask, texts), (same, marks, parts) in zip(
                sides(pair), sides(other), strict=True
            ):
                assert np.array_equal(ids, same)
                assert np.array_equal(mask, marks)
                assert texts == parts


def test_a_labelled_answer_that_is_rewritten_is_refused_with_its_row(
    write_rows: WriteRows, make_tokenizer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer(QWEN3.template, QWEN3.special)
    monkeypatch.setattr(caching, "SMALLEST", 1)
    settings = PairSettings(path=write_rows([{"chosen": CHAT, "rejected": OTHER}]))
    cache = TokenCache(tokenizer, tmp_path)
    for _ in range(2):  # the second time from the cache
        with pytest.raises(UsageError, match=r"row 0 .*of one text: algorithm\.type = \"dpo\""):
            load_labelled(settings, tokenizer, cache=cache)
        load_pairs(settings, tokenizer, cache=cache)


def test_an_answer_may_begin_with_what_the_generation_prompt_ends_with(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows([{"question": "1?", "answer": "<think>one</think> 1"}])
    wanted = DataSettings(path=path, chat_template="tulu_thinker")
    (conversation,) = load_conversations(wanted, tokenizer).all()
    assert decoded(tokenizer, conversation) == (
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
    assert decoded(tokenizer, first) == (
        f"<|user|>1 + 1?<|assistant|>{opened}",
        f"{thought}to add\n</think>\n\n2<|end|>",
    )
    assert decoded(tokenizer, second) == (
        f"<|user|>1 + 1?<|assistant|>\n\n2<|end|><|user|>and 2 + 2?<|assistant|>{opened}",
        f"{thought}again\n</think>\n\n4<|end|>",
    )
    (last,) = load(write_rows([{"messages": CHAT}]), tokenizer, loss_turns="last").all()
    assert decoded(tokenizer, last) == decoded(tokenizer, second)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_thoughts_in_a_key_of_their_own_are_written_where_the_prompt_opens_them(
    key: str, write_rows: WriteRows, make_tokenizer: Make
) -> None:
    tokenizer = make_tokenizer(DROPS_THOUGHTS.replace("OPENING", "<think>\\n"), MARKS)
    thinking_message = {"role": "assistant", "content": "2", key: "to add\n"}
    again = {"role": "assistant", "content": "4", key: "again"}
    path = write_rows([{"messages": [CHAT[0], thinking_message, CHAT[2], again]}])
    first, second = load(path, tokenizer).all()
    assert decoded(tokenizer, first) == (
        "<|user|>1 + 1?<|assistant|><think>\n",
        "to add\n</think>\n\n2<|end|>",
    )
    assert decoded(tokenizer, second) == (
        "<|user|>1 + 1?<|assistant|>2<|end|><|user|>and 2 + 2?<|assistant|><think>\n",
        "again\n</think>\n\n4<|end|>",
    )


@pytest.mark.parametrize("opening", ["<think>", ""])
def test_thoughts_in_a_key_of_their_own_are_refused_where_their_form_is_not_known(
    opening: str, write_rows: WriteRows, make_tokenizer: Make
) -> None:
    tokenizer = make_tokenizer(DROPS_THOUGHTS.replace("OPENING", opening), MARKS)
    thinking_message = {"role": "assistant", "content": "2", "reasoning_content": "to add"}
    path = write_rows([{"messages": [CHAT[0], thinking_message]}])
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
    conversations = load_conversations(DataSettings(path=write_rows(rows)), tokenizer).all()
    assert {decoded(tokenizer, conversation) for conversation in conversations} == {
        ("<|user|>1?<|assistant|><think>\n", "one</think>1<|end|>")
    }


def test_an_answer_without_thoughts_behind_a_prompt_that_opens_them_is_refused_with_what_to_do(
    write_rows: WriteRows, make_tokenizer: Make
) -> None:
    tokenizer = make_tokenizer(DROPS_THOUGHTS.replace("OPENING", "<think>\\n"), MARKS)
    path = write_rows([{"question": "1?", "answer": "1"}])
    with pytest.raises(UsageError, match=r"which opens thoughts: begin the message's content with"):
        load_conversations(DataSettings(path=path), tokenizer)
