"""Overlap with held-out sets: questions that are equal, and rows that share a run of words. A
`Selection` leaves out such rows, and duplicates, as training data is read.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from postgrad.core.text import composed
from postgrad.data.account import Fate
from postgrad.data.answers import preference_of
from postgrad.data.chat_format import Message
from postgrad.data.functions import prepared_rows
from postgrad.data.messages import asked_in, prompt_of
from postgrad.data.rows import Row
from postgrad.data.settings import DataSettings, HeldOutBy, PairSettings, RowSettings, with_own_keys
from postgrad.data.steps import is_stepwise, steps_of

# Chinese and Japanese are written without spaces: each of their characters counts as a word.
_CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_BETWEEN = r"\s!-/:-@\[-`{-~\u00a1-\u00bf\u2000-\u206f\u2190-\u2bff\u3000-\u303f\uff00-\uff0f"
_WORD = re.compile(rf"[{_CJK}]|[^{_BETWEEN}{_CJK}]+")


TEXT = ("role", "content")


def question_key(text: str) -> str:
    """A question without regard to case and white space: equal keys mean the same problem."""
    return " ".join(text.casefold().split())


def words(text: str) -> list[str]:
    """The words of a text, case-folded and NFKC-normalised, without punctuation."""
    return _WORD.findall(composed(text, "NFKC").casefold())


def ngrams(text: str, n: int) -> Iterator[tuple[str, ...]]:
    """Every run of n consecutive words; none for a text with fewer."""
    sequence = words(text)
    return (tuple(sequence[i : i + n]) for i in range(len(sequence) - n + 1))


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The questions of evaluation sets, which training leaves out, or their rows."""

    questions: frozenset[str] = frozenset()  # as question_key gives them
    n: int = 0  # words of a gram; 0: only equal questions count
    grams: frozenset[tuple[str, ...]] = frozenset()  # every n consecutive words of any question
    rows: frozenset[bytes] = frozenset()  # as row_key gives them

    def __or__(self, other: "HeldOut") -> "HeldOut":
        """What either holds out, by the same n."""
        return HeldOut(
            self.questions | other.questions,
            self.n,
            self.grams | other.grams,
            self.rows | other.rows,
        )

    def has(self, questions: Iterable[str], row: Row) -> bool:
        """True where any of the questions is held out, or the row."""
        if self.rows:
            return row_key(row) in self.rows
        return bool(self.questions) and any(question_key(q) in self.questions for q in questions)

    def shares_words(self, texts: Sequence[str]) -> bool:
        """True where a text has n consecutive words that a held-out question has too."""
        return bool(self.grams) and any(
            gram in self.grams for text in texts for gram in ngrams(text, self.n)
        )


def in_eval_part(settings: RowSettings, asked: Sequence[str], texts: Sequence[str]) -> bool:
    """Whether a row belongs to the part of a dataset that data.eval_fraction holds out.

    A hash of its questions decides, or of all its texts where it asks nothing. So the side of a row
    does not depend on the other rows, on their order or on the seed: appended rows move none, rows
    that ask the same are on one side, and a larger fraction only adds rows.
    """
    key = json.dumps([question_key(text) for text in asked or texts])
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") < settings.eval_fraction * 2**64


def held_out(
    sets: Iterable[DataSettings | PairSettings], ngram: int = 0, by: HeldOutBy = "question"
) -> HeldOut:
    """What training must leave out: the questions of evaluation sets, or `by` their rows. ngram:
    how many consecutive words make an overlap (Brown et al. 2020, appendix C, took 13); 0: only
    equal questions count.
    """
    # the part of a fraction is left out by its hash, not for one message that many rows share
    every = list(sets)
    files = [dataset for dataset in every if not dataset.eval_fraction]
    compared = files if by == "question" else []
    questions = frozenset(key for dataset in compared for key in keys(dataset))
    sources = files if by == "row" else []
    rows = frozenset(row_key(row) for dataset in sources for row in prepared_rows(dataset))
    texts = (key for dataset in every for key in keys(dataset)) if ngram else ()
    grams = frozenset(gram for key in texts for gram in ngrams(key, ngram))
    return HeldOut(questions, ngram, grams, rows)


