"""Conversations by ticket: the training rows of SFT."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.progress import tracked
from postgrad.core.ragged import Ragged
from postgrad.core.records import PlacedImage
from postgrad.data.account import Bookkeeper, Fate
from postgrad.data.answer_spans import Rendered, Unmarkable
from postgrad.data.cache import TokenCache, TokenColumns
from postgrad.data.chat_format import Message, bears_loss, says_nothing
from postgrad.data.draws import DrawnSet
from postgrad.data.functions import prepared_rows
from postgrad.data.images import images_in, placed_in, with_image_texts
from postgrad.data.messages import (
    answers_in,
    asked_in,
    conversation_of,
    layout_notes,
    unread_columns,
)
from postgrad.data.overlap import Selection
from postgrad.data.prompts import unencodable
from postgrad.data.rows import Row, dataset_name
from postgrad.data.settings import DataSettings, with_own_keys
from postgrad.data.templates import (
    Unencodable,
    documents,
    render_conversations,
    special_ids,
    template_call,
    tokenise,
    turn_ends,
    unread_notes,
)

if TYPE_CHECKING:
    from postgrad.models.image_reader import ImageReader  # imports torch

COLUMNS = ("token_ids", "loss_mask", "starts")
_ENDLESS = (
    "{} training rows end without a special token, so the policy does not learn to stop: end "
    "answers with eos_token in the chat template, and take a tokenizer that has one"
)
USED: tuple[Fate, ...] = ("kept", "truncated")


@dataclass(frozen=True, slots=True)
class Conversation:
    """One training row of SFT, of T tokens."""

    ticket: int  # the global number of the draw
    row: int  # index in the dataset, from 0
    token_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T] True at the assistant's tokens, its end-of-turn included
    images: tuple[PlacedImage, ...] = ()
    text: int = 0  # which of its row's texts, where a row was unrolled into one for each answer


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
    settings.on_too_long says. Raises UsageError that shows the first row whose assistant tokens the
    chat template cannot mark.
    """
    selection = selection or Selection()
    book = Bookkeeper(dataset_name(settings))
    rows, messages = _selected(settings, selection, book)
    if not settings.text:
        book.notes += unread_notes(tokenizer, rows, messages, template_call(settings))
    columns = _columns(settings, tokenizer, rows, messages, cache, book.notes, reader)
    entries: list[Conversation] = []
    unrolled: list[int] = []  # training rows of each row that has several
    ending, endless = special_ids(tokenizer), 0  # answers without an end that could be learned
    table = zip(rows, messages, *(columns[name] for name in COLUMNS), strict=True)
    for row, conversation, ids, mask, starts in table:
        parts = _pieces(ids, mask, settings) or _texts(ids, mask, starts)
        shown = images_in(conversation)
        texts = [_fitted(row, *text, settings, reader, shown) for text in parts]
        fate = _together([text.fate for text in texts])
        if fate in USED and selection.repeats(conversation):
            fate = "duplicate"
        book.add(fate, row)
        if fate not in USED:
            continue
        kept = [(n, text) for n, text in enumerate(texts) if text.fate in USED]
        for n, text in kept:
            number = len(entries)
            entries.append(Conversation(number, row.index, text.ids, text.mask, text.images, n))
        endless += sum(text.fate == "kept" and text.last not in ending for text in texts)
        if len(texts) > 1:
            unrolled.append(len(kept))
    if endless and not settings.text:
        book.notes.append(_ENDLESS.format(endless))
    if unrolled:
        book.notes.append(_note(unrolled, settings))
    book.notes += layout_notes(rows, settings) + unread_columns(rows, settings)
    account = book.close(settings, f"{settings.max_len} tokens of a conversation")
    return ConversationSet(entries, account, settings.shuffle)


def _note(unrolled: Sequence[int], settings: DataSettings) -> str:
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


