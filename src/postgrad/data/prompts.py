"""Prompts by ticket: the tokens that the policy reads, with the reference answer."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.progress import tracked
from postgrad.core.records import PlacedImage, Prompt
from postgrad.data.account import Bookkeeper
from postgrad.data.answer_spans import Rendered, Unmarkable
from postgrad.data.cache import TokenCache
from postgrad.data.chat_format import Message
from postgrad.data.draws import DrawnSet, Records
from postgrad.data.functions import prepared_rows
from postgrad.data.hints import Hints, halves, hinted
from postgrad.data.images import images_in, placed_in, with_image_texts
from postgrad.data.messages import (
    ColumnNotes,
    answer_of,
    answers_in,
    asked_in,
    prompt_of,
    read_as,
)
from postgrad.data.overlap import Selection
from postgrad.data.packed import PackedJson, StoredColumn
from postgrad.data.rows import PackedRows, Row, dataset_name
from postgrad.data.settings import DataSettings, template_parts, with_own_keys
from postgrad.data.templates import (
    KeysOfMessages,
    Unencodable,
    encoded_texts,
    prompts,
    template_call,
    unencodable,
)
from postgrad.data.texts import (
    DUPLICATE,
    KEPT,
    TOO_LONG,
    TRUNCATED,
    UNREADABLE,
    USED,
    GrowingColumn,
    TokenColumns,
    count_fates,
)
from postgrad.data.token_bounds import bound_of_prompts

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

    A prompt over `max_prompt_tokens`, its hint included, is dropped, cut to its last tokens, or an
    error, as settings.on_too_long says; one that a cut would leave half an image is dropped. Raises
    UsageError that names row and column of what is wrong, and where no token is left for a prompt.
    """
    if max_prompt_tokens < 1:
        raise _no_room(settings)
    selection = selection or Selection()
    book = Bookkeeper(dataset_name(settings))
    selected = _selected(settings, selection, book, tokenizer, max_prompt_tokens, reader)
    read = partial(_tokens, settings, tokenizer, selected, cache, book.notes, reader)
    tokens = read(selected.messages)
    hints = Hints.of(settings, partial(read, selected.hinted))
    lengths = tokens.lengths if hints is None else np.maximum(tokens.lengths, hints.tokens.lengths)
    fates = np.zeros(len(selected.rows), np.int8)
    images: dict[int, tuple[PlacedImage, ...]] = {}
    for place, length in enumerate(lengths.tolist()):
        fate = _fate(selected.rows, place, length, max_prompt_tokens, settings)
        if reader is not None:
            shown = _images(selected, place, tokens, reader, max_prompt_tokens)
            fate = TOO_LONG if shown is None else fate
            if shown:
                images[place] = shown
        if fate in USED and selection.dedup != "none":
            fate = DUPLICATE if selection.repeats(selected.messages[place]) else fate
        if fate in USED and place in selected.unanswered:
            raise selected.unanswered[place]
        fates[place] = fate
    named = partial(_Prompts, settings.environment, book.name, max_prompt_tokens, images, hints)
    if settings.on_unreadable == "drop":
        usable = np.flatnonzero(np.isin(fates, USED))
        fates[usable[[*unreadable(named(selected, tokens, usable))]]] = UNREADABLE
    count_fates(book, fates, selected.rows)
    account = book.close(settings, f"{max_prompt_tokens} tokens of a prompt")
    entries = named(selected, tokens, np.flatnonzero(np.isin(fates, USED)))
    return PromptSet(entries, account, settings.shuffle)


@dataclass(frozen=True, slots=True)
class _Selected:
    """The rows that may be sampled from."""

    rows: PackedRows = field(default_factory=PackedRows)
    messages: PackedJson[list[Message]] = field(default_factory=PackedJson[list[Message]])
    # what graders read, where there are hints
    hinted: PackedJson[list[Message]] = field(default_factory=PackedJson[list[Message]])
    # [question, reference answer, metadata] of each row; for the question the number of its message
    # where it is one
    asked: PackedJson[list[Any]] = field(default_factory=PackedJson[list[Any]])
    # of the rows that have no reference answer: an error where they are used
    unanswered: dict[int, UsageError] = field(default_factory=dict[int, UsageError])

    def add(self, row: Row, messages: list[Message], question: str, settings: DataSettings) -> None:
        """Adds a row. question: the last of the user."""
        contents = [message["content"] for message in messages]
        number = contents.index(question) if question in contents else question
        answer = None
        try:
            answer = answer_of(row, settings)
        except UsageError as error:
            self.unanswered[len(self.rows)] = error
        self.rows.append(row)
        self.messages.append(messages)
        if settings.hint:
            self.hinted.append(hinted(messages, row, settings))
        self.asked.append([number, answer, _metadata(row, settings)])


