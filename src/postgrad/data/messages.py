"""A row as a conversation in the chat format, and as a question with its reference answer."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Collection
from decimal import Decimal
from functools import lru_cache
from operator import attrgetter
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.core.text import how_many, nearest
from postgrad.data.chat_format import EMPTY, Message, messages_of, roles_of, tools_of, with_tools
from postgrad.data.gym import PREFIX
from postgrad.data.images import identified, with_images
from postgrad.data.rows import Row
from postgrad.data.settings import DataSettings, RowSettings, template_parts

SHOWN = 20  # columns that an error message lists
DOCUMENT = "document"  # the role of plain text, which no chat template sees
LAYOUTS: tuple[dict[str, str], ...] = (  # of common datasets: the columns by the key of [data]
    {"messages": "messages"},
    {"messages": "conversations"},
    {"prompt": "instruction", "input": "input", "answer": "output"},
    {"prompt": "instruction", "answer": "output"},
    {"prompt": "prompt", "answer": "completion"},
    {"text": "text"},
)
_named_columns = attrgetter("prompt", "answer", "messages", "text", "input", "template")
DEFAULTS = _named_columns(DataSettings(path=""))


def read_as(row: Row, settings: DataSettings) -> DataSettings:
    """The settings with the columns of a row's layout, where the recipe names no columns, the row
    has no column `question`, and it has one of LAYOUTS alone. Plain text has to be named: it may
    as well be a conversation that somebody has rendered.
    """
    if settings.prompt in row.values or _named_columns(settings) != DEFAULTS:
        return settings
    layouts = _layouts(tuple(row.values))
    if len(layouts) != 1 or "text" in layouts[0]:
        return settings
    return settings.model_copy(update=layouts[0])


@lru_cache(64)  # rows of a dataset have the same columns
def _layouts(columns: tuple[str, ...]) -> list[dict[str, str]]:
    """The layouts that rows with these columns have, without those that a larger one contains."""
    layouts = [layout for layout in LAYOUTS if {*columns} >= {*layout.values()}]
    conversations = [layout for layout in layouts if "text" not in layout] or layouts
    return [
        layout
        for layout in conversations
        if not any({*layout.values()} < {*other.values()} for other in conversations)
    ]


def _stated(layout: dict[str, str]) -> str:
    """A layout as a recipe states it."""
    return ", ".join(f'data.{key} = "{name}"' for key, name in layout.items())


class ColumnNotes:
    """Counts how the columns of rows are read, row after row, for the account."""

    def __init__(self, settings: DataSettings) -> None:
        self._settings = settings
        # by the columns of a row: the layout that it is read with ("": none), and the unread ones
        self._ways: dict[tuple[str, ...], tuple[str, list[str]]] = {}
        self._layouts: Counter[str] = Counter()  # rows that are read with it
        self._unread: Counter[str] = Counter()  # rows with a value in a column that is not read
        self._generated = settings.path.startswith(PREFIX)  # its columns are for its scorer

    def add(self, row: Row) -> None:
        """Counts the columns of one more row."""
        columns = tuple(row.values)
        if columns not in self._ways:
            settings = read_as(row, self._settings)
            other = "" if settings is self._settings else _stated(_layouts(columns)[0])
            unread = [name for name in columns if name not in _read_columns(settings)]
            self._ways[columns] = other, unread
        layout, unread = self._ways[columns]
        if layout:
            self._layouts[layout] += 1
        for name in unread:
            if row.values[name] not in EMPTY:
                self._unread[name] += 1

    def layouts(self) -> list[str]:
        """Lines that say how rows are read whose columns the recipe does not name."""
        return [
            f"{how_many(count, 'row')} read with {keys}" for keys, count in self._layouts.items()
        ]

    def unread(self) -> list[str]:
        """A line for the account of training rows that names the columns which are not read, each
        with the number of rows that have a value there; [] where all are read, and for generated
        problems.
        """
        counts = self._unread
        if not counts or self._generated:
            return []
        named = [
            f"{name!r} ({how_many(count, 'row')})" for name, count in counts.most_common(SHOWN)
        ]
        more = f" and {len(counts) - SHOWN} others" if len(counts) > SHOWN else ""
        return [f"columns that are not trained on: {', '.join(named)}{more}"]


def conversation_of(row: Row, settings: DataSettings) -> list[Message]:
    """Every message of a row, the answer included. Raises UsageError that names row and column."""
    settings = read_as(row, settings)
    if settings.text:
        return [{"role": DOCUMENT, "content": _text(row, settings.text, "data.text", settings)}]
    if settings.messages is not None:
        return _complete(_chat(row, settings), row, settings)
    asked = [
        {**message, "weight": 0} if message["role"] == "assistant" else message
        for message in _asked(row, settings)
    ]
    return _complete([*asked, *_answered(row, settings)], row, settings)


def prompt_of(row: Row, settings: DataSettings) -> list[Message]:
    """The messages that the policy answers: a row's messages without the answers at its end.

    Raises UsageError where nothing is left.
    """
    settings = read_as(row, settings)
    if settings.text:
        return conversation_of(row, settings)
    messages = _asked(row, settings) if settings.messages is None else _chat(row, settings)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        key = "data.prompt" if settings.messages is None else "data.messages"
        raise UsageError(f"{row.place}: row {row.index} has no message to answer ({key})")
    return _complete(messages, row, settings)


def questions_of(messages: list[Message]) -> list[str]:
    """The texts of the user, in order, images by their hashes; of plain text, the text."""
    return [identified(message) for message in messages if message["role"] in ("user", DOCUMENT)]


def answers_in(messages: list[Message]) -> list[str]:
    """The texts of the assistant, in order."""
    return [message["content"] for message in messages if message["role"] == "assistant"]


def asked_in(row: Row, messages: list[Message], settings: DataSettings) -> list[str]:
    """The questions of a row, without the words of data.template: rows are compared by them, and
    verifiers get the last one.

    A template with several columns gives one question, a line for each column.
    """
    if not settings.template:
        return questions_of(messages)
    filled = _filled(row, settings)
    return ["\n".join(value for _, value in filled if value is not None)]


def answer_of(row: Row, settings: DataSettings) -> str | None:
    """The reference answer as text, lists and objects as JSON; None where the recipe or the row
    has none.
    """
    settings = read_as(row, settings)
    if settings.answer == "" or (settings.messages and settings.answer not in row.values):
        return None
    value = column(row, settings.answer, "data.answer")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float):  # 0.00001, not 1e-05, which readers of formulas take for e - 5
        return f"{Decimal(repr(value)):f}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)


def column(row: Row, name: str, key: str) -> Any:
    """The value of a row's column. key: the recipe's, "data.answer", for the message.

    Raises UsageError with the nearest column where the row has no such column.
    """
    if name not in row.values:
        close = nearest(name, row.values)
        ellipsis = ", ..." if len(row.values) > SHOWN else ""
        columns = ", ".join(itertools.islice(row.values, SHOWN)) + ellipsis
        hint = f"did you mean {close!r}?" if close else f"its columns: {columns[:1000]}"
        if isinstance(outer := row.values.get(name.partition(".")[0]), dict):
            keys = ", ".join(itertools.islice(map(str, outer), SHOWN))
            hint = f"the object in {name.partition('.')[0]!r} has the keys {keys[:1000]}"
        if not close and key in ("data.prompt", "data.answer"):
            ways = [_stated(layout) for layout in _layouts(tuple(row.values))]
            hint += f"; they are read with {', or with '.join(ways)}" if ways else ""
        if re.search(r"\.(parquet|arrow) row \d+$", row.place):
            hint += "; columns of bytes are not read"
        raise UsageError(f"{row.place}: row {row.index} has no column {name!r} ({key}); {hint}")
    return row.values[name]


def _asked(row: Row, settings: DataSettings) -> list[Message]:
    """The messages that the answer of columns answers: a question, or a list of messages."""
    if settings.template:
        filled = _filled(row, settings)
        text = "".join(text + (value or "") for text, value in filled)
        return [{"role": "user", "content": text}]
    name, key = settings.prompt, "data.prompt"
    value = column(row, name, key)
    if isinstance(value, list) and not settings.input:
        return _read_chat(value, row, name, key, settings)
    text = _text(row, name, key, settings)
    if settings.input and column(row, settings.input, "data.input") is not None:
        about = _text(row, settings.input, "data.input", settings)
        text = "\n".join(filter(None, (text, about)))
    return [{"role": "user", "content": text}]


def _answered(row: Row, settings: DataSettings) -> list[Message]:
    """The answer of columns: text, or a list of messages."""
    name, key = settings.answer, "data.answer"
    value = column(row, name, key)
    if isinstance(value, list):
        return _read_chat(value, row, name, key, settings)
    return [{"role": "assistant", "content": _text(row, name, key, settings)}]


def _read_columns(settings: DataSettings) -> set[str | None]:
    if settings.text:
        return {settings.text}
    if settings.messages is not None:
        return {settings.messages, settings.tools, settings.images}
    asked = {name for _, name in template_parts(settings.template)} or {settings.prompt}
    return {*asked, settings.input, settings.answer, settings.tools, settings.images}


def _filled(row: Row, settings: DataSettings) -> list[tuple[str, str | None]]:
    """The parts of data.template: (text, value of the column after it, or None at the end)."""
    return [
        (text, None if name is None else filled_in(row, name, "data.template", settings))
        for text, name in template_parts(settings.template)
    ]


def filled_in(row: Row, name: str, key: str, settings: DataSettings) -> str:
    """The text of a column that `key`, "data.template", names. Numbers are allowed; other values
    raise UsageError.
    """
    value = column(row, name, key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return _text(row, name, key, settings)


def _text(row: Row, name: str, key: str, settings: DataSettings) -> str:
    value = column(row, name, key)
    if not isinstance(value, str):
        raise UsageError(
            f"{row.place}: column {name!r} of row {row.index} is {kind_of(value)}, not text "
            f"({key}); leave such rows out (data.filter), or make text of it (data.map)"
        )
    return value.strip() if settings.strip else value


def kind_of(value: Any) -> str:
    """The type of a column's value, for people."""
    return "null" if value is None else type(value).__name__


