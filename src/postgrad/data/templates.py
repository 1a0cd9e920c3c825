"""Chat templates: conversations as text and token ids."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar, get_args

import numpy as np

from postgrad.core.errors import PostgradError, UsageError
from postgrad.data.answer_spans import (
    Rendered,
    TurnEnds,
    Unmarkable,
    answer_texts,
    asked_texts,
)
from postgrad.data.chat_format import REASONING, LossTurns, Message, Role, learned_in
from postgrad.data.dropped import dropped_from
from postgrad.data.messages import DOCUMENT
from postgrad.data.rows import Row
from postgrad.data.settings import RowSettings
from postgrad.data.texts import MarkedTokens
from postgrad.models.named_templates import template_text
from postgrad.models.rendering import RenderRequest, Unrenderable, program_of, rendered

CHUNK = 256  # texts that are tokenised in one call, fewer where they are long
CHARACTERS = 2**20  # of the texts of a chunk, a single one may have more
PROBE = "postgrad"  # an answer of plain text, to see which token ends a turn
SEVERAL_TEXTS = (
    "the chat template writes an answer differently when more messages follow, so that the answers "
    "are not of one text"
)
_WHY_ALONE = (
    "of the messages up to each learned one alone, which show where that ends; leave its role out "
    "of data.loss_turns"
)
Encodable = TypeVar("Encodable")


class Unencodable(Exception):
    """Text number `place` of several has a character that the tokenizer lacks."""

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(reason)
        self.place = place


def unencodable(row: Row, error: Unencodable) -> UsageError:
    """The error for a row with a character that the tokenizer cannot encode."""
    return UsageError(
        f"{row.place}: row {row.index} has a character that the tokenizer lacks ({error}); fix "
        'the row, or take a tokenizer that encodes every text (model.init.tokenizer.kind = "bpe")'
    )


def encode(tokenizer: Any, texts: Sequence[str], **options: Any) -> Any:
    """The tokenizer's ids of texts. No special tokens are added, unless `options` say so: a
    template has written them.
    """
    try:
        return tokenizer(list(texts), **{"add_special_tokens": False, **options})
    except Exception as error:  # tokenizers raise nothing narrower
        for place, text in enumerate(texts):
            try:
                tokenizer(text, add_special_tokens=False)
            except Exception as cause:  # noqa: BLE001
                raise Unencodable(place, str(cause)) from error
        raise


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    generation: bool,
    variables: Mapping[str, Any],
    parts: bool = False,
) -> str:
    """Messages as the template writes them; `generation`: with the generation prompt at the end.
    parts: as models.rendering.rendered.

    Raises Unmarkable where the template refuses them.
    """
    (text,) = prompts(
        tokenizer, [messages], generation=generation, variables=variables, parts=parts
    )
    if isinstance(text, Unmarkable):
        raise text
    return text


def prompts(
    tokenizer: Any,
    conversations: Iterable[Sequence[Message]],
    *,
    generation: bool = True,
    variables: Mapping[str, Any],
    parts: bool = False,
) -> Iterator[str | Unmarkable]:
    """The text of each conversation, up to the first that the template refuses or does not write
    whole. parts: as models.rendering.rendered.
    """
    pending: deque[Sequence[Message]] = deque()

    def rows() -> Iterator[RenderRequest]:
        for messages in conversations:
            pending.append(messages)
            yield messages, [(len(messages), generation)]

    for texts in rendered(tokenizer, rows(), variables, parts=parts):
        messages = pending.popleft()
        if isinstance(texts, Unrenderable):
            yield Unmarkable(str(texts))
        elif problem := dropped_from(messages, texts[0]):
            yield Unmarkable(problem)
            return
        else:
            yield texts[0]


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


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of all special tokens: those of `turn_ends`."""
    added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset((*tokenizer.all_special_ids, *added))


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    ends: re.Pattern[str],
    turns: LossTurns,
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
        raise Unmarkable(SEVERAL_TEXTS)
    return texts[0]


