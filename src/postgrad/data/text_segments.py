"""Samples as a model of another tokenizer reads them: the same text in its own tokens, and the
segments of text that end with a token of both models.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.progress import tracked
from postgrad.core.ragged import Ragged
from postgrad.core.records import Prompt, Sequences
from postgrad.data.answer_spans import Unmarkable
from postgrad.data.settings import DataSettings
from postgrad.data.templates import (
    Unencodable,
    closing_text,
    encode,
    encoded_texts,
    prompts,
    special_ids,
    turn_ends,
)
from postgrad.models.rendering import program_of
from postgrad.models.tokenizer import SpelledText, Spelling, load_tokenizer

UNREAD = -1  # of tokens behind the last segment
TRIED = 64  # questions from which a start tells how alike two tokenizers cut text
LEAST_READ = 0.9  # of their tokens


@dataclass(frozen=True, slots=True)
class Segments:
    """A response in two models' tokens, cut at each byte where a token of both ends. The numbers of
    segments, from 0 on, never fall; UNREAD stands behind the last segment alone.
    """

    policy: NDArray[np.int64]  # [R] the segment of each token of the policy
    other: NDArray[np.int64]  # [T] that of each token of the other model

    @property
    def complete(self) -> bool:
        """Whether every token of both models is in a segment."""
        return bool((self.policy != UNREAD).all() and (self.other != UNREAD).all())

    def closed(self, count: int) -> "Segments":
        """With one more segment: one token of the policy, which ends the turn, and `count` of the
        other model. What was not read to its end is not graded for ending.
        """
        number = self.policy.max(initial=UNREAD) + 1 if self.complete else UNREAD
        other = np.concatenate([self.other, np.full(count, number)])
        return Segments(np.append(self.policy, number), other)

    def within(self, most: int) -> "Segments":
        """Those that lie in the first `most` tokens of the other model, which has no token behind
        them then.
        """
        beyond = self.other[max(most, 0) :]
        cut = beyond[0] if len(beyond) and beyond[0] != UNREAD else self.other.max(initial=0) + 1
        read = (self.other != UNREAD) & (self.other < cut)
        return Segments(np.where(self.policy < cut, self.policy, UNREAD), self.other[read])


def common_segments(policy: SpelledText, other: SpelledText) -> Segments:
    """The segments as far as both spell the same bytes."""
    ends = np.intersect1d(policy.ends, other.ends)
    ends = ends[(ends > 0) & (ends <= _same_bytes(policy.text, other.text))]

    def numbers(of: NDArray[np.int64]) -> NDArray[np.int64]:
        segments = np.searchsorted(ends, of)
        return np.where(segments < len(ends), segments, UNREAD)

    return Segments(numbers(policy.ends), numbers(other.ends))


def _same_bytes(first: bytes, second: bytes) -> int:
    """The length of what both begin with."""
    length = min(len(first), len(second))
    differ = np.frombuffer(first, np.uint8)[:length] != np.frombuffer(second, np.uint8)[:length]
    return int(differ.argmax()) if differ.any() else length


@dataclass(frozen=True, slots=True)
class Reread:
    """S samples in the tokens of another model."""

    rows: NDArray[np.int64]  # which of the S have a segment
    sequences: Sequences  # these, with loss at the tokens of segments
    lengths: NDArray[np.int64]  # [S] tokens of each sample, as the policy wrote it
    segments: tuple[Segments, ...]  # [S] of their responses

    def graded(self, logprobs: Ragged | None) -> Iterator[tuple[Any, Any]]:
        """For each sample over its tokens: the logprob of a segment by the other model, float64, at
        the segment's first token, and 0.0 elsewhere; and the numbers of segments, int64. logprobs:
        of `sequences`; None where there are none.
        """
        by_row = dict(zip(self.rows.tolist(), logprobs or (), strict=True))
        for row, (length, segments) in enumerate(zip(self.lengths, self.segments, strict=True)):
            grades, numbers = np.zeros(length), np.full(length, UNREAD)
            numbers[length - len(segments.policy) :] = segments.policy
            if row in by_row:
                other = by_row[row][-len(segments.other) :].astype(np.float64)
                firsts = np.unique(numbers, return_index=True)[1]
                firsts = firsts[numbers[firsts] != UNREAD]
                grades[firsts] = np.bincount(segments.other, other)
            yield grades, numbers


class TextReader:
    """Reads samples in another model's tokens: the prompt's messages in its chat template, then the
    text that the policy wrote, and its own end of a turn for the policy's.
    """

    def __init__(
        self,
        key: str,
        path: str,
        tokenizer: Any,
        asked: Sequence[tuple[DataSettings, Sequence[Prompt]]],
        max_len: int,
    ) -> None:
        """key: of the recipe's table that names the model at `path`, for messages. tokenizer: the
        policy's. asked: datasets with all of their prompts. max_len: tokens of a sample that the
        model reads; what is behind them is in no segment.

        Raises UsageError for a prompt that the model cannot read, with its row, and for a tokenizer
        whose tokens spell other texts than these.
        """
        other = load_tokenizer(path)
        self._key, self._other, self._max_len = key, other, max_len
        self._special = special_ids(tokenizer)
        same = other.get_vocab() == tokenizer.get_vocab()
        self._spellings = None if same else (Spelling.of(tokenizer), Spelling.of(other))
        # The model's tokens of each prompt, and of the end of a turn that answers it.
        self._prompts: dict[
            tuple[str, int, bytes], tuple[NDArray[np.int32], NDArray[np.int32]]
        ] = {}
        for settings, of_dataset in asked:
            self._read_prompts(of_dataset, settings.chat_template_kwargs)
        first = itertools.chain.from_iterable(of_dataset for _, of_dataset in asked)
        self.notes = [*self._notes(tokenizer, itertools.islice(first, TRIED))]

    def read(
        self, sequences: Sequences, prompts: Sequence[Prompt], ended: NDArray[np.bool_]
    ) -> Reread:
        """S samples of one turn. prompts: by group. ended: [S] whether the policy ended it."""
        answers: list[NDArray[np.int32]] = []
        closings: list[NDArray[np.int32]] = []
        asked = [prompts[group] for group in sequences.group.tolist()]
        rows = zip(asked, sequences.tokens, sequences.loss_mask, ended.tolist(), strict=True)
        for prompt, ids, mask, stopped in rows:
            answer = ids[mask.argmax() :]
            closed = stopped and int(answer[-1]) in self._special
            answers.append(answer[:-1] if closed else answer)
            closings.append(self._prompts[_key_of(prompt)][1][: None if closed else 0])
        segments: list[Segments] = []
        tokens: list[NDArray[np.int32]] = []
        masks: list[NDArray[np.bool_]] = []
        pairs = zip(asked, self._answers(answers), closings, strict=True)
        for prompt, (other, cut), closing in pairs:
            read, _ = self._prompts[_key_of(prompt)]
            cut = cut.closed(len(closing)) if len(closing) else cut
            segments.append(cut.within(self._max_len - len(read)))
            graded = len(segments[-1].other)
            tokens.append(np.concatenate([read, other, closing])[: len(read) + graded])
            masks.append(np.arange(len(tokens[-1])) >= len(read))
        kept = np.flatnonzero([mask.any() for mask in masks])
        return Reread(
            kept,
            Sequences(
                Ragged.of([tokens[row] for row in kept], np.int32),
                Ragged.of([masks[row] for row in kept], np.bool_),
                sequences.group[kept],
            ),
            sequences.tokens.lengths,
            tuple(segments),
        )

    def _answers(
        self, answers: Sequence[NDArray[np.int32]]
    ) -> Iterator[tuple[NDArray[np.int32], Segments]]:
        """The model's tokens of each answer, and their segments."""
        if self._spellings is None:  # the sampled tokens, though the text may be cut into others
            for answer in answers:
                yield answer, Segments(np.arange(len(answer)), np.arange(len(answer)))
            return
        of_policy, of_other = self._spellings
        spelled = [of_policy.decoded(answer) for answer in answers]
        texts = [_readable(each.text) for each in spelled]
        for policy, text, ids in zip(spelled, texts, self._encoded(texts), strict=True):
            other = of_other.spelled(ids)
            bare = other.without_first()  # without the space that SentencePiece puts ahead
            if _nearness(bare.text, text) > _nearness(other.text, text):
                other = bare
            yield ids, common_segments(policy, other)

    def _encoded(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The model's tokens of each text; none of a text with a character that it lacks. What a
        text says of special tokens is text.
        """
        left = list(texts)
        while left:
            try:
                encoded = encode(self._other, left, split_special_tokens=True)["input_ids"]
                return [np.array(ids, np.int32) for ids in encoded]
            except Unencodable as error:
                left[error.place] = ""
        return []

    def _read_prompts(self, asked: Sequence[Prompt], variables: Mapping[str, Any]) -> None:
        """Renders and tokenises the prompts of a dataset as the model reads them."""
        other = self._other
        closing = closing_text(other, turn_ends(other), variables)
        ids_of_end = encode(other, [closing])["input_ids"][0] if closing else [other.eos_token_id]
        end = np.array(ids_of_end, np.int32)
        try:
            texts = encoded_texts(other, self._texts(asked, variables))
            for prompt, ids in zip(asked, texts, strict=True):
                self._prompts[_key_of(prompt)] = np.array(ids, np.int32), end
        except Unencodable as error:
            raise self._refused(asked[error.place], f"its tokenizer lacks {error}") from error

    def _texts(self, asked: Sequence[Prompt], variables: Mapping[str, Any]) -> Iterator[str]:
        """The prompts in the model's chat template."""

        def messages() -> Iterator[Any]:
            for prompt in tracked("rows for the teacher", asked, len(asked)):
                if prompt.images:
                    raise self._refused(prompt, "its image is no text")
                yield prompt.messages

        rendered = prompts(self._other, messages(), variables=variables)
        seen = cache(lambda: "tools" in program_of(self._other, variables, tools=True)[0])
        for place, text in enumerate(rendered):
            if isinstance(text, Unmarkable) or not text:
                raise self._refused(asked[place], f"{text}" or "the chat template writes nothing")
            if any("tools" in first for first in asked[place].messages[:1]) and not seen():
                raise self._refused(asked[place], "its chat template does not write the tools")
            yield text

    def _refused(self, prompt: Prompt, why: str) -> UsageError:
        return UsageError(
            f"{self._key}: this teacher cannot read row {prompt.row} of {prompt.dataset}: {why}. "
            "Leave such rows out (data.filter), or take another teacher"
        )

    def _notes(self, tokenizer: Any, asked: Iterable[Prompt]) -> Iterator[str]:
        """What to tell at the start."""
        if self._spellings is None:
            yield (
                f"{self._key} has the policy's tokenizer: it grades each token alone, behind its "
                "own chat template"
            )
            return
        questions = [prompt.question for prompt in asked if prompt.question]
        encoded = encode(tokenizer, questions)["input_ids"] if questions else []
        answers = self._answers([np.array(ids, np.int32) for ids in encoded])
        alone, joined = token_shares([segments.policy for _, segments in answers])
        shares = f"of the first questions' tokens {alone:.1%} alone, {joined:.1%} with others"
        if questions and alone + joined < LEAST_READ:
            raise UsageError(
                f"{self._key}: its tokens and the policy's spell different texts: {shares}. One of "
                "the tokenizers changes text (lower case, other spaces) or lacks characters: take "
                "another teacher, or let this one write answers (postgrad generate) and train on "
                "their text with SFT"
            )
        yield f"{self._key} has another tokenizer: it grades segments of text, {shares}"
        lengths = np.array([len(read) for read, _ in self._prompts.values()])
        if over := int((lengths >= self._max_len).sum()):
            yield (
                f"{over} of {len(lengths)} prompts have data.max_len = {self._max_len} tokens or "
                f"more for {self._key}, which grades none of their samples"
            )


def token_shares(numbers: Sequence[NDArray[np.int64]]) -> tuple[float, float]:
    """Which shares of tokens are a segment alone, and in a segment of several. numbers: of each
    text the segments of its tokens.
    """
    counts = [np.bincount(row[row != UNREAD]) for row in numbers]
    tokens = max(1, sum(map(len, numbers)))
    alone = sum(int((each == 1).sum()) for each in counts)
    joined = sum(int(each[each > 1].sum()) for each in counts)
    return alone / tokens, joined / tokens


def _readable(text: bytes) -> str:
    """The text up to the first byte that belongs to no character: that of a token that is no text,
    or of half a character at the token limit.
    """
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start].decode()


def _nearness(spelled: bytes, text: str) -> tuple[int, int]:
    wanted = text.encode()
    return _same_bytes(spelled, wanted), -abs(len(spelled) - len(wanted))


def _key_of(prompt: Prompt) -> tuple[str, int, bytes]:
    """Tells prompts apart: two datasets may have one name, and then rows of one number."""
    return prompt.dataset, prompt.row, prompt.token_ids.tobytes()
