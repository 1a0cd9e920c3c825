"""Answers with labelled steps by ticket (process rewards): read, rendered, tokenised, and cut to
data.max_len. Where a step ends in token ids is decided here too, for training rows and for samples.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers.decoders import DecodeStream

from postgrad.core.records import PlacedImage
from postgrad.core.text import how_many
from postgrad.data.account import Bookkeeper, Fate
from postgrad.data.answer_spans import Rendered, Unmarkable
from postgrad.data.cache import TokenCache
from postgrad.data.chat_format import Message
from postgrad.data.draws import DrawnSet
from postgrad.data.functions import prepared_rows
from postgrad.data.images import images_in, placed_in, with_image_texts
from postgrad.data.loss_masks import marked, unmarkable
from postgrad.data.overlap import Selection
from postgrad.data.packed import PackedJson
from postgrad.data.rows import Row, dataset_name
from postgrad.data.settings import PairSettings, with_own_keys
from postgrad.data.steps import StepPath, StepRow, boundaries, steps_of
from postgrad.data.templates import (
    CHUNK,
    KeysOfMessages,
    encode,
    render_conversations,
    single_text,
    template_call,
    turn_ends,
)
from postgrad.data.texts import GrowingColumn, TokenColumns, too_long
from postgrad.data.token_bounds import TokenBound, bound_of_conversations

if TYPE_CHECKING:
    from postgrad.models.image_reader import ImageReader  # imports torch


@dataclass(frozen=True, slots=True)
class Stepwise:
    """An answer of T tokens in steps. It ends with the token that ends its turn."""

    ticket: int  # the global number of the draw
    row: int  # index in the dataset, from 0
    token_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T] True at the last token of each step with a label
    labels: NDArray[np.float32]  # [T] the label there, from 0 (wrong) to 1 (right); 0 elsewhere
    gaps: bool  # a step has no label, and a later one has
    prompt_tokens: int  # tokens before the answer
    metadata: Mapping[str, Any]  # the other columns of the row, JSON values
    path: int = 0  # which of its row's answers
    images: tuple[PlacedImage, ...] = ()


class StepwiseSet(DrawnSet[Stepwise]):
    """The answers of a dataset that are within data.max_len."""


@with_own_keys
def load_steps(
    settings: PairSettings,
    tokenizer: Any,
    *,
    selection: Selection | None = None,
    cache: TokenCache | None = None,
    reader: "ImageReader | None" = None,
) -> StepwiseSet:
    """Reads, renders and tokenises a dataset of labelled steps. selection: held-out questions and
    duplicates, shared by all sets of the run. reader: of a model that reads images; others refuse
    rows with some.

    Answers over settings.max_len tokens are dropped, cut (the steps that end behind it are lost),
    or an error, as settings.on_too_long says; no image is cut. Raises UsageError that names row and
    column.
    """
    selection = selection or Selection()
    book = Bookkeeper(dataset_name(settings))
    refusal = partial(too_long, settings.max_len, "a conversation of ")
    bound = bound_of_conversations(settings, tokenizer, "last", refusal, images=reader is not None)
    rows = _selected(settings, selection, book, bound)
    paths = [(row, path) for row in rows for path in row.paths]
    keys = KeysOfMessages()
    messages: PackedJson[list[Message]] = PackedJson()
    for row, path in paths:
        messages.append(row.messages(path, settings.separator))
        keys.add(row.row, messages[-1])
    call = template_call(settings)
    book.notes += keys.unread_notes(tokenizer, call)

    def make() -> TokenColumns:
        return _tokenised(settings, tokenizer, paths, messages, reader)

    how = f"steps between {settings.separator!r}: {[[*map(len, path.steps)] for _, path in paths]}"
    if reader is not None:
        how += f", images by {reader.fingerprint}"
    columns = cache.columns(messages, call, how, make, book.notes) if cache else make()
    entries = _used(rows, columns, settings, selection, book, reader)
    steps = sum(int(answer.loss_mask.sum()) for answer in entries)
    book.notes.append(f"{how_many(len(entries), 'answer')} with {how_many(steps, 'labelled step')}")
    account = book.close(settings, f"{settings.max_len} tokens of a conversation")
    numbered = [replace(answer, ticket=place) for place, answer in enumerate(entries)]
    return StepwiseSet(numbered, account, settings.shuffle)


def _used(
    rows: Sequence[StepRow],
    columns: TokenColumns,
    settings: PairSettings,
    selection: Selection,
    book: Bookkeeper,
    reader: "ImageReader | None",
) -> list[Stepwise]:
    """The answers that are used, of rows whose tokens are `columns`; `book` counts all rows."""
    encoded = zip(columns["token_ids"], columns["answer"], columns["ends"], strict=True)
    entries: list[Stepwise] = []
    for row in rows:
        answers = [
            _answer(row, number, path, *next(encoded), settings, reader)
            for number, path in enumerate(row.paths)
        ]
        fates: list[Fate] = [fate for fate, _ in answers]
        kept = [answer for _, answer in answers if answer is not None]
        fate = fates[0]
        if kept and any(each != "kept" for each in fates):
            fate = "truncated"
        elif kept:
            fate = "kept"
        if kept and selection.repeats(_compared(row)):
            fate, kept = "duplicate", []
        book.add(fate, row.row)
        entries += kept
    return entries


def step_ends(tokenizer: Any, ids: NDArray[np.int32], separator: str) -> NDArray[np.int64]:
    """[steps] the place of the last token of each step of an answer, [R] token ids as they were
    sampled. A step ends behind a separator, at the token that completes it; the last one ends with
    the answer. Where nothing is written between two ends there is no step.
    """
    stream = DecodeStream(skip_special_tokens=True)
    text, begin = "", 0
    ends: list[int] = []
    for place, token in enumerate(ids.tolist()):
        text += stream.step(tokenizer.backend_tokenizer, token) or ""
        while (edge := text.find(separator, begin)) >= 0:
            if text[begin:edge].strip():
                ends.append(place)
            begin = edge + len(separator)
    if len(ids) and (text[begin:].strip() or not ends):
        ends.append(len(ids) - 1)
    return np.array(sorted(set(ends)), np.int64)


def _selected(
    settings: PairSettings, selection: Selection, book: Bookkeeper, bound: TokenBound
) -> list[StepRow]:
    """The rows that may be tokenised; the others are counted in `book` with their fates."""
    selected: list[StepRow] = []
    shapes: Counter[str] = Counter()
    inside = 0
    for row in prepared_rows(settings, book):
        answers = steps_of(row, settings)
        shapes[answers.shape] += 1
        inside += any(settings.separator in s.strip() for p in answers.paths for s in p.steps)
        texts = [*answers.question, *(step for path in answers.paths for step in path.steps)]
        fate = selection.left_out(settings, row, answers.question, texts)
        if fate is None and answers.empty:
            fate = "empty"
        answered = (answers.messages(path, settings.separator) for path in answers.paths)
        if fate is None and all(bound.fate(row, messages) for messages in answered):
            fate = "too_long"
        if fate is None:
            selected.append(answers)
        else:
            book.add(fate, row)
    book.notes.extend(f"{how_many(count, 'row')}: {shape}" for shape, count in shapes.items())
    if inside:
        book.notes.append(
            f"{inside} rows have the separator {settings.separator!r} inside a step: samples will "
            "be split there"
        )
    return selected


def _tokenised(
    settings: PairSettings,
    tokenizer: Any,
    paths: Sequence[tuple[StepRow, StepPath]],
    messages: Sequence[Sequence[Any]],
    reader: "ImageReader | None",
) -> TokenColumns:
    """Columns by answer: token_ids, answer (True at its tokens), ends (at a step's last token)."""
    rendered = render_conversations(
        tokenizer,
        [(conversation, 0) for conversation in messages],
        ends=turn_ends(tokenizer),
        turns="last",
        variables=template_call(settings),
        parts=reader is not None,
    )
    texts: list[Rendered] = []
    for (row, _), conversation, rendering in zip(
        paths, messages, rendered, strict=False
    ):  # it ends at the first refusal
        try:
            text = single_text(rendering)
            texts += [text] if reader is None else with_image_texts([text], conversation, reader)
        except Unmarkable as error:
            raise unmarkable(row.row, error) from error
    tokens = list(marked(tokenizer, [row.row for row, _ in paths], enumerate(texts)))
    offsets = [
        np.array(part, np.int64).reshape(-1, 2)
        for start in range(0, len(texts), CHUNK)
        for part in encode(
            tokenizer,
            [rendering.text for rendering in texts[start : start + CHUNK]],
            return_offsets_mapping=True,
        )["offset_mapping"]
    ]
    columns = {"token_ids": GrowingColumn(np.int32)}
    columns |= {name: GrowingColumn(np.bool_) for name in ("answer", "ends")}
    for (row, path), text, (ids, mask, _), spans in zip(paths, texts, tokens, offsets, strict=True):
        length = int(np.flatnonzero(mask)[-1]) + 1  # what the template writes behind it is dropped
        try:
            ends = _ends(path, text, spans[:length], settings.separator)
        except Unmarkable as error:
            raise unmarkable(row.row, error) from error
        for name, values in (("token_ids", ids), ("answer", mask), ("ends", ends)):
            columns[name].append(values[:length])
    by_name = {name: column.column() for name, column in columns.items()}
    return TokenColumns(by_name, np.zeros(0, np.int64))


def _ends(
    path: StepPath, text: Rendered, spans: NDArray[np.int64], separator: str
) -> NDArray[np.bool_]:
    """[T] True at the last token of each step. spans: [T, 2] of the tokens, in characters. Raises
    Unmarkable where two steps end in one token.
    """
    content = separator.join(path.steps)
    bare = content.strip()
    begin = text.text.find(bare, text.spans[-1][0]) - content.find(bare)
    places = np.array([begin + end for end in boundaries(path.steps, separator)], np.int64)
    ends = np.zeros(len(spans), np.bool_)
    reached = np.maximum.accumulate(spans[:, 1])
    ends[np.searchsorted(reached, places)] = True
    ends[-1] = True
    if ends.sum() != len(path.steps):
        raise Unmarkable("two of its steps end in one token: choose another data.separator")
    return ends


def _answer(
    row: StepRow,
    number: int,
    path: StepPath,
    ids: NDArray[np.int32],
    answer: NDArray[np.bool_],
    ends: NDArray[np.bool_],
    settings: PairSettings,
    reader: "ImageReader | None",
) -> tuple[Fate, Stepwise | None]:
    """The fate of one answer, and its record where it is used. Raises UsageError where it is too
    long and data.on_too_long = "error".
    """
    fate = _fate(row.row, len(ids), settings)
    places = np.flatnonzero(ends)
    places = places[places < settings.max_len]
    labels = list(path.labels)[: len(places)]
    labelled = [label is not None for label in labels]
    digests = images_in(row.prompt)
    images = () if reader is None else placed_in(row.row, ids, digests, reader)
    images = tuple(image for image in images if image.at[0] < settings.max_len)
    if images and images[-1].at[-1] >= settings.max_len:
        fate = "too_long"  # half an image cannot be shown
    if fate == "too_long" or not any(labelled):
        return "no_loss" if fate != "too_long" else fate, None
    mask, values = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.float32)
    mask[places] = labelled
    values[places] = [label or 0.0 for label in labels]
    last = int(np.flatnonzero(labelled)[-1])
    columns = (column for column in row.row.values.items() if column[0] != settings.images)
    cut = slice(settings.max_len)
    return (
        fate,
        Stepwise(
            ticket=0,  # its place is known once all are read
            row=row.row.index,
            token_ids=ids[cut],
            loss_mask=mask[cut],
            labels=values[cut],
            gaps=not all(labelled[:last]),
            prompt_tokens=int(np.argmax(answer)),
            metadata={name: value for name, value in columns if isinstance(value, str | int)},
            path=number,
            images=images,
        ),
    )


def _fate(row: Row, tokens: int, settings: PairSettings) -> Fate:
    if tokens <= settings.max_len:
        return "kept"
    if settings.on_too_long == "error":
        raise too_long(settings.max_len, "a conversation of ", row, tokens)
    return "truncated" if settings.on_too_long == "truncate" else "too_long"


def _compared(row: StepRow) -> list[Any]:
    """The messages that data.dedup compares: the prompt, then the steps with their labels."""
    answers = [
        {"role": str(label), "content": step}
        for path in row.paths
        for step, label in zip(path.steps, path.labels, strict=True)
    ]
    return [*row.prompt, *answers]