def render_conversations(
    tokenizer: Any,
    conversations: Iterable[tuple[Sequence[Message], int]],
    *,
    ends: re.Pattern[str],
    turns: LossTurns,
    variables: Mapping[str, Any],
    parts: bool = False,
) -> Iterator[list[Rendered] | Unmarkable]:
    """The texts of each conversation, with spans at what bears loss.

    conversations: (messages, first): only messages from index `first` on get spans. turns: which of
    them; "everything" is no such choice. Messages with a weight of 0 get none. ends:
    turn_ends(tokenizer). parts: as models.rendering.rendered.

    The span of an answer begins behind the generation prompt, that of another message with its
    content; both end with the token that ends the turn (the first of `ends` after the content). A
    conversation is one text, but where the template writes an answer differently once more messages
    follow (Qwen3 drops earlier thoughts) it is one text for each answer, as the policy reads and
    writes it at that turn.

    Yields Unmarkable, and stops, at the first conversation whose content the template drops, or
    where an answer does not begin with its generation prompt: RL would sample from another text
    than SFT trains on.
    """
    pending: deque[tuple[Sequence[Message], Sequence[int], int]] = deque()
    turn = TurnEnds(ends, cache(lambda: _end_of_text(tokenizer, ends, variables, parts)))

    def rows() -> Iterator[RenderRequest]:
        for messages, first in conversations:
            learned = learned_in(messages, turns, first)
            requests = asked_texts(messages, learned)
            pending.append((messages, learned, len(requests)))
            yield from requests

    written = rendered(tokenizer, rows(), variables, parts=parts)
    for texts in written:
        messages, learned, requests = pending.popleft()
        blanks = next(written) if requests > 1 and not isinstance(texts, Unrenderable) else []
        if isinstance(texts, Unrenderable) or isinstance(blanks, Unrenderable):
            alone = isinstance(blanks, Unrenderable)
            yield Unmarkable(f"{blanks}: {_WHY_ALONE}" if alone else str(texts))
            return
        try:
            yield answer_texts(messages, learned, texts, blanks, turn)
        except Unmarkable as error:
            yield error
            return


def _end_of_text(
    tokenizer: Any, ends: re.Pattern[str], variables: Mapping[str, Any], parts: bool
) -> str | None:
    """The token that the template writes after an answer of plain text; None where that cannot be
    told, as of a template that refuses a plain question.
    """
    closing = closing_text(tokenizer, ends, variables, parts=parts)
    end = None if closing is None else ends.search(closing)
    return end.group() if end else None


def closing_text(
    tokenizer: Any, ends: re.Pattern[str], variables: Mapping[str, Any], *, parts: bool = False
) -> str | None:
    """What the template writes behind an answer of plain text, up to the token of `ends` that ends
    it and with it; None where that cannot be told.
    """
    chat = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
    (texts,) = rendered(tokenizer, [(chat, [(2, False)])], variables, parts=parts)
    if isinstance(texts, Unrenderable) or PROBE not in texts[0]:
        return None
    behind = texts[0][texts[0].rindex(PROBE) + len(PROBE) :]
    end = ends.search(behind)
    return behind[: end.end()] if end else None


ROLES = {*get_args(Role), DOCUMENT}


class KeysOfMessages:
    """Counts the keys of messages, row after row, to say which of them a chat template does not
    read; and roles, to say which of them are none of the chat format: a "User" is no user.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}  # rows that have the key in a message
        self._roles: dict[str, int] = {}  # rows that have the role, of roles that are not ROLES
        self._first_with_tools: Row | None = None

    def add(self, row: Row, messages: Sequence[Message]) -> None:
        """Counts the keys and roles of a row."""
        for role in {message["role"] for message in messages} - ROLES:
            self._roles[role] = self._roles.get(role, 0) + 1
        keys = {key for message in messages for key in message}
        for key in keys:
            self._counts[key] = self._counts.get(key, 0) + 1
        if "tools" in keys and self._first_with_tools is None:
            self._first_with_tools = replace(row, values={})

    def unread_notes(self, tokenizer: Any, variables: Mapping[str, Any]) -> list[str]:
        """Lines for the account of rows: keys that the chat template does not read and roles that
        are not ROLES, and in how many rows. Reasoning is not among them: an answer without
        its thoughts is refused.

        Raises UsageError where a row has tools and the template does not read them.
        """
        counts = self._counts
        other = [
            f"{count} rows have a message of the role {role[:40]!r}, which is none of the chat "
            "format (system, user, assistant, tool): the chat template gets it as it is"
            for role, count in sorted(self._roles.items())
        ]
        try:
            program, _ = program_of(tokenizer, variables, tools="tools" in counts)
        except Unrenderable:  # every row will be refused for it
            return other
        unread = [key for key in counts if not re.search(rf"\b{re.escape(key)}\b", program)]
        first = self._first_with_tools
        if first is not None and "tools" in unread:
            raise UsageError(
                f"{first.place}: row {first.index} has tools, and the chat "
                "template does not read them: the model would not see the functions that it is to "
                'call; take a template that does (data.chat_template), or say data.tools = ""'
            )
        silent = {"role", "content", "weight", "tools", "tool_calls", "images", *REASONING}
        return other + [
            f"{counts[key]} rows have {key!r} in a message: the chat template does not read it"
            for key in sorted(unread)
            if key not in silent
        ]


def begins_texts(tokenizer: Any) -> bool:
    """Whether the tokenizer writes its begin of text before every text by itself, as Llama's."""
    begin = tokenizer.bos_token_id
    return begin is not None and list(tokenizer("")["input_ids"][:1]) == [begin]


