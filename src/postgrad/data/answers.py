"""Preference rows as conversations: two answers of which one is preferred, or one answer with a
label. The row's own columns and values decide which shape it has (docs/data.md lists them).
"""

import contextlib
import math
import re
from dataclasses import dataclass
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.data.chat_format import Message, bears_loss, says_nothing, with_tools
from postgrad.data.images import identified, with_images
from postgrad.data.messages import called_tools, chat_of, column, kind_of, with_system
from postgrad.data.rows import Row, shown
from postgrad.data.settings import PairSettings

DEFAULT_PROMPT = "prompt"
LARGEST = 3e38  # a margin is a float32 in the loss


def is_transcript(text: str, speakers: tuple[str, str]) -> bool:
    """True where the text begins with the name of the first speaker and a colon."""
    return text.lstrip().startswith(f"{speakers[0]}:")


def turns_of(text: str, speakers: tuple[str, str]) -> list[Message]:
    """The turns of a transcript: the first speaker is the user, the second the assistant.

    A turn begins with a speaker's name and a colon, at the beginning or after an empty line. White
    space at both ends of a turn is removed.

    >>> turns_of("Human: 1 + 1?\\n\\nAssistant: 2", ("Human", "Assistant"))[1]
    {'role': 'assistant', 'content': '2'}
    """
    names = "|".join(map(re.escape, speakers))
    _, *parts = re.split(rf"(?:\A\s*|\n\n)({names}):", text)
    roles = {speakers[0]: "user", speakers[1]: "assistant"}
    return [
        {"role": roles[name], "content": content.strip()}
        for name, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def question_of(text: str, speakers: tuple[str, str]) -> list[Message] | None:
    """The turns of a transcript before its last one, which has to be an empty turn of the
    assistant: the answer is still to come. None for any other text.
    """
    if not is_transcript(text, speakers):
        return None
    *before, last = turns_of(text, speakers)
    return before if last == {"role": "assistant", "content": ""} else None


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """A row of preferences: a pair of conversations, or one with a label."""

    row: Row
    shape: str  # how the row was read, for the account: "pairs of whole conversations"
    conversations: tuple[list[Message], ...]  # (chosen, rejected), or (labelled,)
    first: int  # index of the message where answers begin; in a pair the first that differs
    desirable: bool = True  # the label; True for pairs, where nothing reads it
    asked: int | None = None  # messages of a prompt in a column of its own; None: there is none

    @property
    def is_pair(self) -> bool:
        """Whether there are two conversations, not one with a label."""
        return len(self.conversations) == 2

    @property
    def equal(self) -> bool:
        """Whether the two conversations of a pair are the same."""
        return self.is_pair and self.conversations[0] == self.conversations[1]

    @property
    def empty(self) -> bool:
        """Whether a conversation ends without an answer, or an answer that is learned is blank."""
        return any(
            conversation[-1]["role"] != "assistant"
            or any(bears_loss(turn) and says_nothing(turn) for turn in conversation[self.first :])
            for conversation in self.conversations
        )

    @property
    def complete(self) -> bool:
        """Whether every conversation has a message at `first`: not so in a pair of which one
        conversation is only the beginning of the other.
        """
        return all(self.first < len(conversation) for conversation in self.conversations)

    @property
    def parts_inside_a_turn(self) -> bool:
        """Whether the first two messages of a pair that differ are answers that begin with the same
        character: they part in the middle of a turn.
        """
        if not self.is_pair or not self.complete:
            return False
        parting = [messages[self.first] for messages in self.conversations]
        chosen, rejected = (message["content"] for message in parting)
        answers = all(message["role"] == "assistant" for message in parting)
        return answers and bool(chosen) and chosen[:1] == rejected[:1]

    @property
    def question(self) -> list[str]:
        """All texts of the user before the answer, images by their hashes, joined into one
        question; [] if there are none.

        The last message alone would not do: it may be "go on" in unrelated conversations. What an
        environment said behind the prompt is no question, in however many turns two episodes agree.
        """
        before = self.conversations[0][: self.first if self.asked is None else self.asked]
        texts = [identified(turn) for turn in before if turn["role"] == "user"]
        return ["\n".join(texts)] if texts else []

    @property
    def messages(self) -> list[Message]:
        """Every message once: the first conversation, then the other one's messages from `first`
        on.
        """
        first, *others = self.conversations
        return [*first, *(turn for conversation in others for turn in conversation[self.first :])]


def require_no_fractions(preference: PreferenceRow) -> None:
    """Raises UsageError for a message with a weight that is neither 0 nor 1: losses compare the
    logprobs of answers, which are sums over tokens that count the same.
    """
    row, chats = preference.row, preference.conversations
    if any(message.get("weight", 1) not in (0, 1) for chat in chats for message in chat):
        raise UsageError(
            f"{row.place}: row {row.index} has a message with a weight that is neither 0 nor 1: "
            'fractions and multiples are of job = "sft"; round them with data.map'
        )


def pair_of(row: Row, settings: PairSettings) -> PreferenceRow:
    """A row's chosen and rejected conversation. Raises UsageError that names row and column."""
    if settings.chosen not in row.values and {settings.completion, settings.label} <= {*row.values}:
        held = ""
        if settings.eval_fraction:
            held = (
                ", also that of the part that data.eval_fraction holds out: delete that key, and "
                "give [eval] a file of pairs"
            )
        raise UsageError(
            f"{row.place}: row {row.index} has no column {settings.chosen!r} (data.chosen): it is "
            f"an answer with a label ({settings.completion!r}, {settings.label!r}), which only "
            'algorithm.type = "kto" of job = "preference" learns from; other losses, reward models '
            f"and every evaluation compare two answers{held}"
        )
    columns = {settings.chosen: "data.chosen", settings.rejected: "data.rejected"}
    shape, (chosen, rejected), asked = _conversations(row, settings, columns)
    parted = (
        i
        for i, (chosen_turn, rejected_turn) in enumerate(zip(chosen, rejected, strict=False))
        if chosen_turn != rejected_turn
    )
    first = next(parted, min(len(chosen), len(rejected)))
    differing = [
        conversation[first]["role"]
        for conversation in (chosen, rejected)
        if first < len(conversation)
    ]
    # Behind a prompt of its own each side has what an environment replied to it, which may differ.
    if asked is None and len(differing) == 2 and differing != ["assistant", "assistant"]:
        raise UsageError(
            f"{row.place}: chosen and rejected of row {row.index} part at message {first}, which "
            f"is of the {differing[0]} and of the {differing[1]}: both have to answer the same "
            "messages; put these into a column of their own (data.prompt) where an environment "
            "said the rest, fix the row, or leave it out (data.filter)"
        )
    return PreferenceRow(row, f"pairs of {shape}", (chosen, rejected), first, asked=asked)


def labelled_of(row: Row, settings: PairSettings) -> PreferenceRow:
    """`preference_of`, with an error that names both kinds of row where this is neither."""
    if not {settings.chosen, settings.completion} & {*row.values}:
        raise UsageError(
            f"{row.place}: row {row.index} has neither an answer with a label "
            f"({settings.completion!r}, {settings.label!r}: data.completion, data.label) nor a "
            f"pair ({settings.chosen!r}, {settings.rejected!r}: data.chosen, data.rejected); its "
            f"columns: {', '.join(row.values)[:1000]}"
        )
    return preference_of(row, settings)


def preference_of(row: Row, settings: PairSettings) -> PreferenceRow:
    """A row's answer with its label, or its pair. Raises UsageError that names row and column."""
    if settings.chosen in row.values or settings.completion not in row.values:
        return pair_of(row, settings)
    label = column(row, settings.label, "data.label")
    if isinstance(label, str):  # as CSV has it
        label = {"true": True, "1": True, "false": False, "0": False}.get(label.lower(), label)
    if not isinstance(label, bool) and label not in (0, 1):
        raise UsageError(
            f"{row.place}: column {settings.label!r} of row {row.index} is {shown(label)}; a label "
            "is true for a desirable answer, false for another (data.label)"
        )
    columns = {settings.completion: "data.completion"}
    shape, (messages,), first = _conversations(row, settings, columns)
    if first is None:  # a whole conversation: its last message is the answer
        first = len(messages) - 1
    return PreferenceRow(row, f"labelled {shape}", (messages,), first, bool(label))


def margin_of(row: Row, settings: PairSettings) -> float:
    """How much better the chosen answer is, from column data.margin; 0 where none is named.

    Raises UsageError where the value is no number, or none that a float32 holds.
    """
    if not settings.margin:
        return 0.0
    value = column(row, settings.margin, "data.margin")
    number: float | None = None
    if isinstance(value, int | float | str) and not isinstance(value, bool):  # CSV has text
        with contextlib.suppress(ValueError):
            number = math.inf if isinstance(value, int) and abs(value) > LARGEST else float(value)
    if number is None or not abs(number) <= LARGEST:
        raise UsageError(
            f"{row.place}: column {settings.margin!r} of row {row.index} is {shown(value)}, not a "
            f"number{'' if number is None else ' that a float32 holds'} (data.margin)"
        )
    return number


def metadata_of(row: Row, settings: PairSettings) -> dict[str, Any]:
    """The columns that are neither answers, margin, prompt nor images, such as RewardBench's
    `subset`.
    """
    prompt = DEFAULT_PROMPT if settings.prompt is None else settings.prompt
    read = {settings.chosen, settings.rejected, settings.margin, settings.images, prompt}
    return {name: value for name, value in row.values.items() if name not in read}


def _conversations(
    row: Row, settings: PairSettings, columns: dict[str, str]
) -> tuple[str, list[list[Message]], int | None]:
    """(shape, the conversation of each column, how many messages come before the answers). The last
    is None where a column holds whole conversations, prompt included.

    columns: column name -> recipe key, {"good": "data.chosen"}.
    """
    values = {name: column(row, name, key) for name, key in columns.items()}
    if all(isinstance(value, str) for value in values.values()):
        shape, chats, before = _of_texts(row, settings, values)
    elif all(isinstance(value, list) for value in values.values()):
        shape, chats, before = _of_messages(row, settings, values, columns)
    else:
        kinds = ", ".join(f"{name!r} is {kind_of(value)}" for name, value in values.items())
        raise UsageError(
            f"{row.place}: row {row.index}: {kinds}; an answer is text or a list of messages, and "
            f"both of a pair are the same ({', '.join(columns.values())})"
        )
    tools = called_tools(row, settings)
    conversations = [
        with_images(with_tools(with_system(messages, settings), tools), row, settings)
        for messages in chats
    ]
    added = len(conversations[0]) - len(chats[0])
    return shape, conversations, None if before is None else before + added


def _of_texts(
    row: Row, settings: PairSettings, texts: dict[str, str]
) -> tuple[str, list[list[Message]], int | None]:
    user, assistant = settings.speakers
    if all(is_transcript(text, settings.speakers) for text in texts.values()):
        chats = [turns_of(text, settings.speakers) for text in texts.values()]
        return f"transcripts ({user}:, {assistant}:)", chats, None
    prompt = prompt_before(row, settings)
    if prompt is None:
        raise UsageError(
            f"{row.place}: row {row.index}: {' and '.join(map(repr, texts))} are text that does "
            f"not begin with {user + ':'!r} (data.speakers), and there is no column of what it "
            "answers (data.prompt)"
        )
    before, name, stripped = prompt
    chats: list[list[Message]] = []
    for text in texts.values():
        content = text.strip() if settings.strip or stripped else text
        chats.append([*before, {"role": "assistant", "content": content}])
    return f"texts that answer {name!r}", chats, len(before)


def _of_messages(
    row: Row, settings: PairSettings, values: dict[str, Any], columns: dict[str, str]
) -> tuple[str, list[list[Message]], int | None]:
    chats = [
        chat_of(value, row, name, columns[name], strip=settings.strip)
        for name, value in values.items()
    ]
    alone = [chat[0]["role"] == "assistant" for chat in chats]
    if not any(alone):
        return "whole conversations", chats, None
    if not all(alone):
        raise UsageError(
            f"{row.place}: row {row.index}: of {' and '.join(map(repr, values))} one begins with "
            "the assistant, the other does not"
        )
    prompt = prompt_before(row, settings)
    if prompt is None:
        raise UsageError(
            f"{row.place}: row {row.index}: {' and '.join(map(repr, values))} begin with the "
            "assistant, and there is no column of what it answers (data.prompt)"
        )
    before, name, _ = prompt
    return f"messages that answer {name!r}", [[*before, *chat] for chat in chats], len(before)


def prompt_before(row: Row, settings: PairSettings) -> tuple[list[Message], str, bool] | None:
    """(messages that are answered, name of their column, whether it held a transcript); None where
    the row has no such column.
    """
    name = settings.prompt
    if name is None and DEFAULT_PROMPT in row.values:
        name = DEFAULT_PROMPT
    if not name:
        return None
    value = column(row, name, "data.prompt")
    if isinstance(value, str):
        turns = question_of(value, settings.speakers)
        if turns is not None:
            return turns, name, True
        content = value.strip() if settings.strip else value
        return [{"role": "user", "content": content}], name, False
    messages = chat_of(value, row, name, "data.prompt", strip=settings.strip)
    if messages[-1]["role"] == "assistant" and says_nothing(messages[-1]):
        messages.pop()  # the place of the answer
    if not messages:
        raise UsageError(f"{row.place}: row {row.index} has no message to answer (data.prompt)")
    return messages, name, False
