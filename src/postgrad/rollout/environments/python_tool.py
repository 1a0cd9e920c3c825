"""A tool that runs Python which a model wrote, in the sandbox of code rewards."""

from postgrad.core.errors import RunError
from postgrad.rewards.sandbox.choice import shared
from postgrad.rewards.sandbox.client import Limits, Program, SandboxError

LIMITS = Limits()
STOPPED = {
    "cpu_time": f"it used up its {LIMITS.cpu_seconds:g} s of CPU time",
    "idle": f"it waited for more than {LIMITS.idle_seconds:g} s",
    "output": f"it wrote more than {LIMITS.output_bytes >> 20} MiB",
    "signal": "it crashed, or ran out of memory",
}


def ready() -> None:
    """Checks that this machine can run programs in a sandbox. Raises UsageError if not."""
    shared()


def python(code: str) -> str:
    """Runs a Python program and returns what it printed.

    Args:
        code: The program. Print what you want to know; nothing is kept for the next one.
    """
    # A program that draws random numbers or reads the clock is exact no more: docs/environments.md.
    try:
        end = shared().run([Program({"mode": "script", "sources": [code]})], LIMITS)
    except SandboxError as error:
        raise RunError(f"the sandbox of the tool `python` failed: {error}") from error
    printed = end.output.decode(errors="replace")
    if end.cause is None:
        return printed
    message = end.errors[0].strip() if end.cause == "exit" else ""
    reason = message or STOPPED.get(end.cause, f"it ended with exit code {end.code}")
    return f"{printed.rstrip()}\n{reason}".lstrip()
