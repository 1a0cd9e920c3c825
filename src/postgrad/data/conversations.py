"""Conversations by ticket: what SFT trains on."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.data.account import Bookkeeper, Fate, RowAccount
from postgrad.data.messages import conversation_of, questions_of
from postgrad.data.order import Order
from postgrad.data.overlap import overlaps
from postgrad.data.prompts import unencodable
from postgrad.data.rows import Row, dataset_name, read_rows
from postgrad.data.settings import DataSettings
from postgrad.data.templates import (
    Rendered,
    Unencodable,
    Unmarkable,
    render_conversation,
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


class ConversationSet:
    """The conversations of a dataset that fit. account: where every row went."""

    def __init__(
        self,
        entries: list[tuple[int, NDArray[np.int32], NDArray[np.bool_]]],
        account: RowAccount,
        shuffle: bool,
    ) -> None:
        self.account = account
        self.accounts = (account,)
        self._entries = entries
        self._order = Order(len(entries), shuffle)

    def __len__(self) -> int:
        return len(self._entries)

    def draw(self, ticket: int, seed: int) -> Conversation:
        """The conversation of a ticket: its place in the permutation of its epoch."""
        return Conversation(ticket, *self._entries[self._order.place(ticket, seed)])

    def all(self) -> list[Conversation]:
        """Every conversation once in the order of the rows; its ticket is its place."""
        return [Conversation(place, *entry) for place, entry in enumerate(self._entries)]


def load_conversations(
    settings: DataSettings, tokenizer: Any, *, exclude: frozenset[str] = frozenset()
) -> ConversationSet:
    """Reads, renders and tokenises a dataset. exclude: question keys that are held out.

    A conversation over settings.max_len tokens is dropped, cut at its end, or an error, as
    settings.on_too_long says. Raises UsageError that shows the first row whose assistant tokens the
    chat template cannot mark.
    """
    book = Bookkeeper(dataset_name(settings))
    rows, texts = _rendered(settings, tokenizer, exclude, book)
    entries: list[tuple[int, NDArray[np.int32], NDArray[np.bool_]]] = []
    try:
        tokenised = tokenise(tokenizer, texts)
    except Unencodable as error:
        raise unencodable(rows[error.place], error) from error
    for row, found in zip(rows, tokenised, strict=True):
        if isinstance(found, Unmarkable):
            raise _unmarkable(row, found)
        ids, mask = found
        fate = _fate(row, len(ids), settings)
        if fate == "truncated":
            ids, mask = ids[: settings.max_len], mask[: settings.max_len]
        if fate != "too_long" and not mask[1:].any():  # nothing predicts a first token
            fate = "no_loss"
        book.add(fate, row)
        if fate in ("kept", "truncated"):
            entries.append((row.index, ids, mask))
    account = book.close(settings, f"{settings.max_len} tokens of a conversation")
    return ConversationSet(entries, account, settings.shuffle)


def _rendered(
    settings: DataSettings, tokenizer: Any, exclude: frozenset[str], book: Bookkeeper
) -> tuple[list[Row], list[Rendered]]:
    """The rows that are not held out, and each one's text."""
    ends = turn_ends(tokenizer)
    rows: list[Row] = []
    texts: list[Rendered] = []
    for row in read_rows(settings):
        messages = conversation_of(row, settings)
        if overlaps(questions_of(messages), exclude):
            book.add("excluded", row)
            continue
        try:
            texts.append(
                render_conversation(
                    tokenizer,
                    messages,
                    ends=ends,
                    turns=settings.loss_turns,
                    variables=settings.chat_template_kwargs,
                )
            )
        except Unmarkable as error:
            raise _unmarkable(row, error) from error
        rows.append(row)
    return rows, texts


def _fate(row: Row, tokens: int, settings: DataSettings) -> Fate:
    if tokens <= settings.max_len:
        return "kept"
    if settings.on_too_long == "error":
        raise UsageError(
            f"{row.place}: row {row.index} has {tokens} tokens, data.max_len is "
            f'{settings.max_len}; raise it, or say data.on_too_long = "drop" or "truncate"'
        )
    return "truncated" if settings.on_too_long == "truncate" else "too_long"


def _unmarkable(row: Row, error: Unmarkable) -> UsageError:
    return UsageError(
        f"{row.place}: the assistant's tokens of row {row.index} cannot be marked: {error}; mend "
        "the row or the tokenizer's chat template"
    )
