"""A sample as a page needs it."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.made_run import TOKENIZER, sample
from postgrad.observe.report.page import packed
from postgrad.observe.report.samples import Pieces, body, group_row, vocabulary

PIECES = Pieces(TOKENIZER)


def test_a_group_says_once_what_its_samples_share() -> None:
    lines = [(5, sample(3, 7, 1, "one")), (6, sample(3, 7, 2, "zwei", filtered="equal"))]
    row = group_row(lines)
    assert (row["step"], row["ticket"], row["row"]) == (3, 7, 7)
    assert row["question"] == "What is 7 twice?"
    assert [one["id"] for one in row["samples"]] == [5, 6]
    assert [one["tokens"] for one in row["samples"]] == [3, 4]
    assert row["samples"][0]["total"] == pytest.approx(4 / 3)
    assert row["samples"][0]["advantage"] == pytest.approx(-1 / 6, rel=1e-4)
    assert "failures" not in row["samples"][0]


def test_the_mean_advantage_is_of_tokens_in_the_loss() -> None:
    line = sample(1, 0, 3, "abcd", advantages=[1.0, 0.0, 0.0, 0.5], mask=[1, 0, 0, 1])
    assert group_row([(0, line)])["samples"][0]["advantage"] == 0.75


def test_a_body_has_the_values_of_each_token() -> None:
    line = sample(1, 0, 3, "ab€", columns={"turn_rewards": [0.0]})
    line["turns"][0]["logprobs"][0] = -1.23456
    line["advantages"] = [0.123456789, 1.0, 1.0, 1.0, 1.0]
    found = body(line, PIECES)
    turn = found["turns"][0]
    assert turn["logprobs"] == [-1235, -250, -250, -250, -250]  # thousandths of a nat
    assert turn["differences"] == [98556, 100, 100, 100, 100]  # hundred-thousandths
    assert found["advantages"] == [0.12346, 1.0, 1.0, 1.0, 1.0]
    assert found["mask"] == 1  # all of them
    assert turn["texts"] == {2: "", 3: "", 4: "€"}
    assert found["columns"] == {"turn_rewards": [0.0]}
    words = vocabulary([found], PIECES)
    assert words[TOKENIZER.encode("b").ids[0]] == "b"
    assert set(turn["ids"]) <= set(words)


def test_what_was_not_computed_is_not_there() -> None:
    line = sample(1, 0, 0, "ab")
    for key in ("advantages", "mask"):
        del line[key]
    del line["turns"][0]["learner_logprobs"]
    found = body(line, None)
    assert found["advantages"] == found["mask"] == []
    assert "differences" not in found["turns"][0]
    assert found["turns"][0]["text"] == "ab"  # no tokenizer: the text as a whole
    assert vocabulary([found], None) == {}
    row = group_row([(0, line)])["samples"][0]
    assert row["trained"] is False
    assert "advantage" not in row


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
odd = st.recursive(values, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
KEYS = ("turns", "advantages", "mask", "prompt_token_ids", "rewards", "text", "total", "failures")


@given(
    st.dictionaries(st.sampled_from(KEYS), odd),
    st.dictionaries(st.sampled_from(("token_ids", "logprobs", "learner_logprobs")), odd),
)
def test_lines_of_another_hand_break_nothing(changed: dict[str, Any], turn: dict[str, Any]) -> None:
    line = {**sample(1, 0, 0, "ab"), "turns": [turn], **changed}
    packed(group_row([(0, line)]))
    found = body(line, PIECES)
    packed([found, vocabulary([found], PIECES)])
    numbers = [value for one in found["turns"] for value in one["logprobs"]]
    assert all(value is None or math.isfinite(value) for value in numbers)
