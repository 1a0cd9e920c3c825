"""Preference rows as tokens: reading, filtering, rendering and cutting to data.max_len."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.progress import tracked
from postgrad.core.records import PlacedImage
from postgrad.core.text import how_many
from postgrad.data.account import Bookkeeper, Fate, RowAccount
from postgrad.data.answer_spans import Rendered, Unmarkable
from postgrad.data.answers import PreferenceRow, margin_of, metadata_of, require_no_fractions
from postgrad.data.cache import TokenCache
from postgrad.data.chat_format import Message
from postgrad.data.functions import prepared_rows
from postgrad.data.images import images_in, placed_in, with_image_texts
from postgrad.data.loss_masks import marked, unmarkable
from postgrad.data.overlap import Selection
from postgrad.data.packed import PackedJson
from postgrad.data.rows import PackedRows, Row, dataset_name
from postgrad.data.settings import PairSettings, with_own_keys
from postgrad.data.templates import (
    SEVERAL_TEXTS,
    KeysOfMessages,
    render_conversations,
    template_call,
    turn_ends,
)
from postgrad.data.texts import (
    DUPLICATE,
    EQUAL,
    NO_LOSS,
    TOO_LONG,
    TRUNCATED,
    USED,
    MarkedTokens,
    TokenColumns,
    count_fates,
    fates_of_lengths,
    in_rows,
    last_learned,
    too_long,
)
from postgrad.data.token_bounds import TokenBound, bound_of_conversations
from postgrad.layout.tree import MIN_CONTINUED, grow

if TYPE_CHECKING:
    from postgrad.models.image_reader import ImageReader  # imports torch

ReadRow = Callable[[Row, PairSettings], PreferenceRow]
# What is used of a conversation that the chat template writes as a text for each answer: all texts,
# one behind the other, or the last one, which a reward model scores; "one": it is refused.
UsedTexts = Literal["all", "last", "one"]
LABELLED_TEXTS = f'{SEVERAL_TEXTS}, and a label is of one text: algorithm.type = "dpo" reads pairs'


class Answers:
    """[R] rows of preferences with their [S] conversations, one or two each. First all that may be
    tokenised; `used` are those that are kept once `load_answers` is done.
    """

    def __init__(self) -> None:
        self.rows = PackedRows()
        self.messages: PackedJson[list[Message]] = PackedJson()  # [S]
        self.first_answer = array("q")  # [R] index of the message where answers begin
        self.bounds = array("q", [0])  # [R + 1] where the conversations of each row begin and end
        self.desirable = array("b")  # [R] the label; 1 of pairs
        self.margin = array("d")  # [R] how much better chosen is
        self.without_margin: dict[int, UsageError] = {}  # rows whose margin cannot be read
        self.metadata: PackedJson[dict[str, Any]] = PackedJson()  # [R] the other columns
        self.columns = TokenColumns({}, np.zeros(0, np.int64))
        self.begin = self.end = np.zeros(0, np.int64)  # [S] places among the tokens
        # of conversations of several texts, the tokens at which each further one begins
        self.openings: dict[int, tuple[int, ...]] = {}
        self.images: dict[int, tuple[PlacedImage, ...]] = {}  # of conversations that show some
        self.used = np.zeros(0, np.int64)  # the rows that are kept
        self.index = np.zeros(0, np.int64)  # [R] of each row in its dataset

    def add(self, preference: PreferenceRow, settings: PairSettings) -> None:
        """Adds a row that may be tokenised."""
        margin = 0.0
        try:
            margin = margin_of(preference.row, settings)
        except UsageError as error:  # it matters where the row is kept, and pairs are learned
            self.without_margin[len(self.rows)] = error
        self.rows.append(preference.row)
        self.first_answer.append(preference.first)
        self.desirable.append(preference.desirable)
        self.margin.append(margin)
        self.metadata.append(metadata_of(preference.row, settings))
        for messages in preference.conversations:
            self.messages.append(messages)
        self.bounds.append(len(self.messages))

    def conversations(self, row: int) -> range:
        """The numbers of a row's conversations: of a pair (chosen, rejected)."""
        return range(self.bounds[row], self.bounds[row + 1])

    def part(
        self, conversation: int
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_], tuple[PlacedImage, ...]]:
        """(token ids, loss mask, images) of a conversation, cut to data.max_len."""
        place = int(self.begin[conversation]), int(self.end[conversation])
        ids, mask = (self.columns[name].part(*place) for name in ("token_ids", "loss_mask"))
        return ids, mask, self.images.get(conversation, ())

    def texts(self, conversation: int) -> list[tuple[int, int]]:
        """Begin and end of each text of a conversation, among its tokens."""
        length = int(self.end[conversation] - self.begin[conversation])
        return list(pairwise([0, *self.openings.get(conversation, ()), length]))

    def compared(self, row: int) -> list[Message]:
        """The messages that data.dedup compares: the label, then all conversations with marks
        between them.
        """
        first, *others = [self.messages[place] for place in self.conversations(row)]
        label = "" if others else str(bool(self.desirable[row]))
        parted = [[{"role": "or", "content": ""}, *other] for other in others]
        return [{"role": "label", "content": label}, *first, *(turn for p in parted for turn in p)]