def _pieces(
    ids: NDArray[np.int32], mask: NDArray[np.bool_], settings: DataSettings
) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    """A text of T tokens in pieces of at most data.max_len, [] where it is not to be split.

    A piece begins with the last token of the one before, without loss: so each token is learned
    once, and each has at least one token before it.
    """
    if settings.on_too_long != "split":
        return []
    step = settings.max_len - 1
    pieces: list[tuple[NDArray[np.int32], NDArray[np.bool_]]] = []
    for start in range(0, max(1, len(ids) - 1), step):
        piece = slice(start, start + settings.max_len)
        pieces.append((ids[piece], mask[piece] & (np.arange(len(ids[piece])) > 0)))
    return pieces


@dataclass(frozen=True, slots=True)
class _Text:
    """One text of a row, cut to data.max_len, and its fate."""

    ids: NDArray[np.int32]  # [T]
    mask: NDArray[np.bool_]  # [T] True at tokens that bear loss
    fate: Fate
    images: tuple[PlacedImage, ...] = ()

    @property
    def last(self) -> int:
        """The last token that bears loss."""
        return int(self.ids[self.mask][-1])


def _fitted(
    row: Row,
    ids: NDArray[np.int32],
    mask: NDArray[np.bool_],
    settings: DataSettings,
    reader: "ImageReader | None",
    digests: Sequence[str],
) -> _Text:
    fate = _fate(row, len(ids), settings)
    images = () if reader is None else placed_in(row, ids, digests, reader)
    if fate == "truncated":
        ids, mask = ids[: settings.max_len], mask[: settings.max_len]
        images = tuple(image for image in images if image.at[0] < len(ids))
        if images and images[-1].at[-1] >= len(ids):  # half an image cannot be shown
            fate = "too_long"
    if fate != "too_long" and not mask[1:].any():  # nothing predicts a first token
        fate = "no_loss"
    return _Text(ids, mask, fate, images)


def _texts(
    ids: NDArray[np.int32], mask: NDArray[np.bool_], starts: NDArray[np.bool_]
) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    """(token ids, loss mask) of each text of a row. starts: [T] True where a text begins."""
    edges = np.flatnonzero(starts)
    if len(edges) < 2:
        return [(ids, mask)]
    return list(zip(np.split(ids, edges[1:]), np.split(mask, edges[1:]), strict=True))


def _together(fates: Sequence[Fate]) -> Fate:
    """The fate of a row from the fates of its texts: "truncated" where only a part is used."""
    if not any(fate in USED for fate in fates):
        return fates[0]
    return "kept" if fates.count("kept") == len(fates) else "truncated"


def _selected(
    settings: DataSettings, selection: Selection, book: Bookkeeper
) -> tuple[list[Row], list[list[Message]]]:
    """The rows that may be trained on, and the messages of each."""
    rows: list[Row] = []
    conversations: list[list[Message]] = []
    silent = 0  # rows with an answer that says nothing beside others
    for row in prepared_rows(settings, book):
        messages = conversation_of(row, settings)
        asked = asked_in(row, messages, settings)
        answers = answers_in(messages)
        turns = [message for message in messages if message["role"] == "assistant"]
        learned = [*filter(bears_loss, turns)] or turns
        learned = learned[-1:] if settings.loss_turns == "last" else learned
        fate: Fate | None = "empty" if turns and all(map(says_nothing, learned)) else None
        fate = fate or selection.left_out(settings, row, asked, [*asked, *answers])
        if fate is None and not _can_teach(messages, answers, settings):
            fate = "no_loss"
        if fate is not None:
            book.add(fate, row)
            continue
        silent += any(map(says_nothing, learned))
        rows.append(row)
        conversations.append(messages)
    if silent:
        book.notes.append(f"{silent} rows have an empty answer beside others: its end is learned")
    return rows, conversations


def _can_teach(messages: Sequence[Message], answers: Sequence[str], settings: DataSettings) -> bool:
    """False for a blank text, and where every answer has a weight of 0."""
    if settings.text:
        return bool(messages[0]["content"].strip())
    return not answers or any(map(bears_loss, messages))


