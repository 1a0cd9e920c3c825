"""The report of a dry run: checks with their outcome, and findings that would have come later."""

import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from postgrad.core.errors import PostgradError, RunError, UsageError
from postgrad.core.progress import reported_to
from postgrad.observe.console import Console
from postgrad.training.run import Stopped

RECIPE, FAILURE = UsageError.exit_code, RunError.exit_code


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that would have gone wrong in the run, or that a person should look at."""

    check: str  # the name of the check that found it
    message: str  # what is wrong, and what to do about it
    exit_code: int  # RECIPE: the recipe or the data is wrong; FAILURE: something failed

    def to_json(self) -> dict[str, Any]:
        """check, message, and kind: "recipe" or "failure" by the exit code."""
        kind = "recipe" if self.exit_code == RECIPE else "failure"
        return {"check": self.check, "kind": kind, "message": self.message}


@dataclass(slots=True)
class Check:
    """One check of a dry run and its outcome."""

    name: str  # such as "model" or "rows of eval"
    ok: bool = True
    tried: bool = True  # False where a check that it needs failed before it
    seconds: float = 0.0
    detail: str = ""  # the result in a line: "120 of 128 rows are used"

    @property
    def outcome(self) -> str:
        return ("passed" if self.ok else "failed") if self.tried else "not tried"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ok": self.ok,
            "tried": self.tried,
            "seconds": round(self.seconds, 3),
            "detail": self.detail,
        }


@dataclass(slots=True)
class Report:
    """The checks and findings of one dry run, filled check by check."""

    console: Console
    tracebacks: bool = False  # print the traceback of every error (--debug)
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])  # JSON; {} without a plan
    checks: list[Check] = field(default_factory=list[Check])
    problems: list[Finding] = field(default_factory=list[Finding])
    warnings: list[Finding] = field(default_factory=list[Finding])  # they change no exit code

    def check(self, name: str) -> "CheckBlock":
        """Runs the block of a `with` as a check. An error in it is added to the problems, and the
        dry run goes on; an interrupt ends the dry run.
        """
        return CheckBlock(self, name)

    def failed(self, check: Check, error: Exception) -> None:
        """Adds an error that was raised in a check to the problems."""
        if self.tracebacks:
            traceback.print_exception(error)
        if isinstance(error, PostgradError):
            self.problem(check, str(error), error.exit_code)
        elif isinstance(error, OSError):  # a disk, a network
            self.problem(check, str(error), FAILURE)
        else:  # code of others, memory
            self.problem(check, f"{type(error).__name__}: {error}", FAILURE)

    def problem(self, check: Check, message: str, exit_code: int = RECIPE) -> None:
        """Marks a check as failed and adds the message to the problems."""
        check.ok = False
        self.problems.append(Finding(check.name, message, exit_code))

    def warn(self, check: Check, message: str) -> None:
        """Adds a warning; the check still passes."""
        self.warnings.append(Finding(check.name, message, RECIPE))

    def skip(self, name: str, why: str) -> None:
        """Adds a check that was not tried, because of `why`."""
        self.checks.append(Check(name, ok=False, tried=False, detail=why))

    @property
    def exit_code(self) -> int:
        """0 without problems, else the highest: RECIPE before FAILURE, because a mended recipe may
        mend the failure too.
        """
        codes = [problem.exit_code for problem in self.problems]
        return max(codes, default=0)

    def to_json(self) -> dict[str, Any]:
        """JSON with the keys plan, checks, problems and warnings."""
        return {
            "plan": dict(self.plan),
            "checks": [check.to_json() for check in self.checks],
            "problems": [problem.to_json() for problem in self.problems],
            "warnings": [warning.to_json() for warning in self.warnings],
        }

    def show(self) -> None:
        """Prints the table of checks, then warnings and problems."""
        rows = [
            (
                check.name,
                check.outcome,
                f"{check.seconds:.1f} s" if check.tried else "",
                check.detail,
            )
            for check in self.checks
        ]
        self.console.table("what was tried", ("check", "", "time", ""), rows)
        for warning in self.warnings:
            self.console.warn(f"{warning.check}: {warning.message}")
        if not self.problems:
            skipped = [check.name for check in self.checks if not check.tried]
            but = f", but not all was tried: {', '.join(skipped)}" if skipped else ""
            self.console.note(f"dry run: no check failed{but}")
            return
        self.console.error(f"dry run, what would have failed later ({len(self.problems)}):")
        for number, problem in enumerate(self.problems, 1):
            self.console.error(f"{number}. {problem.check}: {problem.message}")


class CheckBlock:
    """The context manager of `Report.check`: times a check and reports what is raised in it."""

    def __init__(self, report: Report, name: str) -> None:
        self._report = report
        self._check = Check(name)
        self._stack = ExitStack()
        self._began = 0.0

    def __enter__(self) -> Check:
        self._began = time.perf_counter()
        shown = self._stack.enter_context(self._report.console.phase(self._check.name))
        self._stack.enter_context(reported_to(shown.count))
        return self._check

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._stack.close()
        self._check.seconds = time.perf_counter() - self._began
        if error is not None and (isinstance(error, Stopped) or not isinstance(error, Exception)):
            return False
        if error is not None:
            self._report.failed(self._check, error)
        self._report.checks.append(self._check)
        return True
