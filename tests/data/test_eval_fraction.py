"""A part of the training data that is held out by a hash of its questions."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.errors import UsageError
from postgrad.data.conversations import load_conversations
from postgrad.data.overlap import Selection, held_out, in_eval_part
from postgrad.data.pairs import load_pairs
from postgrad.data.prompts import load_prompts
from postgrad.data.settings import DataSettings, PairSettings
from postgrad.data.step_tokens import load_steps

WriteRows = Callable[..., str]
ROWS = [{"question": f"q{n}", "answer": f"a{n}"} for n in range(200)]
PAIRS = [{"prompt": f"q{n}", "chosen": "yes", "rejected": "no"} for n in range(60)]


def both(load: Callable[[Selection], Any]) -> tuple[Any, Any]:
    return load(Selection()), load(Selection(part="evaluation"))


def rows(drawn: Any) -> list[int]:
    return [record.row for record in drawn.all()]


def conversations(path: str, tokenizer: Any, fraction: float) -> tuple[Any, Any]:
    settings = DataSettings(path=path, eval_fraction=fraction)
    return both(lambda selection: load_conversations(settings, tokenizer, selection=selection))


def test_each_row_is_on_one_side_and_counted_on_both(write_rows: WriteRows, tokenizer: Any) -> None:
    trained, held = conversations(write_rows(ROWS), tokenizer, 0.25)
    assert sorted(rows(trained) + rows(held)) == list(range(200))
    assert trained.account.fates == {"kept": len(trained), "excluded": len(held)}
    assert held.account.fates == {"kept": len(held), "trained": len(trained)}
    assert 30 <= len(held) <= 70  # 50 are expected, with a standard deviation of 6


def test_prompts_and_pairs_are_held_out_too(write_rows: WriteRows, tokenizer: Any) -> None:
    settings = DataSettings(path=write_rows(ROWS), eval_fraction=0.25)
    prompts = both(
        lambda selection: load_prompts(
            settings, tokenizer, max_prompt_tokens=500, selection=selection
        )
    )
    assert rows(prompts[1]) == rows(conversations(settings.path, tokenizer, 0.25)[1])
    assert sorted(rows(prompts[0]) + rows(prompts[1])) == list(range(200))
    pairs = PairSettings(path=write_rows(PAIRS, "pairs.jsonl"), eval_fraction=0.25)
    trained, held = both(lambda selection: load_pairs(pairs, tokenizer, selection=selection))
    assert sorted(rows(trained) + rows(held)) == list(range(60))
    assert len(held) > 0


@pytest.mark.parametrize(
    ("load", "kind", "good", "empty"),
    [
        (load_conversations, DataSettings, {"answer": "a"}, {"answer": ""}),
        (load_pairs, PairSettings, {"chosen": "yes", "rejected": "no"},
         {"chosen": "yes", "rejected": ""}),
        (load_pairs, PairSettings, {"chosen": "yes", "rejected": "no"},
         {"chosen": "yes", "rejected": "yes"}),
        (load_steps, PairSettings, {"completions": ["a"], "labels": [True]},
         {"completions": [], "labels": []}),
    ],
)  # fmt: skip
def test_a_row_of_the_other_part_is_no_loss_of_this_one(
    load: Any, kind: Any, good: Any, empty: Any, write_rows: WriteRows, tokenizer: Any
) -> None:
    column = "question" if kind is DataSettings else "prompt"
    # Half of the rows are of no use: in a part of a tenth these would be most, if all were counted.
    path = write_rows([{column: f"q{n}", **(good if n % 2 else empty)} for n in range(200)])
    settings = kind(path=path, eval_fraction=0.1, max_lost_fraction=0.8)
    drawn = both(lambda selection: load(settings, tokenizer, selection=selection))
    fates = [part.account.fates for part in drawn]
    unusable = [fate.get("empty", 0) + fate.get("equal", 0) for fate in fates]
    assert sum(unusable) == 100
    assert sum(fate["kept"] for fate in fates) == 100
    assert fates[1]["kept"] + unusable[1] == fates[0]["excluded"]


def test_appended_rows_move_no_row(write_rows: WriteRows, tokenizer: Any) -> None:
    before = rows(conversations(write_rows(ROWS), tokenizer, 0.25)[1])
    more = [*ROWS, *({"question": f"new {n}", "answer": "b"} for n in range(50))]
    after = rows(conversations(write_rows(more), tokenizer, 0.25)[1])
    assert [row for row in after if row < 200] == before


def test_rows_that_ask_the_same_are_on_one_side(write_rows: WriteRows, tokenizer: Any) -> None:
    again = [{"question": f"  Q{n}", "answer": "another"} for n in range(200)]
    trained, held = conversations(write_rows([*ROWS, *again]), tokenizer, 0.25)
    assert {row % 200 for row in rows(trained)} & {row % 200 for row in rows(held)} == set()


@given(text=st.text(), small=st.floats(0, 0.5), large=st.floats(0.5, 0.99))
def test_a_larger_fraction_only_adds_rows(text: str, small: float, large: float) -> None:
    few, many = (DataSettings(path="a.jsonl", eval_fraction=f) for f in (small, large))
    if in_eval_part(few, [text], []):
        assert in_eval_part(many, [text], [])
    assert not in_eval_part(DataSettings(path="a.jsonl"), [text], [])


def test_one_shared_message_does_not_hold_a_conversation_out(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    """Every conversation has "go on": as the question of a second file it would exclude all."""

    def chat(n: int) -> dict[str, Any]:
        turns = [("user", f"q{n}"), ("assistant", "a"), ("user", "go on"), ("assistant", "b")]
        return {"messages": [{"role": role, "content": text} for role, text in turns]}

    path = write_rows([chat(n) for n in range(40)])
    settings = DataSettings(path=path, messages="messages", eval_fraction=0.3)
    exclude = held_out([settings])
    trained = load_conversations(settings, tokenizer, selection=Selection(exclude))
    held = load_conversations(settings, tokenizer, selection=Selection(part="evaluation"))
    assert len(trained) + len(held) == 40
    assert len(held) > 0


def test_words_that_the_held_part_shares_leave_training_rows_out(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    asked = [{"question": f"one two three four {n}", "answer": "a"} for n in range(40)]
    settings = DataSettings(path=write_rows(asked), eval_fraction=0.3, max_lost_fraction=1.0)
    exclude = held_out([settings], ngram=3)
    with pytest.raises(UsageError, match="no row of 40 is left"):
        load_conversations(settings, tokenizer, selection=Selection(exclude))


def test_a_part_without_rows_names_the_fraction(write_rows: WriteRows, tokenizer: Any) -> None:
    with pytest.raises(UsageError, match=r"no row of 2 .*try a higher data.eval_fraction"):
        conversations(write_rows(ROWS[:2]), tokenizer, 1e-9)