def chat_of(
    value: Any,
    row: Row,
    name: str,
    key: str,
    *,
    strip: bool,
    learned: Collection[str] | None = None,
) -> list[Message]:
    """A column's value as a checked conversation, see messages_of. Raises UsageError that names row
    and column.
    """
    try:
        return messages_of(value, strip=strip, learned=learned)
    except ValueError as error:
        raise UsageError(
            f"{row.place}: column {name!r} of row {row.index} is no conversation: {error} ({key})"
        ) from error


def called_tools(row: Row, settings: RowSettings) -> list[dict[str, Any]]:
    """The functions that a row's conversation may call; [] where it has no column of them. Raises
    UsageError that names row and column.
    """
    try:
        return tools_of(row.values.get(settings.tools)) if settings.tools else []
    except ValueError as error:
        raise UsageError(
            f"{row.place}: column {settings.tools!r} of row {row.index} is not {error} "
            '(data.tools; "" reads no such column)'
        ) from error


def with_system(messages: list[Message], settings: RowSettings) -> list[Message]:
    """`messages` behind the recipe's system message, if it has one and they have none. It takes
    over the tools of the message that was the first.
    """
    if settings.system is None or any(message["role"] == "system" for message in messages):
        return messages
    first, *rest = messages
    system: Message = {"role": "system", "content": settings.system}
    if tools := first.get("tools"):
        first = {key: value for key, value in first.items() if key != "tools"}
        system["tools"] = tools
    return [system, first, *rest]


def _complete(messages: list[Message], row: Row, settings: DataSettings) -> list[Message]:
    """`messages` with the recipe's system message, the row's tools and its images."""
    messages = with_tools(with_system(messages, settings), called_tools(row, settings))
    return with_images(messages, row, settings)


def _chat(row: Row, settings: DataSettings) -> list[Message]:
    assert settings.messages is not None
    value = column(row, settings.messages, "data.messages")
    return _read_chat(value, row, settings.messages, "data.messages", settings)


def _read_chat(value: Any, row: Row, name: str, key: str, settings: DataSettings) -> list[Message]:
    learned = roles_of(settings.loss_turns)
    return chat_of(value, row, name, key, strip=settings.strip, learned=learned)
