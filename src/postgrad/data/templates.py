"""Chat templates: conversations as text and token ids, and which tokens the assistant wrote.

Loss masks come from the offsets of tokens in the text, so templates need no {% generation %} marks.
Where a mask cannot be told from the text, the conversation is refused: nothing is guessed.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from postgrad.data.messages import Message
from postgrad.data.settings import RowSettings
from postgrad.models.named_templates import template_text
from postgrad.models.rendering import RenderRequest, Unrenderable, rendered

LONGEST_SHARED = 64  # characters that a generation prompt and an answer may both begin with


class Unmarkable(Exception):
    """A conversation whose assistant tokens cannot be marked; the message says why."""


class Unencodable(Exception):
    """Text number `place` of several has a character that the tokenizer lacks."""

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(reason)
        self.place = place


def encode(tokenizer: Any, texts: Sequence[str], **options: Any) -> Any:
    """The tokenizer's ids of texts that a template wrote: no special tokens are added."""
    try:
        return tokenizer(list(texts), add_special_tokens=False, **options)
    except Exception as error:  # tokenizers raise nothing narrower
        for place, text in enumerate(texts):
            try:
                tokenizer(text, add_special_tokens=False)
            except Exception as one:  # noqa: BLE001
                raise Unencodable(place, str(one)) from error
        raise


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the chat template writes it."""

    text: str
    spans: tuple[tuple[int, int], ...]  # [start, end) in characters, of what bears loss
    prompt: str  # what the policy reads before the first span, the generation prompt included


def render(
    tokenizer: Any, messages: Sequence[Message], *, generation: bool, variables: Mapping[str, Any]
) -> str:
    """Messages as the template writes them; `generation`: with the generation prompt at the end.

    Raises Unmarkable where the template refuses them.
    """
    (text,) = prompts(tokenizer, [messages], generation=generation, variables=variables)
    if isinstance(text, Unmarkable):
        raise text
    return text


def prompts(
    tokenizer: Any,
    conversations: Iterable[Sequence[Message]],
    *,
    generation: bool = True,
    variables: Mapping[str, Any],
) -> Iterator[str | Unmarkable]:
    """The text of each conversation, up to the first that the template refuses."""
    rows = ((messages, [(len(messages), generation)]) for messages in conversations)
    for texts in rendered(tokenizer, rows, variables):
        yield Unmarkable(str(texts)) if isinstance(texts, Unrenderable) else texts[0]


def template_call(settings: RowSettings) -> dict[str, Any]:
    """The variables of the template's call: those of data.chat_template_kwargs, and the dataset's
    own `chat_template` where it has one. Raises UsageError where that file cannot be read.
    """
    if not settings.chat_template:
        return settings.chat_template_kwargs
    template = template_text(settings.chat_template)
    return {**settings.chat_template_kwargs, "chat_template": template}


def turn_ends(tokenizer: Any) -> re.Pattern[str]:
    """A pattern of all special tokens, one of which ends a turn.

    Llama 3's <|eot_id|> and Gemma 3's <end_of_turn> are not among the named ones (eos, pad, ...),
    only among the added tokens. Without any special token the pattern matches nothing.
    """
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
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
) -> Rendered:
    """The text of a conversation and its spans. Raises Unmarkable for the reasons that
    render_conversations gives, and where the conversation is not a single text.
    """
    (texts,) = render_conversations(
        tokenizer, [(messages, 0)], ends=ends, turns=turns, variables=variables
    )
    return single_text(texts)


def single_text(texts: Sequence[Rendered] | Unmarkable) -> Rendered:
    """The only text of a conversation. Raises Unmarkable where it has several, or none."""
    if isinstance(texts, Unmarkable):
        raise texts
    if len(texts) > 1:
        raise Unmarkable(
            "the chat template writes an answer differently when more messages follow, so "
            "that the answers are not of one text"
        )
    return texts[0]


def render_conversations(
    tokenizer: Any,
    conversations: Iterable[tuple[Sequence[Message], int]],
    *,
    ends: re.Pattern[str],
    turns: Literal["all", "last"],
    variables: Mapping[str, Any],
) -> Iterator[list[Rendered] | Unmarkable]:
    """The texts of each conversation, with spans at what the assistant wrote.

    conversations: (messages, first): only messages from index `first` on get spans. turns: "last"
    marks the last answer alone. ends: turn_ends(tokenizer).

    A span begins behind the generation prompt and ends with the token that ends the turn (the first
    of `ends` after the content). A conversation is one text, but where the template writes an
    answer differently once more messages follow (Qwen3 drops earlier thoughts) it is one text for
    each answer, as the policy reads and writes it at that turn.

    Yields Unmarkable, and stops, at the first conversation whose content the template drops, or
    where an answer does not begin with its generation prompt: RL would sample from another text
    than SFT trains on.
    """
    pending: deque[tuple[Sequence[Message], Sequence[int]]] = deque()

    def rows() -> Iterator[RenderRequest]:
        for messages, first in conversations:
            assistant_turns = [
                i for i, message in enumerate(messages) if message["role"] == "assistant"
            ]
            answers = [i for i in assistant_turns if i >= first]
            answers = answers[-1:] if turns == "last" else answers
            pending.append((messages, answers))
            prefixes = [(len(messages), False)]
            for i in (i for i in answers if i):
                prefixes.append((i, True))
                if i < len(messages) - 1:  # the last message needs no rendering of its own
                    prefixes.append((i + 1, False))
            yield messages, prefixes

    for texts in rendered(tokenizer, rows(), variables):
        messages, answers = pending.popleft()
        if isinstance(texts, Unrenderable):
            yield Unmarkable(str(texts))
            return
        try:
            yield _marked(messages, answers, texts, ends)
        except Unmarkable as error:
            yield error
            return


def _marked(
    messages: Sequence[Message], answers: Sequence[int], texts: list[str], ends: re.Pattern[str]
) -> list[Rendered]:
    """A conversation as one text, or as one for each answer. texts: the renderings in the order of
    render_conversations' `rows`: the whole, then prompt and text of each answer.
    """
    if not answers:
        raise Unmarkable("there is no message of the assistant")
    text, *renderings = texts
    answer_texts: list[Rendered] = []
    for i in answers:
        if i == 0:
            raise Unmarkable("it begins with the assistant, so it answers nothing")
        prompt = renderings.pop(0)
        turn_text = text if i == len(messages) - 1 else renderings.pop(0)
        answer_texts.append(
            Rendered(turn_text, (_span(messages[i], i, turn_text, prompt, ends),), prompt)
        )
    if all(text.startswith(rendering.text[: rendering.spans[0][1]]) for rendering in answer_texts):
        return [
            Rendered(
                text,
                tuple(rendering.spans[0] for rendering in answer_texts),
                answer_texts[0].prompt,
            )
        ]
    return answer_texts


def _span(
    message: Message, i: int, turn_text: str, prompt: str, ends: re.Pattern[str]
) -> tuple[int, int]:
    """[start, end) of message i in `turn_text`, which ends with it; prompt: the text before it.

    Raises Unmarkable where it cannot be told.
    """
    if not prompt:
        raise Unmarkable(f"the chat template writes nothing before message {i}")
    if not turn_text.startswith(prompt):
        raise Unmarkable(
            f"the chat template does not begin message {i} with its generation prompt "
            f"{prompt[-40:]!r}"
        )
    content = message["content"].strip()
    place = _begin(content, turn_text, prompt)
    if place < 0:
        raise Unmarkable(f"the chat template drops text of message {i}: {content[:60]!r}")
    end = ends.search(turn_text, place + len(content))
    return len(prompt), end.end() if end else len(turn_text)


def _begin(content: str, turn_text: str, prompt: str) -> int:
    """Where the content begins in `turn_text`: behind the prompt, or inside its end where the two
    overlap (generation prompt and answer may both have <think>); -1: nowhere.
    """
    place = turn_text.find(content, len(prompt))
    shared = range(1, min(len(content), len(prompt), LONGEST_SHARED) + 1) if place < 0 else ()
    for count in shared:
        if turn_text.startswith(content, len(prompt) - count):
            return len(prompt) - count
    return place


def tokenise(
    tokenizer: Any, conversations: Sequence[Rendered]
) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]] | Unmarkable]:
    """(token ids [T], loss mask [T]) of each conversation, or why it cannot be marked.

    Checked token by token: none may straddle the edge of a span, the tokens before the first span
    are those of the prompt alone, and the marked tokens decode to the span's text. Raises
    Unencodable where the tokenizer lacks a character.
    """
    if not conversations:
        return []
    texts = [conversation.text for conversation in conversations]
    encoded = encode(tokenizer, texts, return_offsets_mapping=True)
    prompts = encode(tokenizer, [conversation.prompt for conversation in conversations])
    tokenised: list[tuple[NDArray[np.int32], NDArray[np.bool_]] | Unmarkable] = []
    for number, conversation in enumerate(conversations):
        ids = np.array(encoded["input_ids"][number], np.int32)
        offsets = np.array(encoded["offset_mapping"][number], np.int64).reshape(-1, 2)
        mask = np.zeros(len(ids), np.bool_)
        for start, end in conversation.spans:
            mask |= (offsets[:, 0] >= start) & (offsets[:, 1] <= end) & (offsets[:, 1] > start)
        problem = _problem(tokenizer, conversation, ids, mask, prompts["input_ids"][number])
        tokenised.append((ids, mask) if problem is None else Unmarkable(problem))
    return tokenised


def _problem(
    tokenizer: Any,
    conversation: Rendered,
    ids: NDArray[np.int32],
    mask: NDArray[np.bool_],
    prompt: Sequence[int],
) -> str | None:
    first = int(np.argmax(mask)) if mask.any() else len(ids)
    if ids[:first].tolist() != list(prompt):
        return (
            "its first tokens are not those of its prompt alone: a token crosses the edge between "
            f"prompt and answer at {conversation.prompt[-20:]!r} (data.strip = true may help)"
        )
    expected = "".join(conversation.text[start:end] for start, end in conversation.spans)
    marked = tokenizer.decode(ids[mask].tolist(), skip_special_tokens=False)
    if "".join(marked.split()) != "".join(expected.split()):
        return f"its marked tokens say {marked[:60]!r}, the assistant wrote {expected[:60]!r}"
    return None
