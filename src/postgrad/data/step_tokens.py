"""Answers with labelled steps by ticket (process rewards): read, rendered, tokenised, and cut to
data.max_len.
"""

import hashlib
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.progress import tracked
from postgrad.core.records import PlacedImage
from postgrad.core.text import how_many
from postgrad.data.account import Bookkeeper, Fate
from postgrad.data.answer_spans import Rendered, Unmarkable
from postgrad.data.cache import TokenCache
from postgrad.data.chat_format import Message
from postgrad.data.draws import DrawnSet, Records
from postgrad.data.functions import prepared_rows
from postgrad.data.images import images_in, placed_in, with_image_texts
from postgrad.data.loss_masks import marked, unmarkable
from postgrad.data.overlap import Selection
from postgrad.data.packed import PackedJson, StoredColumn
from postgrad.data.rows import PackedRows, Row, dataset_name
from postgrad.data.settings import PairSettings, with_own_keys
from postgrad.data.step_ends import marked_ends
from postgrad.data.steps import StepRow, steps_of
from postgrad.data.templates import (
    CHUNK,
    KeysOfMessages,
    encode,
    render_conversations,
    single_text,
    template_call,
    turn_ends,
)
from postgrad.data.texts import (
    DUPLICATE,
    KEPT,
    NO_LOSS,
    TOO_LONG,
    TRUNCATED,
    USED,
    GrowingColumn,
    TokenColumns,
    count_fates,
    fates_of_lengths,
    too_long,
)
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


@dataclass(frozen=True, slots=True)
class _Answers:
    """[P] answers of the [R] rows that may be tokenised."""

    rows: PackedRows
    row: NDArray[np.int64]  # [P] the place of each one's row, rising
    messages: PackedJson[list[Message]]  # [P]
    characters: StoredColumn  # int32, by answer: how many each of its steps has
    labels: StoredColumn  # float32, by answer: of each of its steps, NaN where nobody has said
    metadata: PackedJson[dict[str, Any]]  # [R] the other columns

    def row_of(self, place: int) -> Row:
        """The row of an answer, without its values."""
        return self.rows[int(self.row[place])]

    def of_row(self, row: int) -> range:
        """The places of a row's answers."""
        begin, end = np.searchsorted(self.row, (row, row + 1)).tolist()
        return range(begin, end)

    def steps(self, place: int, separator: str) -> list[str]:
        """The steps of an answer."""
        content, begin = self.messages[place][-1]["content"], 0
        steps: list[str] = []
        for characters in self.characters.row(place).tolist():
            steps.append(content[begin : begin + characters])
            begin += characters + len(separator)
        return steps

    def compared(self, row: int, separator: str) -> list[Any]:
        """The messages that data.dedup compares: the prompt, then the steps with their labels."""
        places = self.of_row(row)
        steps = [
            {"role": str(label), "content": step}
            for place in places
            for step, label in zip(
                self.steps(place, separator), self.labels.row(place).tolist(), strict=True
            )
        ]
        return [*self.messages[places[0]][:-1], *steps]


class _Kept(Records[Stepwise]):
    """The answers of a set that are used."""

    def __init__(self, answers: _Answers, columns: TokenColumns, max_len: int) -> None:
        self._labels, self._metadata = answers.labels, answers.metadata
        self._row, self._index = answers.row, answers.rows.index
        self._columns = columns
        self._max_len = max_len
        self.images: dict[int, tuple[PlacedImage, ...]] = {}  # of answers that show some
        self.used = np.zeros(0, np.int64)  # the places of answers that are used

    def __len__(self) -> int:
        return len(self.used)

    def labelled(self, place: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """[steps] the last token of each step of an answer before max_len, and its label."""
        ends = np.flatnonzero(self._columns["ends"].row(place))
        ends = ends[ends < self._max_len]
        return ends, self._labels.row(place)[: len(ends)]

    def record(self, place: int) -> Stepwise:
        """The answer at `place`."""
        number = int(self.used[place])
        row, cut = int(self._row[number]), slice(self._max_len)
        ids, answer = (self._columns[name].row(number) for name in ("token_ids", "answer"))
        ends, of_steps = self.labelled(number)
        has_label = ~np.isnan(of_steps)
        mask, labels = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.float32)
        mask[ends], labels[ends] = has_label, np.nan_to_num(of_steps)
        return Stepwise(
            ticket=place,
            row=int(self._index[row]),
            token_ids=ids[cut],
            loss_mask=mask[cut],
            labels=labels[cut],
            gaps=not has_label[: np.flatnonzero(has_label)[-1]].all(),
            prompt_tokens=int(np.argmax(answer)),
            metadata=self._metadata[row],
            path=number - int(np.searchsorted(self._row, row)),
            images=self.images.get(number, ()),
        )


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
    answers = _selected(settings, selection, book, tokenizer, bound)
    columns = _columns(settings, tokenizer, answers, cache, book.notes, reader)
    kept = _Kept(answers, columns, settings.max_len)
    fates, labelled = _cut(answers, columns, kept, settings, reader)
    rows = _together(fates, answers.row)
    if selection.dedup != "none":
        for row in np.flatnonzero(np.isin(rows, USED)).tolist():
            if selection.repeats(answers.compared(row, settings.separator)):
                rows[row] = DUPLICATE
    count_fates(book, rows, answers.rows)
    kept.used = np.flatnonzero(np.isin(fates, USED) & np.isin(rows, USED)[answers.row])
    steps = int(labelled[kept.used].sum())
    book.notes.append(f"{how_many(len(kept), 'answer')} with {how_many(steps, 'labelled step')}")
    account = book.close(settings, f"{settings.max_len} tokens of a conversation")
    return StepwiseSet(kept, account, settings.shuffle)


