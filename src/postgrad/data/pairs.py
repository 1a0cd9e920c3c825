"""Preferences by ticket: pairs of answers (DPO and reward models), labelled answers (KTO)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.records import PlacedImage
from postgrad.data.answer_tokens import load_answers
from postgrad.data.answers import labelled_of, margin_of, metadata_of, pair_of
from postgrad.data.cache import TokenCache
from postgrad.data.draws import DrawnSet, Draws
from postgrad.data.mixture import mixture_of, selection_and_cache
from postgrad.data.overlap import HeldOut, Selection
from postgrad.data.settings import PairMixSettings, PairSettings

if TYPE_CHECKING:
    from postgrad.models.image_reader import ImageReader  # imports torch


@dataclass(frozen=True, slots=True)
class Pair:
    """Two conversations of which the first is preferred, of T and U tokens. Each ends with the
    token that ends its last answer's turn.

    A mask is True at the assistant's tokens from the first message on that differs; the tokens
    before it are the same in both.
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
) -> PairSet:
    """Reads, renders and tokenises a dataset of pairs. selection: held-out questions and
    duplicates, shared by all sets of the run. reader: of a model that reads images; others refuse
    rows with some.

    Pairs with a conversation over settings.max_len tokens are dropped, cut (both at that place), or
    an error, as settings.on_too_long says. Raises UsageError that names the row and what is wrong
    with it.
    """
    kept, account = load_answers(settings, tokenizer, pair_of, selection, cache, reader)
    pairs = [
        Pair(
            place,
            preference.row.index,
            chosen.ids,
            rejected.ids,
            chosen.mask,
            rejected.mask,
            margin_of(preference.row, settings),
            metadata_of(preference.row, settings),
            chosen.images,
            rejected.images,
        )
        for place, (preference, (chosen, rejected)) in enumerate(kept)
    ]
    return PairSet(pairs, account, settings.shuffle)


def load_labelled(
    settings: PairSettings,
    tokenizer: Any,
    *,
    selection: Selection | None = None,
    cache: TokenCache | None = None,
    reader: "ImageReader | None" = None,
) -> LabelledSet:
    """load_pairs for labelled answers: rows with a label, and pairs, which give two each."""
    kept, account = load_answers(settings, tokenizer, labelled_of, selection, cache, reader)
    answers = [
        (
            preference.row.index,
            tokens,
            preference.desirable if not preference.is_pair else number == 0,
        )
        for preference, conversations in kept
        for number, tokens in enumerate(conversations)
    ]
    labelled = [
        Labelled(
            place,
            row,
            tokens.ids,
            tokens.mask,
            desirable,
            int(np.argmax(tokens.mask)),
            tokens.images,
        )
        for place, (row, tokens, desirable) in enumerate(answers)
    ]
    if any(preference.is_pair for preference, _ in kept):
        note = 'a pair gives two answers with labels; algorithm.type = "dpo" compares the two'
        account = replace(account, notes=(*account.notes, note))
    labels = {answer.desirable for answer in labelled}
    if len(labels) == 1:  # what KTO learns is the difference
        note = f"all labels are {str(labels.pop()).lower()}: there is no answer of the other kind"
        account = replace(account, notes=(*account.notes, note))
    return LabelledSet(labelled, account, settings.shuffle)


def training_pairs(
    settings: PairMixSettings,
    tokenizer: Any,
    *,
    exclude: HeldOut,
    reader: "ImageReader | None" = None,
) -> Draws[Pair]:
    """The pairs of [data] by ticket. Raises UsageError as load_pairs does."""
    selection, cache = selection_and_cache(settings, tokenizer, exclude)
    sets = [
        load_pairs(source, tokenizer, selection=selection, cache=cache, reader=reader)
        for source in settings.sources
    ]
    return mixture_of(settings.sets, sets, settings.shuffle)


def training_labelled(
    settings: PairMixSettings,
    tokenizer: Any,
    *,
    exclude: HeldOut,
    reader: "ImageReader | None" = None,
) -> Draws[Labelled]:
    """The labelled answers of [data] by ticket. Raises UsageError as load_labelled does."""
    selection, cache = selection_and_cache(settings, tokenizer, exclude)
    sets = [
        load_labelled(source, tokenizer, selection=selection, cache=cache, reader=reader)
        for source in settings.sources
    ]
    return mixture_of(settings.sets, sets, settings.shuffle)
