"""The raw texts of a dataset, for training a fresh tokenizer."""

from collections.abc import Iterator

from postgrad.data.functions import prepared_rows
from postgrad.data.messages import conversation_of, prompt_of
from postgrad.data.settings import DataSettings


def texts(settings: DataSettings) -> Iterator[str]:
    """Every message of every row, in order; questions alone where rows have no answer."""
    read = prompt_of if settings.answer == "" else conversation_of
    for row in prepared_rows(settings):
        for message in read(row, settings):
            yield message["content"]
