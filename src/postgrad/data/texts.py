"""The raw texts of a dataset, for training a fresh tokenizer."""

from collections.abc import Iterator

from postgrad.data.answers import labelled_of
from postgrad.data.functions import prepared_rows
from postgrad.data.messages import Message, conversation_of, prompt_of
from postgrad.data.pair_settings import PairSettings
from postgrad.data.rows import Row
from postgrad.data.settings import DataSettings


def dataset_texts(settings: DataSettings | PairSettings) -> Iterator[str]:
    """The text of every message of every row, in order. The common beginning of a pair comes once;
    rows without an answer give their question.
    """
    for row in prepared_rows(settings):
        for message in _messages_of(row, settings):
            yield message["content"]


def _messages_of(row: Row, settings: DataSettings | PairSettings) -> list[Message]:
    if isinstance(settings, PairSettings):
        return labelled_of(row, settings).messages
    return prompt_of(row, settings) if settings.answer == "" else conversation_of(row, settings)
