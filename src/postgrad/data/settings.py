"""The recipe's settings of a dataset, and of several as one mixture."""

import functools
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from string import Formatter
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec, Self, TypeVar, get_args

from pydantic import Field, PrivateAttr, field_validator, model_validator

from postgrad.core.errors import UsageError
from postgrad.core.hub import REVISION
from postgrad.core.settings import Settings
from postgrad.data.chat_format import LossTurns, Role
from postgrad.data.files import SUFFIXES

WHICH_ROWS = (  # keys that decide which rows of the world are read
    *("path", "name", "revision", "split", "filter", "map", "limit", "task", "size", "seed"),
)
# A key in a message, which is no name of a file such as data.path.jsonl or /my/data.path.
_SUFFIX = "|".join(map(re.escape, SUFFIXES))
KEY = re.compile(rf"(?<![\w./])data\.([a-z_]+)(?![\w/])(?!(?:{_SUFFIX})\b)")
FUNCTION = re.compile(r"[\w.]+:\w+")
NO_ENVIRONMENT = "none"  # of `environment`
GROUP_ANSWER = "group.answer"  # in a hint: a right answer among the samples of the prompt
_ONLY_TEXT = 'on_too_long = "split" is of plain text (data.text): say "drop", "truncate" or "error"'


class RowSettings(Settings):
    """Where the rows of a dataset are, how they are read, and what is done with long ones.

    `path` is a hub id, a .jsonl, .jsonl.gz, .json, .csv, .parquet or .arrow file, a directory, or
    "reasoning-gym:TASK" (`task` holds the task's own parameters; `size` problems are made from
    `seed`).
    """

    # Keys that name a column, or with dots a place within one: "reward_model.ground_truth".
    COLUMNS: ClassVar[tuple[str, ...]] = ("tools",)

    path: str
    name: str | None = None  # configuration of a hub dataset, such as "main" of openai/gsm8k
    # Branch, tag or commit of a hub dataset; left out, main as it is when the run begins.
    revision: str | None = Field(default=None, pattern=REVISION)
    split: str = "train"  # with a slice as in `datasets`: "train[:-500]", "test[90%:]"
    # In place of the tokenizer's: a name ("chatml", "tulu", "llama3"), a Jinja file, or its text,
    # which may include a name or the tokenizer's own: {{ bos_token }}{% include "tokenizer" %}.
    chat_template: str = ""
    filter: str = ""  # "package.module:function", row -> bool
    map: str = ""  # "package.module:function", row -> row
    system: str | None = None  # a system message before every conversation that has none
    # Column with the functions that a conversation may call, read where rows have it; "": none.
    tools: str = "tools"
    # Column with the images of a row, read where rows have it (data/images.py); "": none.
    images: str = "images"
    strip: bool = False  # take white space off both ends of every message
    chat_template_kwargs: dict[str, Any] = {}  # variables of the chat template: enable_thinking
    limit: int | None = Field(default=None, ge=1)  # use only the first rows
    task: dict[str, Any] = {}
    size: int = Field(default=1000, ge=1, le=10_000_000)
    seed: int = 0
    max_len: int = Field(default=1024, ge=2)  # tokens, prompt and response
    # What is done with longer rows; "split" cuts plain text (data.text) into several rows.
    on_too_long: Literal["drop", "truncate", "error", "split"] = "drop"
    max_lost_fraction: float = Field(default=0.5, ge=0.0, le=1.0)  # losing more stops the run
    shuffle: bool = True  # a new order each epoch, from seed and epoch
    # Of the questions, by their hash; their rows are evaluated on where [eval] names no rows.
    eval_fraction: float = Field(default=0.0, ge=0.0, lt=1.0)
    # Keys that are not those of [data], as the recipe has them: {"path": "data.sets.1.path"}.
    _keys_in_recipe: dict[str, str] = PrivateAttr(default_factory=dict)
    _paths_beside: tuple[str, ...] = PrivateAttr(default=())

    @property
    def paths_beside(self) -> tuple[str, ...]:
        """The paths of the other sets of its section, from whose names its own has to differ."""
        return self._paths_beside

    def stand_beside(self, paths: Sequence[str]) -> None:
        """Takes note of the paths of all sets of its section."""
        self._paths_beside = tuple(path for path in paths if path != self.path)

    def columns_within(self) -> list[str]:
        """The columns that the recipe names by their places within others, with dots."""
        named = [getattr(self, key) for key in self.COLUMNS]
        return [name for name in named if name and "." in name]

    def own_keys(self, text: str) -> str:
        """A reader's message, in which "data.KEY" is the key that the recipe says it by."""

        def key_in_recipe(match: re.Match[str]) -> str:
            return self._keys_in_recipe.get(match[1], match[0])

        return KEY.sub(key_in_recipe, text)

    @field_validator("filter", "map")
    @classmethod
    def _names_a_function(cls, name: str) -> str:
        if name and not FUNCTION.fullmatch(name):
            raise ValueError("a function is named as 'package.module:function'")
        return name


