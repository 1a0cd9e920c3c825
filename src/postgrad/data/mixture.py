"""Several datasets as one: every epoch has a stated number of draws from each."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic

import numpy as np

from postgrad.core.records import Prompt
from postgrad.core.seeds import integer
from postgrad.data.account import RowAccount
from postgrad.data.cache import TokenCache
from postgrad.data.conversations import Conversation, load_conversations
from postgrad.data.draws import Drawn, DrawnSet, Draws
from postgrad.data.order import Order
from postgrad.data.overlap import HeldOut
from postgrad.data.prompts import load_prompts
from postgrad.data.selection import Selection
from postgrad.data.settings import MixSettings, Share, Together


class Mixture(Generic[Drawn]):
    """draws: of each set in one epoch. Sets are interleaved by a permutation of the epoch's draws,
    and each goes through its own rows in its own order, on through the epochs: a set with half of
    its rows in an epoch gives the other half in the next.
    """

    def __init__(self, sets: Sequence[Draws[Drawn]], draws: Sequence[int], shuffle: bool) -> None:
        self._sets = sets
        self._draws = draws
        self._starts = np.concatenate([[0], np.cumsum(draws)])
        self._order = Order(len(self), shuffle)

    def __len__(self) -> int:
        return sum(self._draws)

    @property
    def accounts(self) -> list[RowAccount]:
        """Of every set, in order."""
        return [account for dataset in self._sets for account in dataset.accounts]

    @property
    def parts(self) -> list[DrawnSet[Drawn]]:
        """The sets, in order."""
        return [part for dataset in self._sets for part in dataset.parts]

    def draw(self, ticket: int, seed: int) -> Drawn:
        """The epoch's permutation says which set's turn it is, and the how manieth."""
        place = self._order.place(ticket, integer(seed, "mixture"))
        number = int(np.searchsorted(self._starts, place, side="right")) - 1
        set_ticket = ticket // len(self) * self._draws[number] + place - int(self._starts[number])
        drawn = self._sets[number].draw(set_ticket, integer(seed, "mixture", number))
        return dataclasses.replace(drawn, ticket=ticket)

    def all(self) -> list[Drawn]:
        """Every row of every set once."""
        rows = [row for dataset in self._sets for row in dataset.all()]
        return [dataclasses.replace(row, ticket=place) for place, row in enumerate(rows)]


def training_prompts(
    data: MixSettings, tokenizer: Any, *, max_new_tokens: int, exclude: HeldOut
) -> Draws[Prompt]:
    """The prompts of [data]. Raises UsageError as data.prompts does."""
    selection, cache = selection_and_cache(data, tokenizer, exclude)
    sets = [
        load_prompts(
            source,
            tokenizer,
            max_prompt_tokens=source.max_len - max_new_tokens,
            selection=selection,
            cache=cache,
        )
        for source in data.sources
    ]
    return mixture_of(data.sets, sets, data.shuffle)


def training_conversations(
    data: MixSettings, tokenizer: Any, *, exclude: HeldOut
) -> Draws[Conversation]:
    """The conversations of [data]. Raises UsageError as data.conversations does."""
    selection, cache = selection_and_cache(data, tokenizer, exclude)
    sets = [
        load_conversations(source, tokenizer, selection=selection, cache=cache)
        for source in data.sources
    ]
    return mixture_of(data.sets, sets, data.shuffle)


def selection_and_cache(
    data: Together, tokenizer: Any, exclude: HeldOut
) -> tuple[Selection, TokenCache | None]:
    """What all sets of a run have in common: what is left out, and where tokens are kept."""
    return Selection(exclude, data.dedup), TokenCache(tokenizer) if data.cache else None


def mixture_of(
    shares: Sequence[Share], sets: Sequence[Draws[Drawn]], shuffle: bool
) -> Draws[Drawn]:
    """`sets` as one, each with its share; the only set as it is where there are no shares."""
    if not shares:
        return sets[0]
    draws = [share.draws(len(dataset)) for share, dataset in zip(shares, sets, strict=True)]
    return Mixture(sets, draws, shuffle)
