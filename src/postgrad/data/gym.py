"""Rows that a program makes: reasoning-gym's procedural problems with answers and their own
scorers, or what a function of the user's returns.

Some tasks of reasoning-gym iterate over sets, so the order of hashes decides their problems
(word_ladder, ransom_note, polynomial_multiplication and others). All are made in a process with a
fixed hash seed, `python -m postgrad.data.gym`; the workers that score them have the same seed.
"""

import dataclasses
import importlib.metadata
import inspect
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from postgrad.core.errors import PostgradError, UsageError, described
from postgrad.core.files import computed_once, version
from postgrad.core.process import import_path, inherited
from postgrad.core.seeds import integer
from postgrad.core.text import nearest, resolve
from postgrad.data.files import RowValues

PREFIX = "reasoning-gym:"
KEPT = 4  # tasks in memory: a run reads its sets several times, and making one takes seconds
_cached_entries: dict[str, list[RowValues]] = {}


def read_gym(
    task: str, parameters: dict[str, Any], size: int, seed: int
) -> Iterator[tuple[str, RowValues]]:
    """(place, values) of `size` problems, which the user's cache keeps.

    Values are the problem's entry (question, answer, metadata) and what rebuilds it exactly:
    `reasoning_gym.create_dataset(task, **parameters)[index]` (JSON turns the tuples of an entry
    into lists, which the scorers of arc_agi and rearc do not take). reasoning-gym seeds problem i
    with seed + i, so that near seeds would share problems: ours is mixed first.
    Raises UsageError for what the task does not know, refuses or cannot make.
    """
    arguments = {**parameters, "size": size, "seed": integer(seed, "reasoning-gym")}
    request = json.dumps([task, parameters, arguments], sort_keys=True, default=repr)
    if request not in _cached_entries:
        text = computed_once("problems", _made_by(request), lambda: json.dumps(_ask(request)))
        while len(_cached_entries) >= KEPT:
            del _cached_entries[next(iter(_cached_entries))]
        _cached_entries[request] = json.loads(text)
    for index, entry in enumerate(_cached_entries[request]):
        yield (
            f"{PREFIX}{task} problem {index}",
            {**entry, "task": task, "parameters": arguments, "index": index},
        )


def _made_by(request: str) -> str:
    libraries = {name: version(name) for name in sorted(_libraries())}
    code = Path(__file__).read_text("utf-8")
    return json.dumps([request, platform.python_version(), libraries, code])


def _libraries() -> set[str]:
    """reasoning-gym, and all that is installed with it."""
    installed: set[str] = set()
    names = ["reasoning-gym"]
    while names:
        name = names.pop()
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # of another system or Python
            continue
        installed.add(name)
        needs = [need for need in needs if "extra ==" not in need]
        names += {re.split(r"[^\w.-]", need, maxsplit=1)[0] for need in needs} - installed
    return installed


def _ask(request: str) -> list[RowValues]:
    """The entries of a request, made in a separate process. Raises UsageError where it refuses."""
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "postgrad.data.gym"],
        input=request,
        env=inherited() | import_path() | {"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        last = ended.stderr.strip().rpartition("\n")[2]
        raise UsageError(f"data.path: the process that runs reasoning-gym ended: {last}")
    answer = json.loads(ended.stdout)
    if "refused" in answer:
        raise UsageError(answer["refused"])
    return answer["entries"]


def main() -> None:
    """Reads a request from standard input; writes {"entries": [...]} or {"refused": reason}."""
    task, parameters, arguments = json.loads(sys.stdin.read())
    output, sys.stdout = sys.stdout, sys.stderr  # what the library prints is no answer
    try:
        answer = {"entries": _entries(task, parameters, arguments)}
    except UsageError as error:
        answer = {"refused": str(error)}
    output.write(json.dumps(answer, default=str))


def _entries(task: str, parameters: dict[str, Any], arguments: dict[str, Any]) -> list[RowValues]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        close = nearest(task, DATASETS)
        hint = f"did you mean {close!r}?" if close else f"there are {len(DATASETS)} in its gallery"
        raise UsageError(f"data.path: reasoning-gym has no task {task!r}; {hint}")
    accepted = {f.name for f in dataclasses.fields(DATASETS[task][1])} - {"size", "seed"}
    for key in parameters:
        if key in ("size", "seed"):
            raise UsageError(f"data.task.{key}: say data.{key} instead")
        if key not in accepted:
            hint = f"did you mean {nearest(key, accepted)!r}? " if nearest(key, accepted) else ""
            raise UsageError(
                f"data.task.{key}: no parameter of task {task!r}; {hint}known: {sorted(accepted)}"
            )
    try:
        problems = reasoning_gym.create_dataset(task, **arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise UsageError(f"data.task: task {task!r} refuses its parameters: {error}") from error
    entries: list[RowValues] = []
    for index in range(arguments["size"]):
        try:
            entries.append(problems[index])
        except Exception as error:  # of the library, whatever it is
            raise UsageError(
                f"data.task: task {task!r} makes no problem {index} with these parameters: "
                f"{type(error).__name__}: {error}. Try other parameters, or another data.seed"
            ) from error
    return entries


if __name__ == "__main__":
    main()


def is_function(path: str) -> bool:
    """Whether a recipe's data.path is "package.module:function"."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", path) is not None


def read_function(
    path: str, task: dict[str, Any], size: int, seed: int
) -> Iterator[tuple[str, RowValues]]:
    """(place, values) of the rows that `path`(size, seed, **task) yields: JSON values by column.

    The same arguments must give the same rows. Raises UsageError where there is no such function,
    it does not take `task`, or a row is no JSON object.
    """
    function = resolve(path, {}, "function of rows")
    try:
        inspect.signature(function).bind(size, seed, **task)
    except TypeError as error:
        raise UsageError(
            f"data.task: {path} cannot be called with (size, seed"
            f"{''.join(f', {key}=' for key in task)}): {error}"
        ) from error
    for number, row in enumerate(_yielded(function, path, size, seed, task)):
        place = f"{path} row {number}"
        try:
            values = json.loads(json.dumps(row, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UsageError(f"{place}: not JSON: {error}; fix the function") from error
        if not isinstance(values, dict):
            raise UsageError(f"{place}: a row is a JSON object, this is {type(row).__name__}")
        yield place, values


def _yielded(function: Any, path: str, size: int, seed: int, task: dict[str, Any]) -> Iterator[Any]:
    """What the user's function yields. Raises UsageError, with the row, where it raises."""
    number = 0
    try:
        for row in function(size, seed, **task):
            yield row
            number += 1
    except PostgradError:
        raise
    except Exception as error:
        raise UsageError(
            f"{path} row {number}: the function raised {described(error)}; fix it there"
        ) from error
