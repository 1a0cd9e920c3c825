"""Masks of several texts at once, and whose error is told where several rows are wrong."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.errors import UsageError
from postgrad.data.answer_spans import Rendered
from postgrad.data.loss_masks import _mask, marked
from postgrad.data.rows import Row
from postgrad.data.templates import CHUNK, encoded_ahead

PLACES = st.integers(0, 12)
SPANS = st.tuples(PLACES, PLACES).map(sorted).map(tuple)
TEXTS = st.lists(
    st.tuples(st.lists(SPANS, max_size=3), st.lists(SPANS.filter(bool), max_size=6).map(sorted)),
    min_size=1,
    max_size=4,
)
GOOD = Rendered("ab", ((1, 2),), "a")


@given(TEXTS)
def test_a_token_bears_loss_if_it_lies_within_a_span_of_its_own_text(
    texts: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]],
) -> None:
    """Spans may overlap, tokens may be without a character."""
    rendered = [Rendered("x" * 12, tuple(spans), "") for spans, _ in texts]
    edges = np.cumsum([0, *(len(tokens) for _, tokens in texts)]).tolist()
    offsets = np.array([t for _, tokens in texts for t in tokens], np.int64).reshape(-1, 2)
    wanted = [
        end > begin and any(start <= begin and end <= stop for start, stop in spans)
        for spans, tokens in texts
        for begin, end in tokens
    ]
    assert _mask(rendered, edges, offsets).tolist() == wanted


def rows(count: int) -> list[Row]:
    return [Row(number, {}, f"rows.jsonl:{number + 1}") for number in range(count)]


@pytest.mark.parametrize("good", [0, 3, CHUNK - 1, CHUNK + 3, 2 * CHUNK])
def test_the_first_row_that_is_wrong_is_told_whatever_is_wrong_with_later_ones(
    good: int, tokenizer: Any
) -> None:
    """The template refuses a row behind one that the tokenizer cannot encode."""

    def texts() -> Iterator[tuple[int, Rendered]]:
        for number in range(good):
            yield number, GOOD
        yield good, Rendered("a\u4e00", ((1, 2),), "a")
        raise UsageError("a later row is refused")

    with pytest.raises(UsageError, match=rf"^rows.jsonl:{good + 1}: .* lacks"):
        list(marked(tokenizer, rows(good + 1), texts()))


@pytest.mark.parametrize("good", [0, 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_what_comes_before_a_refusal_is_encoded_before_it_is_told(
    good: int, tokenizer: Any
) -> None:
    def texts() -> Iterator[str]:
        yield from ["ab"] * good
        raise UsageError("refused")

    encoded: list[list[int]] = []

    def read() -> None:
        for items, chunk in encoded_ahead(tokenizer, texts(), str):
            assert items == ["ab"] * len(items)
            encoded.extend(chunk["input_ids"])

    with pytest.raises(UsageError, match="refused"):
        read()
    assert len(encoded) == good
