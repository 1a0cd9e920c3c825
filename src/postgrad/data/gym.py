"""Rows made by reasoning-gym: procedural problems with answers and their own scorers."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.core.names import nearest
from postgrad.core.seeds import integer
from postgrad.data.files import Values

PREFIX = "reasoning-gym:"
KEPT = 4  # tasks: a run reads its sets again and again, and some make all words at their start
_made: dict[str, Any] = {}


def read_gym(
    task: str, parameters: dict[str, Any], size: int, seed: int
) -> Iterator[tuple[str, Values]]:
    """(place, values) of `size` problems.

    Values are the problem's entry (question, answer, metadata) and what rebuilds it exactly:
    `reasoning_gym.create_dataset(task, **parameters)[index]` (JSON turns the tuples of an entry
    into lists, which the scorers of arc_agi and rearc do not take). reasoning-gym seeds problem i
    with seed + i, so that near seeds would share problems: ours is mixed first.
    """
    whole = {**parameters, "size": size, "seed": integer(seed, "reasoning-gym")}
    problems = _problems(task, parameters, whole)
    for index in range(size):
        entry = json.loads(json.dumps(problems[index], default=str))
        yield (
            f"{PREFIX}{task} problem {index}",
            {
                **entry,
                "task": task,
                "parameters": whole,
                "index": index,
            },
        )


def _problems(task: str, parameters: dict[str, Any], whole: dict[str, Any]) -> Any:
    import reasoning_gym  # a second to import, needed only here
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        close = nearest(task, DATASETS)
        hint = f"did you mean {close!r}?" if close else f"there are {len(DATASETS)} in its gallery"
        raise UsageError(f"data.path: reasoning-gym has no task {task!r}; {hint}")
    known = {f.name for f in dataclasses.fields(DATASETS[task][1])} - {"size", "seed"}
    for key in parameters:
        if key in ("size", "seed"):
            raise UsageError(f"data.task.{key}: say data.{key} instead")
        if key not in known:
            hint = f"did you mean {nearest(key, known)!r}? " if nearest(key, known) else ""
            raise UsageError(
                f"data.task.{key}: no parameter of task {task!r}; {hint}known: {sorted(known)}"
            )
    try:
        key = json.dumps([task, whole], sort_keys=True, default=repr)
        if key not in _made:
            found = reasoning_gym.create_dataset(task, **whole)
            while len(_made) >= KEPT:
                del _made[next(iter(_made))]
            _made[key] = found
        return _made[key]
    except (AssertionError, TypeError, ValueError) as error:
        raise UsageError(f"data.task: task {task!r} refuses its parameters: {error}") from error
