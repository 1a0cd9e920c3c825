"""IFEval (Zhou et al., 2023, arXiv:2311.07911): are the instructions of a row followed?

With the kinds of IF-RLVR and IFBench (Pyatkin et al., 2025, arXiv:2507.02833).
"""

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import ValidationError

from postgrad.core.text import nearest
from postgrad.rewards.ifeval import (
    copying,
    counts,
    form,
    functions,
    keywords,
    length,
    markup,
    positions,
    sequences,
    tasks,
    whole,
)
from postgrad.rewards.ifeval.instruction import Instruction
from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier

KINDS: dict[str, type[Instruction]] = (
    keywords.KINDS
    | length.KINDS
    | form.KINDS
    | whole.KINDS
    | positions.KINDS
    | copying.KINDS
    | counts.KINDS
    | sequences.KINDS
    | markup.KINDS
    | tasks.KINDS
    | functions.KINDS
)


class IFEval(Verifier):
    """1 where a sample follows all instructions of its row, else 0.

    `loose` also tries the sample without its first line, its last, both, and without asterisks; an
    instruction is followed where any of these eight variants follows it.
    """

    highest: ClassVar[float | None] = 1.0

    # Column with a list of ids, or with both as Open-Instruct writes them: a mapping with
    # `instruction_id` and `kwargs`, or `func_name`. May be text. "answer": the reference answer.
    instructions: str = "instruction_id_list"
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
        place = self.instructions
        names = _column(prompt, place, "instructions")
        while isinstance(names, list) and len(names) == 1 and _holds_more(names[0]):
            names = _decoded(names[0], place)
        if isinstance(names, Mapping):
            names, values = (_listed(value, place) for value in _both(names, place))
        else:
            names, place = _listed(names, place), self.kwargs
            values = _listed(_column(prompt, place, "kwargs"), place)
        if not names:
            raise ValueError(f"{_place(self.instructions)} names no instruction")
        if len(names) != len(values):
            raise ValueError(
                f"{len(names)} instructions in {self.instructions!r}, {len(values)} sets of values "
                f"in {place!r}: one for each is expected"
            )
        return [
            (name, instruction(name, arguments))
            for name, arguments in zip(names, values, strict=True)
        ]


def instruction(name: Any, values: Any) -> Instruction:
    """The instruction with the id `name` and the arguments `values` (None values are dropped).

    Raises ValueError where the id is unknown or the arguments are wrong.
    """
    if not isinstance(name, str) or name not in KINDS:
        close = nearest(str(name), KINDS)
        hint = f"did you mean {close!r}?" if close else f"known: {', '.join(KINDS)}"
        raise ValueError(f"no instruction is called {name!r}; {hint}")
    if not isinstance(values, Mapping | None):
        raise ValueError(f"values of {name}: a mapping is expected, not {values!r:.80}")
    renamed = functions.RENAMED.get(name, {})
    arguments = {
        renamed.get(key, key): value for key, value in (values or {}).items() if value is not None
    }
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


def _column(prompt: PromptView, column: str, setting: str) -> Any:
    """The value of a column, decoded where it is text."""
    metadata = prompt.metadata
    if column == "answer":
        value = prompt.answer
    elif column in metadata:
        value = metadata[column]
    else:
        close = nearest(column, metadata)
        hint = f"the nearest is {close!r}" if close else f"there are: {', '.join(metadata)}"
        raise ValueError(f"no column {column!r} ({hint}); name it with the setting `{setting}`")
    return _decoded(value, column)


def _decoded(value: Any, column: str) -> Any:
    """The value that a text stands for, as JSON or as Python writes it: Open-Instruct has both."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        problem = f"{error!s:.200}"
        raise ValueError(
            f"{_place(column)} is text that is neither JSON nor a Python literal: {problem}"
        ) from error


def _holds_more(value: Any) -> bool:
    """Whether a list of this alone is a list around a mapping, or around the text of one."""
    return isinstance(value, Mapping) or (
        isinstance(value, str) and value.lstrip().startswith(("[", "{"))
    )


def _both(mapping: Mapping[str, Any], column: str) -> tuple[Any, Any]:
    """Ids and values of one mapping."""
    if "func_name" in mapping:  # a row of the older verifier: one function, its values beside it
        values = {key: value for key, value in mapping.items() if key != "func_name"}
        return [mapping["func_name"]], [values]
    if missing := [key for key in ("instruction_id", "kwargs") if key not in mapping]:
        raise ValueError(f"{_place(column)}: there is no {missing[0]!r} in {dict(mapping)!r:.80}")
    return mapping["instruction_id"], mapping["kwargs"]


def _listed(value: Any, column: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{_place(column)}: a list is expected, not {value!r:.80}")
    if len(value) > 1 and all(isinstance(item, Mapping) and "kwargs" in item for item in value):
        raise ValueError(f"{_place(column)} has {len(value)} sets of instructions; one is expected")
    return value


def _place(column: str) -> str:
    return "the reference answer" if column == "answer" else f"column {column!r}"


def _problem(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"there is no {key!r}"
    if first["type"] == "extra_forbidden":
        return f"it takes no {key!r}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{key} = {first['input']!r:.80}: {message}" if key else message
