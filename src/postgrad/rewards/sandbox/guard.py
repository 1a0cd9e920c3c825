"""Code that is made of text, held to what a formula needs, by Python's audit hooks (PEP 578).

Scorers of others hand a sample's text to `eval`. Under the guard such code may name literals and
the functions of a list, and do nothing else: no attributes, no imports, no assignments, no
definitions. So it changes nothing, and what it leaves for the next sample is nothing.
"""

import dis
import sys
from collections.abc import Callable, Collection
from types import CodeType
from typing import Any, TypeVar

# Nothing runs without one of these. To parse (ast.literal_eval) is not to run.
_RUNS = frozenset({"exec", "code.__new__", "function.__new__"})
_OPERATIONS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER", "STORE_", "DELETE_", "IMPORT_")
# Code that a library makes of numbers of its own: module and function that run it.
_GENERATORS = frozenset({("sympy.polys.monomials", "_build")})
_PREAMBLE = compile("from sympy import *", "<string>", "exec")  # sympy's parser runs it each time
_Value = TypeVar("_Value")


class NotAFormula(ValueError):
    """Text was about to run as code that is more than a formula."""


class Guard:
    """One audit hook of this process. Python has no way to take one away, so make one only."""

    def __init__(self) -> None:
        self._names: frozenset[str] | None = None
        self._refused: str | None = None
        sys.addaudithook(self._hook)

    def formulas(
        self, names: Collection[str], score: Callable[[], _Value]
    ) -> tuple[_Value, str | None]:
        """What `score` returns, and why it was not allowed to run a text, None where it was.

        names: what text may name, beside single letters. Where it names more, NotAFormula is raised
        at the place where the text is run; a scorer may catch it.
        """
        self._names, self._refused = frozenset(names), None
        try:
            return score(), self._refused
        finally:
            self._names = None

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        names = self._names
        if names is None or event not in _RUNS:
            return
        caller = sys._getframe(1)
        if (caller.f_globals.get("__name__"), caller.f_code.co_name) in _GENERATORS:
            return
        code = arguments[0] if arguments else None
        reason = _reason(code, names) if isinstance(code, CodeType) else "code that is no text"
        if reason is not None:
            self._refused = reason
            raise NotAFormula(f"a sample's text is no formula: {reason}")


def _reason(code: CodeType, names: frozenset[str]) -> str | None:
    """Why it is neither a module's code nor a formula; None where it is one of them."""
    if code.co_filename.startswith(("/", "<frozen ")):  # only running code can call itself so
        return None
    parts = (code.co_code, code.co_names, code.co_consts)
    if parts == (_PREAMBLE.co_code, _PREAMBLE.co_names, _PREAMBLE.co_consts):
        return None
    for name in (*code.co_names, *code.co_varnames):
        if name not in names and len(name) > 1:
            return f"it names {name[:40]!r}"
    if any(isinstance(constant, CodeType) for constant in code.co_consts):
        return "it defines a function"
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith(_OPERATIONS):
            return f"it has a {instruction.opname.lower()}"
    return None
