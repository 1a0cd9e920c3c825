"""Prompts by ticket: what the policy reads, with the reference answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt
from postgrad.data.account import Bookkeeper, RowAccount
from postgrad.data.messages import answer_of, prompt_of, questions_of
from postgrad.data.order import Order
from postgrad.data.overlap import overlaps
from postgrad.data.rows import Row, dataset_name, read_rows
from postgrad.data.settings import DataSettings
from postgrad.data.templates import Unencodable, Unmarkable, encode, render


@dataclass(frozen=True, slots=True)
class _Entry:
    row: int
    token_ids: NDArray[np.int32]
    question: str
    answer: str | None
    metadata: Mapping[str, Any]


class PromptSet:
    """The prompts of a dataset that fit. account: where every row went."""

    def __init__(
        self, name: str, entries: list[_Entry], account: RowAccount, shuffle: bool
    ) -> None:
        self.account = account
        self.accounts = (account,)
        self._name = name
        self._entries = entries
        self._order = Order(len(entries), shuffle)

    def __len__(self) -> int:
        return len(self._entries)

    def draw(self, ticket: int, seed: int) -> Prompt:
        """The prompt of a ticket: its place in the permutation of its epoch."""
        return self._prompt(ticket, self._order.place(ticket, seed))

    def all(self) -> list[Prompt]:
        """Every prompt once in the order of the rows; a prompt's ticket is its place."""
        return [self._prompt(place, place) for place in range(len(self))]

    def _prompt(self, ticket: int, place: int) -> Prompt:
        one = self._entries[place]
        return Prompt(
            ticket, one.token_ids, one.question, one.answer, self._name, one.row, one.metadata
        )


def load_prompts(
    settings: DataSettings,
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
    exclude: frozenset[str] = frozenset(),
) -> PromptSet:
    """Reads, renders and tokenises a dataset. exclude: question keys that are held out.

    A prompt over `max_prompt_tokens` is dropped, cut to its last tokens, or an error, as
    settings.on_too_long says. Raises UsageError that names row and column of what is wrong, and
    where no token is left for a prompt.
    """
    if max_prompt_tokens < 1:
        raise _no_room(settings)
    name = dataset_name(settings)
    book = Bookkeeper(name)
    rows: list[Row] = []
    texts: list[str] = []
    questions: list[str] = []
    for row in read_rows(settings):
        messages = prompt_of(row, settings)
        asked = questions_of(messages)
        if overlaps(asked, exclude):
            book.add("excluded", row)
            continue
        rows.append(row)
        texts.append(_text(tokenizer, row, messages, settings))
        questions.append(asked[-1] if asked else "")
    try:
        tokens = encode(tokenizer, texts)["input_ids"] if texts else []
    except Unencodable as error:
        raise unencodable(rows[error.place], error) from error
    entries: list[_Entry] = []
    for row, ids, question in zip(rows, tokens, questions, strict=True):
        if len(ids) > max_prompt_tokens:
            if settings.on_too_long == "error":
                raise _too_long(row, len(ids), max_prompt_tokens)
            book.add("truncated" if settings.on_too_long == "truncate" else "too_long", row)
            if settings.on_too_long == "drop":
                continue
        else:
            book.add("kept", row)
        kept = np.array(ids[-max_prompt_tokens:], np.int32)
        entries.append(
            _Entry(row.index, kept, question, answer_of(row, settings), _rest(row, settings))
        )
    account = book.close(settings, f"{max_prompt_tokens} tokens of a prompt")
    return PromptSet(name, entries, account, settings.shuffle)


def _text(tokenizer: Any, row: Row, messages: list[Any], settings: DataSettings) -> str:
    variables = settings.chat_template_kwargs
    try:
        text = render(tokenizer, messages, generation=True, variables=variables)
    except Unmarkable as error:
        raise UsageError(f"{row.place}: row {row.index}: {error}") from error
    if not text:
        raise UsageError(
            f"{row.place}: row {row.index}: the chat template writes nothing for its prompt, and "
            "there is no sampling from nothing; mend the row or the template"
        )
    return text


def _rest(row: Row, settings: DataSettings) -> dict[str, Any]:
    """What else a verifier may want of a row."""
    read = {settings.prompt, settings.answer, settings.messages}
    return {key: value for key, value in row.values.items() if key not in read}


def unencodable(row: Row, error: Unencodable) -> UsageError:
    """What is told of a row whose text the tokenizer cannot write."""
    return UsageError(
        f"{row.place}: row {row.index} has a character that the tokenizer lacks ({error}); mend "
        'the row, or take a tokenizer that knows every text (model.init.tokenizer.kind = "bpe")'
    )


def _no_room(settings: DataSettings) -> UsageError:
    return UsageError(
        f"{settings.path}: max_len = {settings.max_len} tokens, prompt and response, leaves no "
        "room for a prompt; raise max_len or lower max_new_tokens"
    )


def _too_long(row: Row, tokens: int, limit: int) -> UsageError:
    return UsageError(
        f"{row.place}: the prompt of row {row.index} has {tokens} tokens, the limit is {limit} "
        "(data.max_len less the new tokens); raise data.max_len, or say data.on_too_long = "
        '"drop" or "truncate"'
    )