def _columns(
    settings: DataSettings,
    tokenizer: Any,
    rows: Sequence[Row],
    messages: Sequence[Sequence[Message]],
    cache: TokenCache | None,
    notes: list[str],
    reader: "ImageReader | None",
) -> TokenColumns:
    """COLUMNS by row: the tokens of its texts joined; `starts` is True where a text begins."""
    call = template_call(settings)

    def make() -> TokenColumns:
        if settings.text:
            return _documents(tokenizer, rows, messages)
        return _tokenised(settings, tokenizer, rows, messages, call, reader)

    if cache is None:
        return make()
    how = "documents" if settings.text else f"conversations, loss on {settings.loss_turns}"
    if reader is not None:
        how += f", images by {reader.fingerprint}"
    return cache.columns(messages, call, how, make, notes)


def _documents(
    tokenizer: Any, rows: Sequence[Row], messages: Sequence[Sequence[Message]]
) -> TokenColumns:
    try:
        tokens = documents(tokenizer, [message["content"] for (message,) in messages])
    except Unencodable as error:
        raise unencodable(rows[error.place], error) from error
    return _in_rows(tokens, [1] * len(rows))


def _tokenised(
    settings: DataSettings,
    tokenizer: Any,
    rows: Sequence[Row],
    messages: Sequence[Sequence[Message]],
    call: Mapping[str, Any],
    reader: "ImageReader | None",
) -> TokenColumns:
    texts: list[Rendered] = []
    counts: list[int] = []  # texts of each row
    rendered = render_conversations(
        tokenizer,
        tracked("rows rendered", ((each, 0) for each in messages), len(messages)),
        ends=turn_ends(tokenizer),
        turns=settings.loss_turns,
        variables=call,
        parts=reader is not None,
    )
    for row, conversation, row_texts in zip(rows, messages, rendered, strict=False):
        if isinstance(row_texts, Unmarkable):
            raise unmarkable(row, row_texts) from row_texts
        if reader is not None:
            try:
                row_texts = with_image_texts(row_texts, conversation, reader)
            except Unmarkable as error:
                raise unmarkable(row, error) from error
        texts += row_texts
        counts.append(len(row_texts))
    sources = [row for row, n in zip(rows, counts, strict=True) for _ in range(n)]
    return _in_rows(marked(tokenizer, sources, texts), counts)


def _in_rows(
    tokens: Sequence[tuple[NDArray[np.int32], NDArray[np.bool_]]], counts: Sequence[int]
) -> TokenColumns:
    """(ids, mask) of texts joined into COLUMNS of rows. counts: how many texts each row has."""
    ids = Ragged.of([ids for ids, _ in tokens], np.int32)
    mask = Ragged.of([mask for _, mask in tokens], np.bool_)
    starts = np.zeros(len(ids.values), np.bool_)
    starts[ids.offsets[:-1][ids.lengths > 0]] = True
    edges = ids.offsets[np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])]
    columns = (ids.values, mask.values, starts)
    return {name: Ragged(values, edges) for name, values in zip(COLUMNS, columns, strict=True)}


def marked(
    tokenizer: Any, rows: Sequence[Row], texts: Sequence[Rendered]
) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    """(token ids, loss mask) of each text; rows: the row of each text, for error messages.

    Raises UsageError that shows the first row whose assistant tokens cannot be marked.
    """
    try:
        tokenised = tokenise(tokenizer, texts)
    except Unencodable as error:
        raise unencodable(rows[error.place], error) from error
    tokens: list[tuple[NDArray[np.int32], NDArray[np.bool_]]] = []
    for row, encoded in zip(rows, tokenised, strict=True):
        if isinstance(encoded, Unmarkable):
            raise unmarkable(row, encoded)
        tokens.append(encoded)
    return tokens


def _fate(row: Row, tokens: int, settings: DataSettings) -> Fate:
    if tokens <= settings.max_len:
        return "kept"
    if settings.on_too_long == "error":
        raise UsageError(
            f"{row.place}: row {row.index} has {tokens} tokens, data.max_len is "
            f'{settings.max_len}; raise it, or say data.on_too_long = "drop" or "truncate"'
        )
    return "truncated" if settings.on_too_long == "truncate" else "too_long"


def unmarkable(row: Row, error: Unmarkable) -> UsageError:
    """The error for a row whose assistant tokens the chat template does not show."""
    return UsageError(
        f"{row.place}: the assistant's tokens of row {row.index} cannot be marked: {error}; fix "
        "the row or the tokenizer's chat template"
    )
