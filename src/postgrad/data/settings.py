"""What a recipe says about a dataset."""

from typing import Any, Literal

from pydantic import Field

from postgrad.core.settings import Settings


class DataSettings(Settings):
    """One dataset: where its rows are, which columns to read, and what to do with long rows.

    `path` is a hub id, a .jsonl, .jsonl.gz or .parquet file, a directory of those, or
    "reasoning-gym:TASK" (`task` holds the task's own parameters; `size` problems are made from
    `seed`). A row is a question (`prompt`) with its `answer`, or, when `messages` names a column,
    a conversation in the chat format.
    """

    path: str
    name: str | None = None  # configuration of a hub dataset, such as "main" of openai/gsm8k
    split: str = "train"  # with a slice as in `datasets`: "train[:-500]", "test[90%:]"
    prompt: str = "question"
    answer: str = "answer"  # "": the rows have no reference answer (prompts for RL only)
    messages: str | None = None
    system: str | None = None  # a system message before every conversation that has none
    strip: bool = False  # take white space off both ends of every message
    loss_turns: Literal["all", "last"] = "all"  # assistant turns of a conversation that bear loss
    chat_template_kwargs: dict[str, Any] = {}  # variables of the chat template: enable_thinking
    limit: int | None = Field(default=None, ge=1)  # use only the first rows
    task: dict[str, Any] = {}
    size: int = Field(default=1000, ge=1)
    seed: int = 0
    max_len: int = Field(default=1024, ge=2)
    on_too_long: Literal["drop", "truncate", "error"] = "drop"
    max_lost_fraction: float = Field(default=0.5, ge=0.0, le=1.0)
    shuffle: bool = True


class MixedSet(DataSettings):
    """One of several sets: how much of an epoch it is. A weight of 1 is each of its rows once, 0.5
    half of them, 2 each twice; `count` says the draws themselves.
    """

    weight: float = Field(default=1.0, gt=0.0)
    count: int | None = Field(default=None, ge=1)

    def draws(self, rows: int) -> int:
        """Draws of this set in one epoch."""
        return self.count or max(1, round(self.weight * rows))


class MixSettings(DataSettings):
    """The training data: one dataset, or several as [[data.sets]]. What a set leaves out is taken
    from [data].
    """

    path: str = ""
    sets: tuple[MixedSet, ...] = ()

    @property
    def sources(self) -> tuple[DataSettings, ...]:
        """The datasets that are read."""
        return self.sets or (self,)
