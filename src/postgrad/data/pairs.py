"""Preferences by ticket: pairs of answers (DPO and reward models), labelled answers (KTO)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.records import PlacedImage
from postgrad.data.answer_tokens import Answers, load_answers
from postgrad.data.answers import labelled_of, pair_of
from postgrad.data.cache import TokenCache
from postgrad.data.draws import DrawnSet, Records
from postgrad.data.overlap import Selection
from postgrad.data.packed import PackedJson
from postgrad.data.settings import PairSettings
from postgrad.layout.tree import MIN_CONTINUED

if TYPE_CHECKING:
    from postgrad.models.image_reader import ImageReader  # imports torch


@dataclass(frozen=True, slots=True)
class Pair:
    """Two conversations of which the first is preferred, of T and U tokens. Each ends with the
    token that ends its last answer's turn.

    A mask is True at the assistant's tokens from the first message on that differs; the tokens
    before it are the same in both. Where the chat template writes an answer differently once more
    messages follow, a conversation is a text for each answer, one behind the other.
    """

    ticket: int  # the global number of the draw
    row: int  # index in the dataset, from 0
    chosen: NDArray[np.int32]  # [T] token ids
    rejected: NDArray[np.int32]  # [U] token ids
    chosen_mask: NDArray[np.bool_]  # [T]
    rejected_mask: NDArray[np.bool_]  # [U]
    margin: float  # how much better chosen is, in the column's own unit; 0 without a column
    metadata: Mapping[str, Any]  # the other columns of the row, JSON values
    chosen_images: tuple[PlacedImage, ...] = ()
    rejected_images: tuple[PlacedImage, ...] = ()
    chosen_openings: tuple[int, ...] = ()  # the tokens at which each further text begins
    rejected_openings: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Labelled:
    """A conversation of T tokens whose answer is desirable or not."""

    ticket: int  # the global number of the draw
    row: int  # index in the dataset, from 0
    token_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T] True at the answer's tokens
    desirable: bool
    prompt_tokens: int  # tokens before the answer
    images: tuple[PlacedImage, ...] = ()


class PairSet(DrawnSet[Pair]):
    """The pairs of a dataset that are within data.max_len."""


class LabelledSet(DrawnSet[Labelled]):
    """The labelled answers of a dataset; a row with a pair gives two, the desirable one first."""


def load_pairs(
    settings: PairSettings,
    tokenizer: Any,
    *,
    selection: Selection | None = None,
    cache: TokenCache | None = None,
    reader: "ImageReader | None" = None,
    scored: bool = False,
    shared: Callable[[], int] = lambda: MIN_CONTINUED,
) -> PairSet:
    """Reads, renders and tokenises a dataset of pairs. selection: held-out questions and
    duplicates, shared by all sets of the run. reader: of a model that reads images; others refuse
    rows with some. scored: for a model that scores the last token of a conversation: of several
    texts it reads the last one alone, which has all messages. shared: as of load_answers.

    Pairs with a conversation over settings.max_len tokens are dropped, cut (both at that place), or
    an error, as settings.on_too_long says. Raises UsageError that names the row and what is wrong
    with it.
    """
    answers, account = load_answers(
        settings,
        tokenizer,
        pair_of,
        selection,
        cache,
        reader,
        used_texts="last" if scored else "all",
        shared=shared,
    )
    for row in answers.used.tolist() if answers.without_margin else ():
        if row in answers.without_margin:
            raise answers.without_margin[row]
    return PairSet(_Pairs(answers), account, settings.shuffle)


class _Pairs(Records[Pair]):
    """The pairs of a set."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def __len__(self) -> int:
        return len(self._answers.used)

    def record(self, place: int) -> Pair:
        """The pair at `place`."""
        answers, row = self._answers, int(self._answers.used[place])
        (chosen, chosen_mask, chosen_images), (rejected, rejected_mask, rejected_images) = map(
            answers.part, answers.conversations(row)
        )
        return Pair(
            place,
            int(answers.index[row]),
            chosen,
            rejected,
            chosen_mask,
            rejected_mask,
            answers.margin[row],
            answers.metadata[row],
            chosen_images,
            rejected_images,
            *(answers.openings.get(number, ()) for number in answers.conversations(row)),
        )


def load_labelled(
    settings: PairSettings,
    tokenizer: Any,
    *,
    selection: Selection | None = None,
    cache: TokenCache | None = None,
    reader: "ImageReader | None" = None,
) -> LabelledSet:
    """load_pairs for labelled answers: rows with a label, and pairs, which give two each."""
    answers, account = load_answers(
        settings, tokenizer, labelled_of, selection, cache, reader, used_texts="one"
    )
    answers.metadata = PackedJson()
    counts = [len(answers.conversations(row)) for row in answers.used.tolist()]
    labelled = _Labelled(answers, np.repeat(answers.used, counts))
    if 2 in counts:
        note = 'a pair gives two answers with labels; algorithm.type = "dpo" compares the two'
        account = replace(account, notes=(*account.notes, note))
    labels = {labelled.desirable(place) for place in range(len(labelled))}
    if len(labels) == 1:  # what KTO learns is the difference
        note = f"all labels are {str(labels.pop()).lower()}: there is no answer of the other kind"
        account = replace(account, notes=(*account.notes, note))
    return LabelledSet(labelled, account, settings.shuffle)


class _Labelled(Records[Labelled]):
    """The labelled answers of a set."""

    def __init__(self, answers: Answers, row: NDArray[np.int64]) -> None:
        """row: of each answer."""
        self._answers = answers
        self._row = row

    def __len__(self) -> int:
        return len(self._row)

    def _number(self, place: int) -> int:
        """Which of its row's answers the one at `place` is."""
        return int(place > 0 and self._row[place - 1] == self._row[place])

    def desirable(self, place: int) -> bool:
        """The label at `place`: of a pair, whether it is the chosen one."""
        row = int(self._row[place])
        if len(self._answers.conversations(row)) == 2:
            return self._number(place) == 0
        return bool(self._answers.desirable[row])

    def record(self, place: int) -> Labelled:
        """The answer at `place`."""
        answers, row = self._answers, int(self._row[place])
        conversation = answers.conversations(row)[self._number(place)]
        ids, mask, images = answers.part(conversation)
        first = int(np.argmax(mask))
        return Labelled(
            place, int(answers.index[row]), ids, mask, self.desirable(place), first, images
        )
