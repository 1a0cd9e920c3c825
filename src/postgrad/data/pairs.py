"""Preferences by ticket: pairs of answers, and answers with a label."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.data.answer_tokens import load_answers
from postgrad.data.answers import labelled_of, margin_of, pair_of, rest_of
from postgrad.data.cache import TokenCache
from postgrad.data.draws import DrawnSet, Draws
from postgrad.data.mixture import mixture_of, selection_and_cache
from postgrad.data.overlap import HeldOut
from postgrad.data.pair_settings import PairMixSettings, PairSettings
from postgrad.data.selection import Selection


@dataclass(frozen=True, slots=True)
class Pair:
    """Two conversations, of which the first is preferred; they end with the token that ends the
    last answer's turn.

    chosen, rejected: [T] int32 token ids. chosen_mask, rejected_mask: [T] True at what the
    assistant wrote from the first message on that differs; the tokens before it are the same in
    both. margin: how much better chosen is, 0 where no column says it. metadata: the other columns.
    """

    ticket: int
    row: int
    chosen: NDArray[np.int32]
    rejected: NDArray[np.int32]
    chosen_mask: NDArray[np.bool_]
    rejected_mask: NDArray[np.bool_]
    margin: float
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Labelled:
    """A conversation whose answer is desirable or not. prompt_tokens: where the answer begins."""

    ticket: int
    row: int
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    desirable: bool
    prompt_tokens: int


class PairSet(DrawnSet[Pair]):
    """The pairs of a dataset."""


class LabelledSet(DrawnSet[Labelled]):
    """The labelled answers of a dataset; a row with a pair gives two, the desirable one first."""


def load_pairs(
    settings: PairSettings,
    tokenizer: Any,
    *,
    selection: Selection | None = None,
    cache: TokenCache | None = None,
) -> PairSet:
    """Reads, renders and tokenises a dataset of pairs. selection: what the run leaves out of all
    its sets.

    Pairs with a conversation over settings.max_len tokens are dropped, cut (both at that place), or
    an error, as settings.on_too_long says. Raises UsageError that names the row and what is wrong
    with it.
    """
    kept, account = load_answers(settings, tokenizer, pair_of, selection, cache)
    pairs = [
        Pair(
            place,
            preference.row.index,
            chosen.ids,
            rejected.ids,
            chosen.mask,
            rejected.mask,
            margin_of(preference.row, settings),
            rest_of(preference.row, settings),
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
) -> LabelledSet:
    """The same of labelled answers: rows with a label, and pairs."""
    kept, account = load_answers(settings, tokenizer, labelled_of, selection, cache)
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
        Labelled(place, row, tokens.ids, tokens.mask, desirable, int(np.argmax(tokens.mask)))
        for place, (row, tokens, desirable) in enumerate(answers)
    ]
    return LabelledSet(labelled, account, settings.shuffle)


def training_pairs(settings: PairMixSettings, tokenizer: Any, *, exclude: HeldOut) -> Draws[Pair]:
    """The pairs of [data]. Raises UsageError as load_pairs does."""
    selection, cache = selection_and_cache(settings, tokenizer, exclude)
    sets = [
        load_pairs(source, tokenizer, selection=selection, cache=cache)
        for source in settings.sources
    ]
    return mixture_of(settings.sets, sets, settings.shuffle)


def training_labelled(
    settings: PairMixSettings, tokenizer: Any, *, exclude: HeldOut
) -> Draws[Labelled]:
    """The labelled answers of [data]. Raises UsageError as load_labelled does."""
    selection, cache = selection_and_cache(settings, tokenizer, exclude)
    sets = [
        load_labelled(source, tokenizer, selection=selection, cache=cache)
        for source in settings.sources
    ]
    return mixture_of(settings.sets, sets, settings.shuffle)
