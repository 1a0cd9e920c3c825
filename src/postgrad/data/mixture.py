"""Mixtures: several datasets as one, with a stated number of draws from each in every epoch."""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from postgrad.core.records import Prompt
from postgrad.core.seeds import integer
from postgrad.data.account import RowAccount
from postgrad.data.answers import preference_of
from postgrad.data.cache import TokenCache
from postgrad.data.chat_format import Message, texts_of
from postgrad.data.draws import Drawn, DrawnSet, Draws, Order, Records
from postgrad.data.functions import prepared_rows
from postgrad.data.messages import answer_of, conversation_of, prompt_of
from postgrad.data.overlap import HeldOut, Selection
from postgrad.data.prompts import PromptSet, Unreadable, every_answer_is_read, load_prompts
from postgrad.data.rows import Row
from postgrad.data.settings import (
    DataSettings,
    MixSettings,
    PairMixSettings,
    PairSettings,
    Share,
)
from postgrad.data.steps import is_stepwise, steps_of

if TYPE_CHECKING:
    from postgrad.models.image_reader import ImageReader  # imports torch


class Mixture(Generic[Drawn]):
    """Several sets drawn as one, interleaved by a permutation of each epoch's draws.

    Each set goes through its own rows in its own order, across epochs: a set that gives half of its
    rows in one epoch gives the other half in the next.
    """

    def __init__(self, sets: Sequence[Draws[Drawn]], draws: Sequence[int], shuffle: bool) -> None:
        """draws: how many draws of each set one epoch has."""
        self._sets = sets
        self._draws = draws
        self._starts = np.concatenate([[0], np.cumsum(draws)])
        self._order = Order(len(self), shuffle)

    def __len__(self) -> int:
        return sum(self._draws)

    @property
    def accounts(self) -> list[RowAccount]:
        """The accounts of all sets, in order."""
        return [account for dataset in self._sets for account in dataset.accounts]

    @property
    def parts(self) -> list[DrawnSet[Drawn]]:
        """The datasets of all sets, in order."""
        return [part for dataset in self._sets for part in dataset.parts]

    def draw(self, ticket: int, seed: int) -> Drawn:
        """The record of a ticket: the epoch's permutation decides the set, and which draw of that
        set this is.
        """
        place = self._order.place(ticket, integer(seed, "mixture"))
        number = int(np.searchsorted(self._starts, place, side="right")) - 1
        set_ticket = ticket // len(self) * self._draws[number] + place - int(self._starts[number])
        drawn = self._sets[number].draw(set_ticket, integer(seed, "mixture", number))
        return dataclasses.replace(drawn, ticket=ticket)

    def all(self) -> Sequence[Drawn]:
        """Every record of every set once, with its position as its ticket: made when it is asked
        for.
        """
        return _RecordsOfSets([dataset.all() for dataset in self._sets])


class _RecordsOfSets(Records[Drawn]):
    """The records of several sets, one set behind the other."""

    def __init__(self, sets: Sequence[Sequence[Drawn]]) -> None:
        self._sets = sets
        self._starts = [0, *itertools.accumulate(map(len, sets))]

    def __len__(self) -> int:
        return self._starts[-1]

    def record(self, place: int) -> Drawn:
        """The record at `place`."""
        number = bisect.bisect(self._starts, place) - 1
        row = self._sets[number][place - self._starts[number]]
        return dataclasses.replace(row, ticket=place)


def training_prompts(
    data: MixSettings,
    tokenizer: Any,
    *,
    max_new_tokens: int,
    exclude: HeldOut,
    reader: "ImageReader | None" = None,
    unreadable: Unreadable = every_answer_is_read,
) -> Draws[Prompt]:
    """The prompts of [data] by ticket. max_new_tokens: what max_len keeps free for the response.

    exclude: held-out questions. reader, unreadable: as of load_prompts. Raises UsageError as
    load_prompts does.
    """

    def load(source: DataSettings, tokenizer: Any, **shared: Any) -> PromptSet:
        most = source.max_len - max_new_tokens
        return load_prompts(
            source, tokenizer, max_prompt_tokens=most, unreadable=unreadable, **shared
        )

    return training_rows(load, data, tokenizer, exclude=exclude, reader=reader)


def training_rows(
    load: Callable[..., DrawnSet[Drawn]],
    data: MixSettings | PairMixSettings,
    tokenizer: Any,
    *,
    exclude: HeldOut,
    reader: "ImageReader | None" = None,
) -> Draws[Drawn]:
    """The rows of [data] by ticket, each set as `load` reads it: load_conversations, load_pairs,
    load_labelled or load_steps. Raises UsageError as `load` does.

    All sets share one selection, so that duplicates are found across sets, and one token cache.
    """
    shared = {
        "selection": Selection(exclude, data.dedup),
        "cache": TokenCache(tokenizer) if data.cache else None,
        "reader": reader,
    }
    sets = [load(source, tokenizer, **shared) for source in data.sources]
    return mixture_of(data.sets, sets, data.shuffle)


def mixture_of(
    shares: Sequence[Share], sets: Sequence[Draws[Drawn]], shuffle: bool
) -> Draws[Drawn]:
    """A mixture of `sets` by their shares; without shares the only set itself."""
    if not shares:
        return sets[0]
    draws = [share.draws(len(dataset)) for share, dataset in zip(shares, sets, strict=True)]
    return Mixture(sets, draws, shuffle)


def dataset_texts(settings: DataSettings | PairSettings) -> Iterator[str]:
    """The text of every message of every row, in order. The common beginning of a pair comes once;
    rows without an answer give their question.
    """
    for row in prepared_rows(settings):
        for message in _messages_of(row, settings):
            yield from texts_of(message)


def _messages_of(row: Row, settings: DataSettings | PairSettings) -> list[Message]:
    if isinstance(settings, PairSettings):
        if is_stepwise(row, settings):
            answers = steps_of(row, settings)
            main, *_ = answers.paths
            return answers.messages(main, settings.separator)
        return preference_of(row, settings).messages
    if settings.answer == "":
        return prompt_of(row, settings)
    if isinstance(row.values.get(settings.answer), dict | int | float):  # a verifier's reference
        written = answer_of(row, settings) or ""
        return [*prompt_of(row, settings), {"role": "assistant", "content": written}]
    return conversation_of(row, settings)
