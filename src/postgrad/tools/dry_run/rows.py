"""Training rows as the learner sees them: tokens that are only read, trained on, or cut off."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, zip_longest
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from postgrad.core.records import Prompt
from postgrad.data.conversations import Conversation
from postgrad.data.draws import DrawnSet
from postgrad.data.pairs import Labelled, Pair
from postgrad.data.step_tokens import Stepwise
from postgrad.data.templates import special_ids
from postgrad.observe.console import Console

SHOWN = 10
LONGEST = 600  # characters of one span that are shown: of a longer one, its two ends
TokenKind = Literal["read", "trained", "cut"]
STYLES = {  # by kind, and whether the token is a special one
    ("read", False): "dim",
    ("read", True): "dim cyan",
    ("trained", False): "green",
    ("trained", True): "bold green",
    ("cut", False): "red strike",
    ("cut", True): "red strike",
}
BRACKETS = {"read": ("", ""), "trained": ("⟦", "⟧"), "cut": ("⟪cut: ", "⟫")}
Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Consecutive tokens of one kind, decoded."""

    text: str
    kind: TokenKind
    special: bool  # they are special tokens, such as <|im_end|>
    weight: float = 1.0  # what each counts in the loss, where it is trained on


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A record, ready to be printed."""

    title: str  # "row 3 of gsm8k"
    # label and spans of each sequence; a label is "conversation, 120 tokens, 40 trained"
    sequences: tuple[tuple[str, tuple[TextSpan, ...]], ...]


def spans_of(
    tokenizer: Any, ids: Ids, kinds: Sequence[TokenKind], weights: Sequence[float] = ()
) -> tuple[TextSpan, ...]:
    """Decodes tokens to spans of one kind and weight each; special tokens are spans of their own.
    weights: of the first tokens, read where they are trained on; of further ones 1.

    The text of a span is what it adds to the text before it: decoded alone, some tokenizers would
    leave out its first blank.
    """
    marks = special_ids(tokenizer)
    spans: list[TextSpan] = []
    end, before = 0, ""
    weighed = zip_longest(kinds, weights, fillvalue=1.0)
    counts = (weight if kind == "trained" else 1.0 for kind, weight in weighed)
    marked = zip(kinds, (int(token_id) in marks for token_id in ids), counts, strict=True)
    for (kind, special, weight), run in groupby(marked):
        start, end = end, end + len(list(run))
        decoded = _decode(tokenizer, ids[:end])
        follows = decoded.startswith(before)
        text = decoded[len(before) :] if follows else _decode(tokenizer, ids[start:end])
        spans.append(TextSpan(text, kind, special, weight))
        before = decoded
    return tuple(spans)


def _decode(tokenizer: Any, ids: Ids) -> str:
    return tokenizer.decode(
        ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def kinds_of(
    ids: Ids, mask: NDArray[np.bool_] | None, uncut: Ids | None
) -> tuple[Ids, list[TokenKind]]:
    """The token ids to show and the kind of each; with `uncut` the ids that were cut off too.

    mask: [T] which tokens bear loss; None where none does. uncut: the row's ids before it was cut,
    at its start or at its end; None where it was not.
    """
    kinds: list[TokenKind] = ["read"] * len(ids)
    if mask is not None:
        kinds = ["trained" if trained else "read" for trained in mask]
    if uncut is None or len(uncut) <= len(ids):
        return ids, kinds
    cut: list[TokenKind] = ["cut"] * (len(uncut) - len(ids))
    at_end = np.array_equal(uncut[: len(ids)], ids)
    return uncut, [*kinds, *cut] if at_end else [*cut, *kinds]


def spread(part: DrawnSet[Any], count: int, first: Sequence[int] = ()) -> list[Any]:
    """`count` records, evenly spread over the dataset; those at the indices `first` come first."""
    entries = part.all()
    step = max(1, -(-len(entries) // max(1, count)))
    places = list(dict.fromkeys([*first, *range(0, len(entries), step)]))[:count]
    return [entries[place] for place in sorted(places)]


def shown_row(tokenizer: Any, name: str, record: Any, uncut: Any) -> ShownRow:
    """Formats a record. name: of its dataset. uncut: the same record before it was cut, or None."""
    title = f"row {record.row} of {name}"
    sequences: list[tuple[str, tuple[TextSpan, ...]]] = []
    weights: list[float] = []  # a conversation is cut at its end: of its first tokens
    if isinstance(record, Conversation) and record.loss_weights is not None:
        weights = record.loss_weights.tolist()
    for label, ids, mask in _sequences(record):
        uncut_ids = None if uncut is None else {n: i for n, i, _ in _sequences(uncut)}[label]
        tokens, kinds = kinds_of(ids, mask, uncut_ids)
        counts = [f"{len(ids)} tokens"]
        if mask is not None:
            counts.append(f"{int(mask.sum())} trained")
        if len(tokens) > len(ids):
            counts.append(f"{len(tokens) - len(ids)} cut off")
        sequences.append((", ".join([label, *counts]), spans_of(tokenizer, tokens, kinds, weights)))
    if isinstance(record, Prompt) and record.answer is not None:
        sequences.append(("reference answer", (TextSpan(record.answer, "read", False),)))
    return ShownRow(title, tuple(sequences))


def _sequences(record: Any) -> Iterator[tuple[str, Ids, NDArray[np.bool_] | None]]:
    """The sequences of a record: label, token ids, and the loss mask or None."""
    if isinstance(record, Prompt):
        yield "prompt", record.token_ids, None
    elif isinstance(record, Conversation):
        yield "conversation", record.token_ids, record.loss_mask
    elif isinstance(record, Stepwise):
        steps = ", ".join(f"{label:.3g}" for label in record.labels[record.loss_mask])
        yield f"steps {steps}", record.token_ids, record.loss_mask
    elif isinstance(record, Labelled):
        label = "desirable" if record.desirable else "undesirable"
        yield label, record.token_ids, record.loss_mask
    else:
        assert isinstance(record, Pair)
        yield from _texts("chosen", record.chosen, record.chosen_mask, record.chosen_openings)
        rejected = record.rejected, record.rejected_mask, record.rejected_openings
        yield from _texts("rejected", *rejected)


def _texts(
    label: str, ids: Ids, mask: NDArray[np.bool_], openings: tuple[int, ...]
) -> Iterator[tuple[str, Ids, NDArray[np.bool_]]]:
    """The texts of one side of a pair, numbered where there are several."""
    parts = list(pairwise([0, *openings, len(ids)]))
    for number, (begin, end) in enumerate(parts, 1):
        several = f" (text {number} of {len(parts)})" if len(parts) > 1 else ""
        yield label + several, ids[begin:end], mask[begin:end]


def show(row: ShownRow, console: Console) -> None:
    """Prints a row: with colours in a terminal, else with brackets around trained and cut spans. A
    weight other than 1 stands before them, as in "0.5×".
    """
    console.heading(row.title)
    for label, spans in row.sequences:
        console.note(f"{label}:")
        console.spans(list(_coloured(spans) if console.is_terminal else _bracketed(spans)))


def _coloured(spans: Sequence[TextSpan]) -> Iterator[tuple[str, str]]:
    for (_, weight), run in groupby(spans, _kind_and_weight):
        if weight != 1.0:
            yield f"{weight:.4g}×", "yellow"
        for span in run:
            yield shortened(span.text), STYLES[span.kind, span.special]


def _bracketed(spans: Sequence[TextSpan]) -> Iterator[tuple[str, str]]:
    for (kind, weight), run in groupby(spans, _kind_and_weight):
        opened, closed = BRACKETS[kind]
        opened = opened if weight == 1.0 else f"{weight:.4g}×{opened}"
        yield f"{opened}{''.join(shortened(span.text) for span in run)}{closed}", ""


def _kind_and_weight(span: TextSpan) -> tuple[TokenKind, float]:
    return span.kind, span.weight


def shortened(text: str, most: int = LONGEST) -> str:
    """`text`, or its two ends where it has more than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} […{len(text) - 2 * half} characters…] {text[-half:]}"
