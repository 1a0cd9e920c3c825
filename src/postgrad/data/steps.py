"""Rows with labelled steps as prompts and steps: the layouts of TRL's stepwise rows, Math-Shepherd,
PRM800K and ProcessBench. A row's own columns decide which it has
(docs/algorithms/process_reward.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from postgrad.core.errors import UsageError
from postgrad.data.answers import prompt_before
from postgrad.data.chat_format import Message
from postgrad.data.images import identified, with_images
from postgrad.data.messages import column, with_system
from postgrad.data.rows import Row, shown
from postgrad.data.settings import PairSettings

LAYOUTS = (
    "prompt, completions and labels (TRL); input and label (Math-Shepherd); question and label as "
    "objects (PRM800K); problem, steps and label (ProcessBench)"
)
RATINGS = (-1, 0, 1)  # PRM800K: bad, neutral, good
MARKED = "input"  # Math-Shepherd's column of text; data.prompt names another
NO_ERROR = -1  # ProcessBench's label of a row without a wrong step

Label = float | None  # the share of right; None: nobody has said


@dataclass(frozen=True, slots=True)
class StepPath:
    """An answer in steps, each with its label."""

    steps: tuple[str, ...]
    labels: tuple[Label, ...]  # as many


@dataclass(frozen=True, slots=True)
class StepRow:
    """A row: a prompt and its answers in steps. PRM800K has one answer that goes on to the end, and
    one more for each other candidate of a step, of which only that step has a label: each label of
    the row is there once.
    """

    row: Row
    shape: str  # how the row was read, for the account
    prompt: tuple[Message, ...]
    paths: tuple[StepPath, ...]

    @property
    def question(self) -> list[str]:
        """All texts of the user, joined into one question, with the hashes of their images; [] if
        there are none.
        """
        texts = [identified(turn) for turn in self.prompt if turn["role"] == "user"]
        return ["\n".join(texts)] if texts else []

    @property
    def empty(self) -> bool:
        """Whether an answer has no step, or a blank one."""
        return not self.paths or any(
            not path.steps or not all(step.strip() for step in path.steps) for path in self.paths
        )

    def messages(self, path: StepPath, separator: str) -> list[Message]:
        """The conversation of one of its answers."""
        return [*self.prompt, {"role": "assistant", "content": separator.join(path.steps)}]


def is_stepwise(row: Row, settings: PairSettings) -> bool:
    """Whether a row has the columns of one of the layouts, and not those of other preferences."""
    others = {settings.chosen, settings.completion} & row.values.keys()
    return not others and _layout(row.values, settings) is not None


def steps_of(row: Row, settings: PairSettings) -> StepRow:
    """A row's prompt and steps. Raises UsageError that names row and column."""
    layout = _layout(row.values, settings)
    readers = {
        "TRL": _stepwise,
        "Math-Shepherd": _marked,
        "PRM800K": _rated,
        "ProcessBench": _benchmark,
    }
    if layout is None:
        raise UsageError(
            f"{row.place}: row {row.index} has {', '.join(row.values) or 'no column'}; rows with "
            f"labelled steps have {LAYOUTS}: name its columns (data.completions, data.labels) or "
            "bring it into that form (data.map)"
        )
    prompt, paths = readers[layout](row, settings)
    messages = tuple(with_images(with_system(prompt, settings), row, settings))
    return StepRow(row, f"steps as {layout} has them", messages, tuple(paths))


def _layout(values: Mapping[str, Any], settings: PairSettings) -> str | None:
    if settings.completions in values:
        return "TRL"
    text = values.get(settings.prompt or MARKED)
    if isinstance(text, str) and isinstance(values.get(settings.label), str | list):
        return "Math-Shepherd"
    if isinstance(values.get("question"), dict) and isinstance(values.get(settings.label), dict):
        return "PRM800K"
    return "ProcessBench" if {"problem", "steps"} <= values.keys() else None


def _refuse(row: Row, name: str, value: object, wanted: str, key: str) -> UsageError:
    return UsageError(
        f"{row.place}: column {name!r} of row {row.index} is {shown(value)}; {wanted} ({key})"
    )


def _texts(row: Row, name: str, key: str) -> tuple[str, ...]:
    value = column(row, name, key)
    if not isinstance(value, list) or not all(isinstance(t, str) for t in cast(list[Any], value)):
        raise _refuse(row, name, value, "steps are a list of texts", key)
    return tuple(cast(list[str], value))


def _stepwise(row: Row, settings: PairSettings) -> tuple[list[Message], list[StepPath]]:
    steps, key = _texts(row, settings.completions, "data.completions"), "data.labels"
    labels = _labels(row, settings.labels, column(row, settings.labels, key), len(steps), key)
    prompt = prompt_before(row, settings)
    if prompt is None:
        raise UsageError(
            f"{row.place}: row {row.index} has steps and no column of what they answer "
            "(data.prompt)"
        )
    return prompt[0], [StepPath(steps, labels)]