def row_key(row: Row) -> bytes:
    """The SHA-256 of all columns of a row: equal keys mean equal rows."""
    return hashlib.sha256(json.dumps(row.values, sort_keys=True).encode()).digest()


@with_own_keys
def keys(settings: DataSettings | PairSettings) -> frozenset[str]:
    """The keys of all questions of a dataset, or of the part that data.eval_fraction holds out; in
    preferences a question is all that the user said before the answer.
    """
    asked = (_questions(row, settings) for row in prepared_rows(settings))
    return frozenset(
        question_key(question)
        for questions in asked
        if not settings.eval_fraction or in_eval_part(settings, questions, ())
        for question in questions
    )


def _questions(row: Row, settings: DataSettings | PairSettings) -> list[str]:
    if isinstance(settings, PairSettings):
        if is_stepwise(row, settings):
            return steps_of(row, settings).question
        return preference_of(row, settings).question
    return asked_in(row, prompt_of(row, settings), settings)


@dataclass(slots=True)
class Selection:
    """Tells held-out rows and duplicates; remembers the rows that were kept. part: which rows are
    wanted of a dataset with data.eval_fraction.
    """

    held_out: HeldOut = field(default_factory=HeldOut)  # of the evaluation sets
    dedup: Literal["none", "exact", "normalised"] = "none"  # when two rows are equal
    part: Literal["training", "evaluation"] = "training"
    # rows that are held out for this message, while others of their user's are no held-out ones
    _shared: Counter[str] = field(default_factory=Counter)
    _seen: set[bytes] = field(default_factory=set)  # SHA-256 of the kept rows' messages

    def left_out(
        self, settings: RowSettings, row: Row, asked: Sequence[str], texts: Sequence[str]
    ) -> Fate | None:
        """Why a row is not used, or None. asked: its questions, without a template's words; texts:
        all of its texts that may share words with a held-out question.
        """
        if settings.eval_fraction:
            held = in_eval_part(settings, asked, texts)
            if held != (self.part == "evaluation"):
                return "excluded" if held else "trained"
        if self.held_out.has(asked, row):
            self._note_shared(asked)
            return "excluded"
        return "contaminated" if self.held_out.shares_words(texts) else None

    def notes(self) -> list[str]:
        """A line for the account of a dataset, of which `left_out` was asked since the last call:
        how many conversations are held out for a part of what the user says; [] for none.
        """
        shared, self._shared = self._shared, Counter()
        if not shared:
            return []
        text, count = shared.most_common(1)[0]
        quoted = f"{text[:60]!r}{'...' * (len(text) > 60)}"
        return [
            f"{shared.total()} of the rows held out share only a part of the user's messages with "
            f"the evaluation data ({count} of them {quoted}); if that may stay in training, say "
            'data.held_out = "row"'
        ]

    def _note_shared(self, asked: Sequence[str]) -> None:
        if self.held_out.rows:
            return
        equal = [text for text in asked if question_key(text) in self.held_out.questions]
        if len(equal) < len(asked):
            self._shared[equal[0]] += 1

    def repeats(self, messages: Sequence[Message]) -> bool:
        """True where an earlier kept row of any set had the same messages; else remembers them.

        Call it only for rows that are kept otherwise: a dropped row must not hide a later one.
        """
        if self.dedup == "none":
            return False
        text = question_key if self.dedup == "normalised" else str
        compared: list[list[Any]] = []
        for message in messages:
            others = {key: message[key] for key in sorted(message) if key not in TEXT}
            compared.append([message["role"], text(message["content"]), *filter(None, [others])])
        serialised = json.dumps(compared)
        key = hashlib.sha256(serialised.encode()).digest()
        if key in self._seen:
            return True
        self._seen.add(key)
        return False
