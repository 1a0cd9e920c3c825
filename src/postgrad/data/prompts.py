"""Prompts by ticket: the tokens that the policy reads, with the reference answer."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.progress import tracked
from postgrad.core.ragged import Ragged
from postgrad.core.records import PlacedImage, Prompt
from postgrad.data.account import Bookkeeper, Fate
from postgrad.data.answer_spans import Rendered, Unmarkable
from postgrad.data.cache import TokenCache, TokenColumns
from postgrad.data.chat_format import Message
from postgrad.data.draws import DrawnSet
from postgrad.data.functions import prepared_rows
from postgrad.data.images import images_in, placed_in, with_image_texts
from postgrad.data.messages import answer_of, answers_in, asked_in, layout_notes, prompt_of, read_as
from postgrad.data.overlap import Selection
from postgrad.data.rows import Row, dataset_name
from postgrad.data.settings import DataSettings, template_parts, with_own_keys
from postgrad.data.templates import (
    Unencodable,
    encoded_texts,
    prompts,
    template_call,
    unread_notes,
)

if TYPE_CHECKING:
    from postgrad.models.image_reader import ImageReader  # imports torch


# Of prompts, the tickets of those whose reference answers a verifier cannot read.
Unreadable = Callable[[Sequence[Prompt]], Collection[int]]


def every_answer_is_read(prompts: Sequence[Prompt]) -> Collection[int]:
    """Unreadable, where no verifier is asked."""
    del prompts
    return ()


class PromptSet(DrawnSet[Prompt]):
    """The prompts of a dataset that leave room for a response."""


@with_own_keys
def load_prompts(
    settings: DataSettings,
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
    selection: Selection | None = None,
    cache: TokenCache | None = None,
    reader: "ImageReader | None" = None,
    unreadable: Unreadable = every_answer_is_read,
) -> PromptSet:
    """Reads, renders and tokenises a dataset. selection: held-out questions and duplicates, shared
    by all sets of the run. reader: of a model that reads images; others refuse rows with some.
    unreadable: asked where settings.on_unreadable is "drop".

    A prompt over `max_prompt_tokens` is dropped, cut to its last tokens, or an error, as
    settings.on_too_long says; one that a cut would leave half an image is dropped. Raises
    UsageError that names row and column of what is wrong, and where no token is left for a prompt.
    """
    if max_prompt_tokens < 1:
        raise _no_room(settings)
    selection = selection or Selection()
    book = Bookkeeper(dataset_name(settings))
    selected = _selected(settings, selection, book)
    rows, conversations = [row for row, *_ in selected], [messages for _, messages, _ in selected]
    book.notes += unread_notes(tokenizer, rows, conversations, template_call(settings))
    book.notes += layout_notes(rows, settings)
    tokens = _tokens(settings, tokenizer, selected, cache, book.notes, reader)
    usable: list[tuple[Fate, Row, Prompt]] = []
    for (row, messages, question), ids in zip(selected, tokens, strict=True):
        fate = _fate(row, len(ids), max_prompt_tokens, settings)
        images = _images(row, ids, messages, reader, len(ids) - max_prompt_tokens)
        fate = "too_long" if images is None else fate
        if fate != "too_long" and selection.repeats(messages):
            fate = "duplicate"
        if fate not in ("kept", "truncated"):
            book.add(fate, row)
            continue
        prompt = Prompt(
            len(usable), ids[-max_prompt_tokens:], question, answer_of(row, settings), book.name,
            row.index, _metadata(row, settings), messages, images or (), settings.environment,
        )  # fmt: skip
        usable.append((fate, row, prompt))
    entries = _readable(usable, settings, book, unreadable)
    account = book.close(settings, f"{max_prompt_tokens} tokens of a prompt")
    return PromptSet(entries, account, settings.shuffle)


def _readable(
    usable: Sequence[tuple[Fate, Row, Prompt]],
    settings: DataSettings,
    book: Bookkeeper,
    unreadable: Unreadable,
) -> list[Prompt]:
    """The prompts that are kept, numbered anew, with every row in the account."""
    prompts = [prompt for *_, prompt in usable]
    dropped = unreadable(prompts) if settings.on_unreadable == "drop" else ()
    for fate, row, prompt in usable:
        book.add("unreadable" if prompt.ticket in dropped else fate, row)
    kept = [prompt for prompt in prompts if prompt.ticket not in dropped]
    return [replace(prompt, ticket=place) for place, prompt in enumerate(kept)]


def _selected(
    settings: DataSettings, selection: Selection, book: Bookkeeper
) -> list[tuple[Row, list[Message], str]]:
    """(row, messages, last question) of each row that may be sampled from."""
    selected: list[tuple[Row, list[Message], str]] = []
    for row in prepared_rows(settings, book):
        messages = prompt_of(row, settings)
        questions = asked_in(row, messages, settings)
        fate = selection.left_out(settings, row, questions, [*questions, *answers_in(messages)])
        if fate is not None:
            book.add(fate, row)
        else:
            selected.append((row, messages, questions[-1] if questions else ""))
    return selected


def _tokens(
    settings: DataSettings,
    tokenizer: Any,
    selected: Sequence[tuple[Row, list[Message], str]],
    cache: TokenCache | None,
    notes: list[str],
    reader: "ImageReader | None",
) -> Ragged:
    """Token ids of each prompt, int32."""
    call = template_call(settings)

    def make() -> TokenColumns:
        rendered = prompts(
            tokenizer,
            tracked("rows rendered", (messages for _, messages, _ in selected), len(selected)),
            variables=call,
            parts=reader is not None,
        )
        texts = [
            _text(row, text if reader is None else _with_images(text, messages, reader))
            for (row, messages, _), text in zip(selected, rendered, strict=False)
        ]
        try:
            ids = list(encoded_texts(tokenizer, texts))
        except Unencodable as error:
            raise unencodable(selected[error.place][0], error) from error
        return {"token_ids": Ragged.of(ids, np.int32)}

    if cache is None:
        return make()["token_ids"]
    messages = [messages for _, messages, _ in selected]
    how = "prompts" if reader is None else f"prompts, images by {reader.fingerprint}"
    return cache.columns(messages, call, how, make, notes)["token_ids"]


def _with_images(
    text: str | Unmarkable, messages: Sequence[Message], reader: "ImageReader"
) -> str | Unmarkable:
    if isinstance(text, Unmarkable):
        return text
    try:
        (filled,) = with_image_texts([Rendered(text, (), "")], messages, reader)
    except Unmarkable as error:
        return error
    return filled.text


def _images(
    row: Row,
    ids: NDArray[np.int32],
    messages: Sequence[Message],
    reader: "ImageReader | None",
    cut: int,
) -> tuple[PlacedImage, ...] | None:
    """The images of a prompt that loses its first `cut` tokens, if that is more than 0; None where
    half of one would be left.
    """
    images = () if reader is None else placed_in(row, ids, images_in(messages), reader)
    if cut <= 0:
        return images
    left = [image for image in images if image.at[-1] >= cut]
    if left and left[0].at[0] < cut:
        return None
    return tuple(image.moved(-cut) for image in left)


def _fate(row: Row, tokens: int, limit: int, settings: DataSettings) -> Fate:
    if tokens <= limit:
        return "kept"
    if settings.on_too_long == "error":
        raise _too_long(row, tokens, limit)
    return "truncated" if settings.on_too_long == "truncate" else "too_long"


def _text(row: Row, text: str | Unmarkable) -> str:
    if isinstance(text, Unmarkable):
        raise UsageError(f"{row.place}: row {row.index}: {text}") from text
    if not text:
        raise UsageError(
            f"{row.place}: row {row.index}: the chat template writes nothing for its prompt, so "
            "there is nothing to sample from; fix the row or the template"
        )
    return text


def _metadata(row: Row, settings: DataSettings) -> dict[str, Any]:
    """The columns that verifiers get as metadata: all but question, answer, messages and images;
    those of a template with several columns are kept.
    """
    settings = read_as(row, settings)
    question_columns = {name for _, name in template_parts(settings.template)} - {None} or {
        settings.prompt
    }
    read = {
        settings.answer,
        settings.messages,
        settings.input,
        settings.images,
        *(question_columns if len(question_columns) == 1 else ()),
    }
    return {key: value for key, value in row.values.items() if key not in read}


def unencodable(row: Row, error: Unencodable) -> UsageError:
    """The error for a row with a character that the tokenizer cannot encode."""
    return UsageError(
        f"{row.place}: row {row.index} has a character that the tokenizer lacks ({error}); fix "
        'the row, or take a tokenizer that encodes every text (model.init.tokenizer.kind = "bpe")'
    )


def _no_room(settings: DataSettings) -> UsageError:
    return UsageError(
        f"{settings.path}: max_len = {settings.max_len} tokens, prompt and response, leaves no "
        "room for a prompt; raise max_len or lower max_new_tokens"
    )


def _too_long(row: Row, tokens: int, limit: int) -> UsageError:
    return UsageError(
        f"{row.place}: the prompt of row {row.index} has {tokens} tokens, the limit is {limit} "
        "(data.max_len less the new tokens); raise data.max_len, or say data.on_too_long = "
        '"drop" or "truncate"'
    )
