"""The tokens of SFT's rows, and which of them bear loss."""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from postgrad.core.errors import UsageError
from postgrad.core.progress import tracked
from postgrad.data.answer_spans import Rendered, Unmarkable
from postgrad.data.cache import TokenCache
from postgrad.data.chat_format import Message
from postgrad.data.images import with_image_texts
from postgrad.data.loss_masks import marked, unmarkable
from postgrad.data.packed import PackedJson
from postgrad.data.rows import PackedRows
from postgrad.data.settings import DataSettings
from postgrad.data.templates import (
    Unencodable,
    documents,
    encoded_texts,
    prompts,
    render_conversations,
    template_call,
    turn_ends,
    unencodable,
)
from postgrad.data.texts import MarkedTokens, TokenColumns, in_rows

if TYPE_CHECKING:
    from postgrad.models.image_reader import ImageReader  # imports torch


def conversation_columns(
    settings: DataSettings,
    tokenizer: Any,
    rows: PackedRows,
    messages: PackedJson[list[Message]],
    cache: TokenCache | None,
    notes: list[str],
    reader: "ImageReader | None",
) -> TokenColumns:
    """By row, the tokens of its texts joined: see in_rows."""
    call = template_call(settings)

    def make() -> TokenColumns:
        if settings.text:
            texts = (message["content"] for (message,) in _watched(messages))
            return _single_texts(documents(tokenizer, texts), rows)
        if settings.loss_turns == "everything":
            return _single_texts(_fully_learned(tokenizer, rows, messages, call, reader), rows)
        return _tokenised(settings, tokenizer, rows, messages, call, reader)

    if cache is None:
        return make()
    how = "documents" if settings.text else f"conversations, loss on {settings.loss_turns}"
    if reader is not None:
        how += f", images by {reader.fingerprint}"
    return cache.columns(messages, call, how, make, notes)


def _watched(messages: PackedJson[list[Message]]) -> Iterator[list[Message]]:
    """The conversations, which the progress counts."""
    return tracked("rows tokenised", messages, len(messages))


def _single_texts(texts: Iterable[MarkedTokens], rows: PackedRows) -> TokenColumns:
    """The columns of rows that are one text each."""
    try:
        return in_rows(texts, np.ones(len(rows), np.int64))
    except Unencodable as error:
        raise unencodable(rows[error.place], error) from error


def _fully_learned(
    tokenizer: Any,
    rows: PackedRows,
    messages: PackedJson[list[Message]],
    call: Mapping[str, Any],
    reader: "ImageReader | None",
) -> Iterator[MarkedTokens]:
    """Conversations as the template writes them. Every token bears loss but the first, which
    nothing predicts, and those of images.
    """
    rendered = prompts(
        tokenizer,
        _watched(messages),
        generation=False,
        variables=call,
        parts=reader is not None,
    )

    def texts() -> Iterator[str]:
        for place, text in enumerate(rendered):
            try:
                yield _readable(text, messages[place], reader)
            except Unmarkable as error:
                row = rows[place]
                raise UsageError(
                    f"{row.place}: row {row.index} cannot be rendered: {error}; fix the row or the "
                    "tokenizer's chat template"
                ) from error

    for encoded in encoded_texts(tokenizer, texts()):
        ids = np.array(encoded, np.int32)
        mask = np.arange(len(ids)) > 0
        yield MarkedTokens(ids, mask if reader is None else mask & (ids != reader.token_id))


def _readable(text: str | Unmarkable, messages: list[Message], reader: "ImageReader | None") -> str:
    """What the model reads of a rendered conversation. Raises Unmarkable."""
    if isinstance(text, Unmarkable):
        raise text
    if reader is None:
        return text
    return with_image_texts([Rendered(text, (), "")], messages, reader)[0].text


def _tokenised(
    settings: DataSettings,
    tokenizer: Any,
    rows: PackedRows,
    messages: PackedJson[list[Message]],
    call: Mapping[str, Any],
    reader: "ImageReader | None",
) -> TokenColumns:
    counts = array("q")  # texts of each row
    rendered = render_conversations(
        tokenizer,
        ((each, 0) for each in _watched(messages)),
        ends=turn_ends(tokenizer),
        turns=settings.loss_turns,
        variables=call,
        parts=reader is not None,
    )

    def texts() -> Iterator[tuple[int, Rendered]]:
        for place, row_texts in enumerate(rendered):
            if isinstance(row_texts, Unmarkable):
                raise unmarkable(rows[place], row_texts) from row_texts
            if reader is not None:
                try:
                    row_texts = with_image_texts(row_texts, messages[place], reader)
                except Unmarkable as error:
                    raise unmarkable(rows[place], error) from error
            counts.append(len(row_texts))
            yield from ((place, text) for text in row_texts)

    return in_rows(marked(tokenizer, rows, texts()), counts)
