"""The recipe's settings of a dataset of preferences."""

from typing import Self

from pydantic import model_validator

from postgrad.data.settings import RowSettings, Share, Together


class PairSettings(RowSettings):
    """One dataset in which one answer is preferred to another, or each answer has a label.

    A row's own columns say which of the shapes in docs/data.md it has. `max_len` counts the tokens
    of one conversation, prompt and answer. "" is none.
    """

    chosen: str = "chosen"  # answers, whole conversations, or transcripts
    rejected: str = "rejected"  # the same
    prompt: str | None = None  # None: the column "prompt" where rows have it
    margin: str = ""  # a number: how much better chosen is
    completion: str = "completion"  # rows with one answer and a label (KTO)
    label: str = "label"  # true: desirable
    speakers: tuple[str, str] = ("Human", "Assistant")  # of transcripts: the user, the assistant

    @model_validator(mode="after")
    def _columns_differ(self) -> Self:
        named = [self.chosen, self.rejected, self.completion, self.label, self.margin, self.prompt]
        columns = [name for name in named if name]
        if len(set(columns)) < len(columns):
            raise ValueError(f"two of its columns have one name: {columns}")
        if not all(speaker.strip() for speaker in self.speakers) or len(set(self.speakers)) < 2:
            raise ValueError(f"speakers are two different names: {list(self.speakers)}")
        return self


class MixedPairs(Share, PairSettings):
    """One of several sets of preferences."""


class PairMixSettings(Together, PairSettings):
    """The training data of a reward or preference job: one dataset, or several as [[data.sets]].
    What a set leaves out is taken from [data].
    """

    path: str = ""
    sets: tuple[MixedPairs, ...] = ()

    @property
    def sources(self) -> tuple[PairSettings, ...]:
        """The datasets that are read."""
        return self.sets or (self,)
