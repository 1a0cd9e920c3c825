"""Chat templates: conversations as text and token ids, and which tokens the assistant wrote.

Loss masks come from the offsets of tokens in the text, so templates need no {% generation %} marks.
Where a mask cannot be told from the text, the conversation is refused: nothing is guessed.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.progress import report
from postgrad.data.answer_spans import Rendered, TurnEnds, Unmarkable, answer_texts, dropped_from
from postgrad.data.chat_format import REASONING, Message, bears_loss
from postgrad.data.rows import Row
from postgrad.data.settings import RowSettings
from postgrad.models.named_templates import template_text
from postgrad.models.rendering import RenderRequest, Unrenderable, program_of, rendered

CHUNK = 256  # texts that are tokenised in one call
MOST_TAILS = 1000  # of prompts, whose tokens are remembered
PROBE = "postgrad"  # an answer of plain text, to see which token ends a turn


class Unencodable(Exception):
    """Text number `place` of several has a character that the tokenizer lacks."""

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(reason)
        self.place = place


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
            except Exception as one:  # noqa: BLE001
                raise Unencodable(place, str(one)) from error
        raise


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
    parts: bool = False,
) -> Iterator[list[Rendered] | Unmarkable]:
    """The texts of each conversation, with spans at what the assistant wrote.

    conversations: (messages, first): only messages from index `first` on get spans. turns: "last"
    marks the last answer alone. Answers with a weight of 0 get none. ends: turn_ends(tokenizer).
    parts: as models.rendering.rendered.

    A span begins behind the generation prompt and ends with the token that ends the turn (the first
    of `ends` after the content). A conversation is one text, but where the template writes an
    answer differently once more messages follow (Qwen3 drops earlier thoughts) it is one text for
    each answer, as the policy reads and writes it at that turn.

    Yields Unmarkable, and stops, at the first conversation whose content the template drops, or
    where an answer does not begin with its generation prompt: RL would sample from another text
    than SFT trains on.
    """
    pending: deque[tuple[Sequence[Message], Sequence[int]]] = deque()
    turn = TurnEnds(ends, cache(lambda: _end_of_text(tokenizer, ends, variables, parts)))

    def rows() -> Iterator[RenderRequest]:
        for messages, first in conversations:
            answers = [i for i in range(first, len(messages)) if bears_loss(messages[i])]
            answers = answers[-1:] if turns == "last" else answers
            pending.append((messages, answers))
            prefixes = [(len(messages), False)]
            for i in (i for i in answers if i):
                prefixes.append((i, True))
                if i < len(messages) - 1:  # the last message needs no rendering of its own
                    prefixes.append((i + 1, False))
            yield messages, prefixes

    for texts in rendered(tokenizer, rows(), variables, parts=parts):
        messages, answers = pending.popleft()
        if isinstance(texts, Unrenderable):
            yield Unmarkable(str(texts))
            return
        try:
            yield answer_texts(messages, answers, texts, turn)
        except Unmarkable as error:
            yield error
            return


def _end_of_text(
    tokenizer: Any, ends: re.Pattern[str], variables: Mapping[str, Any], parts: bool
) -> str | None:
    """The token that the template writes after an answer of plain text; None where that cannot be
    told, as of a template that refuses a plain question.
    """
    chat = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
    (texts,) = rendered(tokenizer, [(chat, [(2, False)])], variables, parts=parts)
    if isinstance(texts, Unrenderable) or PROBE not in texts[0]:
        return None
    end = ends.search(texts[0], texts[0].rindex(PROBE))
    return end.group() if end else None


def unread_notes(
    tokenizer: Any,
    rows: Sequence[Row],
    conversations: Sequence[Sequence[Message]],
    variables: Mapping[str, Any],
) -> list[str]:
    """Lines for the account of rows: keys of messages that the chat template does not read, and in
    how many rows. Reasoning is not among them: an answer without its thoughts is refused.

    Raises UsageError where a row has tools and the template does not read them.
    """
    counts: dict[str, int] = {}
    first_with_tools: Row | None = None
    for row, messages in zip(rows, conversations, strict=True):
        keys = {key for message in messages for key in message}
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
        if "tools" in keys and first_with_tools is None:
            first_with_tools = row
    try:
        program, _ = program_of(tokenizer, variables, tools="tools" in counts)
    except Unrenderable:  # every row will be refused for it
        return []
    unread = [key for key in counts if not re.search(rf"\b{re.escape(key)}\b", program)]
    if first_with_tools is not None and "tools" in unread:
        raise UsageError(
            f"{first_with_tools.place}: row {first_with_tools.index} has tools, and the chat "
            "template does not read them: the model would not see the functions that it is to "
            'call; take a template that does (data.chat_template), or say data.tools = ""'
        )
    silent = {"role", "content", "weight", "tools", "tool_calls", "images", *REASONING}
    return [
        f"{counts[key]} rows have {key!r} in a message: the chat template does not read it"
        for key in sorted(unread)
        if key not in silent
    ]


def documents(
    tokenizer: Any, texts: Sequence[str]
) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    """(token ids [T], loss mask [T]) of plain texts: as the tokenizer begins a text, and its end of
    text behind each. Every token but the first bears loss, since nothing predicts that one.

    Raises Unencodable where the tokenizer lacks a character.
    """
    end = tokenizer.eos_token_id
    tokenised: list[tuple[NDArray[np.int32], NDArray[np.bool_]]] = []
    for text_ids in encoded_texts(tokenizer, texts, add_special_tokens=True):
        closed = text_ids if end is None or text_ids[-1:] == [end] else [*text_ids, end]
        ids = np.array(closed, np.int32)
        tokenised.append((ids, np.arange(len(ids)) > 0))
    return tokenised


def encoded_texts(tokenizer: Any, texts: Sequence[str], **options: Any) -> Iterator[list[int]]:
    """The ids of each text, in chunks: a Ctrl-C is answered between two. See `encode`."""
    for start in range(0, len(texts), CHUNK):
        report("rows tokenised", start, len(texts))
        try:
            yield from encode(tokenizer, texts[start : start + CHUNK], **options)["input_ids"]
        except Unencodable as error:
            raise Unencodable(start + error.place, str(error)) from error


def tokenise(
    tokenizer: Any, conversations: Sequence[Rendered]
) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]] | Unmarkable]:
    """(token ids [T], loss mask [T]) of each conversation, or why it cannot be marked.

    Checked token by token: none may straddle the edge of a span, the tokens before the first span
    are those of the prompt alone, and the marked tokens decode to the span's text. Raises
    Unencodable where the tokenizer lacks a character.
    """
    cut = _PromptCheck(tokenizer)
    tokenised: list[tuple[NDArray[np.int32], NDArray[np.bool_]] | Unmarkable] = []
    for start in range(0, len(conversations), CHUNK):  # between two a Ctrl-C is answered
        report("rows tokenised", start, len(conversations))
        try:
            tokenised += _tokenised(tokenizer, conversations[start : start + CHUNK], cut)
        except Unencodable as error:
            raise Unencodable(start + error.place, str(error)) from error
    return tokenised


def _tokenised(
    tokenizer: Any, conversations: Sequence[Rendered], cut: "_PromptCheck"
) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]] | Unmarkable]:
    texts = [conversation.text for conversation in conversations]
    encoded = encode(
        tokenizer,
        texts,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
    )
    tokens: list[tuple[NDArray[np.int32], NDArray[np.bool_]]] = []
    ends: list[NDArray[np.int64]] = []
    for number, conversation in enumerate(conversations):
        ids = np.array(encoded["input_ids"][number], np.int32)
        pairs = encoded["offset_mapping"][number]  # from an iterator: in half the time of np.array
        offsets = np.fromiter(chain.from_iterable(pairs), np.int64, 2 * len(ids)).reshape(-1, 2)
        mask = np.zeros(len(ids), np.bool_)
        for start, end in conversation.spans:
            mask |= (offsets[:, 0] >= start) & (offsets[:, 1] <= end) & (offsets[:, 1] > start)
        tokens.append((ids, mask))
        ends.append(offsets)
    # all at once: the library then uses every core
    marked = tokenizer.backend_tokenizer.decode_batch(
        [ids[mask].tolist() for ids, mask in tokens], skip_special_tokens=False
    )
    checked: list[tuple[NDArray[np.int32], NDArray[np.bool_]] | Unmarkable] = []
    for conversation, (ids, mask), offsets, text in zip(
        conversations, tokens, ends, marked, strict=True
    ):
        first = int(np.argmax(mask)) if mask.any() else len(ids)
        problem = _problem(conversation, text, cut.begins(conversation.prompt, ids, offsets, first))
        checked.append((ids, mask) if problem is None else Unmarkable(problem))
    return checked


def _problem(conversation: Rendered, marked: str, begins: bool) -> str | None:
    if not begins:
        return (
            "its first tokens are not those of its prompt alone: a token crosses the edge between "
            f"prompt and answer at {conversation.prompt[-20:]!r} (data.strip = true may help)"
        )
    expected = "".join(conversation.text[start:end] for start, end in conversation.spans)
    if "".join(marked.split()) != "".join(expected.split()):
        return f"its marked tokens say {marked[:60]!r}, the assistant wrote {expected[:60]!r}"
    return None


class _PromptCheck:
    """Tells whether the tokens of a text begin with those of its prompt alone.

    A tokenizer cuts a text at its special tokens first, and encodes what lies between them each for
    itself. So only what follows the prompt's last special token can come out differently, and that
    is a few words which all rows share: they are encoded once.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._cuts = {
            str(token): number
            for number, token in added
            if token.special and not (token.single_word or token.normalized or token.lstrip)
        }
        longest_first = sorted(self._cuts, key=lambda mark: (-len(mark), mark))
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._ids: dict[str, list[int]] = {}

    def begins(
        self, prompt: str, ids: NDArray[np.int32], offsets: NDArray[np.int64], first: int
    ) -> bool:
        """Whether ids[:first] are those of `prompt`. ids: [T] of a text that begins with it;
        offsets: [T, 2] of its tokens.
        """
        marks = deque(self._pattern.finditer(prompt), maxlen=1)
        for last in marks:
            place = int(np.searchsorted(offsets[:, 0], last.start()))
            if place < len(ids) and ids[place] == self._cuts[last.group()]:
                return ids[place:first].tolist() == self._encoded(prompt[last.start() :])
        return ids[:first].tolist() == self._encode(prompt)

    def _encoded(self, text: str) -> list[int]:
        if text not in self._ids and len(self._ids) < MOST_TAILS:
            self._ids[text] = self._encode(text)
        return self._ids[text] if text in self._ids else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return list(encode(self._tokenizer, [text])["input_ids"][0])
