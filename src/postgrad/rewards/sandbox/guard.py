"""Restricts code that is compiled from text to formulas, with Python's audit hooks (PEP 578).

Third-party scorers pass a sample's text to `eval`. Under the guard such code may use literals and
the functions of a list, and do nothing else: no attributes, no imports, no assignments, no
definitions. So it changes nothing, and leaves nothing behind for the next sample.
"""

import dis
import sys
from collections.abc import Callable, Collection
from types import CodeType
from typing import Any, TypeVar

# Audit events without which no code from text runs. Parsing alone (ast.literal_eval) raises none.
_RUNS = frozenset({"exec", "code.__new__", "function.__new__"})
_OPERATIONS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER", "STORE_", "DELETE_", "IMPORT_")
# (module, function) that runs code which a library generates from numbers of its own.
_GENERATORS = frozenset({("sympy.polys.monomials", "_build")})
_PREAMBLE = compile("from sympy import *", "<string>", "exec")  # sympy's parser runs it each time
_Value = TypeVar("_Value")


class NotAFormula(ValueError):
    """Text was about to run as code that is more than a formula."""


class Guard:
    """An audit hook of this process. Python cannot remove a hook, so create only one."""

    def __init__(self) -> None:
        self._names: frozenset[str] | None = None
        self._refused: str | None = None
        sys.addaudithook(self._hook)

    def formulas(
        self, names: Collection[str], score: Callable[[], _Value]
    ) -> tuple[_Value, str | None]:
        """(return value of `score`, why a text was not allowed to run, None where all were).

        names: what a text may use, beside single letters. Where it uses more, NotAFormula is raised
        at the place that would run the text; a scorer may catch it.
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
    """Why `code` is neither a module's code nor a formula; None where it is one of them."""
    if code.co_filename.startswith(("/", "<frozen ")):  # a text cannot choose its file name
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
