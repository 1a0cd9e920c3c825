"""The fewest tokens that a text can have, told from its length.

A tokenizer takes two seconds for a megabyte, and a row may have twenty of them: such a row is known
to be over any limit before it is tokenised.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from postgrad.core.errors import UsageError
from postgrad.data.account import Fate
from postgrad.data.answer_spans import Unmarkable
from postgrad.data.chat_format import Message
from postgrad.data.messages import DOCUMENT
from postgrad.data.rows import Row
from postgrad.data.settings import LossTurns, RowSettings
from postgrad.data.templates import prompts, render_conversations, template_call, turn_ends

LONG = 2**18  # characters of messages: shorter ones are tokenised in half a second
COMPOSED = 4  # characters that NFC makes one of, at most (Unicode Standard Annex 15, section 9)


class TokenBound:
    """Tells rows of a dataset that are certainly over a limit of tokens."""

    def __init__(
        self,
        settings: RowSettings,
        tokenizer: Any,
        limit: int,
        refusal: Callable[[Row, str], UsageError],
        write: Callable[[Sequence[Message], int], Iterable[str]],
    ) -> None:
        """limit: tokens. refusal: the error of a row, by what its number of tokens is. write: what
        of a conversation is tokenised; nothing where that cannot be told.
        """
        self._tokenizer, self._limit = tokenizer, limit
        self._refusal, self._write = refusal, write
        self._says: str = settings.on_too_long

    def fate(self, row: Row, *conversations: Sequence[Message], first: int = 0) -> Fate | None:
        """The fate "too_long" where each text of one of a row's conversations is certainly over the
        limit. Raises UsageError there, where data.on_too_long = "error". first: the message where
        answers begin.

        None where that cannot be told: of a conversation that is not LONG, of rows that are used in
        parts, and of a tokenizer whose tokens may stand for any number of characters.
        """
        if self._says not in ("drop", "error"):
            return None
        fewest = max(self._fewest(messages, first) for messages in conversations)
        if fewest <= self._limit:
            return None
        if self._says == "error":
            raise self._refusal(row, f"at least {fewest}")
        return "too_long"

    def _fewest(self, messages: Sequence[Message], first: int) -> int:
        """No text of the conversation has fewer tokens."""
        if sum(len(message["content"]) for message in messages) < LONG or self._longest is None:
            return 0
        of_ascii, of_any = self._longest
        return min(
            (
                -(-_visible(text) // (of_ascii if text.isascii() else of_any))
                for text in self._write(messages, first)
            ),
            default=0,
        )

    @cached_property
    def _longest(self) -> tuple[int, int] | None:
        return characters_of_a_token(self._tokenizer)


def bound_of_conversations(
    settings: RowSettings,
    tokenizer: Any,
    turns: LossTurns,
    refusal: Callable[[Row, str], UsageError],
    *,
    images: bool,
) -> TokenBound:
    """Of conversations up to the last token that is learned. turns: those that are. images: whether
    the model reads some; their tokens are not counted.
    """

    def write(messages: Sequence[Message], first: int) -> Iterable[str]:
        if messages[0]["role"] == DOCUMENT:
            return [messages[0]["content"]]
        call = template_call(settings)
        if turns == "everything":
            rendered = prompts(
                tokenizer, [messages], generation=False, variables=call, parts=images
            )
            return (text for text in rendered if isinstance(text, str))
        (texts,) = render_conversations(
            tokenizer,
            [(messages, first)],
            ends=turn_ends(tokenizer),
            turns=turns,
            variables=call,
            parts=images,
        )
        if isinstance(texts, Unmarkable):  # it is told when all are written
            return []
        return [each.text[: max(end for _, end in each.spans)] for each in texts]

    return TokenBound(settings, tokenizer, settings.max_len, refusal, write)


def bound_of_prompts(
    settings: RowSettings,
    tokenizer: Any,
    limit: int,
    refusal: Callable[[Row, str], UsageError],
    *,
    images: bool,
) -> TokenBound:
    """Of prompts of at most `limit` tokens. images: as of conversations."""

    def write(messages: Sequence[Message], first: int) -> Iterable[str]:
        del first
        call = template_call(settings)
        texts = prompts(tokenizer, [messages], variables=call, parts=images)
        return (text for text in texts if isinstance(text, str))

    return TokenBound(settings, tokenizer, limit, refusal, write)


def _visible(text: str) -> int:
    return sum(map(len, text.split()))


def characters_of_a_token(tokenizer: Any) -> tuple[int, int] | None:
    """The most characters that one token can stand for in a text of ASCII alone, and in any text.
    White space is not counted: special tokens may take in what is around them. None where any
    number is possible, as of a vocabulary of words with one token for all others, or where it
    cannot be told.

    It holds where no other character is dropped or merged before the vocabulary is asked, and every
    byte is in the vocabulary: then a token stands for no more characters than its own text has.
    """
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    model: Mapping[str, Any] = parts["model"]
    normalizers = _steps(parts["normalizer"], "normalizers")
    splits = _steps(parts["pre_tokenizer"], "pretokenizers")
    if model["type"] != "BPE" or not all(map(_keeps, normalizers)) or not all(map(_cuts, splits)):
        return None
    if model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return None
    if any(split["type"] == "ByteLevel" for split in splits):
        smallest = ByteLevel.alphabet()
    elif model["byte_fallback"]:
        smallest = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return None
    vocabulary: Mapping[str, int] = model["vocab"]
    if not all(token in vocabulary for token in smallest):
        return None
    added = (token["content"] for token in parts["added_tokens"])
    composes = any(normalizer["type"] == "NFC" for normalizer in normalizers)
    longest = max(map(len, chain(vocabulary, added)))
    return longest, longest * (COMPOSED if composes else 1)


def _steps(part: Mapping[str, Any] | None, of_sequence: str) -> list[Mapping[str, Any]]:
    """The normalizers or splits of a tokenizer, one behind the other."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for each in part[of_sequence] for step in _steps(each, of_sequence)]


def _keeps(normalizer: Mapping[str, Any]) -> bool:
    """Whether it makes no text shorter, but for composing characters."""
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return pattern is not None and len(normalizer["content"]) >= len(pattern)
    return normalizer["type"] in ("NFC", "Prepend")


def _cuts(split: Mapping[str, Any]) -> bool:
    """Whether it cuts a text and drops nothing."""
    if split["type"] in ("Split", "Punctuation"):
        return split["behavior"] != "Removed"
    return split["type"] in ("ByteLevel", "Digits", "Metaspace")
