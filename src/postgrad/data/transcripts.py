"""Transcripts: a conversation of two speakers in one string, as Anthropic's hh-rlhf has it:
"\\n\\nHuman: question\\n\\nAssistant: answer".
"""

import re

from postgrad.data.messages import Message


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
