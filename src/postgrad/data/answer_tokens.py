"""Preference rows as tokens: reading, filtering, rendering and cutting to data.max_len."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import PlacedImage
from postgrad.data.account import Bookkeeper, Fate, RowAccount
from postgrad.data.answer_spans import Rendered, Unmarkable
from postgrad.data.answers import PreferenceRow
from postgrad.data.cache import TokenCache, TokenColumns
from postgrad.data.chat_format import Message
from postgrad.data.conversations import marked, unmarkable
from postgrad.data.functions import prepared_rows
from postgrad.data.images import images_in, placed_in, with_image_texts
from postgrad.data.overlap import Selection
from postgrad.data.rows import Row, dataset_name
from postgrad.data.settings import PairSettings, with_own_keys
from postgrad.data.templates import (
    render_conversations,
    single_text,
    template_call,
    turn_ends,
    unread_notes,
)

if TYPE_CHECKING:
    from postgrad.models.image_reader import ImageReader  # imports torch

ReadRow = Callable[[Row, PairSettings], PreferenceRow]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One conversation of T tokens."""

    ids: NDArray[np.int32]  # [T] token ids
    mask: NDArray[np.bool_]  # [T] True at the answer's tokens
    images: tuple[PlacedImage, ...] = ()

    def cut(self, limit: int) -> "Tokens":
        """The conversation's first `limit` tokens, and the images that begin among them."""
        images = tuple(image for image in self.images if image.at[0] < limit)
        return Tokens(self.ids[:limit], self.mask[:limit], images)

    @property
    def cuts_no_image(self) -> bool:
        """Whether no image is cut: half an image cannot be shown."""
        return not self.images or bool(self.images[-1].at[-1] < len(self.ids))


@with_own_keys
def load_answers(
    settings: PairSettings,
    tokenizer: Any,
    read: ReadRow,
    selection: Selection | None,
    cache: TokenCache | None,
    reader: "ImageReader | None" = None,
) -> tuple[list[tuple[PreferenceRow, list[Tokens]]], RowAccount]:
    """The rows that are kept, each with the tokens of its conversations, and the account of all.

    read: pair_of or labelled_of. reader: of a model that reads images; others refuse rows with
    some. Raises UsageError that names the first row that cannot be read,
    or whose answer tokens the chat template cannot mark.
    """
    selection = selection or Selection()
    book = Bookkeeper(dataset_name(settings))
    rows = _selected(settings, read, selection, book)
    book.notes += unread_notes(
        tokenizer,
        [preference.row for preference in rows],
        [preference.messages for preference in rows],
        template_call(settings),
    )
    columns = _columns(settings, tokenizer, rows, cache, book.notes, reader)
    encoded = zip(columns["token_ids"], columns["loss_mask"], strict=True)
    kept: list[tuple[PreferenceRow, list[Tokens]]] = []
    for preference in rows:
        tokens = [
            _shown(preference.row, Tokens(*next(encoded)), messages, reader)
            for messages in preference.conversations
        ]
        fate = _fate(preference.row, tokens, settings)
        if fate == "truncated":
            tokens = [conversation.cut(settings.max_len) for conversation in tokens]
            if not all(conversation.cuts_no_image for conversation in tokens):
                fate = "too_long"
            elif not _teaches(tokens):
                fate = "no_loss"
        if fate in ("kept", "truncated") and selection.repeats(_compared_messages(preference)):
            fate = "duplicate"
        if fate in ("kept", "truncated"):
            kept.append((preference, tokens))
        book.add(fate, preference.row)
    return kept, book.close(settings, f"{settings.max_len} tokens of a conversation")


def _selected(
    settings: PairSettings, read: ReadRow, selection: Selection, book: Bookkeeper
) -> list[PreferenceRow]:
    """The rows that may be tokenised; the others are counted in `book` with their fates."""
    selected: list[PreferenceRow] = []
    shapes: Counter[str] = Counter()
    inside = 0
    for row in prepared_rows(settings, book):
        preference = read(row, settings)
        shapes[preference.shape] += 1
        inside += preference.parts_inside_a_turn
        fate = _before_tokens(settings, preference, selection)
        if fate is None:
            selected.append(preference)
        else:
            book.add(fate, row)
    book.notes.extend(f"{count} rows are {shape}" for shape, count in shapes.items())
    if inside:
        book.notes.append(f"{inside} pairs differ within a turn: the loss covers all of that turn")
    return selected