def documents(tokenizer: Any, texts: Iterable[str]) -> Iterator[MarkedTokens]:
    """The tokens of plain texts: as the tokenizer begins a text, and its end of text behind each.
    Every token but the first bears loss, since nothing predicts that one. A text that has either
    already, as a chat template wrote it, gets no second.

    Raises Unencodable where the tokenizer lacks a character.
    """
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    for text_ids in encoded_texts(tokenizer, texts, add_special_tokens=True):
        if begin is not None and text_ids[:2] == [begin, begin]:
            text_ids = text_ids[1:]
        if end is not None and text_ids[-2:] == [end, end]:
            text_ids = text_ids[:-1]
        closed = text_ids if end is None or text_ids[-1:] == [end] else [*text_ids, end]
        ids = np.array(closed, np.int32)
        yield MarkedTokens(ids, np.arange(len(ids)) > 0)


def encoded_texts(tokenizer: Any, texts: Iterable[str], **options: Any) -> Iterator[list[int]]:
    """The ids of each text. See `encode` and `encoded_ahead`."""
    for _, encoded in encoded_ahead(tokenizer, texts, str, **options):
        yield from encoded["input_ids"]


def encoded_ahead(
    tokenizer: Any, items: Iterable[Encodable], text_of: Callable[[Encodable], str], **options: Any
) -> Iterator[tuple[list[Encodable], Any]]:
    """Items in chunks, each with what `encode` gives of their texts. Between two chunks a Ctrl-C is
    answered.

    A thread encodes a chunk while the caller works on the one before and makes the items of the
    next: the tokenizer's library computes outside of Python, on every core. What `items` raises is
    raised behind the chunks of the items before it. Raises Unencodable with the number of the item.
    """
    chunks = _chunks(items, text_of)
    number = 0  # of the chunk's first item
    waiting: deque[tuple[list[Encodable], Future[Any]]] = deque()

    def finished() -> tuple[list[Encodable], Any]:
        nonlocal number
        chunk, encoded = waiting.popleft()
        try:
            result = encoded.result()
        except Unencodable as error:
            raise Unencodable(number + error.place, str(error)) from error
        number += len(chunk)
        return chunk, result

    with ThreadPoolExecutor(1, "tokenizer") as thread:
        try:
            for chunk in chunks:
                texts = [text_of(item) for item in chunk]
                waiting.append((chunk, thread.submit(encode, tokenizer, texts, **options)))
                if len(waiting) > 1:
                    yield finished()
        except PostgradError:
            while waiting:
                yield finished()
            raise
        while waiting:
            yield finished()


def _chunks(
    items: Iterable[Encodable], text_of: Callable[[Encodable], str]
) -> Iterator[list[Encodable]]:
    """Lists of at most CHUNK items; an error of `items` comes behind the items before it."""
    chunk: list[Encodable] = []
    characters = 0
    try:
        for item in items:
            chunk.append(item)
            characters += len(text_of(item))
            if len(chunk) == CHUNK or characters >= CHARACTERS:
                yield chunk
                chunk, characters = [], 0
    except PostgradError:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk
