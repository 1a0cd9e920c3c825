"""Programs run against tests in a sandbox: stdin and stdout, calls, assertions."""

import os
import re
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from postgrad.rewards.code_tests import (
    AssertionTest,
    CallTest,
    StdinTest,
    Test,
    read_tests,
    same_text,
    same_value,
)
from postgrad.rewards.sandbox.choice import shared
from postgrad.rewards.sandbox.client import End, Limits, Program, SandboxError
from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier

# Possessive, so that each character of a line is looked at once.
_FENCE = re.compile(r"[ \t]*+```[ \t]*+([^\s`]*+)[^`]*+$")
_LABELS = ("", "python", "python3", "py")
# Of the component's limits, so that a program ends before its verifier does; and what it costs to
# start and watch programs, which counts against none of them.
_SHARE, _OWN_SHARE = 0.8, 0.15
_LEAST_SECONDS = 0.01
_MESSAGE = 300  # characters


@dataclass
class _Budget:
    """What the programs of one sample may still use, and the sandbox for them."""

    cpu_seconds: float
    idle_seconds: float
    own_cpu_seconds: float


class Code(Verifier):
    """1 where the sample's program passes every test of its row, else 0.

    The program is the last fenced block that is Python or has no label. `tests` is the column of
    the tests (code_tests.py), "answer" or one of the row's others. A program that crashes or wants
    more than its limits has failed that test: a score with the cause in its detail. What is
    compared with a reference is compared out here, where no program can reach it.
    """

    tests: str = "answer"
    entry_point: str | None = None  # columns of the row
    setup: str | None = None
    prefix: str | None = None
    prelude: str = ""  # code before every program, after the prefix
    whole_text: bool = False  # the sample is the program, without fences
    partial: bool = False  # the fraction of tests that pass
    tolerance: float = Field(default=0.0, ge=0.0)
    test_cpu_seconds: float = Field(default=2.0, gt=0.0)
    test_idle_seconds: float = Field(default=5.0, gt=0.0)
    memory_mb: int = Field(default=512, ge=64)
    threads: int = Field(default=16, ge=1)
    output_bytes: int = Field(default=1 << 20, ge=1024)
    scratch_mb: int = Field(default=16, ge=1)
    unsafe: bool = False
    cpu_seconds: float = 5.0  # of the component: for all tests together
    wall_seconds: float = 30.0

    def prepare(self) -> None:
        shared(self.unsafe)

    def check(self, prompt: PromptView) -> str | None:
        try:
            self._tests(prompt)
        except ValueError as error:
            return str(error)
        return None

    def score(self, prompt: PromptView, rollout: RolloutView) -> Score:
        tests = self._tests(prompt)
        program = rollout.text if self.whole_text else last_block(rollout.text)
        if program is None:
            return Score(0.0, {"passed": 0, "tests": len(tests), "cause": "no_code"})
        sources = [part for part in (self._column(prompt, self.prefix), self.prelude) if part]
        budget = _Budget(
            _SHARE * self.cpu_seconds, _SHARE * self.wall_seconds, _OWN_SHARE * self.cpu_seconds
        )
        passed, detail = 0, {"tests": len(tests)}
        for place, test in enumerate(tests):
            cause, message = self._run(test, [*sources, program], budget)
            passed += cause is None
            if cause is not None and "cause" not in detail:
                detail |= {"test": place, "cause": cause, "message": message[-_MESSAGE:]}
            if cause is not None and not self.partial:
                break
        value = passed / len(tests) if self.partial else float(passed == len(tests))
        return Score(value, {"passed": passed} | detail)

    def _run(self, test: Test, sources: list[str], budget: _Budget) -> tuple[str | None, str]:
        """Why a test failed, with a message; None where it passed."""
        if min(budget.cpu_seconds, budget.idle_seconds) < _LEAST_SECONDS:
            spent = "cpu_time" if budget.cpu_seconds < _LEAST_SECONDS else "idle"
            return spent, "the tests before it used up the time of the whole sample"
        if budget.own_cpu_seconds < 0.0:
            raise SandboxError(
                f"to start programs alone took {_OWN_SHARE:.0%} of cpu_seconds = "
                f"{self.cpu_seconds:g}: the row has more tests than that allows, raise it"
            )
        limits = Limits(
            cpu_seconds=min(self.test_cpu_seconds, budget.cpu_seconds),
            idle_seconds=min(self.test_idle_seconds, budget.idle_seconds),
            memory_bytes=self.memory_mb << 20,
            threads=self.threads,
            output_bytes=self.output_bytes,
            scratch_bytes=self.scratch_mb << 20,
        )
        end = shared(self.unsafe).run(_programs(test, sources, limits), limits)
        budget.cpu_seconds -= end.cpu_seconds
        budget.idle_seconds -= end.idle_seconds
        budget.own_cpu_seconds -= end.own_cpu_seconds
        if end.cause is None:
            return (None, "") if self._is_right(test, end) else ("wrong_answer", _told(end))
        if end.cause == "exit" and isinstance(test, AssertionTest):
            return "wrong_answer", _told(end)
        return end.cause, _told(end)

    def _is_right(self, test: Test, end: End) -> bool:
        if isinstance(test, StdinTest):
            return same_text(test.wanted, end.output.decode(errors="replace"), self.tolerance)
        if isinstance(test, AssertionTest):
            return end.result == {"passed": True}
        try:
            return same_value(test.wanted, end.result["value"], self.tolerance)
        except (LookupError, TypeError, ValueError, RecursionError):
            return False  # a program wrote this itself, and not well

    def _tests(self, prompt: PromptView) -> list[Test]:
        value = prompt.answer if self.tests == "answer" else prompt.metadata.get(self.tests)
        if value is None:
            raise ValueError(f"the row has no tests in {self.tests!r}")
        entry = self._column(prompt, self.entry_point)
        return read_tests(value, entry or None, self._column(prompt, self.setup))

    def _column(self, prompt: PromptView, name: str | None) -> str:
        if name is None:
            return ""
        value = prompt.metadata.get(name)
        if isinstance(value, list) and all(isinstance(line, str) for line in value):
            return "\n".join(value)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"column {name!r} is {type(value).__name__}, not text")
        return value or ""