class DataSettings(RowSettings):
    """One dataset of questions or conversations: which columns to read.

    A row is a question (`prompt`) with its `answer`, or, when `messages` names a column, a
    conversation in the chat format, or, when `text` does, plain text. "" is none, so that a set can
    undo what [data] says.
    """

    COLUMNS = (*RowSettings.COLUMNS, "prompt", "input", "answer", "messages", "text")

    prompt: str = "question"  # text, or the messages before the answer
    input: str = ""  # what the question is about (Alpaca), on a new line unless "" or null
    answer: str = "answer"  # "": the rows have no reference answer (prompts for RL only)
    messages: str | None = None
    text: str = ""  # SFT on plain text, all of it, without a chat template
    template: str = ""  # the user's message from columns: "Question: {question}\nAnswer:"
    # What of a conversation bears loss: "all" answers of the assistant, the "last" one,
    # "everything", or the messages of roles, as in ["assistant", "tool"].
    loss_turns: LossTurns = "all"
    # What who grades samples reads behind the prompt, and the policy does not, from columns: "A
    # right solution:\n{answer}". {group.answer}: a right answer among the prompt's samples.
    hint: str = ""
    # The one of several environments that plays these rows, by name; "none": no environment does.
    environment: str | None = None
    # What is done with rows of prompts whose reference answer a verifier cannot read.
    on_unreadable: Literal["drop", "error"] = "error"

    @field_validator("loss_turns", mode="before")
    @classmethod
    def _turns_or_roles(cls, turns: Any) -> Any:
        words, roles = get_args(get_args(LossTurns)[0]), get_args(Role)
        named = isinstance(turns, list | tuple) and turns and all(role in roles for role in turns)
        if turns not in words and not named:
            raise ValueError(
                f"it is one of {', '.join(words)}, or a list of roles: {', '.join(roles)}"
            )
        return tuple(turns) if named else turns

    @field_validator("messages")
    @classmethod
    def _none_if_empty(cls, column: str | None) -> str | None:
        return column or None

    @field_validator("template", "hint")
    @classmethod
    def _names_columns(cls, template: str) -> str:
        if template and not any(column for _, column in template_parts(template)):
            raise ValueError('it names no column: "Question: {question}" is one that does')
        return template

    @field_validator("hint")
    @classmethod
    def _one_answer(cls, hint: str) -> str:
        if [column for _, column in template_parts(hint)].count(GROUP_ANSWER) > 1:
            raise ValueError(f"{{{GROUP_ANSWER}}} may stand in it once")
        return hint

    @property
    def shows_group(self) -> bool:
        """Whether its hints show graders a right answer of the prompt's group."""
        return any(column == GROUP_ANSWER for _, column in template_parts(self.hint))

    def columns_within(self) -> list[str]:
        """The columns that the recipe names by their places within others, with dots."""
        parts = [*template_parts(self.template), *template_parts(self.hint)]
        in_texts = [name for _, name in parts if name and "." in name and name != GROUP_ANSWER]
        return [*super().columns_within(), *in_texts]

    @model_validator(mode="after")
    def _one_layout(self) -> Self:
        layouts = {"text": self.text, "messages": self.messages, "input": self.input}
        named = [key for key, column in layouts.items() if column]
        if len(named) > 1 or (self.template and {"text", "input"} & {*named}):
            both = " and ".join([*named, *(("template",) if self.template else ())])
            raise ValueError(f"{both} are ways to read a row that exclude each other: keep one")
        if self.on_too_long == "split" and not self.text:
            raise ValueError(_ONLY_TEXT)
        return self

    @model_validator(mode="after")
    def _question_or_chat(self) -> Self:
        if self.template and self.messages is not None:
            raise ValueError(
                "template makes a question from columns, messages names a column that has whole "
                "conversations: say one of them"
            )
        return self


def _number(data: RowSettings, sets: Sequence[RowSettings]) -> None:
    """Tells each of [[data.sets]] its keys, but those whose values it takes over from [data], and
    what stands beside it.
    """
    for number, dataset in enumerate(sets):
        dataset.stand_beside([other.path for other in sets])
        for key in type(dataset).model_fields.keys() & type(data).model_fields.keys():
            if getattr(dataset, key) != getattr(data, key):
                dataset._keys_in_recipe[key] = f"data.sets.{number}.{key}"  # pyright: ignore[reportPrivateUsage]


RowsRead = TypeVar("RowsRead")
RestOfCall = ParamSpec("RestOfCall")
OneDataset = TypeVar("OneDataset", bound=RowSettings)


def with_own_keys(
    read: Callable[Concatenate[OneDataset, RestOfCall], RowsRead],
) -> Callable[Concatenate[OneDataset, RestOfCall], RowsRead]:
    """A reader of one dataset whose errors name that dataset's keys: readers speak of [data]'s, and
    "data.path" becomes "data.sets.1.path" where one of [[data.sets]] says it.
    """

    @functools.wraps(read)
    def read_with_own_keys(
        settings: OneDataset, *args: RestOfCall.args, **kwargs: RestOfCall.kwargs
    ) -> RowsRead:
        with _own_keys_named(settings):
            return read(settings, *args, **kwargs)

    return read_with_own_keys


