"""Loss masks: which tokens of a conversation bear loss, and what each of them counts.

They come from the offsets of tokens in the text, so templates need no {% generation %} marks. Where
a mask cannot be told from the text, the conversation is refused: nothing is guessed.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.data.answer_spans import Rendered, Unmarkable
from postgrad.data.rows import Row
from postgrad.data.templates import Unencodable, encode, encoded_ahead, unencodable
from postgrad.data.texts import MarkedTokens

MOST_TAILS = 1000  # of prompts, whose tokens are remembered


def tokenise(
    tokenizer: Any, conversations: Iterable[Rendered]
) -> Iterator[MarkedTokens | Unmarkable]:
    """The tokens of each conversation, or why it cannot be marked.

    Checked token by token: none may straddle the edge of a span, the tokens before the first span
    are those of the prompt alone, and the marked tokens decode to the span's text. Raises
    Unencodable where the tokenizer lacks a character.
    """
    cut = _PromptCheck(tokenizer)
    chunks = encoded_ahead(
        tokenizer,
        conversations,
        _text,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
    )
    for chunk, encoded in chunks:
        yield from _marked(tokenizer, chunk, encoded, cut)


def marked(
    tokenizer: Any, rows: Sequence[Row], texts: Iterable[tuple[int, Rendered]]
) -> Iterator[MarkedTokens]:
    """The tokens of each text. texts: each with the place of its row in `rows`, for error messages.

    Raises UsageError that shows the first row whose learned tokens cannot be marked.
    """
    sources: deque[int] = deque()  # of the texts that are not done
    done = 0

    def noted() -> Iterator[Rendered]:
        for place, text in texts:
            sources.append(place)
            yield text

    try:
        for encoded in tokenise(tokenizer, noted()):
            place = sources.popleft()
            done += 1
            if isinstance(encoded, Unmarkable):
                raise unmarkable(rows[place], encoded)
            yield encoded
    except Unencodable as error:
        raise unencodable(rows[sources[error.place - done]], error) from error


def unmarkable(row: Row, error: Unmarkable) -> UsageError:
    """The error for a row whose learned tokens the chat template does not show."""
    return UsageError(
        f"{row.place}: the learned tokens of row {row.index} cannot be marked: {error}; fix the "
        "row or the chat template (the tokenizer's, where data.chat_template names no other)"
    )


def _text(conversation: Rendered) -> str:
    return conversation.text


def _marked(
    tokenizer: Any, conversations: Sequence[Rendered], encoded: Any, cut: "_PromptCheck"
) -> Iterator[MarkedTokens | Unmarkable]:
    """The tokens of a chunk of conversations. encoded: with their offsets."""
    rows: list[list[int]] = encoded["input_ids"]
    edges = [0, *accumulate(map(len, rows))]
    ids = np.fromiter(chain.from_iterable(rows), np.int32, edges[-1])
    pairs = chain.from_iterable(chain.from_iterable(encoded["offset_mapping"]))
    offsets = np.fromiter(pairs, np.int64, 2 * len(ids)).reshape(-1, 2)
    mask = _mask(conversations, edges, offsets)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(mask)])[edges].tolist()
    marked_ids: list[int] = ids[mask].tolist()
    # all at once: the library then uses every core
    texts: list[str] = tokenizer.backend_tokenizer.decode_batch(
        [marked_ids[bounds[n] : bounds[n + 1]] for n in range(len(conversations))],
        skip_special_tokens=False,
    )
    for n, (conversation, text) in enumerate(zip(conversations, texts, strict=True)):
        part = slice(edges[n], edges[n + 1])
        text_ids, text_mask = ids[part], mask[part]
        first = int(np.argmax(text_mask)) if bounds[n] < bounds[n + 1] else len(text_ids)
        begins = cut.begins(conversation.prompt, text_ids, offsets[part], first)
        problem = _problem(conversation, text, begins)
        text_mask[:1] = False  # nothing predicts the first token
        weights = _weights(conversation, text_mask, offsets[part])
        yield MarkedTokens(text_ids, text_mask, weights) if problem is None else Unmarkable(problem)


def _mask(
    conversations: Sequence[Rendered], edges: Sequence[int], offsets: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """[N] True at the tokens of several texts that lie within a span of their own text, none at a
    token of no character. edges: where the tokens of each text begin and end; offsets: [N, 2].
    """
    # texts one behind the other, so that a token's place is in one text only
    bases = [0, *accumulate(len(conversation.text) + 1 for conversation in conversations)]
    spans = [
        (base + start, base + end)
        for base, conversation in zip(bases, conversations, strict=False)
        for start, end in conversation.spans
    ]
    if not spans:
        return np.zeros(len(offsets), np.bool_)
    begin, end = np.array(sorted(spans), np.int64).T
    reach = np.maximum.accumulate(end)  # of all spans that begin no later
    places = offsets + np.repeat(bases[:-1], np.diff(edges))[:, None]
    latest = np.searchsorted(begin, places[:, 0], side="right") - 1  # -1: before every span
    within = (latest >= 0) & (places[:, 1] <= reach[latest])
    return within & (offsets[:, 1] > offsets[:, 0])


def _weights(
    conversation: Rendered, mask: NDArray[np.bool_], offsets: NDArray[np.int64]
) -> NDArray[np.float32] | None:
    """[T] what each token counts: the weight of the span that it lies in. offsets: [T, 2]."""
    if not conversation.weights:
        return None
    starts = [start for start, _ in conversation.spans]
    span = np.searchsorted(starts, offsets[:, 0], side="right") - 1
    return np.where(mask, np.array(conversation.weights, np.float32)[span], np.float32(0.0))


def _problem(conversation: Rendered, marked: str, begins: bool) -> str | None:
    if not begins:
        return (
            "its first tokens are not those of its prompt alone: a token crosses the edge between "
            f"prompt and answer at {conversation.prompt[-20:]!r} (data.strip = true may help)"
        )
    expected = "".join(conversation.text[start:end] for start, end in conversation.spans)
    if "".join(marked.split()) != "".join(expected.split()):
        return f"its marked tokens say {marked[:60]!r}, its messages {expected[:60]!r}"
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
