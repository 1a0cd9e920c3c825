"""A Python program read by its text: which calls it would make, with which values. Nothing of it is
run or imported.

Statements are followed from the top: names keep what is assigned to them, functions of the program
are followed where they are called, and of a condition that the text decides only one branch counts.
Where it does not, a name keeps what both branches agree on. A loop over a list of the program is
followed through, any other through its first iteration, and nothing is assumed to raise.
"""

import ast
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from postgrad.core.errors import UsageError
from postgrad.translate import python_values as values
from postgrad.translate.python_expressions import Expressions, Hook
from postgrad.translate.python_values import (
    Built,
    Defined,
    DefinedClass,
    Imported,
    Scope,
    Unread,
)

MOST_CALLS = 10  # functions within functions


def followed(
    text: str, name: str, hook: Hook, environment: Mapping[str, str] | None = None
) -> list[Built]:
    """The calls that a program would make, in order, with the attributes that it sets later.

    name: of the program, for messages. hook: see `Expressions`. environment: variables that are
    set before it begins. Raises UsageError, with the line, where it is not Python or would not end.
    """
    tree = _parsed(text, name)
    try:
        return list(_Program(text, name, hook, environment or {}).follow(tree).values())
    except RecursionError:
        raise UsageError(f"{name}: its code is nested too deeply to be read") from None