@with_own_keys
def load_answers(
    settings: PairSettings,
    tokenizer: Any,
    read: ReadRow,
    selection: Selection | None,
    cache: TokenCache | None,
    reader: "ImageReader | None" = None,
    *,
    used_texts: UsedTexts,
    shared: Callable[[], int] = lambda: MIN_CONTINUED,
) -> tuple[Answers, RowAccount]:
    """The rows that are kept, with the tokens of their conversations, and the account of all.

    read: pair_of or labelled_of. reader: of a model that reads images; others refuse rows with
    some. shared: the least tokens that a learner computes once for several texts; asked where there
    are some. Raises UsageError that names the first row that cannot be read, or whose answer tokens
    the chat template cannot mark.
    """
    selection = selection or Selection()
    book = Bookkeeper(dataset_name(settings))
    refusal = partial(too_long, settings.max_len, "a conversation of ")
    bound = bound_of_conversations(settings, tokenizer, "all", refusal, images=reader is not None)
    answers = _selected(settings, read, selection, book, tokenizer, bound)
    answers.columns = _columns(settings, tokenizer, answers, cache, book.notes, reader)
    offsets = answers.columns["token_ids"].offsets
    answers.begin, answers.end = offsets[:-1], offsets[1:]
    _use(answers, used_texts)
    fates = _cut(answers, settings, reader, shared)
    if selection.dedup != "none":
        for row in np.flatnonzero(np.isin(fates, USED)).tolist():
            if selection.repeats(answers.compared(row)):
                fates[row] = DUPLICATE
    answers.used = np.flatnonzero(np.isin(fates, USED))
    answers.index = answers.rows.index
    count_fates(book, fates, answers.rows)
    if answers.openings:
        book.notes.append(
            f"{how_many(len(answers.openings), 'side')} of pairs with a text for each answer: the "
            "chat template writes an answer differently when more messages follow"
        )
    answers.rows, answers.messages = PackedRows(), PackedJson()  # they are tokens now
    return answers, book.close(settings, f"{settings.max_len} tokens of a conversation")


def _selected(
    settings: PairSettings,
    read: ReadRow,
    selection: Selection,
    book: Bookkeeper,
    tokenizer: Any,
    bound: TokenBound,
) -> Answers:
    """The rows that may be tokenised; the others are counted in `book` with their fates."""
    selected = Answers()
    keys = KeysOfMessages()
    shapes: Counter[str] = Counter()
    inside = 0
    for row in prepared_rows(settings, book):
        preference = read(row, settings)
        require_no_fractions(preference)
        shapes[preference.shape] += 1
        inside += preference.parts_inside_a_turn
        fate = _before_tokens(settings, preference, selection) or bound.fate(
            row, *preference.conversations, first=preference.first
        )
        if fate is not None:
            book.add(fate, row)
            continue
        selected.add(preference, settings)
        keys.add(row, preference.messages)
    book.notes.extend(f"{how_many(count, 'row')}: {shape}" for shape, count in shapes.items())
    if inside:
        book.notes.append(f"{inside} pairs differ within a turn: the loss covers all of that turn")
    book.notes += keys.unread_notes(tokenizer, template_call(settings))
    return selected


