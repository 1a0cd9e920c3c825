"""Programs run against tests in a sandbox: stdin and stdout, calls, assertions."""

import os
import re
from dataclasses import dataclass
from typing import Any, ClassVar

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
# Shares of the component's time limits: programs get the first, so that they end before their
# verifier does; starting and watching them gets the second, and does not count against programs.
_SHARE, _OWN_SHARE = 0.8, 0.15
_LEAST_SECONDS = 0.01
_MESSAGE = 300  # characters of a test's message that are kept


@dataclass
class _Budget:
    """Seconds that are left for all the programs of one sample."""

    cpu_seconds: float  # of the programs themselves
    idle_seconds: float  # in which they neither run nor wait for a processor
    own_cpu_seconds: float  # of the sandbox, to start and watch them


class Code(Verifier):
    """1 where the sample's program passes every test of its row, else 0.

    The program is the last closed block between fences that is labelled Python or has no label. A
    program that crashes or exceeds a limit has failed that test, and the score's detail has the
    cause. Output is compared with the reference in this process, which no program can reach.
    """

    highest: ClassVar[float | None] = 1.0

    tests: str = "answer"  # column with the tests (code_tests.py): "answer" or one of the metadata
    entry_point: str | None = None  # column with the name of the function to call
    setup: str | None = None  # column with code before every assertion
    prefix: str | None = None  # column with code before every program, such as a signature
    prelude: str = ""  # code before every program, after the prefix
    whole_text: bool = False  # the sample is the program, without fences
    partial: bool = False  # score the fraction of tests that pass
    tolerance: float = Field(default=0.0, ge=0.0)  # absolute or relative, between two numbers
    test_cpu_seconds: float = Field(default=2.0, gt=0.0)  # of one test
    test_idle_seconds: float = Field(default=5.0, gt=0.0)  # of one test
    memory_mb: int = Field(default=512, ge=64)  # address space of a program
    threads: int = Field(default=16, ge=1)
    output_bytes: int = Field(default=1 << 20, ge=1024)  # largest file or stream it can write
    scratch_mb: int = Field(default=16, ge=1)  # its /tmp
    unsafe: bool = False  # run programs without isolation where the machine has none
    cpu_seconds: float = 5.0  # of the component: for all tests together
    wall_seconds: float = 30.0  # of the component

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
        program = rollout.text if self.whole_text else program_in(rollout.text)
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
        """(cause, message) of a test that failed; (None, "") where it passed."""
        if min(budget.cpu_seconds, budget.idle_seconds) < _LEAST_SECONDS:
            spent = "cpu_time" if budget.cpu_seconds < _LEAST_SECONDS else "idle"
            return spent, "earlier tests used up the time of this sample"
        if budget.own_cpu_seconds < 0.0:
            raise SandboxError(
                f"starting the programs took {_OWN_SHARE:.0%} of cpu_seconds = "
                f"{self.cpu_seconds:g}: the row has too many tests for it, raise cpu_seconds"
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
            return (None, "") if self._is_right(test, end) else ("wrong_answer", _error_lines(end))
        if end.cause == "exit" and isinstance(test, AssertionTest):
            return "wrong_answer", _error_lines(end)
        return end.cause, _error_lines(end)

    def _is_right(self, test: Test, end: End) -> bool:
        if isinstance(test, StdinTest):
            return same_text(test.wanted, end.output.decode(errors="replace"), self.tolerance)
        if isinstance(test, AssertionTest):
            return end.result == {"passed": True}
        try:
            return same_value(test.wanted, end.result["value"], self.tolerance)
        except (LookupError, TypeError, ValueError, RecursionError):
            return False  # the program wrote the result itself, and it is malformed

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


def program_in(text: str) -> str | None:
    """The last fenced block that is labelled Python or not at all; None without one. A block that
    is not closed is none: the sample ended within it. It loses the indentation of its fence, as
    blocks of a list are indented as a whole, which Python refuses; where the fence alone is
    indented, the block is as it is.
    """
    block = _last_block(text)
    if block is None:
        return None
    indent, lines = block
    if not all(line.startswith(indent) for line in lines if not line.isspace()):
        indent = ""
    return "".join(line.removeprefix(indent) for line in lines)


def _last_block(text: str) -> tuple[str, list[str]] | None:
    """White space before the opening fence of the last block, and the block's lines."""
    block: tuple[str, list[str]] | None = None
    label, indent, lines = None, "", list[str]()
    for line in text.splitlines(keepends=True):
        fence = _FENCE.match(line)
        if label is None and fence:
            label, indent, lines = fence[1].lower(), line.partition("`")[0], []
        elif label is not None and fence and not fence[1]:
            if label in _LABELS:
                block, lines = (indent, lines), []
            label = None
        else:
            lines.append(line)
    return block


def _programs(test: Test, sources: list[str], limits: Limits) -> list[Program]:
    """The programs to run for a test; how the first one ends decides.

    Only assertions give reference answers to a program, and it is not the model's one.
    """
    if isinstance(test, StdinTest):
        return [Program({"mode": "script", "sources": sources}, _bytes(test.stdin))]
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
    (ask_read, ask_write), (reply_read, reply_write) = os.pipe(), os.pipe()
    return [
        Program(judge, pipes=(ask_write, reply_read)),
        Program({"mode": "serve", "sources": sources}, pipes=(ask_read, reply_write)),
    ]


def _bytes(text: str) -> bytes:
    """UTF-8 of a row's text; JSON may hold half a surrogate pair."""
    return text.encode("utf-8", "surrogatepass")


def _plain(argument: Any) -> Any:
    """An argument from a data set's JSON in the encoding of sandbox/values.py."""
    if isinstance(argument, list):
        return [_plain(item) for item in argument]
    if isinstance(argument, dict):
        return {"dict": [[key, _plain(value)] for key, value in argument.items()]}
    return argument


def _error_lines(end: End) -> str:
    """The last line of each program's standard error, joined by semicolons."""
    lines = [errors.rpartition("\n")[2] for errors in end.errors]
    return "; ".join(line for line in lines if line)
