"""Calls of tools in a turn of the policy, and the messages that answer them."""

import re
from collections.abc import Sequence
from itertools import chain, count
from typing import Any, Literal

from postgrad.core.errors import UsageError
from postgrad.data.chat_format import THOUGHT, Message
from postgrad.rollout.environments.tool_formats import (
    FORMATS,
    Call,
    Calls,
    Malformed,
    Schemas,
    ToolFormat,
    harmony_messages,
)

# Formats in which the marks of thoughts are special tokens.
MARKED: frozenset[ToolFormat | Literal["auto"]] = frozenset({"mistral", "harmony"})
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


def format_of(template: str) -> ToolFormat | None:
    """The format of tool calls in a chat template's text; None where it has none of these."""
    for style, form in FORMATS.items():
        if all(re.search(pattern, template) for pattern in form.taught):
            return style
    return None


def taught_format(template: str) -> ToolFormat:
    """The format of tool calls that a chat template teaches. Raises UsageError where it teaches
    none, or shows no tools.
    """
    style = format_of(template)
    if style is None:
        *others, last = (f'"{style}"' for style in FORMATS)
        raise UsageError(
            "environment.tool_format: the tokenizer's chat template teaches no format of tool "
            f"calls that is known here: say tool_format = {', '.join(others)} or {last}, or take a "
            "tokenizer whose template does"
        )
    if not re.search(r"\btools\b", template):  # as those of DeepSeek's distilled models
        raise UsageError(
            f'environment: the tokenizer\'s chat template writes calls as "{style}", and does not '
            "read `tools`: the model would not see the functions that it is to call; give "
            "data.chat_template one that does"
        )
    return style


def calls_in(text: str, style: ToolFormat, schemas: Schemas) -> Calls:
    """The calls of a turn in order; [] where it is an answer. Text up to </think> is ignored.

    text: special tokens included. schemas: in "qwen_xml" and "glm" values are texts, and the schema
    of a tool says which of them are numbers, lists or other values of JSON.
    """
    form = FORMATS[style]
    _, reply = _thoughts_and_reply(text, style)
    calls = form.read(reply, schemas)
    if not calls and form.begin and form.begin in reply:
        return [Malformed(f"no call follows {form.begin}")]
    return calls


def text_beside(text: str, style: ToolFormat) -> str:
    """What a turn says beside its calls: all that stands before them; in "harmony" what is in the
    channel final, or else in no channel of thoughts.
    """
    if style == "harmony":
        messages = [(channel, body) for to, channel, body in harmony_messages(text) if not to]
        final = [body for channel, body in messages if channel in ("final", "")]
        others = [body for channel, body in messages if channel != "analysis"]
        return "\n".join(filter(None, final or others))
    thoughts, reply = _thoughts_and_reply(text, style)
    if not calls_in(text, style, {}):
        return text
    begin = FORMATS[style].begin
    return (thoughts + (reply.partition(begin)[0] if begin else "")).strip()


def thoughts_apart(
    text: str, style: ToolFormat | Literal["auto"], *, opened: bool
) -> tuple[str, str]:
    """What a turn thinks, and what it says behind that, without the marks between and white space
    at both ends. A turn that ends within its thoughts says nothing; one without thoughts is not
    changed.

    opened: whether the prompt has the mark that opens them.
    """
    marks = (THOUGHT,) if style == "auto" else FORMATS[style].thoughts
    thoughts, reply = _up_to_last(text, marks)
    begins = tuple(mark.replace("/", "") for mark in marks)
    if not thoughts:
        if not (opened or text.lstrip().startswith(begins)):
            return "", text
        thoughts, reply = text, ""
    for mark in marks:
        thoughts = thoughts.removesuffix(mark)
    thoughts = thoughts.strip()
    for mark in begins:
        thoughts = thoughts.removeprefix(mark)
    return thoughts.strip(), reply.strip()


def analysis_in(text: str) -> str:
    """What a turn of "harmony" thinks: its messages in the channel analysis."""
    messages = harmony_messages(text)
    return "\n".join(body for to, channel, body in messages if channel == "analysis" and not to)


def _thoughts_and_reply(text: str, style: ToolFormat) -> tuple[str, str]:
    return _up_to_last(text, FORMATS[style].thoughts)


def _up_to_last(text: str, marks: Sequence[str]) -> tuple[str, str]:
    """A text in two, parted behind the last of the marks in it."""
    place = max((text.rfind(mark) + len(mark) for mark in marks if mark in text), default=0)
    return text[:place], text[place:]


def ids_of(calls: Sequence[Call | Malformed], before: int) -> list[str]:
    """The id of each call of a turn, all different: as the model wrote it, else by its place among
    all calls of the conversation, so that it is the same in every run. before: the calls of earlier
    turns.

    Nine letters and digits, as the templates of Mistral demand.
    """
    ids: list[str] = []
    for place, call in enumerate(calls, before):
        numbered = (f"call{number:05d}" for number in count(place))
        wanted = chain([call.id] if call.id else [], numbered)
        ids.append(next(identifier for identifier in wanted if identifier not in ids))
    return ids


def written_call(identifier: str, call: Call) -> dict[str, Any]:
    """A call of an answer, as chat templates read it."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"type": "function", "id": identifier, "function": function}


def result_message(
    call: Call | Malformed, identifier: str, content: str | list[dict[str, Any]]
) -> Message:
    """The message with a call's result, a text or parts with images. It names the function where
    such a name can exist: a model may have written anything.
    """
    message = {"role": "tool", "content": content, "tool_call_id": identifier}
    return {**message, "name": call.name} if _NAME.fullmatch(call.name) else message


def result_example(name: str) -> Message:
    """A result of the tool called `name`, for the check whether a chat template writes results."""
    call = Call(name, {})
    return result_message(call, ids_of([call], 0)[0], "0")