def _before_tokens(
    settings: PairSettings, preference: PreferenceRow, selection: Selection
) -> Fate | None:
    """Why a row is left out before it is tokenised, or None where it is not."""
    texts = [turn["content"] for turn in preference.messages if turn["role"] != "system"]
    # First: a row of the other part is no loss of this one.
    fate = selection.left_out(settings, preference.row, preference.question, texts)
    if fate is not None:
        return fate
    if preference.equal:
        return "equal"
    if preference.empty:
        return "empty"
    return None if preference.complete else "no_loss"


def _columns(
    settings: PairSettings,
    tokenizer: Any,
    answers: Answers,
    cache: TokenCache | None,
    notes: list[str],
    reader: "ImageReader | None",
) -> TokenColumns:
    """By conversation, row after row, the tokens of its texts joined: see in_rows."""
    call = template_call(settings)
    messages = answers.messages
    places = np.repeat(np.arange(len(answers.rows)), np.diff(answers.bounds))
    firsts = np.array(answers.first_answer, np.int64)[places].tolist()

    def make() -> TokenColumns:
        tracked_messages = tracked("rows tokenised", messages, len(messages))
        rendered = render_conversations(
            tokenizer,
            zip(tracked_messages, firsts, strict=True),
            ends=turn_ends(tokenizer),
            turns="all",
            variables=call,
            parts=reader is not None,
        )

        counts = array("q")  # texts of each conversation
        texts = _texts(answers, rendered, counts, reader)
        return in_rows(map(_ended, marked(tokenizer, answers.rows, texts)), counts)

    if cache is None:
        return make()
    how = f"texts of answers from messages {firsts}"
    if reader is not None:
        how += f", images by {reader.fingerprint}"
    return cache.columns(messages, call, how, make, notes)


def _texts(
    answers: Answers,
    rendered: Iterable[list[Rendered] | Unmarkable],
    counts: "array[int]",
    reader: "ImageReader | None",
) -> Iterator[tuple[int, Rendered]]:
    """The texts of all conversations, each with its row. counts: gets how many each conversation
    has. Raises UsageError that names the row.
    """
    places = np.repeat(np.arange(len(answers.rows)), np.diff(answers.bounds)).tolist()
    for number, texts in enumerate(rendered):
        row = places[number]
        try:
            if isinstance(texts, Unmarkable):
                raise texts
            if reader is not None:
                texts = with_image_texts(texts, answers.messages[number], reader)
        except Unmarkable as error:
            raise unmarkable(answers.rows[row], error) from error
        counts.append(len(texts))
        yield from ((row, text) for text in texts)


def _ended(text: MarkedTokens) -> MarkedTokens:
    """The tokens up to the end of the last answer: a rollout ends there too, so what the template
    writes behind it is dropped.
    """
    end = int(np.flatnonzero(text.mask)[-1]) + 1 if text.mask.any() else 0
    return MarkedTokens(text.ids[:end], text.mask[:end])


def _use(answers: Answers, used_texts: UsedTexts) -> None:
    """Notes where the further texts of conversations begin, and leaves out what is not used. Raises
    UsageError that names the first row with several texts where these cannot be used.
    """
    owners, first = np.unique(answers.columns.owners(), return_index=True)
    if used_texts == "one" and len(owners):
        row = int(np.searchsorted(answers.bounds, owners[0], side="right")) - 1
        raise unmarkable(answers.rows[row], Unmarkable(LABELLED_TEXTS))
    answers.begin = answers.begin.copy()
    for number, places in zip(
        owners.tolist(), np.split(answers.columns.further, first[1:]), strict=False
    ):
        if used_texts == "last":
            answers.begin[number] = places[-1]
        else:
            answers.openings[number] = tuple((places - answers.begin[number]).tolist())


