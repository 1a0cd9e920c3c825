"""Mixtures: every epoch has the stated draws of each set, and no row is favoured."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postgrad.core.errors import UsageError
from postgrad.data.account import RowAccount
from postgrad.data.conversations import Conversation, ConversationSet, load_conversations
from postgrad.data.mixture import Mixture, training_prompts, training_rows
from postgrad.data.overlap import HeldOut
from postgrad.data.settings import MixedSet, MixSettings

WriteRows = Callable[..., str]
ROWS = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(4)]


def a_set(number: int, rows: int) -> ConversationSet:
    """Rows of set n are numbered from 100 n on."""
    account = RowAccount(f"set{number}", rows, {"kept": rows}, {})
    nothing: Any = None
    return ConversationSet(
        [Conversation(row, 100 * number + row, nothing, nothing) for row in range(rows)],
        account,
        shuffle=True,
    )


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_epochs_have_their_draws_and_rows_are_drawn_equally_often(
    sizes: list[tuple[int, int]], seed: int
) -> None:
    mixture: Mixture[Conversation] = Mixture(
        [a_set(n, rows) for n, (rows, _) in enumerate(sizes)], [d for _, d in sizes], True
    )
    n = len(mixture)
    assert n == sum(draws for _, draws in sizes)
    drawn = [mixture.draw(ticket, seed) for ticket in range(3 * n)]
    assert [draw.ticket for draw in drawn] == list(range(3 * n))
    for epoch in range(3):
        counts = Counter(draw.row // 100 for draw in drawn[epoch * n : (epoch + 1) * n])
        assert [counts[i] for i in range(len(sizes))] == [draws for _, draws in sizes]
    times = Counter(draw.row for draw in drawn)
    for number, (rows, _) in enumerate(sizes):
        each = [times[100 * number + row] for row in range(rows)]
        assert max(each) - min(each) <= 1
    assert mixture.draw(n, seed).row == drawn[n].row  # any order, the same rows


def test_a_weight_is_passes_over_a_sets_rows_and_a_count_is_draws() -> None:
    assert MixedSet(path="a").draws(10) == 10
    assert MixedSet(path="a", weight=0.25).draws(10) == 2
    assert MixedSet(path="a", weight=2.0).draws(10) == 20
    assert MixedSet(path="a", weight=0.01).draws(10) == 1
    assert MixedSet(path="a", count=7, weight=2.0).draws(10) == 7


def test_sets_of_a_recipe_are_mixed_with_an_account_each(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    first_path = write_rows([{"question": f"a{i}", "answer": "x"} for i in range(4)], "one.jsonl")
    second_path = write_rows([{"q": f"b{i}", "answer": "y"} for i in range(6)], "two.jsonl")
    data = MixSettings(
        sets=(
            MixedSet(path=first_path, weight=2.0),
            MixedSet(path=second_path, prompt="q", count=3),
        )
    )
    held = HeldOut(frozenset({"a0", "b1"}))
    prompts = training_prompts(data, tokenizer, max_new_tokens=8, exclude=held)
    assert len(prompts) == 2 * 3 + 3
    assert [account.kept for account in prompts.accounts] == [3, 5]
    epoch = Counter(prompts.draw(ticket, 0).question for ticket in range(9))
    assert {q: epoch[q] for q in ("a1", "a2", "a3")} == {"a1": 2, "a2": 2, "a3": 2}
    assert sum(count for q, count in epoch.items() if q[0] == "b") == 3
    assert [prompt.ticket for prompt in prompts.all()] == list(range(8))
    mixture = training_rows(load_conversations, data, tokenizer, exclude=HeldOut())
    assert len(mixture) == 2 * 4 + 3


def test_one_dataset_is_drawn_as_it_is(write_rows: WriteRows, tokenizer: Any) -> None:
    path = write_rows([{"question": f"a{i}", "answer": "x"} for i in range(5)])
    prompts = training_prompts(
        MixSettings(path=path), tokenizer, max_new_tokens=8, exclude=HeldOut()
    )
    with pytest.raises(AttributeError):
        _ = prompts._sets  # pyright: ignore[reportAttributeAccessIssue]
    assert sorted(prompts.draw(ticket, 3).row for ticket in range(5)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"path": "no.jsonl"}, r"no.jsonl: no such file or folder \(data.sets.1.path\)"),
        ({"split": "a b"}, r"data.sets.1.split 'a b': a split is a name"),
        ({"answer": "reply"}, r"no column 'reply' \(data.sets.1.answer\)"),
        ({"filter": "nowhere:f"}, r"data.sets.1.filter 'nowhere:f'"),
        ({"limit": 1, "max_len": 2}, r"raise data.sets.1.max_len, or cut rows with data.on_too_l"),
    ],
)
def test_a_mistake_is_told_with_the_key_of_its_own_set(
    wrong: dict[str, Any], message: str, write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows(ROWS)
    first, second = MixedSet(path=path), MixedSet(**({"path": path} | wrong))
    with pytest.raises(UsageError, match=message):
        training_rows(
            load_conversations, MixSettings(sets=(first, second)), tokenizer, exclude=HeldOut()
        )


def test_a_key_that_a_set_takes_over_is_told_as_that_of_the_data(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows(ROWS)
    sets = tuple(MixedSet(path=path, answer="reply") for _ in range(2))
    with pytest.raises(UsageError, match=r"no column 'reply' \(data.answer\)"):
        training_rows(
            load_conversations, MixSettings(answer="reply", sets=sets), tokenizer, exclude=HeldOut()
        )


def test_a_file_whose_name_looks_like_a_key_keeps_its_name(tokenizer: Any) -> None:
    for path in ("/no/data.path", "data.path.jsonl"):
        settings = MixSettings(sets=(MixedSet(path=path),))
        with pytest.raises(UsageError, match=rf"^{path}: no such file .*\(data.sets.0.path\)$"):
            training_rows(load_conversations, settings, tokenizer, exclude=HeldOut())
