"""Ten rows as the learner sees them: what it reads, what it learns from, what was cut off."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from postgrad.core.records import Prompt
from postgrad.data.conversations import Conversation
from postgrad.data.draws import DrawnSet
from postgrad.data.pairs import Labelled, Pair
from postgrad.observe.console import Console

SHOWN = 10
LONGEST = 600  # characters of one piece: of a longer one, its ends
Kind = Literal["read", "trained", "cut"]
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
class Piece:
    """A run of tokens of one kind, as text."""

    text: str
    kind: Kind
    special: bool


@dataclass(frozen=True, slots=True)
class ShownRow:
    """title: where it is from. sequences: (what it is, its pieces)."""

    title: str
    sequences: tuple[tuple[str, tuple[Piece, ...]], ...]


def pieces(tokenizer: Any, ids: Ids, kinds: Sequence[Kind]) -> tuple[Piece, ...]:
    """Tokens with their kinds as runs of text; special tokens are pieces of their own.

    The text of a run is what it adds to the text before it: decoded alone, some tokenizers would
    leave out its first blank.
    """
    marks = special_ids(tokenizer)
    found: list[Piece] = []
    end, before = 0, ""
    marked = zip(kinds, (int(one) in marks for one in ids), strict=True)
    for (kind, special), run in groupby(marked):
        start, end = end, end + len(list(run))
        whole = _decode(tokenizer, ids[:end])
        follows = whole.startswith(before)
        text = whole[len(before) :] if follows else _decode(tokenizer, ids[start:end])
        found.append(Piece(text, kind, special))
        before = whole
    return tuple(found)


def special_ids(tokenizer: Any) -> set[int]:
    """Of every special token, named or only added."""
    added = [i for i, one in tokenizer.added_tokens_decoder.items() if one.special]
    return {*tokenizer.all_special_ids, *added}


def _decode(tokenizer: Any, ids: Ids) -> str:
    return tokenizer.decode(
        ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def kinds_of(ids: Ids, mask: NDArray[np.bool_] | None, whole: Ids | None) -> tuple[Ids, list[Kind]]:
    """Tokens with what they are for. mask: None where nothing is learned from them. whole: the row
    before it was cut, at its start or at its end.
    """
    kinds: list[Kind] = ["read"] * len(ids)
    if mask is not None:
        kinds = ["trained" if one else "read" for one in mask]
    if whole is None or len(whole) <= len(ids):
        return ids, kinds
    cut: list[Kind] = ["cut"] * (len(whole) - len(ids))
    at_end = np.array_equal(whole[: len(ids)], ids)
    return whole, [*kinds, *cut] if at_end else [*cut, *kinds]


def spread(part: DrawnSet[Any], count: int, first: Sequence[int] = ()) -> list[Any]:
    """So many records from the whole length of a dataset, those of `first` (places) among them."""
    entries = part.all()
    step = max(1, -(-len(entries) // max(1, count)))
    places = list(dict.fromkeys([*first, *range(0, len(entries), step)]))[:count]
    return [entries[place] for place in sorted(places)]


def shown_row(tokenizer: Any, name: str, one: Any, whole: Any) -> ShownRow:
    """A record as it is shown. name: of its dataset. whole: the same row, not cut, if it was."""
    title = f"row {one.row} of {name}"
    sequences: list[tuple[str, tuple[Piece, ...]]] = []
    for what, ids, mask in _sequences(one):
        uncut = None if whole is None else {n: i for n, i, _ in _sequences(whole)}[what]
        tokens, kinds = kinds_of(ids, mask, uncut)
        counts = [f"{len(ids)} tokens"]
        if mask is not None:
            counts.append(f"{int(mask.sum())} trained")
        if len(tokens) > len(ids):
            counts.append(f"{len(tokens) - len(ids)} cut off")
        sequences.append((", ".join([what, *counts]), pieces(tokenizer, tokens, kinds)))
    if isinstance(one, Prompt) and one.answer is not None:
        sequences.append(("reference answer", (Piece(one.answer, "read", False),)))
    return ShownRow(title, tuple(sequences))


def _sequences(one: Any) -> Iterator[tuple[str, Ids, NDArray[np.bool_] | None]]:
    """What a record has: a name, token ids, which of them bear loss."""
    if isinstance(one, Prompt):
        yield "prompt", one.token_ids, None
    elif isinstance(one, Conversation):
        yield "conversation", one.token_ids, one.loss_mask
    elif isinstance(one, Labelled):
        label = "desirable" if one.desirable else "undesirable"
        yield label, one.token_ids, one.loss_mask
    else:
        assert isinstance(one, Pair)
        yield "chosen", one.chosen, one.chosen_mask
        yield "rejected", one.rejected, one.rejected_mask


def show(row: ShownRow, console: Console) -> None:
    """In a terminal with colours, else with brackets around what is trained and what was cut."""
    console.heading(row.title)
    for what, found in row.sequences:
        console.note(f"{what}:")
        console.spans(list(_coloured(found) if console.is_terminal else _bracketed(found)))


def _coloured(found: Sequence[Piece]) -> Iterator[tuple[str, str]]:
    for one in found:
        yield shortened(one.text), STYLES[one.kind, one.special]


def _bracketed(found: Sequence[Piece]) -> Iterator[tuple[str, str]]:
    for kind, run in groupby(found, lambda one: one.kind):
        opened, closed = BRACKETS[kind]
        yield f"{opened}{''.join(shortened(one.text) for one in run)}{closed}", ""


def shortened(text: str, most: int = LONGEST) -> str:
    """Its two ends where it is long."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} […{len(text) - 2 * half} characters…] {text[-half:]}"
