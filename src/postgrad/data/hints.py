"""Hints of rows (data.hint): what graders read behind a prompt, and the policy does not."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.records import Hinted
from postgrad.data.chat_format import Message
from postgrad.data.messages import filled_in
from postgrad.data.packed import StoredColumn
from postgrad.data.rows import Row
from postgrad.data.settings import GROUP_ANSWER, DataSettings, template_parts

# Stands for {group.answer} until samples are there: a code point that is no character.
ANSWER_PLACE = "\ufdd0"


def hinted(messages: list[Message], row: Row, settings: DataSettings) -> list[Message]:
    """The messages of a prompt with the row's hint behind the user's last one, after an empty line:
    what a grader reads. ANSWER_PLACE stands for {group.answer}.

    Raises UsageError for a row without the columns, without a user, or with images.
    """
    users = [n for n, message in enumerate(messages) if message["role"] == "user"]
    if not users or any("images" in message for message in messages):
        lacks = "has images" if users else "has no message of a user"
        raise UsageError(
            f"{row.place}: row {row.index} {lacks}, and data.hint stands behind the user's last "
            "text: leave such rows out (data.filter)"
        )
    last, text = messages[users[-1]], _text(row, settings)
    with_hint: Message = {**last, "content": f"{last['content']}\n\n{text}"}
    return [*messages[: users[-1]], with_hint, *messages[users[-1] + 1 :]]


def halves(row: Row, text: str) -> list[str]:
    """What the text of a row's prompt has before ANSWER_PLACE, and behind it."""
    parts = text.split(ANSWER_PLACE)
    if len(parts) != 2:
        raise UsageError(
            f"{row.place}: row {row.index}: its prompt has {len(parts) - 1} places for "
            f"{{{GROUP_ANSWER}}} of data.hint, and 1 is needed: the chat template leaves the hint "
            f"out or repeats it, or the row has the code point U+{ord(ANSWER_PLACE):04X}"
        )
    return parts


@dataclass(frozen=True, slots=True)
class Hints:
    """The tokens that graders read of the rows of a dataset."""

    tokens: StoredColumn
    # [rows] where among them a right answer of the group comes in; None: hints name none
    answer_at: NDArray[np.int64] | None

    @classmethod
    def of(cls, settings: DataSettings, read: Callable[..., StoredColumn]) -> "Hints | None":
        """None where the dataset has no hints. read: gives the tokens of each row's text, or, with
        halved = True, of both `halves` of each.
        """
        if not settings.hint:
            return None
        if not settings.shows_group:
            return cls(read(), None)
        both = read(halved=True)
        return cls(replace(both, offsets=both.offsets[::2]), both.lengths[::2])

    def row(self, row: int, limit: int) -> Hinted:
        """The last `limit` tokens of a row. One that is cut has no room for an answer."""
        tokens = self.tokens.row(row)
        if self.answer_at is None:
            return Hinted(tokens[-limit:])
        cut = max(0, len(tokens) - limit)
        at = max(0, int(self.answer_at[row]) - cut)
        return Hinted(tokens[-limit:], at, room=limit - len(tokens) + cut)


def _require_no_such_column(row: Row) -> None:
    outer, _, inner = GROUP_ANSWER.partition(".")
    value = row.values.get(outer)
    if GROUP_ANSWER in row.values or (isinstance(value, dict) and inner in value):
        raise UsageError(
            f"{row.place}: row {row.index} has a column {GROUP_ANSWER!r}, and in data.hint "
            f"{{{GROUP_ANSWER}}} is a right answer among the prompt's samples: rename the column "
            "(data.map)"
        )


def _text(row: Row, settings: DataSettings) -> str:
    """The hint of a row, with ANSWER_PLACE for {group.answer}."""
    text = ""
    for words, name in template_parts(settings.hint):
        text += words
        if name == GROUP_ANSWER:
            _require_no_such_column(row)
            text += ANSWER_PLACE
        elif name is not None:
            text += filled_in(row, name, "data.hint", settings)
    return text
