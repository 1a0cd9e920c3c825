"""Conversations by ticket: the training rows of SFT."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.records import PlacedImage
from postgrad.core.text import how_many
from postgrad.data.account import Bookkeeper
from postgrad.data.cache import TokenCache
from postgrad.data.chat_format import (
    LossTurns,
    Message,
    bears_loss,
    learned_in,
    roles_of,
    says_nothing,
)
from postgrad.data.conversation_tokens import conversation_columns
from postgrad.data.draws import DrawnSet, Records
from postgrad.data.functions import prepared_rows
from postgrad.data.images import images_in, placed_in
from postgrad.data.messages import ColumnNotes, answers_in, asked_in, conversation_of
from postgrad.data.overlap import Selection
from postgrad.data.packed import PackedJson
from postgrad.data.rows import PackedRows, Row, dataset_name
from postgrad.data.settings import DataSettings, with_own_keys
from postgrad.data.templates import KeysOfMessages, special_ids, template_call
from postgrad.data.texts import (
    DUPLICATE,
    KEPT,
    NO_LOSS,
    TOO_LONG,
    TRUNCATED,
    USED,
    TokenColumns,
    count_fates,
    fates_of_lengths,
    last_learned,
    too_long,
)
from postgrad.data.token_bounds import TokenBound, bound_of_conversations

if TYPE_CHECKING:
    from postgrad.models.image_reader import ImageReader  # imports torch

_ENDLESS = (
    "{} training rows end without a special token, so the policy does not learn to stop: end "
    "answers with eos_token in the chat template, and take a tokenizer that has one"
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """One training row of SFT, of T tokens."""

    ticket: int  # the global number of the draw
    row: int  # index in the dataset, from 0
    token_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T] True at the learned tokens, ends of turns included
    images: tuple[PlacedImage, ...] = ()
    text: int = 0  # which of its row's texts, where a row was unrolled into one for each answer
    loss_weights: NDArray[np.float32] | None = None  # [T] see Sequences; None: 1 each


class ConversationSet(DrawnSet[Conversation]):
    """The conversations of a dataset that are within data.max_len."""


@with_own_keys
def load_conversations(
    settings: DataSettings,
    tokenizer: Any,
    *,
    selection: Selection | None = None,
    cache: TokenCache | None = None,
    reader: "ImageReader | None" = None,
) -> ConversationSet:
    """Reads, renders and tokenises a dataset. selection: held-out questions and duplicates, shared
    by all sets of the run. reader: of a model that reads images; others refuse rows with some.

    A conversation over settings.max_len tokens is dropped, cut at its end, or an error, as
    settings.on_too_long says. Raises UsageError that shows the first row whose learned tokens the
    chat template cannot mark.
    """
    selection = selection or Selection()
    book = Bookkeeper(dataset_name(settings))
    refusal = partial(too_long, settings.max_len, "")
    images, turns = reader is not None, settings.loss_turns
    bound = bound_of_conversations(settings, tokenizer, turns, refusal, images=images)
    rows, messages, noted = _selected(settings, selection, book, tokenizer, bound)
    columns = conversation_columns(settings, tokenizer, rows, messages, cache, book.notes, reader)
    texts = _texts_of(columns, settings)
    _cut(texts, columns, rows, messages, settings, reader)
    fates = _together(texts, len(rows))
    if selection.dedup != "none":
        for place in np.flatnonzero(np.isin(fates, USED)).tolist():
            if selection.repeats(messages[place]):
                fates[place] = DUPLICATE
    count_fates(book, fates, rows)
    kept = np.isin(texts.fate, USED) & np.isin(fates, USED)[texts.row]
    if endless := _endless(texts, kept, columns, tokenizer, settings):
        book.notes.append(_ENDLESS.format(endless))
    several = np.bincount(texts.row, minlength=len(rows)) > 1
    unrolled = np.bincount(texts.row[kept], minlength=len(rows))[several & np.isin(fates, USED)]
    if len(unrolled):
        book.notes.append(_note(unrolled, settings))
    book.notes += noted
    account = book.close(settings, f"{settings.max_len} tokens of a conversation")
    entries = _Conversations(columns, texts, np.flatnonzero(kept), rows, settings)
    return ConversationSet(entries, account, settings.shuffle)


class _Conversations(Records[Conversation]):
    """The texts of a set that are used."""

    def __init__(
        self,
        columns: TokenColumns,
        texts: "_Texts",
        kept: NDArray[np.int64],
        rows: PackedRows,
        settings: DataSettings,
    ) -> None:
        """kept: which of the texts are used."""
        self._ids, self._mask = columns["token_ids"], columns["loss_mask"]
        self._weights = columns.by_name.get("loss_weights")  # None: 1 each
        self._begin, self._end = texts.begin[kept], texts.end[kept]
        self._row, self._number = rows.index[texts.row[kept]], texts.number[kept].astype(np.int32)
        self._images = {
            place: images
            for place, text in enumerate(kept.tolist() if texts.images else ())
            if (images := texts.images.get(text))
        }
        self._split = settings.on_too_long == "split"

    def __len__(self) -> int:
        return len(self._begin)

    def record(self, place: int) -> Conversation:
        """The training row at `place`."""
        begin, end = int(self._begin[place]), int(self._end[place])
        ids, mask = self._ids.part(begin, end), self._mask.part(begin, end)
        if self._split:
            mask[:1] = False
        images, number = self._images.get(place, ()), int(self._number[place])
        weights = None if self._weights is None else self._weights.part(begin, end)
        return Conversation(place, int(self._row[place]), ids, mask, images, number, weights)


def _endless(
    texts: "_Texts",
    kept: NDArray[np.bool_],
    columns: TokenColumns,
    tokenizer: Any,
    settings: DataSettings,
) -> int:
    """How many texts have answers without an end that could be learned. kept: which are used."""
    if settings.text or settings.loss_turns == "everything":
        return 0
    ending, ids = special_ids(tokenizer), columns["token_ids"]
    last = texts.last[kept & (texts.fate == KEPT)].tolist()
    return sum(int(ids.part(place, place + 1)[0]) not in ending for place in last)


def _note(unrolled: NDArray[np.int64], settings: DataSettings) -> str:
    """The account's note about rows that became several. unrolled: training rows of each."""
    if settings.text:
        return (
            f"{len(unrolled)} texts are split into {sum(unrolled)} training rows of at most "
            f"{settings.max_len} tokens"
        )
    return (
        f"{len(unrolled)} rows are unrolled into {sum(unrolled)} training rows, one for each "
        "answer: the chat template writes an answer differently when more messages follow"
    )


