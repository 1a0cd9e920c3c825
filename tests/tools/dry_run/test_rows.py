"""Rows as a person sees them: what is trained, what was cut, and nothing that steers a terminal."""

from io import StringIO
from typing import Any

import numpy as np

from helpers.chat import chat_tokenizer
from postgrad.data.conversations import Conversation
from postgrad.observe.console import Console
from postgrad.tools.dry_run.rows import (
    LONGEST,
    ShownRow,
    TextSpan,
    kinds_of,
    shortened,
    show,
    shown_row,
    spans_of,
    spread,
)


def shown(*span: TextSpan) -> str:
    output = StringIO()
    show(ShownRow("row 0", (("conversation", span),)), Console("plain", output))
    return output.getvalue()


def test_pieces_say_what_the_tokens_say_and_special_tokens_stand_alone() -> None:
    tokenizer = chat_tokenizer()
    text = "<|im_start|>user\nHi there<|im_end|>"
    ids = np.array(tokenizer(text)["input_ids"], np.int32)
    spans = spans_of(tokenizer, ids, ["read"] * len(ids))
    assert "".join(span.text for span in spans) == text
    assert [span.text for span in spans if span.special] == ["<|im_start|>", "<|im_end|>"]


def test_what_is_trained_and_what_was_cut_stand_in_brackets_outside_a_terminal() -> None:
    output = shown(
        TextSpan("Why?", "read", False),
        TextSpan("Because", "trained", False),
        TextSpan("<|im_end|>", "trained", True),
        TextSpan(" and on", "cut", False),
    )
    assert "Why?⟦Because<|im_end|>⟧⟪cut:  and on⟫" in output


def test_what_weighs_more_or_less_than_1_says_so() -> None:
    output = shown(
        TextSpan("Why?", "trained", False, 0.5),
        TextSpan("<|im_end|>", "trained", True, 0.5),
        TextSpan("Because", "trained", False),
        TextSpan("so", "trained", False, 2.0),
    )
    assert "0.5×⟦Why?<|im_end|>⟧⟦Because⟧2×⟦so⟧" in output


def test_a_conversation_shows_the_weights_of_its_trained_tokens_before_the_cut() -> None:
    tokenizer = chat_tokenizer()
    ids = np.array(tokenizer("abcdef")["input_ids"], np.int32)
    mask, weights = np.arange(4) > 0, np.array([0.0, 0.5, 0.5, 2.0], np.float32)
    cut, uncut = (
        Conversation(0, 3, ids[:length], np.arange(length) > 0, loss_weights=w)
        for length, w in ((4, weights), (6, np.ones(6, np.float32)))
    )
    row = shown_row(tokenizer, "rows", cut, uncut)
    ((label, spans),) = row.sequences
    assert label == f"conversation, 4 tokens, {mask.sum()} trained, 2 cut off"
    assert [(span.text, span.kind, span.weight) for span in spans] == [
        ("a", "read", 1.0), ("bc", "trained", 0.5), ("d", "trained", 2.0), ("ef", "cut", 1.0),
    ]  # fmt: skip


def test_text_of_rows_is_neither_markup_nor_control_characters() -> None:
    output = shown(TextSpan("[red]\x1b[2J[/red]", "read", False))
    assert "[red]\\x1b[2J[/red]" in output
    assert "\x1b" not in output


def test_tokens_cut_off_at_the_end_or_the_start_are_marked() -> None:
    ids = np.array([1, 2, 3, 4], np.int32)
    mask = np.array([False, True])
    assert kinds_of(ids[:2], mask, ids)[1] == ["read", "trained", "cut", "cut"]
    assert kinds_of(ids[2:], None, ids)[1] == ["cut", "cut", "read", "read"]
    assert kinds_of(ids, None, ids)[1] == ["read"] * 4


def test_a_long_piece_shows_its_ends() -> None:
    text = "a" + "b" * 2 * LONGEST + "c"
    assert shortened(text)[0] == "a"
    assert shortened(text)[-1] == "c"
    assert len(shortened(text)) < LONGEST + 40


def test_rows_are_taken_from_the_whole_dataset_with_the_ones_asked_for() -> None:
    class Part:
        def all(self) -> list[int]:
            return list(range(100))

    part: Any = Part()
    assert spread(part, 4) == [0, 25, 50, 75]
    assert 77 in spread(part, 4, [77])
    assert len(spread(part, 4, [77])) == 4