def _cut(
    answers: Answers,
    settings: PairSettings,
    reader: "ImageReader | None",
    shared: Callable[[], int],
) -> NDArray[np.int8]:
    """[R] the fates of the rows, whose conversations are cut to data.max_len where data.on_too_long
    says so. Raises UsageError where that is "error". A conversation of several texts is not cut.
    """
    start = np.array(answers.bounds, np.int64)[:-1]
    if not len(start):
        return np.zeros(0, np.int8)
    longest = np.maximum.reduceat(_lengths(answers, shared), start)
    fates = fates_of_lengths(longest, settings.max_len, settings.on_too_long)
    several = np.isin(np.arange(len(answers.begin)), [*answers.openings])
    fates[(fates == TRUNCATED) & np.logical_or.reduceat(several, start)] = TOO_LONG
    fates[_alike(answers)] = EQUAL  # texts that the chat template writes alike
    refused = len(start)
    if settings.on_too_long == "error" and (fates == TOO_LONG).any():
        refused = int(np.argmax(fates == TOO_LONG))
    if reader is not None:
        for row in range(min(refused + 1, len(start))):
            _show(answers, row, fates, settings, reader)
    if refused < len(start):
        row, tokens = answers.rows[refused], int(longest[refused])
        raise too_long(settings.max_len, "a conversation of ", row, tokens)
    shortened = np.repeat(fates == TRUNCATED, np.diff(answers.bounds))
    most = np.minimum(answers.end, answers.begin + settings.max_len)
    answers.end = np.where(shortened, most, answers.end)
    # nothing predicts a first token
    mask = answers.columns["loss_mask"]
    silent = last_learned(mask, answers.begin, answers.end) <= answers.begin
    used = np.isin(fates, USED)
    fates[used & np.logical_or.reduceat(silent, start)] = NO_LOSS
    fates[_alike(answers) & (fates == TRUNCATED)] = NO_LOSS
    return fates


def _lengths(answers: Answers, shared: Callable[[], int]) -> NDArray[np.int64]:
    """[S] the tokens of each conversation. What several texts begin with alike counts once, as a
    learner computes it.
    """
    lengths = answers.end - answers.begin
    least = max(MIN_CONTINUED, shared()) if answers.openings else 0
    for number in answers.openings:
        ids, *_ = answers.part(number)
        texts = [ids[begin:end] for begin, end in answers.texts(number)]
        lengths[number] = grow(texts, least).n_tokens
    return lengths


def _alike(answers: Answers) -> NDArray[np.bool_]:
    """[R] whether the two conversations of a pair have the same tokens."""
    bounds = np.array(answers.bounds, np.int64)
    first, last = bounds[:-1], bounds[1:] - 1
    lengths = answers.end - answers.begin
    alike = (first < last) & (lengths[first] == lengths[last])
    for row in np.flatnonzero(alike).tolist():
        (chosen, *_), (rejected, *_) = map(answers.part, answers.conversations(row))
        alike[row] = np.array_equal(chosen, rejected)
    return alike


def _show(
    answers: Answers,
    row: int,
    fates: NDArray[np.int8],
    settings: PairSettings,
    reader: "ImageReader",
) -> None:
    """Places the images of a row's conversations among their tokens. Behind the last answer there
    are none. Half an image cannot be shown: the row is too long.
    """
    limit = settings.max_len
    for number in answers.conversations(row):
        ids, *_ = answers.part(number)
        digests = images_in(answers.messages[number])
        images = tuple(
            image.moved(begin)
            for begin, end in answers.texts(number)
            for image in placed_in(answers.rows[row], ids[begin:end], digests, reader)
        )
        if fates[row] == TRUNCATED:
            images = tuple(image for image in images if image.at[0] < limit)
            if images and images[-1].at[-1] >= min(limit, len(ids)):
                fates[row] = TOO_LONG
        if images:
            answers.images[number] = images
