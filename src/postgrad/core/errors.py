"""Errors for people: the message says what is wrong, where, and what to do."""

from collections.abc import Sequence


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


class DiskFull(RunError):
    """The disk is full; files that were written before are intact."""
