"""What a chat template leaves out: calls of tools, and their results.

Nothing of a conversation is dropped without a word: one whose template drops a part is refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from postgrad.core.media import MARK
from postgrad.data.chat_format import THOUGHT, Message


def dropped_from(messages: Sequence[Message], text: str) -> str | None:
    """What of tools and their results is missing in the text of a conversation, or None."""
    place = 0  # behind the newest message: schemas of tools, which name them too, stand before it
    for i, message in enumerate(messages):
        content = message["content"].strip()
        pieces = [piece.strip() for piece in content.split(MARK)]
        if message["role"] == "tool" and not all(_has(text, piece) for piece in pieces if piece):
            return f"the chat template drops the tool's result in message {i}: {content[:60]!r}"
        for call in message.get("tool_calls", ()):
            if text.find(call["function"]["name"], place) < 0:
                return _dropped_call(call, i)
        if message["role"] != "system":  # that may stand anywhere
            place = _behind(message, text, place)
    return None


def _behind(message: Message, text: str, place: int) -> int:
    """Where the content of a message ends in `text`, from `place` on; `place` where it is not
    there. No later than where the template wrote it: that may drop the thoughts of earlier answers
    and write results as JSON, and another message may say the same as it was.
    """
    nearest, end = len(text), place
    for form in dict.fromkeys(written_forms(message["content"].rpartition(THOUGHT)[2].strip())):
        begin = text.find(form, place, nearest + len(form) - 1)
        if begin >= 0:
            nearest, end = begin, begin + len(form)
    return end


def missing_call(message: Message, i: int, text: str) -> str | None:
    """The first call of message i whose name or an argument is not in the answer's text, as a
    problem; None where all are there.
    """
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = _leaves(function["arguments"])
        if function["name"] not in text or not all(_has(text, leaf) for leaf in arguments):
            return _dropped_call(call, i)
    return None


def written_forms(content: str) -> Iterator[str]:
    """A content as templates write it: as it is, without white space at its ends, inside JSON."""
    for form in dict.fromkeys((content, content.strip())):
        yield form
        for ascii_only in (False, True):
            yield json.dumps(form, ensure_ascii=ascii_only)[1:-1]


def _dropped_call(call: Mapping[str, Any], i: int) -> str:
    written = json.dumps(call["function"], ensure_ascii=False)
    return (
        f"the chat template drops a call of message {i}: {written[:100]}; take a template that "
        "writes tool_calls"
    )


def _leaves(value: Any) -> Iterator[Any]:
    """The values inside objects and lists."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


def _has(text: str, value: Any) -> bool:
    """Whether `value` is in the text, as it is or as JSON. White space at its ends is free."""
    if not isinstance(value, str):
        return str(value) in text or json.dumps(value) in text
    return any(form in text for form in written_forms(value.strip()))