class _Prompts(Records[Prompt]):
    """The rows of a set that are used."""

    def __init__(
        self,
        environment: str | None,
        dataset: str,
        max_prompt_tokens: int,
        images: Mapping[int, tuple[PlacedImage, ...]],
        hints: Hints | None,
        selected: _Selected,
        tokens: StoredColumn,
        used: NDArray[np.int64],
    ) -> None:
        """images: of selected rows that have some; used: which of the selected rows are."""
        self._environment, self._dataset = environment, dataset
        self._tokens, self._hints, self._used = tokens, hints, used
        self._most = max_prompt_tokens
        self._row = selected.rows.index[used]
        self._messages, self._asked = selected.messages, selected.asked
        shown = enumerate(used.tolist() if images else ())
        self._images = {n: images[place] for n, place in shown if place in images}

    def __len__(self) -> int:
        return len(self._row)

    def record(self, place: int) -> Prompt:
        """The prompt at `place`."""
        row = int(self._used[place])
        messages = self._messages[row]
        question, answer, metadata = self._asked[row]
        return Prompt(
            place,
            self._tokens.row(row)[-self._most :],
            messages[question]["content"] if isinstance(question, int) else question,
            answer,
            self._dataset,
            int(self._row[place]),
            metadata,
            messages,
            self._images.get(place, ()),
            self._environment,
            None if self._hints is None else self._hints.row(row, self._most),
        )


def _selected(
    settings: DataSettings,
    selection: Selection,
    book: Bookkeeper,
    tokenizer: Any,
    limit: int,
    reader: "ImageReader | None",
) -> _Selected:
    """The rows that may be sampled from; the others are counted in `book`. limit: tokens of a
    prompt.
    """
    refusal = partial(_too_long, limit)
    bound = bound_of_prompts(settings, tokenizer, limit, refusal, images=reader is not None)
    selected = _Selected()
    keys, columns = KeysOfMessages(), ColumnNotes(settings)
    for row in prepared_rows(settings, book):
        messages = prompt_of(row, settings)
        questions = asked_in(row, messages, settings)
        fate = selection.left_out(settings, row, questions, [*questions, *answers_in(messages)])
        fate = fate or bound.fate(row, messages)
        if fate is not None:
            book.add(fate, row)
            continue
        selected.add(row, messages, questions[-1] if questions else "", settings)
        keys.add(row, messages)
        columns.add(row)
    book.notes += selection.notes()
    book.notes += keys.unread_notes(tokenizer, template_call(settings))
    book.notes += columns.layouts()
    return selected


def _tokens(
    settings: DataSettings,
    tokenizer: Any,
    selected: _Selected,
    cache: TokenCache | None,
    notes: list[str],
    reader: "ImageReader | None",
    messages: PackedJson[list[Message]],
    *,
    halved: bool = False,
) -> StoredColumn:
    """Token ids of each prompt, int32. messages: of each of the selected rows. halved: two rows for
    each prompt, of what is before the place of a right answer and behind it.
    """
    call = template_call(settings)

    def make() -> TokenColumns:
        rendered = prompts(
            tokenizer,
            tracked("rows tokenised", messages, len(messages)),
            variables=call,
            parts=reader is not None,
        )
        texts = (
            _text(
                selected.rows,
                place,
                text if reader is None else _with_images(text, messages[place], reader),
            )
            for place, text in enumerate(rendered)
        )
        if halved:
            pairs = (halves(selected.rows[place], text) for place, text in enumerate(texts))
            texts = itertools.chain.from_iterable(pairs)
        ids = GrowingColumn(np.int32)
        try:
            for encoded in encoded_texts(tokenizer, texts):
                ids.append(np.array(encoded, np.int32))
        except Unencodable as error:
            row = error.place // 2 if halved else error.place
            raise unencodable(selected.rows[row], error) from error
        return TokenColumns({"token_ids": ids.column()}, np.zeros(0, np.int64))

    if cache is None:
        return make()["token_ids"]
    how = "prompts" if reader is None else f"prompts, images by {reader.fingerprint}"
    how += ", in halves" if halved else ""
    rows_each = 2 if halved else 1
    return cache.columns(messages, call, how, make, notes, rows_each)["token_ids"]


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
    selected: _Selected, place: int, tokens: StoredColumn, reader: "ImageReader", most: int
) -> tuple[PlacedImage, ...] | None:
    """The images of a prompt that keeps its last `most` tokens; None where half of one would be
    left.
    """
    cut = int(tokens.lengths[place]) - most
    digests = images_in(selected.messages[place])
    images = placed_in(selected.rows[place], tokens.row(place), digests, reader)
    if cut <= 0:
        return images
    left = [image for image in images if image.at[-1] >= cut]
    if left and left[0].at[0] < cut:
        return None
    return tuple(image.moved(-cut) for image in left)


def _fate(rows: PackedRows, place: int, tokens: int, limit: int, settings: DataSettings) -> int:
    if tokens <= limit:
        return KEPT
    if settings.on_too_long == "error":
        raise _too_long(limit, rows[place], tokens)
    return TRUNCATED if settings.on_too_long == "truncate" else TOO_LONG


def _text(rows: PackedRows, place: int, text: str | Unmarkable) -> str:
    if isinstance(text, Unmarkable):
        row = rows[place]
        raise UsageError(f"{row.place}: row {row.index}: {text}") from text
    if not text:
        row = rows[place]
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


def _no_room(settings: DataSettings) -> UsageError:
    return UsageError(
        f"{settings.path}: max_len = {settings.max_len} tokens, prompt and response, leaves no "
        "room for a prompt; raise max_len or lower max_new_tokens"
    )


def _too_long(limit: int, row: Row, tokens: int | str) -> UsageError:
    return UsageError(
        f"{row.place}: the prompt of row {row.index} has {tokens} tokens, the limit is {limit} "
        "(data.max_len less the new tokens); raise data.max_len, or say data.on_too_long = "
        '"drop" or "truncate"'
    )