def _marked(row: Row, settings: PairSettings) -> tuple[list[Message], list[StepPath]]:
    """Math-Shepherd: `input` has a mark behind each step; `label` is the same text with + or - in
    the place of each mark, or a list of those or of numbers (OpenRLHF). The prompt is what stands
    before "Step 1:".
    """
    name, labels, mark = settings.prompt or MARKED, row.values[settings.label], settings.step_mark
    text = row.values[name]
    *pieces, rest = text.split(mark)
    if not pieces or rest.strip():
        wanted = f"every step ends with the mark {mark!r}"
        raise _refuse(row, name, rest or text, wanted, "data.step_mark")
    if isinstance(labels, str):
        labels = _signs(row, pieces, labels, settings)
    signs = {"+": True, "-": False}
    labels = [signs.get(label, label) if isinstance(label, str) else label for label in labels]
    question, first, step = pieces[0].partition("Step 1:")
    if not first or not question.strip():
        raise _refuse(row, name, text, 'the question stands before "Step 1:"', "data.map")
    steps = tuple(piece.strip() for piece in [first + step, *pieces[1:]])
    prompt: list[Message] = [{"role": "user", "content": question.strip()}]
    return prompt, [StepPath(steps, _labels(row, settings.label, labels, len(steps), "data.label"))]


def _signs(row: Row, pieces: list[str], text: str, settings: PairSettings) -> list[str]:
    """The sign behind each piece of a text that is the same otherwise."""
    signs: list[str] = []
    for piece in pieces:
        sign, following = text[len(piece) : len(piece) + 1], text[len(piece) + 1 :]
        if not text.startswith(piece) or sign not in ("+", "-"):
            wanted = f"behind step {len(signs) + 1} it parts from `input`: + or - is for each mark"
            raise _refuse(row, settings.label, text, wanted, "data.label")
        signs.append(sign)
        text = following
    return signs


def _labels(row: Row, name: str, labels: Any, steps: int, key: str) -> tuple[Label, ...]:
    """A list of labels, one for each step. Raises UsageError that names row and column."""
    if not isinstance(labels, list) or len(cast(list[Any], labels)) != steps:
        wanted = f"a list of {steps} labels is expected, one for each step"
        raise _refuse(row, name, labels, wanted, key)
    read: list[Label] = []
    for label in cast(list[Any], labels):
        number = isinstance(label, bool | int | float) and 0 <= label <= 1
        if label is not None and not number:
            wanted = "a label is true, false, a number from 0 to 1, or null where nobody said"
            raise _refuse(row, name, labels, wanted, key)
        read.append(None if label is None else float(label))
    return tuple(read)


def _rated(row: Row, settings: PairSettings) -> tuple[list[Message], list[StepPath]]:
    """PRM800K: at each step people rated several candidates and chose one, or wrote one (which is
    right), to go on from. Where none was chosen, the first rated one ends the answer.
    """
    problem, rated = row.values["question"].get("problem"), row.values[settings.label].get("steps")
    if not isinstance(problem, str):
        raise _refuse(row, "question", row.values["question"], "`problem` is a text", "data.map")
    if not isinstance(rated, list):
        raise _refuse(row, settings.label, rated, "`steps` is a list", "data.label")
    steps: list[str] = []
    labels: list[Label] = []
    others: list[StepPath] = []
    for number, step in enumerate(cast(list[Any], rated)):
        where = f"steps[{number}] of column {settings.label!r}"
        candidates, chosen = _candidates(row, step, where, settings)
        if not candidates:
            break
        going_on = 0 if chosen is None else chosen
        for place, (text, label) in enumerate(candidates):
            if place != going_on and label is not None:
                unsaid = (*[None] * len(steps), label)
                others.append(StepPath((*steps, text), unsaid))
        steps.append(candidates[going_on][0])
        labels.append(candidates[going_on][1])
        if chosen is None:
            break
    main = [StepPath(tuple(steps), tuple(labels))]
    prompt: list[Message] = [{"role": "user", "content": problem}]
    return prompt, [*main, *others]


def _candidates(
    row: Row, step: Any, where: str, settings: PairSettings
) -> tuple[list[tuple[str, Label]], int | None]:
    """The candidates of a step, and the index of that which was chosen or None."""
    try:
        listed = [(c["text"], c["rating"]) for c in step["completions"] or ()]
        chosen, human = step["chosen_completion"], step["human_completion"]
        if chosen is None and human is not None:
            chosen = len(listed)
            listed.append((human if isinstance(human, str) else human["text"], 1))
        readable = all(isinstance(t, str) and r in (None, *RATINGS) for t, r in listed)
        if not readable or not (chosen is None or 0 <= chosen < len(listed)):
            raise ValueError("ratings are -1, 0 and 1, and the chosen one is of the list")
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{row.place}: row {row.index}: {where} is no rated step of PRM800K: "
            f"{type(error).__name__}: {error} (data.label)"
        ) from error
    by_rating: dict[int | None, Label] = {-1: 0.0, 0: settings.neutral, 1: 1.0, None: None}
    return [(text, by_rating[rating]) for text, rating in listed], chosen


def _benchmark(row: Row, settings: PairSettings) -> tuple[list[Message], list[StepPath]]:
    """ProcessBench: `label` is the index of the first wrong step, -1 where all are right. What
    follows a wrong step has no label.
    """
    problem, steps = row.values["problem"], _texts(row, "steps", "data.completions")
    first = column(row, settings.label, "data.label")
    if not isinstance(problem, str):
        raise _refuse(row, "problem", problem, "a text is expected", "data.map")
    if isinstance(first, bool) or first not in range(NO_ERROR, len(steps)):
        wanted = f"the index of one of {len(steps)} steps is expected, or -1"
        raise _refuse(row, settings.label, first, wanted, "data.label")
    right = len(steps) if first == NO_ERROR else first
    labels = [
        1.0 if place < right else 0.0 if place == right else None for place in range(len(steps))
    ]
    prompt: list[Message] = [{"role": "user", "content": problem}]
    return prompt, [StepPath(steps, tuple(labels))]
