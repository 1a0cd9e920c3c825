"""Tests of programs as data sets write them, and the comparison of output with expected output.

- stdin: {"inputs": [text, ...], "outputs": [text, ...]}
- calls: the same with "fn_name"; inputs are lists of arguments, outputs values
- [{"input": ..., "output": ..., "testtype": "stdin" | "functional"}, ...], as LiveCodeBench
- assertions: code as text, or a list of texts; `check(candidate)` of HumanEval is called
- a list of one text that is any of these
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from typing import Any

_LONGEST_NUMBER = 400  # characters
_LONGEST_BITS = 1 << 15  # of an integer that is compared within a tolerance
# No number of a program overflows, and none that is no number is an exception.
_EXACTLY = Context(prec=2 * _LONGEST_NUMBER, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])


@dataclass(frozen=True, slots=True)
class StdinTest:
    """A run that reads `stdin` and should print `wanted`."""

    stdin: str
    wanted: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """A call of `function`, or of that method of class Solution, that should return `wanted`."""

    function: str
    arguments: tuple[Any, ...]  # JSON values
    wanted: Any  # a JSON value


@dataclass(frozen=True, slots=True)
class AssertionTest:
    """Code that raises where the program is wrong."""

    sources: tuple[str, ...]  # run one after another, the last one holds the assertions
    entry_point: str | None  # name of the function that HumanEval's `check(candidate)` gets


Test = StdinTest | CallTest | AssertionTest


def read_tests(value: Any, entry_point: str | None = None, setup: str = "") -> list[Test]:
    """The tests of a row, at least one. setup: code before every assertion.

    Raises ValueError where `value` has none of the forms above.
    """
    value = _parsed(value)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = _parsed(value[0])  # of a column that has a list of references
    if isinstance(value, str) and value.strip():
        tests: list[Test] = [_assertion(value, entry_point, setup)]
    elif isinstance(value, Mapping):
        tests = _in_columns(value, entry_point)
    elif isinstance(value, list):
        tests = [
            _assertion(entry, entry_point, setup)
            if isinstance(entry, str)
            else _case(entry, entry_point)
            for entry in value
        ]
    else:
        raise ValueError(f"the tests are {_kind(value)}, not text, an object or a list")
    if not tests:
        raise ValueError("there are no tests")
    return tests


def _parsed(value: Any) -> Any:
    """The value of a text that is JSON by its first letter. Raises ValueError where it is not."""
    if not (isinstance(value, str) and value.lstrip()[:1] in ("{", "[")):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"the tests are no JSON: {error}") from error


def same_text(wanted: str, got: str, tolerance: float = 0.0) -> bool:
    """Whether two texts are equal line by line.

    A run of white space counts as one space, and empty lines at the end do not count. tolerance:
    two words that are both numbers may differ by that much, absolute or relative.
    """
    wanted_lines, got_lines = _lines(wanted), _lines(got)
    if wanted_lines == got_lines or not tolerance or len(wanted_lines) != len(got_lines):
        return wanted_lines == got_lines
    return all(
        len(a) == len(b) and all(_same_word(x, y, tolerance) for x, y in zip(a, b, strict=True))
        for a, b in zip(wanted_lines, got_lines, strict=True)
    )


def same_value(wanted: Any, got: Any, tolerance: float = 0.0) -> bool:
    """Whether the JSON value `wanted` equals `got`, a value encoded by sandbox/values.py.

    A tuple equals a list, and a dict's key equals its text. True is not 1; 1 is 1.0. `got` comes
    from a program: sets are never built, and dicts only with as many keys as `wanted` has, since a
    million keys with one hash would hold up the worker. Raises ValueError or TypeError for what
    values.py never writes.
    """
    if isinstance(got, dict) and len(got) == 1:
        ((kind, inner),) = got.items()
        if kind == "dict":
            return isinstance(wanted, Mapping) and _same_pairs(wanted, inner, tolerance)
        if kind == "integer":
            inner = int(inner, 16)
        got = inner if kind in ("tuple", "integer") else NotImplemented
    if isinstance(wanted, bool) or isinstance(got, bool):
        return wanted is got
    if isinstance(wanted, int | float) and isinstance(got, int | float):
        return wanted == got or bool(tolerance and _close(wanted, got, tolerance))
    if isinstance(wanted, list) and isinstance(got, list):
        return len(wanted) == len(got) and all(
            same_value(a, b, tolerance) for a, b in zip(wanted, got, strict=True)
        )
    return type(wanted) is type(got) and wanted == got


def _same_pairs(wanted: Mapping[str, Any], pairs: Any, tolerance: float) -> bool:
    if not isinstance(pairs, list) or len(pairs) != len(wanted):
        return False
    got = {str(key): value for key, value in pairs}
    return got.keys() == wanted.keys() and all(
        same_value(wanted[key], got[key], tolerance) for key in wanted
    )


def _in_columns(tests: Mapping[str, Any], entry_point: str | None) -> list[Test]:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError(f"the tests have the keys {sorted(tests)}, not 'inputs' and 'outputs'")
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    name = tests.get("fn_name") or entry_point
    if name is None:
        pairs = zip(inputs, outputs, strict=True)
        return [StdinTest(_text(stdin), _text(wanted)) for stdin, wanted in pairs]
    calls: list[Test] = []
    for arguments, wanted in zip(inputs, outputs, strict=True):
        if not isinstance(arguments, list):
            raise ValueError(f"the arguments of {name} are {_kind(arguments)}, not a list")
        calls.append(CallTest(name, tuple(arguments), wanted))
    return calls


def _case(case: Any, entry_point: str | None) -> Test:
    if not isinstance(case, Mapping) or "input" not in case or "output" not in case:
        raise ValueError("a test is neither code nor an object with 'input' and 'output'")
    test_input, wanted = case["input"], case["output"]
    if case.get("testtype", "stdin") == "stdin":
        return StdinTest(_text(test_input), _text(wanted))
    name = case.get("fn_name") or entry_point
    if name is None:
        raise ValueError("a functional test has no 'fn_name': say which column is the entry_point")
    try:
        # not by splitlines, which also ends lines where a JSON text has U+2028 or U+0085 in it
        arguments = tuple(json.loads(line) for line in test_input.split("\n") if line.strip())
        return CallTest(name, arguments, json.loads(wanted))
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"a functional test is not JSON line by line: {error}") from error


def _assertion(source: str, entry_point: str | None, setup: str) -> AssertionTest:
    return AssertionTest((setup, source) if setup else (source,), entry_point)


def _kind(value: Any) -> str:
    return "empty" if value in (None, "") else type(value).__name__


def _text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"an input or output is {_kind(value)}, not text")
    return value


def _lines(text: str) -> list[list[str]]:
    lines = [line.split() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_word(wanted: str, got: str, tolerance: float) -> bool:
    if wanted == got or max(len(wanted), len(got)) > _LONGEST_NUMBER:
        return wanted == got
    with localcontext(_EXACTLY):
        return _close(Decimal(wanted), Decimal(got), tolerance)


def _close(wanted: float | Decimal, got: float | Decimal, tolerance: float) -> bool:
    """As math.isclose, also for numbers that no float holds: 10**400 is not near infinity."""
    if any(isinstance(n, int) and n.bit_length() > _LONGEST_BITS for n in (wanted, got)):
        return False
    with localcontext(_EXACTLY):
        a, b, nearest = Decimal(wanted), Decimal(got), Decimal(repr(tolerance))
        if not (a.is_finite() and b.is_finite()):
            return a == b
        widest = max(a.copy_abs(), b.copy_abs())
        return (a - b).copy_abs() <= max(nearest, nearest * widest)
