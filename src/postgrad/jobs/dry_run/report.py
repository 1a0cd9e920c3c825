"""What a dry run found: checks with their outcome, and problems that would have come later."""

import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from postgrad.core.errors import PostgradError, RunError, UsageError
from postgrad.jobs.stopping import Stopped
from postgrad.observe.console import Console

RECIPE, FAILURE = UsageError.exit_code, RunError.exit_code


@dataclass(frozen=True, slots=True)
class Problem:
    """What would have gone wrong, where, and what to do: one message. exit_code: RECIPE where the
    recipe or the data is wrong, FAILURE where something failed.
    """

    check: str
    message: str
    exit_code: int

    def to_json(self) -> dict[str, Any]:
        """kind: "recipe" or "failure"."""
        kind = "recipe" if self.exit_code == RECIPE else "failure"
        return {"check": self.check, "kind": kind, "message": self.message}


@dataclass(slots=True)
class Check:
    """One thing that was tried. detail: what came out, in a line; tried: False where another one
    failed before it.
    """

    name: str
    ok: bool = True
    tried: bool = True
    seconds: float = 0.0
    detail: str = ""

    @property
    def outcome(self) -> str:
        """In a word."""
        return ("passed" if self.ok else "failed") if self.tried else "not tried"

    def to_json(self) -> dict[str, Any]:
        """As its fields."""
        return {
            "name": self.name,
            "ok": self.ok,
            "tried": self.tried,
            "seconds": round(self.seconds, 3),
            "detail": self.detail,
        }


@dataclass(slots=True)
class Report:
    """Filled check by check. tracebacks: show where an error came from, for --debug.

    plan: its JSON, {} where none could be made. warnings: what a person should look at; they
    change no exit code.
    """

    console: Console
    tracebacks: bool = False
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])
    checks: list[Check] = field(default_factory=list[Check])
    problems: list[Problem] = field(default_factory=list[Problem])
    warnings: list[Problem] = field(default_factory=list[Problem])

    def check(self, name: str) -> "Trying":
        """Tries what is in its block. An error there is a problem, and the dry run goes on; an
        interrupt ends it.
        """
        return Trying(self, name)

    def failed(self, one: Check, error: Exception) -> None:
        """What was raised in a check."""
        if self.tracebacks:
            traceback.print_exception(error)
        if isinstance(error, PostgradError):
            self.problem(one, str(error), error.exit_code)
        elif isinstance(error, OSError):  # a disk, a network
            self.problem(one, str(error), FAILURE)
        else:  # code of others, memory
            self.problem(one, f"{type(error).__name__}: {error}", FAILURE)

    def problem(self, one: Check, message: str, exit_code: int = RECIPE) -> None:
        """A check did not pass."""
        one.ok = False
        self.problems.append(Problem(one.name, message, exit_code))

    def warn(self, one: Check, message: str) -> None:
        """A check passed, and there is something to look at."""
        self.warnings.append(Problem(one.name, message, RECIPE))

    def skip(self, name: str, why: str) -> None:
        """A check that could not be tried: another one failed before it."""
        self.checks.append(Check(name, ok=False, tried=False, detail=why))

    @property
    def exit_code(self) -> int:
        """0: clean. A wrong recipe comes first: mending it may mend the failure."""
        codes = [one.exit_code for one in self.problems]
        return max(codes, default=0)

    def to_json(self) -> dict[str, Any]:
        """plan, checks, problems and warnings."""
        return {
            "plan": dict(self.plan),
            "checks": [one.to_json() for one in self.checks],
            "problems": [one.to_json() for one in self.problems],
            "warnings": [one.to_json() for one in self.warnings],
        }

    def show(self) -> None:
        """Every check in a table, then what would have failed."""
        rows = [
            (one.name, one.outcome, f"{one.seconds:.1f} s" if one.tried else "", one.detail)
            for one in self.checks
        ]
        self.console.table("what was tried", ("check", "", "time", ""), rows)
        for one in self.warnings:
            self.console.warn(f"{one.check}: {one.message}")
        if not self.problems:
            skipped = [one.name for one in self.checks if not one.tried]
            but = f", but not all was tried: {', '.join(skipped)}" if skipped else ""
            self.console.note(f"dry run: nothing was found that would fail later{but}")
            return
        self.console.error(f"dry run, what would have failed later ({len(self.problems)}):")
        for number, one in enumerate(self.problems, 1):
            self.console.error(f"{number}. {one.check}: {one.message}")


class Trying:
    """The block of a check: see Report.check."""

    def __init__(self, report: Report, name: str) -> None:
        self._report = report
        self._check = Check(name)
        self._phase = report.console.phase(name)
        self._began = 0.0

    def __enter__(self) -> Check:
        self._began = time.perf_counter()
        self._phase.__enter__()
        return self._check

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._phase.__exit__(None, None, None)
        self._check.seconds = time.perf_counter() - self._began
        if error is not None and (isinstance(error, Stopped) or not isinstance(error, Exception)):
            return False
        if error is not None:
            self._report.failed(self._check, error)
        self._report.checks.append(self._check)
        return True