def _parsed(text: str, name: str) -> ast.Module:
    version = ".".join(map(str, sys.version_info[:2]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes within its texts
            return ast.parse(text)
    except SyntaxError as error:
        where = f"line {error.lineno} is not Python {version}: {error.msg}"
        raise UsageError(f"{name}: {where}") from error
    except (RecursionError, MemoryError):
        raise UsageError(f"{name}: its expressions are nested too deeply to be read") from None
    except ValueError as error:  # a NUL
        raise UsageError(f"{name} is not Python: {error}") from error


# Tables of names, inmost first, and the environment behind them; calls by their numbers.
_State = tuple[list[dict[str, Any]], dict[int, Built]]


@dataclass(slots=True)
class _Frame:
    """A function that is being followed, or the program itself."""

    scope: Scope
    returns: list[Any] = field(default_factory=list[Any])


class _Program:
    """Follows the statements of a program."""

    def __init__(self, text: str, name: str, hook: Hook, environment: Mapping[str, str]) -> None:
        self._read = Expressions(text, name, hook, self._inline, environment)
        self._active: list[ast.AST] = []
        self._scopes: list[Scope] = []  # of the functions that are being followed, inmost last
        self._entered: set[ast.AST] = set()

    def follow(self, tree: ast.Module) -> dict[int, Built]:
        """The calls by their numbers."""
        top = Scope({"__name__": "__main__", "__file__": self._read.name})
        self._scopes.append(top)
        self._run(tree.body, _Frame(top))
        for node in tree.body:  # what a launcher or a notebook calls
            if isinstance(node, ast.FunctionDef) and node not in self._entered:
                self._inline(Defined(node.name, node, top), [], {})
        return dict(sorted(self._read.calls.items()))

    def _inline(self, function: Defined, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Follows a call of the program's own function, and says what it returns."""
        node = function.node
        recursive = node in self._active or len(self._active) >= MOST_CALLS
        unread = Unread(f"{function.name}(...)", node.lineno)
        if recursive:
            return unread
        self._entered.add(node)
        self._active.append(node)
        scope = Scope(self._parameters(function, args, kwargs), function.scope)
        self._scopes.append(scope)
        try:
            if isinstance(node, ast.Lambda):
                return self._read.value(node.body, scope)
            frame = _Frame(scope)
            if not self._run(node.body, frame):
                frame.returns.append(None)
        finally:
            self._active.pop()
            self._scopes.pop()
            for before in scope.changed:  # a table of the caller, which the function has changed
                self._scopes[-1].replace(before, unread)
                self._scopes[-1].changed.append(before)
        result = frame.returns[0] if frame.returns else unread
        for other in frame.returns[1:]:
            result = values.merged(result, other, unread)
        return result

    def _parameters(
        self, function: Defined, args: list[Any], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """The values of a function's parameters in a call."""
        accepted = function.node.args
        places = [*accepted.posonlyargs, *accepted.args]
        parameters: dict[str, Any] = {
            arg.arg: Unread(arg.arg, arg.lineno) for arg in [*places, *accepted.kwonlyargs]
        }
        defaults = [None] * (len(places) - len(accepted.defaults)) + accepted.defaults
        optional = [*zip(places, defaults, strict=True)]
        optional += zip(accepted.kwonlyargs, accepted.kw_defaults, strict=True)
        for arg, default in optional:
            if default is not None:
                parameters[arg.arg] = self._read.value(default, function.scope)
        parameters |= {arg.arg: value for arg, value in zip(places, args, strict=False)}
        others = {name: value for name, value in kwargs.items() if name not in parameters}
        parameters |= {name: value for name, value in kwargs.items() if name in parameters}
        if accepted.vararg is not None:
            parameters[accepted.vararg.arg] = args[len(places) :]
        if accepted.kwarg is not None:
            parameters[accepted.kwarg.arg] = others
        return parameters

    # Statements

    def _run(self, body: Sequence[ast.stmt], frame: _Frame) -> bool:
        """Follows statements; whether the function ends within them."""
        return any(self._statement(node, frame) for node in body)

    def _statement(self, node: ast.stmt, frame: _Frame) -> bool:
        """Follows one statement; whether the function ends with it."""
        self._read.spend()
        scope = frame.scope
        match node:
            case ast.Import() | ast.ImportFrom():
                _bind_modules(node, scope)
            case ast.Assign(targets=targets, value=expression):
                value = self._read.value(expression, scope)
                for target in targets:
                    self._assign(target, value, scope)
            case ast.AnnAssign(target=target, value=ast.expr() as expression):
                self._assign(target, self._read.value(expression, scope), scope)
            case ast.AugAssign(target=target, op=kind, value=expression):
                self._augment(node, target, kind, expression, scope)
            case ast.Expr(value=expression):
                self._expression(expression, scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                scope.names[node.name] = Defined(node.name, node, scope)
            case ast.ClassDef():
                self._class(node, scope)
            case ast.Return(value=expression):
                frame.returns.append(self._read.value(expression, scope) if expression else None)
                return True
            case ast.Raise():
                return True
            case ast.Delete(targets=targets):
                for target in targets:
                    self._delete(target, scope)
            case ast.Global(names=names):
                scope.shared |= {*names}
            case _:
                return self._block(node, frame)
        return False

    def _block(self, node: ast.stmt, frame: _Frame) -> bool:
        """Follows a statement that has others in it."""
        match node:
            case ast.If(test=test):
                return self._branches(node, self._read.value(test, frame.scope), frame)
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(node, frame)
            case ast.With(items=items) | ast.AsyncWith(items=items):
                for item in items:
                    value = self._read.value(item.context_expr, frame.scope)
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, value, frame.scope)
                return self._run(node.body, frame)
            case ast.Try() | ast.TryStar():
                ends = self._run(node.body, frame) or self._run(node.orelse, frame)
                return self._run(node.finalbody, frame) or ends
            case ast.Match():
                stored = (name for name in ast.walk(node) if isinstance(name, ast.Name))
                for name in (name for name in stored if isinstance(name.ctx, ast.Store)):
                    frame.scope.names[name.id] = self._read.unread(node)
                return False
            case _:
                return False

    def _class(self, node: ast.ClassDef, scope: Scope) -> None:
        inner = Scope(outer=scope)
        self._run(node.body, _Frame(inner))
        bases = tuple(self._read.value(base, scope) for base in node.bases)
        scope.names[node.name] = DefinedClass(node.name, node.lineno, bases, inner.names)

    def _branches(self, node: ast.If, test: Any, frame: _Frame) -> bool:
        decided = values.truth(test)
        if decided is not None:
            return self._run(node.body if decided else node.orelse, frame)
        before = self._state(frame.scope)
        first_ends = self._run(node.body, frame)
        first = self._state(frame.scope)
        self._restore(frame.scope, before)
        second_ends = self._run(node.orelse, frame)
        if first_ends == second_ends:
            self._agree(frame.scope, first, self._read.unread(node.test))
        elif second_ends:
            self._restore(frame.scope, first)
        return first_ends and second_ends

    def _state(self, scope: Scope) -> _State:
        """The names that a scope sees and the environment, and the objects that they stand for."""
        tables = [*(each.names for each in scope.chain), self._read.environment]
        self._read.spend((sum(map(len, tables)) + len(self._read.calls)) // 16)
        return [dict(table) for table in tables], dict(self._read.calls)

    def _restore(self, scope: Scope, state: _State) -> None:
        """Goes back to a state; trainers that were called since are not forgotten."""
        tables, calls = state
        trainers = {n: call for n, call in self._read.calls.items() if n not in calls}
        for each, names in zip(scope.chain, tables, strict=False):
            each.names = dict(names)
        self._read.environment = dict(tables[-1])
        self._read.calls = {**calls, **trainers}

    def _agree(self, scope: Scope, other: _State, otherwise: Unread) -> None:
        """The state after two branches, of which one runs: its own, and another one's."""
        tables, calls = self._state(scope)
        agreed = [
            values.merged_tables(*pair, otherwise) for pair in zip(other[0], tables, strict=True)
        ]
        for number, call in other[1].items():
            calls[number] = values.merged(call, calls.get(number, call), otherwise)
        self._restore(scope, (agreed, calls))

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, frame: _Frame) -> bool:
        """Each iteration over a list of the program; of other loops the first, and what that
        changes is not known behind it.
        """
        scope = frame.scope
        leaves = any(isinstance(inner, ast.Break | ast.Continue) for inner in ast.walk(node))
        source: Any = None
        if not isinstance(node, ast.While):
            source = self._read.value(node.iter, scope)
        elif self._read.value(node.test, scope) is False:
            source = []
        if isinstance(source, list) and not (leaves and source):
            for part in cast(list[Any], source):
                if not isinstance(node, ast.While):
                    self._assign(node.target, part, scope)
                if self._run(node.body, frame):
                    return True
            return self._run(node.orelse, frame)
        if not isinstance(node, ast.While):
            first = source[0] if isinstance(source, list) else self._read.unread(node.iter)
            self._assign(node.target, first, scope)
        before = self._state(scope)
        self._run(node.body, frame)
        self._agree(scope, before, self._read.unread(node))
        return False

    # Assignments

    def _assign(self, target: ast.expr, value: Any, scope: Scope) -> None:
        match target:
            case ast.Name(id=name):
                scope.put(name, value)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for place, inner in enumerate(targets):
                    try:
                        part = self._read.entry(value, place, target)
                    except ValueError:
                        part = value if isinstance(value, Unread) else self._read.unread(target)
                    self._assign(inner, part, scope)
            case ast.Attribute(value=inner, attr=attribute):
                self._set(inner, attribute, value, scope)
            case ast.Subscript(value=outer, slice=place):
                self._put(outer, self._read.value(place, scope), value, scope)
            case _:
                pass

    def _set(self, inner: ast.expr, attribute: str, value: Any, scope: Scope) -> None:
        """An attribute of an object, which keeps its other ones."""
        before = self._read.value(inner, scope)
        if isinstance(before, DefinedClass) and isinstance(inner, ast.Name):
            members = {**before.members, attribute: value}
            scope.change(inner.id, replace(before, members=members))
        elif isinstance(before, Built):
            after = replace(before, kwargs={**before.kwargs, attribute: value})
            self._read.spend(len(after.kwargs))
            if values.size(after) > values.MOST_VALUES:
                after = replace(before, kwargs={"**": self._read.unread(inner)})
            self._read.calls[after.number] = after

    def _put(self, outer: ast.expr, key: Any, value: Any, scope: Scope) -> None:
        """An entry of a table that a name stands for, or of the environment."""
        before = self._read.value(outer, scope)
        if isinstance(before, Imported) and before.name in ("os.environ", "environ"):
            if isinstance(key, str):
                self._read.environment[key] = value
        elif isinstance(before, dict | list) and isinstance(outer, ast.Name):
            after: Any = self._read.unread(outer)
            if isinstance(before, dict) and isinstance(key, str):
                after = {**before, key: value}
            scope.change(outer.id, self._read.bounded(after, outer))

    def _delete(self, target: ast.expr, scope: Scope) -> None:
        """`del name` and `del table[key]`."""
        match target:
            case ast.Name(id=name):
                scope.names.pop(name, None)
            case ast.Subscript(value=ast.Name(id=name) as inner, slice=place):
                before, key = self._read.value(inner, scope), self._read.value(place, scope)
                if isinstance(before, dict) and isinstance(key, str):
                    rest = {other: value for other, value in before.items() if other != key}
                    scope.change(name, rest)
                elif isinstance(before, dict | list):
                    scope.change(name, self._read.unread(target))
            case _:
                pass

    def _augment(
        self, node: ast.AugAssign, target: ast.expr, kind: ast.operator, added: ast.expr,
        scope: Scope,
    ) -> None:  # fmt: skip
        try:
            pair = self._read.value(target, scope), self._read.value(added, scope)
            result = values.operated(kind, *pair)
        except ValueError:
            result = self._read.unread(node)
        self._assign(target, self._read.bounded(result, node), scope)

    def _expression(self, node: ast.expr, scope: Scope) -> None:
        """A call for what it does."""
        match node:
            case ast.Call(func=ast.Name(id="setattr"), args=[inner, attribute, value]):
                key = self._read.value(attribute, scope)
                result = self._read.value(value, scope)
                if not isinstance(key, str):
                    key, result = "**", self._read.unread(node)
                self._set(inner, key, result, scope)
            case _:
                self._read.value(node, scope)


def _bind_modules(node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            name = f"{node.module or ''}.{alias.name}".lstrip(".")
            scope.names[alias.asname or alias.name] = Imported(name, node.lineno)
        elif alias.asname:
            scope.names[alias.asname] = Imported(alias.name, node.lineno)
        else:
            top = alias.name.partition(".")[0]
            scope.names[top] = Imported(top, node.lineno)
