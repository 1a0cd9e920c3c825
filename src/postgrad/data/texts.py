"""The raw texts of a dataset, for training a fresh tokenizer."""

from collections.abc import Iterator

from postgrad.data.answers import labelled_of
from postgrad.data.functions import prepared_rows
from postgrad.data.messages import Message, conversation_of, prompt_of
from postgrad.data.pair_settings import PairSettings
from postgrad.data.rows import Row
from postgrad.data.settings import DataSettings


def dataset_texts(settings: DataSettings | PairSettings) -> Iterator[str]:
    """Every message of every row, in order: what two answers have in common once, questions alone
    where rows have no answer.
    """
    for row in prepared_rows(settings):
        for message in _messages_of(row, settings):
            yield message["content"]


def _messages_of(row: Row, settings: DataSettings | PairSettings) -> list[Message]:
    if isinstance(settings, PairSettings):
        return labelled_of(row, settings).messages
    return prompt_of(row, settings) if settings.answer == "" else conversation_of(row, settings)