def iterated_with_own_keys(
    read: Callable[Concatenate[OneDataset, RestOfCall], Iterator[RowsRead]],
) -> Callable[Concatenate[OneDataset, RestOfCall], Iterator[RowsRead]]:
    """`with_own_keys` for a reader that gives its rows one at a time."""

    @functools.wraps(read)
    def iterated(
        settings: OneDataset, *args: RestOfCall.args, **kwargs: RestOfCall.kwargs
    ) -> Iterator[RowsRead]:
        with _own_keys_named(settings):
            yield from read(settings, *args, **kwargs)

    return iterated


@contextmanager
def _own_keys_named(settings: RowSettings) -> Generator[None]:
    try:
        yield
    except UsageError as error:
        if (text := settings.own_keys(str(error))) == str(error):
            raise
        raise UsageError(text) from error.__cause__


def template_parts(template: str) -> list[tuple[str, str | None]]:
    """The parts of a template, in order: (text, name of the column after it or None).

    Raises ValueError for anything but text with {column} in it.
    """
    parts: list[tuple[str, str | None]] = []
    for text, column, form, conversion in Formatter().parse(template):
        if column == "" or form or conversion:
            raise ValueError(
                "braces hold the name of a column, as in {question}; {{ and }} are braces"
            )
        parts.append((text, column))
    return parts


class Share(Settings):
    """How much of an epoch one of several sets is. A weight of 1 is each of its rows once, 0.5 half
    of them, 2 each twice; `count` says the draws themselves.
    """

    weight: float = Field(default=1.0, gt=0.0)
    count: int | None = Field(default=None, ge=1)

    def draws(self, rows: int) -> int:
        """Draws of this set in one epoch."""
        return self.count or max(1, round(self.weight * rows))


HeldOutBy = Literal["question", "row", "none"]


class Together(Settings):
    """What is said of all sets of a run together."""

    # Keep the first of equal rows; "normalised": equal but for case and white space.
    dedup: Literal["none", "exact", "normalised"] = "none"
    # What is equal to a held-out row, and left out: its question, or all of its columns. Default:
    # "row" with an [environment], whose rows may share an instruction, else "question".
    held_out: HeldOutBy | None = None
    decontaminate_ngram: int = Field(default=0, ge=0)  # words; 0: equal questions only
    cache: bool = True  # keep tokens for the next run


class MixedSet(Share, DataSettings):
    """One of several sets of questions or conversations."""


class MixSettings(Together, DataSettings):
    """The training data: one dataset, or several as [[data.sets]]. What a set leaves out is taken
    from [data].
    """

    path: str = ""
    sets: tuple[MixedSet, ...] = ()

    @model_validator(mode="after")
    def _numbered(self) -> Self:
        _number(self, self.sets)
        return self

    @property
    def sources(self) -> tuple[DataSettings, ...]:
        """The datasets that are read."""
        return self.sets or (self,)


class PairSettings(RowSettings):
    """One dataset in which one answer is preferred to another, or each answer or each of its steps
    has a label.

    A row's own columns say which of the shapes in docs/data.md it has. `max_len` counts the tokens
    of one conversation, prompt and answer. "" is none.
    """

    COLUMNS = (
        *(*RowSettings.COLUMNS, "chosen", "rejected", "prompt", "margin", "completion", "label"),
        *("completions", "labels"),
    )

    chosen: str = "chosen"  # answers, whole conversations, or transcripts
    rejected: str = "rejected"  # the same
    prompt: str | None = None  # None: the column "prompt" where rows have it
    margin: str = ""  # a number: how much better chosen is
    completion: str = "completion"  # rows with one answer and a label (KTO)
    label: str = "label"  # true: desirable
    speakers: tuple[str, str] = ("Human", "Assistant")  # of transcripts: the user, the assistant
    completions: str = "completions"  # rows of steps (process rewards): a list of texts
    labels: str = "labels"  # of each step: true or false, or a number from 0 to 1
    separator: str = Field(default="\n\n", min_length=1)  # written between two steps
    step_mark: str = Field(default="ки", min_length=1)  # ends a step in Math-Shepherd's texts
    neutral: float = Field(default=1.0, ge=0.0, le=1.0)  # the label of PRM800K's rating 0

    @model_validator(mode="after")
    def _columns_differ(self) -> Self:
        named = [self.chosen, self.rejected, self.completion, self.label, self.margin, self.prompt]
        named += [self.completions, self.labels]
        columns = [name for name in named if name]
        if self.on_too_long == "split":
            raise ValueError(_ONLY_TEXT)
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

    @model_validator(mode="after")
    def _numbered(self) -> Self:
        _number(self, self.sets)
        return self

    @property
    def sources(self) -> tuple[PairSettings, ...]:
        """The datasets that are read."""
        return self.sets or (self,)