def last_block(text: str) -> str | None:
    """The last fenced block that is labelled Python or not at all; None without one."""
    found: str | None = None
    label, lines = None, list[str]()
    for line in text.splitlines(keepends=True):
        fence = _FENCE.match(line)
        if label is None and fence:
            label, lines = fence[1].lower(), []
        elif label is not None and fence and not fence[1]:
            if label in _LABELS:
                found = "".join(lines)
            label = None
        else:
            lines.append(line)
    return found


def _programs(test: Test, sources: list[str], limits: Limits) -> list[Program]:
    """What to run for a test; the first decides. No reference answer goes in, but in assertions."""
    if isinstance(test, StdinTest):
        return [Program({"mode": "script", "sources": sources}, _bytes(test.given))]
    if isinstance(test, CallTest):
        arguments = list(test.arguments)
        task = {"mode": "call", "sources": sources, "function": test.function}
        return [Program(task | {"arguments": [_plain(argument) for argument in arguments]})]
    judge: dict[str, Any] = {
        "mode": "judge",
        "sources": test.sources,
        "entry_point": test.entry_point,
        "line_bytes": limits.output_bytes,
    }
    (asked, ask), (reply, replied) = os.pipe(), os.pipe()
    return [
        Program(judge, pipes=(ask, reply)),
        Program({"mode": "serve", "sources": sources}, pipes=(asked, replied)),
    ]


def _bytes(text: str) -> bytes:
    """Of a row; JSON may hold half a surrogate pair."""
    return text.encode("utf-8", "surrogatepass")


def _plain(argument: Any) -> Any:
    """JSON of a data set in the writing of values.py."""
    if isinstance(argument, list):
        return [_plain(item) for item in argument]
    if isinstance(argument, dict):
        return {"dict": [[key, _plain(value)] for key, value in argument.items()]}
    return argument


def _told(end: End) -> str:
    """The last line of each program's standard error."""
    lines = [errors.rpartition("\n")[2] for errors in end.errors]
    return "; ".join(line for line in lines if line)
