"""What a run leaves out of all its sets together: held-out questions, rows that repeat others."""

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
    """held_out: of the evaluation sets. dedup: when two rows are one."""

    held_out: HeldOut = field(default_factory=HeldOut)
    dedup: Literal["none", "exact", "normalised"] = "none"
    _seen: set[bytes] = field(default_factory=set)

    def left_out(self, asked: Sequence[str], texts: Sequence[str]) -> Fate | None:
        """Why a row must not be trained on. asked: its questions, without a template's words; said:
        all texts of it that may share words with a held-out question.
        """
        if self.held_out.has(asked):
            return "excluded"
        return "contaminated" if self.held_out.shares_words(texts) else None

    def repeats(self, messages: Sequence[Message]) -> bool:
        """True where a row before had the same messages, in this set or in one before it.

        Ask only about rows that are kept: a row that was dropped takes the place of none.
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
