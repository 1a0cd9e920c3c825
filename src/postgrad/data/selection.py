"""Which rows a run leaves out, across all its sets: held-out questions and duplicates."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from postgrad.data.account import Fate
from postgrad.data.messages import Message
from postgrad.data.overlap import HeldOut, question_key


@dataclass(slots=True)
class Selection:
    """Tells held-out rows and duplicates; remembers the rows that were kept."""

    held_out: HeldOut = field(default_factory=HeldOut)  # of the evaluation sets
    dedup: Literal["none", "exact", "normalised"] = "none"  # when two rows are equal
    _seen: set[bytes] = field(default_factory=set)  # SHA-256 of the kept rows' messages

    def left_out(self, asked: Sequence[str], texts: Sequence[str]) -> Fate | None:
        """Why a row must not be trained on, or None. asked: its questions, without a template's
        words; texts: all of its texts that may share words with a held-out question.
        """
        if self.held_out.has(asked):
            return "excluded"
        return "contaminated" if self.held_out.shares_words(texts) else None

    def repeats(self, messages: Sequence[Message]) -> bool:
        """True where an earlier kept row of any set had the same messages; else remembers them.

        Call it only for rows that are kept otherwise: a dropped row must not hide a later one.
        """
        if self.dedup == "none":
            return False
        text = question_key if self.dedup == "normalised" else str
        serialised = json.dumps(
            [[message["role"], text(message["content"])] for message in messages]
        )
        key = hashlib.sha256(serialised.encode()).digest()
        if key in self._seen:
            return True
        self._seen.add(key)
        return False
