"""Chat templates: text once, token ids once, and which tokens the assistant wrote.

Loss masks come from token offsets, so templates need no {% generation %} marks; what a template
cannot show is refused rather than guessed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.data.messages import Message
from postgrad.data.settings import RowSettings


class Unmarkable(Exception):
    """A conversation whose assistant tokens cannot be marked; the message says why."""


class Unencodable(Exception):
    """Text number `place` of several has a character that the tokenizer lacks."""

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(reason)
        self.place = place


def encode(tokenizer: Any, texts: Sequence[str], **more: Any) -> Any:
    """The tokenizer's ids of texts that a template wrote: no special tokens are added."""
    try:
        return tokenizer(list(texts), add_special_tokens=False, **more)
    except Exception as error:  # tokenizers raise nothing narrower
        for place, text in enumerate(texts):
            try:
                tokenizer(text, add_special_tokens=False)
            except Exception as one:  # noqa: BLE001
                raise Unencodable(place, str(one)) from error
        raise


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text. spans: [start, end) characters that bear loss. prompt: what the
    policy reads before the first of them.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    prompt: str


def render(
    tokenizer: Any, messages: Sequence[Message], *, generation: bool, variables: Mapping[str, Any]
) -> str:
    """Messages as the template writes them; `generation`: with the start of an answer."""
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation, **variables
        )
    except (
        TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:  # a template is a program
        raise Unmarkable(f"the chat template refuses it: {error}") from error


def template_call(settings: RowSettings) -> dict[str, Any]:
    """What the template is called with beside messages: the dataset's variables, and its own
    template where it has one. Raises UsageError where that is a file that cannot be read.
    """
    own = settings.chat_template
    if not own:
        return settings.chat_template_kwargs
    if "{{" not in own and "{%" not in own:
        try:
            own = Path(own).expanduser().read_text("utf-8")
        except (OSError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"data.chat_template {own!r} cannot be read: {error}; it is a Jinja file, or a "
                "template's own text"
            ) from error
    return {**settings.chat_template_kwargs, "chat_template": own}


def turn_ends(tokenizer: Any) -> re.Pattern[str]:
    """Finds the special tokens, one of which ends a turn.

    Llama 3's <|eot_id|> and Gemma 3's <end_of_turn> are no named ones (eos, pad, ...): they are
    found among the added tokens. Without any special token nothing is found.
    """
    added = [str(one) for one in tokenizer.added_tokens_decoder.values() if one.special]
    marks = {mark for mark in (*tokenizer.all_special_tokens, *added) if mark}
    longest_first = sorted(marks, key=lambda mark: (-len(mark), mark))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    ends: re.Pattern[str],
    turns: Literal["all", "last"],
    variables: Mapping[str, Any],
    first: int = 0,
) -> Rendered:
    """The text of a conversation and where its assistant wrote, in message `first` or later.

    A span is what follows the generation prompt, up to the token that ends the turn (the first of
    `ends` after the content). Raises Unmarkable where the template rewrites earlier turns, drops
    content, or does not begin an answer as its generation prompt does: what RL samples from would
    not be what SFT trained on.
    """
    text = render(tokenizer, messages, generation=False, variables=variables)
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    answers = [i for i in said if i >= first]
    if not answers:
        raise Unmarkable("there is no message of the assistant")
    if turns == "last":
        answers = answers[-1:]
    parts = [_part(tokenizer, messages, i, text, ends, variables) for i in answers]
    return Rendered(text, tuple(span for _, span in parts), parts[0][0])


def _part(
    tokenizer: Any,
    messages: Sequence[Message],
    i: int,
    text: str,
    ends: re.Pattern[str],
    variables: Mapping[str, Any],
) -> tuple[str, tuple[int, int]]:
    """What the policy reads before message i of `text`, and the span of that message."""
    if i == 0:
        raise Unmarkable("it begins with the assistant: there is nothing that it answers")
    prompt = render(tokenizer, messages[:i], generation=True, variables=variables)
    upto = text  # the last message needs no rendering of its own
    if i < len(messages) - 1:
        upto = render(tokenizer, messages[: i + 1], generation=False, variables=variables)
    if not prompt:
        raise Unmarkable(f"the chat template writes nothing before message {i}")
    if not text.startswith(upto):
        raise Unmarkable(
            f"the chat template writes message {i} in another way when more messages follow "
            '(data.loss_turns = "last" learns from last answers only)'
        )
    if not upto.startswith(prompt):
        raise Unmarkable(
            f"the chat template does not begin message {i} with its generation prompt "
            f"{prompt[-40:]!r}"
        )
    content = messages[i]["content"].strip()
    place = upto.find(content, len(prompt))
    if place < 0:
        raise Unmarkable(f"the chat template drops text of message {i}: {content[:60]!r}")
    end = ends.search(upto, place + len(content))
    return prompt, (len(prompt), end.end() if end else len(upto))


def tokenise(
    tokenizer: Any, conversations: Sequence[Rendered]
) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]] | Unmarkable]:
    """Token ids and loss mask of each conversation, or why it cannot be marked.

    Checked token by token: none may straddle the edge of a span, the tokens before the first span
    are those of the prompt alone, and the marked tokens decode to the span's text. Raises
    Unencodable where the tokenizer lacks a character.
    """
    if not conversations:
        return []
    texts = [one.text for one in conversations]
    encoded = encode(tokenizer, texts, return_offsets_mapping=True)
    prompts = encode(tokenizer, [one.prompt for one in conversations])
    found: list[tuple[NDArray[np.int32], NDArray[np.bool_]] | Unmarkable] = []
    for number, one in enumerate(conversations):
        ids = np.array(encoded["input_ids"][number], np.int32)
        offsets = np.array(encoded["offset_mapping"][number], np.int64).reshape(-1, 2)
        mask = np.zeros(len(ids), np.bool_)
        for start, end in one.spans:
            mask |= (offsets[:, 0] >= start) & (offsets[:, 1] <= end) & (offsets[:, 1] > start)
        problem = _problem(tokenizer, one, ids, mask, prompts["input_ids"][number])
        found.append((ids, mask) if problem is None else Unmarkable(problem))
    return found


def _problem(
    tokenizer: Any,
    one: Rendered,
    ids: NDArray[np.int32],
    mask: NDArray[np.bool_],
    prompt: Sequence[int],
) -> str | None:
    first = int(np.argmax(mask)) if mask.any() else len(ids)
    if ids[:first].tolist() != list(prompt):
        return (
            "its first tokens are not those of its prompt alone: a token crosses the edge between "
            f"prompt and answer at {one.prompt[-20:]!r} (data.strip = true may help)"
        )
    wanted = "".join(one.text[start:end] for start, end in one.spans)
    marked = tokenizer.decode(ids[mask].tolist(), skip_special_tokens=False)
    if "".join(marked.split()) != "".join(wanted.split()):
        return f"its marked tokens say {marked[:60]!r}, the assistant wrote {wanted[:60]!r}"
    return None