def _before_tokens(
    settings: PairSettings, preference: PreferenceRow, selection: Selection
) -> Fate | None:
    """Why a row is left out before it is tokenised, or None where it is not."""
    if preference.equal:
        return "equal"
    if preference.empty:
        return "empty"
    if not preference.complete:
        return "no_loss"
    texts = [turn["content"] for turn in preference.messages if turn["role"] != "system"]
    return selection.left_out(settings, preference.row, preference.question, texts)


def _columns(
    settings: PairSettings,
    tokenizer: Any,
    rows: Sequence[PreferenceRow],
    cache: TokenCache | None,
    notes: list[str],
    reader: "ImageReader | None",
) -> TokenColumns:
    """Columns token_ids and loss_mask: an entry for each conversation, row after row."""
    call = template_call(settings)
    conversations = [
        (preference.row, messages, preference.first)
        for preference in rows
        for messages in preference.conversations
    ]

    def make() -> TokenColumns:
        rendered = render_conversations(
            tokenizer,
            [(messages, first) for _, messages, first in conversations],
            ends=turn_ends(tokenizer),
            turns="all",
            variables=call,
            parts=reader is not None,
        )
        texts: list[Rendered] = []
        for (row, messages, _), rendering in zip(
            conversations, rendered, strict=False
        ):  # it ends at the first refusal
            try:
                text = single_text(rendering)
                texts += [text] if reader is None else with_image_texts([text], messages, reader)
            except Unmarkable as error:
                raise unmarkable(row, error) from error
        tokens = [
            _ended(ids, mask)
            for ids, mask in marked(tokenizer, [row for row, *_ in conversations], texts)
        ]
        return {
            "token_ids": Ragged.of([conversation.ids for conversation in tokens], np.int32),
            "loss_mask": Ragged.of([conversation.mask for conversation in tokens], np.bool_),
        }

    if cache is None:
        return make()
    how = f"answers from messages {[first for *_, first in conversations]}"
    if reader is not None:
        how += f", images by {reader.fingerprint}"
    return cache.columns([messages for _, messages, _ in conversations], call, how, make, notes)


def _shown(
    row: Row, tokens: Tokens, messages: Sequence[Message], reader: "ImageReader | None"
) -> Tokens:
    """The tokens of a conversation with its images. Behind the last answer there are none."""
    if reader is None:
        return tokens
    return replace(tokens, images=placed_in(row, tokens.ids, images_in(messages), reader))


def _ended(ids: NDArray[np.int32], mask: NDArray[np.bool_]) -> Tokens:
    """The tokens up to the end of the last answer: a rollout ends there too, so what the template
    writes behind it is dropped.
    """
    return Tokens(ids, mask).cut(int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0)


def _fate(row: Row, tokens: Sequence[Tokens], settings: PairSettings) -> Fate:
    """The fate of a tokenised row. For "truncated" the caller checks that the cut leaves an answer.
    Raises UsageError where it is too long and data.on_too_long = "error".
    """
    if len(tokens) == 2 and np.array_equal(tokens[0].ids, tokens[1].ids):
        return "equal"  # texts that the chat template writes alike
    longest = max(len(conversation.ids) for conversation in tokens)
    if longest <= settings.max_len:
        return "kept" if _teaches(tokens) else "no_loss"
    if settings.on_too_long == "error":
        raise UsageError(
            f"{row.place}: a conversation of row {row.index} has {longest} tokens, data.max_len "
            f'is {settings.max_len}; raise it, or say data.on_too_long = "drop" or "truncate"'
        )
    return "truncated" if settings.on_too_long == "truncate" else "too_long"


def _teaches(tokens: Sequence[Tokens]) -> bool:
    """Whether there is anything to learn: every answer has a token with a token before it that
    predicts it, and the two of a pair differ.
    """
    same = len(tokens) == 2 and np.array_equal(tokens[0].ids, tokens[1].ids)
    return not same and all(conversation.mask[1:].any() for conversation in tokens)


def _compared_messages(preference: PreferenceRow) -> list[Message]:
    """The messages that data.dedup compares: the label, then all conversations with marks between
    them.
    """
    label = "" if preference.is_pair else str(preference.desirable)
    first, *others = preference.conversations
    parted = [[{"role": "or", "content": ""}, *other] for other in others]
    return [{"role": "label", "content": label}, *first, *(turn for p in parted for turn in p)]