@dataclass(slots=True)
class _Texts:
    """[S] texts of [R] rows, in the order of the rows, as places among the N tokens of all."""

    row: NDArray[np.int64]  # [S] from 0, rising
    begin: NDArray[np.int64]  # [S]
    end: NDArray[np.int64]  # [S]
    number: NDArray[np.int64]  # [S] which of its row's texts
    fate: NDArray[np.int8]  # [S] of FATES
    last: NDArray[np.int64]  # [S] the last token that bears loss; none where not behind `begin`
    images: dict[int, tuple[PlacedImage, ...]]  # of texts that show some


def _texts_of(columns: TokenColumns, settings: DataSettings) -> _Texts:
    """The texts of all rows, whole. With data.on_too_long = "split" they are pieces of at most
    data.max_len tokens: a piece begins with the last token of the one before, without loss. So each
    token is learned once, and each has at least one token before it.
    """
    offsets = columns["token_ids"].offsets
    row, begin = np.arange(len(offsets) - 1), offsets[:-1]
    if settings.on_too_long == "split":
        step = settings.max_len - 1
        pieces = -(-np.maximum(1, np.diff(offsets) - 1) // step)
        row = np.repeat(row, pieces)
        first = np.cumsum(pieces) - pieces
        begin = begin[row] + step * (np.arange(len(row)) - first[row])
        end = np.minimum(begin + settings.max_len, offsets[1:][row])
    else:
        row, begin = np.append(row, columns.owners()), np.append(begin, columns.further)
        order = np.lexsort((begin, row))
        row, begin = row[order], begin[order]
        end = np.append(begin[1:], offsets[-1:])[: len(begin)]
    number = np.arange(len(row)) - np.searchsorted(row, row)
    empty = np.zeros(len(row), np.int8)
    return _Texts(row, begin, end, number, empty, begin.copy(), {})


def _cut(
    texts: _Texts,
    columns: TokenColumns,
    rows: PackedRows,
    messages: PackedJson[list[Message]],
    settings: DataSettings,
    reader: "ImageReader | None",
) -> None:
    """Cuts the texts to data.max_len as data.on_too_long says, and settles their fates. Raises
    UsageError where that is "error".
    """
    lengths = texts.end - texts.begin
    over = np.flatnonzero(lengths > settings.max_len)
    refused = int(over[0]) if len(over) and settings.on_too_long == "error" else len(lengths)
    fate = fates_of_lengths(lengths, settings.max_len, settings.on_too_long)
    for text in range(min(refused + 1, len(lengths)) if reader is not None else 0):
        assert reader is not None
        place, limit = int(texts.row[text]), settings.max_len
        if text == refused:
            break
        tokens = columns["token_ids"].part(int(texts.begin[text]), int(texts.end[text]))
        images = placed_in(rows[place], tokens, images_in(messages[place]), reader)
        if fate[text] == TRUNCATED:
            images = tuple(image for image in images if image.at[0] < limit)
            if images and images[-1].at[-1] >= limit:  # half an image cannot be shown
                fate[text] = TOO_LONG
        if images:
            texts.images[text] = images
    if refused < len(lengths):
        row = rows[int(texts.row[refused])]
        raise too_long(settings.max_len, "", row, int(lengths[refused]))
    texts.end = np.where(fate == TRUNCATED, texts.begin + settings.max_len, texts.end)
    texts.last = last_learned(columns["loss_mask"], texts.begin, texts.end)
    silent = texts.last <= texts.begin  # nothing predicts a first token
    texts.fate = np.where((fate != TOO_LONG) & silent, NO_LOSS, fate).astype(np.int8)


def _together(texts: _Texts, rows: int) -> NDArray[np.int8]:
    """[R] the fates of rows from those of their texts: TRUNCATED where only a part is used."""
    first = np.searchsorted(texts.row, np.arange(rows))
    if not rows:
        return np.zeros(0, np.int8)
    used = np.logical_or.reduceat(np.isin(texts.fate, USED), first)
    uncut = np.logical_and.reduceat(texts.fate == KEPT, first)
    fates = np.where(used, np.where(uncut, KEPT, TRUNCATED), texts.fate[first])
    return fates.astype(np.int8)


def _selected(
    settings: DataSettings,
    selection: Selection,
    book: Bookkeeper,
    tokenizer: Any,
    bound: TokenBound,
) -> tuple[PackedRows, PackedJson[list[Message]], list[str]]:
    """The rows that may be trained on, the messages of each, and notes for the account's end."""
    rows = PackedRows()
    conversations: PackedJson[list[Message]] = PackedJson()
    keys, columns = KeysOfMessages(), ColumnNotes(settings)
    silent = 0  # rows with an answer that says nothing beside others
    for row in prepared_rows(settings, book):
        messages = conversation_of(row, settings)
        asked = asked_in(row, messages, settings)
        answers = answers_in(messages)
        learned = _to_learn(messages, settings.loss_turns)
        fate = selection.left_out(settings, row, asked, [*asked, *answers])
        if fate is None and learned and all(map(says_nothing, learned)):
            fate = "empty"
        if settings.loss_turns == "everything":
            _require_no_weights(row, messages)
        if fate is None and not _can_teach(messages, learned, settings):
            fate = "no_loss"
        fate = fate or bound.fate(row, messages)
        if fate is not None:
            book.add(fate, row)
            continue
        silent += any(map(says_nothing, learned))
        rows.append(row)
        conversations.append(messages)
        keys.add(row, messages)
        columns.add(row)
    book.notes += selection.notes()
    if silent:
        book.notes.append(
            f"{how_many(silent, 'row')} with an empty answer beside others: its end is learned"
        )
    if not settings.text:
        book.notes += keys.unread_notes(tokenizer, template_call(settings))
    return rows, conversations, columns.layouts() + columns.unread()


def _to_learn(messages: list[Message], turns: LossTurns) -> list[Message]:
    """The messages that bear loss; where weights of 0 leave none, those that would without. Of
    "everything", the answers.
    """
    turns = "all" if turns == "everything" else turns
    learned = [messages[i] for i in learned_in(messages, turns)]
    if learned:
        return learned
    roles = roles_of(turns)
    unlearned = [message for message in messages if message["role"] in roles]
    return unlearned[-1:] if turns == "last" else unlearned


def _require_no_weights(row: Row, messages: Sequence[Message]) -> None:
    """Raises UsageError for a message with a weight, where all of a conversation is learned."""
    for message in messages:
        if (weight := message.get("weight", 1)) != 1:
            raise UsageError(
                f"{row.place}: row {row.index} has a message with a weight of {weight:g}, and "
                'data.loss_turns = "everything" puts the same loss on all tokens of a '
                "conversation: remove the weight, or name roles, as in data.loss_turns = "
                '["user", "assistant"]'
            )


def _can_teach(
    messages: Sequence[Message], learned: Sequence[Message], settings: DataSettings
) -> bool:
    """False for a blank text, and where all of _to_learn has a weight of 0."""
    if settings.text:
        return bool(messages[0]["content"].strip())
    roles = roles_of(settings.loss_turns)
    return not learned or any(bears_loss(message, roles) for message in learned)
