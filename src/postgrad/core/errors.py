"""The errors a person sees: one message that says what is wrong, where, and what to do."""


class PostgradError(Exception):
    """Base of every error with a message for people; the command line prints only that."""

    exit_code = 1


class UsageError(PostgradError):
    """The command, the recipe or the data is wrong: nothing was run, exit code 2."""

    exit_code = 2


class RunError(PostgradError):
    """A run that had started cannot go on: exit code 1."""


class WorkerLost(RunError):
    """A process of the run, or its machine, was lost: it can go on from its last checkpoint."""


class DiskFull(RunError):
    """There is no room for what was to be written; what was written before stands."""