def _selected(
    settings: PairSettings,
    selection: Selection,
    book: Bookkeeper,
    tokenizer: Any,
    bound: TokenBound,
) -> _Answers:
    """The rows that may be tokenised; the others are counted in `book` with their fates."""
    rows, row_of = PackedRows(), array("q")
    messages: PackedJson[list[Message]] = PackedJson()
    characters, labels = GrowingColumn(np.int32), GrowingColumn(np.float32)
    metadata: PackedJson[dict[str, Any]] = PackedJson()
    keys = KeysOfMessages()
    shapes: Counter[str] = Counter()
    inside = 0
    for row in prepared_rows(settings, book):
        answers = steps_of(row, settings)
        shapes[answers.shape] += 1
        inside += any(settings.separator in s.strip() for p in answers.paths for s in p.steps)
        conversations = [answers.messages(path, settings.separator) for path in answers.paths]
        fate = _before_tokens(settings, answers, selection)
        if fate is None and all(bound.fate(row, each) for each in conversations):
            fate = "too_long"
        if fate is not None:
            book.add(fate, row)
            continue
        for path, conversation in zip(answers.paths, conversations, strict=True):
            row_of.append(len(rows))
            messages.append(conversation)
            characters.append(np.array([*map(len, path.steps)], np.int32))
            labels.append(np.array(path.labels, np.float32))  # NaN of None
            keys.add(row, conversation)
        rows.append(row)
        metadata.append(
            {
                name: value
                for name, value in row.values.items()
                if name != settings.images and isinstance(value, str | int)
            }
        )
    book.notes.extend(f"{how_many(count, 'row')}: {shape}" for shape, count in shapes.items())
    if inside:
        book.notes.append(
            f"{inside} rows have the separator {settings.separator!r} inside a step: samples will "
            "be split there"
        )
    book.notes += keys.unread_notes(tokenizer, template_call(settings))
    places = np.array(row_of, np.int64)
    return _Answers(rows, places, messages, characters.column(), labels.column(), metadata)


def _before_tokens(settings: PairSettings, answers: StepRow, selection: Selection) -> Fate | None:
    """Why a row is left out before it is tokenised, or None where it is not."""
    texts = [*answers.question, *(step for path in answers.paths for step in path.steps)]
    fate = selection.left_out(settings, answers.row, answers.question, texts)
    return "empty" if fate is None and answers.empty else fate


def _columns(
    settings: PairSettings,
    tokenizer: Any,
    answers: _Answers,
    cache: TokenCache | None,
    notes: list[str],
    reader: "ImageReader | None",
) -> TokenColumns:
    """By answer: token_ids, answer (True at its tokens), ends (True at a step's last token)."""

    def make() -> TokenColumns:
        return _tokenised(settings, tokenizer, answers, reader)

    if cache is None:
        return make()
    lengths = hashlib.sha256(answers.characters.offsets.tobytes())
    for piece in answers.characters.pieces():
        lengths.update(piece)
    how = f"steps between {settings.separator!r}: {lengths.hexdigest()}"
    if reader is not None:
        how += f", images by {reader.fingerprint}"
    return cache.columns(answers.messages, template_call(settings), how, make, notes)


