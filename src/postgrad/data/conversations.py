"""Conversations by ticket: what SFT trains on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.data.account import Bookkeeper, Fate
from postgrad.data.cache import Columns, TokenCache
from postgrad.data.draws import DrawnSet
from postgrad.data.functions import prepared_rows
from postgrad.data.messages import Message, answers_in, asked_in, conversation_of
from postgrad.data.prompts import unencodable
from postgrad.data.rows import Row, dataset_name
from postgrad.data.selection import Selection
from postgrad.data.settings import DataSettings
from postgrad.data.templates import (
    Rendered,
    Unencodable,
    Unmarkable,
    render_conversation,
    template_call,
    tokenise,
    turn_ends,
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """token_ids: [T] int32; loss_mask: [T] True at what the assistant wrote and its turn's end."""

    ticket: int
    row: int
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


class ConversationSet(DrawnSet[Conversation]):
    """The conversations of a dataset that fit."""


def load_conversations(
    settings: DataSettings,
    tokenizer: Any,
    *,
    selection: Selection | None = None,
    cache: TokenCache | None = None,
) -> ConversationSet:
    """Reads, renders and tokenises a dataset. selection: what the run leaves out of all its sets.

    A conversation over settings.max_len tokens is dropped, cut at its end, or an error, as
    settings.on_too_long says. Raises UsageError that shows the first row whose assistant tokens the
    chat template cannot mark.
    """
    selection = selection or Selection()
    book = Bookkeeper(dataset_name(settings))
    rows, messages = _selected(settings, selection, book)
    columns = _columns(settings, tokenizer, rows, messages, cache, book.notes)
    entries: list[Conversation] = []
    found = zip(rows, messages, columns["token_ids"], columns["loss_mask"], strict=True)
    for row, said, ids, mask in found:
        fate = _fate(row, len(ids), settings)
        if fate == "truncated":
            ids, mask = ids[: settings.max_len], mask[: settings.max_len]
        if fate != "too_long" and not mask[1:].any():  # nothing predicts a first token
            fate = "no_loss"
        if fate in ("kept", "truncated"):
            if selection.repeats(said):
                fate = "duplicate"
            else:
                entries.append(Conversation(len(entries), row.index, ids, mask))
        book.add(fate, row)
    account = book.close(settings, f"{settings.max_len} tokens of a conversation")
    return ConversationSet(entries, account, settings.shuffle)


def _selected(
    settings: DataSettings, selection: Selection, book: Bookkeeper
) -> tuple[list[Row], list[list[Message]]]:
    """The rows that may be trained on, and what each says."""
    rows: list[Row] = []
    conversations: list[list[Message]] = []
    for row in prepared_rows(settings, book):
        messages = conversation_of(row, settings)
        asked = asked_in(row, messages, settings)
        fate = selection.left_out(asked, [*asked, *answers_in(messages)])
        if fate is not None:
            book.add(fate, row)
            continue
        rows.append(row)
        conversations.append(messages)
    return rows, conversations


def _columns(
    settings: DataSettings,
    tokenizer: Any,
    rows: Sequence[Row],
    messages: Sequence[Sequence[Message]],
    cache: TokenCache | None,
    notes: list[str],
) -> Columns:
    """token_ids and loss_mask of each row."""
    call = template_call(settings)

    def make() -> Columns:
        return _tokenised(settings, tokenizer, rows, messages, call)

    if cache is None:
        return make()
    return cache.columns(
        messages, call, f"conversations, loss on {settings.loss_turns}", make, notes
    )


def _tokenised(
    settings: DataSettings,
    tokenizer: Any,
    rows: Sequence[Row],
    messages: Sequence[Sequence[Message]],
    call: Mapping[str, Any],
) -> Columns:
    ends = turn_ends(tokenizer)
    texts: list[Rendered] = []
    for row, one in zip(rows, messages, strict=True):
        try:
            texts.append(
                render_conversation(
                    tokenizer, one, ends=ends, turns=settings.loss_turns, variables=call
                )
            )
        except Unmarkable as error:
            raise unmarkable(row, error) from error
    found = marked(tokenizer, rows, texts)
    return {
        "token_ids": Ragged.of([ids for ids, _ in found], np.int32),
        "loss_mask": Ragged.of([mask for _, mask in found], np.bool_),
    }


def marked(
    tokenizer: Any, rows: Sequence[Row], texts: Sequence[Rendered]
) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    """Token ids and loss mask of each text; rows: where each is from, for the errors.

    Raises UsageError that shows the first row whose assistant tokens cannot be marked.
    """
    try:
        tokenised = tokenise(tokenizer, texts)
    except Unencodable as error:
        raise unencodable(rows[error.place], error) from error
    found: list[tuple[NDArray[np.int32], NDArray[np.bool_]]] = []
    for row, one in zip(rows, tokenised, strict=True):
        if isinstance(one, Unmarkable):
            raise unmarkable(row, one)
        found.append(one)
    return found


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
    """What is told of a row whose assistant tokens cannot be marked."""
    return UsageError(
        f"{row.place}: the assistant's tokens of row {row.index} cannot be marked: {error}; mend "
        "the row or the tokenizer's chat template"
    )
