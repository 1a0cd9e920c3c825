"""Errors for people: the message says what is wrong, where, and what to do."""

import traceback
from collections.abc import Sequence
from pathlib import PurePath
from typing import cast

# What to do where a checkpoint is not of the model that is here.
AS_IT_BEGAN = (
    "go on with the model, adapter and optimizer that the run began with (recipe.json in its "
    "run_dir names them), or put its own files back"
)


class PostgradError(Exception):
    """Base of all errors whose message is for people; the command line prints the message alone."""

    exit_code = 1


class UsageError(PostgradError):
    """The command, the recipe or the data is wrong: nothing was run, exit code 2."""

    exit_code = 2


class SettingsError(UsageError):
    """Settings of one table are wrong: at which keys, and what is wrong there. A recipe that has
    the table can name the line of each key.
    """

    def __init__(self, table: str, problems: Sequence[tuple[tuple[str | int, ...], str]]) -> None:
        """table: what the message calls it. problems: each with its place in the table, () for one
        of several keys together.
        """
        lines = (f"{'.'.join(map(str, (table, *place)))}: {text}" for place, text in problems)
        super().__init__("\n".join(lines))
        self.problems = tuple(problems)


class RunError(PostgradError):
    """A run that had started cannot go on: exit code 1."""


class WorkerLost(RunError):
    """A process of the run, or its machine, was lost; the run can resume from its checkpoint."""


class ScoresMissing(RunError):
    """Verifiers or the environment gave too few scores to go on; no weight is wrong by that."""


class Diverged(RunError):
    """The policy or its gradient is not finite: going on from these weights is of no use."""


class DiskFull(RunError):
    """The disk is full; files that were written before are intact."""


def described(error: BaseException) -> str:
    """What code of others raised, as one line: type, message, and the line that raised it. Of a
    group, which parts that work side by side raise, the first one.
    """
    if isinstance(error, BaseExceptionGroup):
        first, *others = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return described(first) + (f", and {len(others)} more" if others else "")
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if not frame.filename.startswith("<frozen ")]  # of imports
    if isinstance(error, SyntaxError):  # whose message has file and line of its text
        frames = []
    where = f" ({PurePath(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:500]}{where}"