def _tokenised(
    settings: PairSettings,
    tokenizer: Any,
    answers: _Answers,
    reader: "ImageReader | None",
) -> TokenColumns:
    texts: deque[Rendered] = deque()  # whose tokens have not come
    columns = {"token_ids": GrowingColumn(np.int32)}
    columns |= {name: GrowingColumn(np.bool_) for name in ("answer", "ends")}

    def noted() -> Iterator[tuple[int, Rendered]]:
        for row, text in _texts(settings, tokenizer, answers, reader):
            texts.append(text)
            yield row, text

    tokens = enumerate(marked(tokenizer, answers.rows, noted()))
    while chunk := list(islice(tokens, CHUNK)):
        of_chunk = [texts.popleft() for _ in chunk]
        encoded = encode(tokenizer, [text.text for text in of_chunk], return_offsets_mapping=True)
        for (place, (ids, mask, _)), text, spans in zip(
            chunk, of_chunk, encoded["offset_mapping"], strict=True
        ):
            length = int(np.flatnonzero(mask)[-1]) + 1  # what is written behind it is dropped
            offsets = np.array(spans, np.int64).reshape(-1, 2)[:length]
            steps = answers.steps(place, settings.separator)
            try:
                ends = marked_ends(steps, text, offsets, settings.separator)
            except Unmarkable as error:
                raise unmarkable(answers.row_of(place), error) from error
            for name, values in (("token_ids", ids), ("answer", mask), ("ends", ends)):
                columns[name].append(values[:length])
    by_name = {name: column.column() for name, column in columns.items()}
    return TokenColumns(by_name, np.zeros(0, np.int64))


def _texts(
    settings: PairSettings,
    tokenizer: Any,
    answers: _Answers,
    reader: "ImageReader | None",
) -> Iterator[tuple[int, Rendered]]:
    """The text of each answer, with the place of its row. Raises UsageError that names the row."""
    conversations = tracked("rows tokenised", answers.messages, len(answers.messages))
    rendered = render_conversations(
        tokenizer,
        ((conversation, 0) for conversation in conversations),
        ends=turn_ends(tokenizer),
        turns="last",
        variables=template_call(settings),
        parts=reader is not None,
    )
    for place, rendering in enumerate(rendered):
        try:
            text = single_text(rendering)
            if reader is not None:
                (text,) = with_image_texts([text], answers.messages[place], reader)
        except Unmarkable as error:
            raise unmarkable(answers.row_of(place), error) from error
        yield int(answers.row[place]), text


def _cut(
    answers: _Answers,
    columns: TokenColumns,
    kept: _Kept,
    settings: PairSettings,
    reader: "ImageReader | None",
) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """[P] the fate of each answer, and how many of its steps before data.max_len have a label.
    kept: gets the images that are shown. Raises UsageError where an answer is too long and
    data.on_too_long = "error".
    """
    ids, limit = columns["token_ids"], settings.max_len
    lengths = ids.lengths
    fates = fates_of_lengths(lengths, limit, settings.on_too_long)
    labelled = np.zeros(len(fates), np.int64)
    for place in range(len(fates)):
        if fates[place] == TOO_LONG and settings.on_too_long == "error":
            raise too_long(limit, "a conversation of ", answers.row_of(place), int(lengths[place]))
        if reader is not None:
            digests = images_in(answers.messages[place])
            images = placed_in(answers.row_of(place), ids.row(place), digests, reader)
            shown = tuple(image for image in images if image.at[0] < limit)
            if shown and shown[-1].at[-1] >= limit:
                fates[place] = TOO_LONG  # half an image cannot be shown
            elif shown:
                kept.images[place] = shown
        labelled[place] = np.isfinite(kept.labelled(place)[1]).sum()
    fates[(fates != TOO_LONG) & (labelled == 0)] = NO_LOSS
    return fates, labelled


def _together(fates: NDArray[np.int8], row: NDArray[np.int64]) -> NDArray[np.int8]:
    """[R] the fates of rows. fates: [P] of their answers; row: [P] the row of each."""
    if not len(row):
        return np.zeros(0, np.int8)
    begins = np.flatnonzero(np.diff(row, prepend=-1))
    used = np.logical_or.reduceat(np.isin(fates, USED), begins)
    uncut = np.logical_and.reduceat(fates == KEPT, begins)
    return np.where(uncut, KEPT, np.where(used, TRUNCATED, fates[begins])).astype(np.int8)
