"""IFEval (Zhou et al., 2023, arXiv:2311.07911): are the instructions of a row followed?"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import ValidationError

from postgrad.core.text import nearest
from postgrad.rewards.ifeval import form, keywords, length, whole
from postgrad.rewards.ifeval.instruction import Instruction
from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier

KINDS: dict[str, type[Instruction]] = keywords.KINDS | length.KINDS | form.KINDS | whole.KINDS


class IFEval(Verifier):
    """1 where a sample follows all instructions of its row, else 0.

    `loose` also tries the sample without its first line, its last, both, and without asterisks; an
    instruction is followed where any of these eight variants follows it.
    """

    highest: ClassVar[float | None] = 1.0

    instructions: str = "instruction_id_list"  # column with a list of ids, or JSON text of one
    kwargs: str = "kwargs"  # column with a mapping of arguments for each id; null means absent
    credit: Literal["all", "fraction"] = "all"  # "fraction": the share of instructions followed
    loose: bool = False

    def check(self, prompt: PromptView) -> str | None:
        try:
            self._read(prompt)
        except ValueError as error:
            return str(error)
        return None

    def score(self, prompt: PromptView, rollout: RolloutView) -> Score:
        asked = self._read(prompt)
        texts = list(variants(rollout.text)) if self.loose else [rollout.text]
        texts = [text for text in texts if text.strip()]
        followed = [any(map(instruction.follows, texts)) for _, instruction in asked]
        detail = [
            {"instruction": name, "followed": yes}
            for (name, _), yes in zip(asked, followed, strict=True)
        ]
        share = sum(followed) / len(followed)
        return Score(share if self.credit == "fraction" else float(all(followed)), detail)

    def _read(self, prompt: PromptView) -> list[tuple[str, Instruction]]:
        """The instructions of a row; ValueError where they cannot be read."""
        names = _column(prompt.metadata, self.instructions, "instructions")
        values = _column(prompt.metadata, self.kwargs, "kwargs")
        if not names:
            raise ValueError(f"column {self.instructions!r} names no instruction")
        if len(names) != len(values):
            raise ValueError(
                f"{len(names)} instructions in {self.instructions!r}, {len(values)} sets of values "
                f"in {self.kwargs!r}: one for each is expected"
            )
        return [
            (name, instruction(name, arguments))
            for name, arguments in zip(names, values, strict=True)
        ]


def instruction(name: Any, values: Any) -> Instruction:
    """The instruction with the id `name` and the arguments `values` (None values are dropped).

    Raises ValueError where the id is unknown or the arguments are wrong.
    """
    if name not in KINDS:
        close = nearest(str(name), KINDS)
        hint = f"did you mean {close!r}?" if close else f"known: {', '.join(KINDS)}"
        raise ValueError(f"no instruction is called {name!r}; {hint}")
    if not isinstance(values, Mapping | None):
        raise ValueError(f"values of {name}: a mapping is expected, not {values!r:.80}")
    arguments = {key: value for key, value in (values or {}).items() if value is not None}
    try:
        return KINDS[name].model_validate(arguments)
    except ValidationError as error:
        raise ValueError(f"values of {name}: {_problem(error)}") from error


def variants(text: str) -> Iterator[str]:
    """The eight variants of a text for the paper's loose accuracy."""
    lines = text.split("\n")
    for part in (lines, lines[1:], lines[:-1], lines[1:-1]):
        joined = text if part is lines else "\n".join(part).strip()
        yield joined
        yield joined.replace("*", "")


def _column(metadata: Mapping[str, Any], column: str, setting: str) -> list[Any]:
    if column not in metadata:
        close = nearest(column, metadata)
        hint = f"the nearest is {close!r}" if close else f"there are: {', '.join(metadata)}"
        raise ValueError(f"no column {column!r} ({hint}); name it with the setting `{setting}`")
    value = metadata[column]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"column {column!r} is text that is no JSON: {error}") from error
    if not isinstance(value, list):
        raise ValueError(f"column {column!r}: a list is expected, not {value!r:.80}")
    return value


def _problem(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"there is no {key!r}"
    if first["type"] == "extra_forbidden":
        return f"it takes no {key!r}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{key} = {first['input']!r:.80}: {message}" if key else message
