"""Expressions of a Python program, by their text: literals, names, operators, and the calls that
they would make.
"""

import ast
import contextlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from postgrad.core.errors import UsageError
from postgrad.translate import python_values as values
from postgrad.translate.python_values import (
    Built,
    Defined,
    DefinedClass,
    Imported,
    Scope,
    Unread,
)

MOST_STEPS = 100_000  # expressions and statements of a program that are followed
MOST_DEPTH = 150  # of expressions within expressions, of those of functions that are called too
_WHERE_SET = ("os.environ.get", "os.getenv", "environ.get", "getenv")
_COPIES = ("copy.copy", "copy.deepcopy", "deepcopy", "dataclasses.replace")
Hook = Callable[["Expressions", Built], Any]
Follow = Callable[[Defined, list[Any], dict[str, Any]], Any]


class Expressions:
    """The values of a program's expressions. `calls` are those that it would make, in order.

    follow: the result of a call of the program's own function. hook: asked at each other call; what
    it returns, or None where the hook has no answer. environment: variables that are set before.
    """

    def __init__(
        self, text: str, name: str, hook: Hook, follow: Follow, environment: Mapping[str, str]
    ) -> None:
        self.name = name  # of the program, for messages
        self.calls: dict[int, Built] = {}  # by number, with the attributes that are set later
        self.environment: dict[str, Any] = dict(environment)
        self._hook = hook
        self._follow = follow
        self._lines = text.encode(errors="replace").split(b"\n")
        self._numbers = itertools.count()
        self._steps = 0
        self._depth = 0

    def spend(self, steps: int = 1) -> None:
        """Counts what is followed. Raises UsageError for a program that goes on without end."""
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise UsageError(f"{self.name}: it goes on for too long to be read")

    def unread(self, node: ast.expr | ast.stmt) -> Unread:
        """That a run alone would give this value."""
        line = self._lines[node.lineno - 1] if node.lineno <= len(self._lines) else b""
        end = node.end_col_offset if node.end_lineno == node.lineno else None
        text = line[node.col_offset : end].decode(errors="replace").strip()
        return Unread(f"{text}{'' if end else ' ...'}"[:200], node.lineno)

    def value(self, node: ast.expr, scope: Scope) -> Any:
        """The value of an expression, `Unread` where its text does not give one."""
        self.spend()
        self._depth += 1
        try:
            result = self._value(node, scope) if self._depth <= MOST_DEPTH else self.unread(node)
        except ValueError:
            result = self.unread(node)
        finally:
            self._depth -= 1
        if isinstance(result, Built):  # with the attributes that were set since
            result = self.calls.get(result.number, result)
        return self.bounded(result, node)

    def bounded(self, value: Any, node: ast.expr | ast.stmt) -> Any:
        """The value; `Unread` where no person writes one of its size."""
        if isinstance(value, list | dict | str | Built):
            count = values.size(value)
            self.spend(count // 4)
            if count > values.MOST_VALUES:
                return self.unread(node)
        return value

    def _value(self, node: ast.expr, scope: Scope) -> Any:
        match node:
            case ast.Constant(value=constant):
                plain = isinstance(constant, bool | int | float | str | type(None))
                return constant if plain else self.unread(node)
            case ast.Name(id=name):
                try:
                    return scope.get(name)
                except KeyError:
                    return Imported(name, node.lineno)
            case ast.Attribute(value=inner, attr=name):
                return self._attribute(self.value(inner, scope), name, node)
            case ast.Subscript(value=inner, slice=place):
                return self._subscript(node, self.value(inner, scope), place, scope)
            case ast.List(elts=inner) | ast.Tuple(elts=inner) | ast.Set(elts=inner):
                return self._listed(inner, scope)
            case ast.Dict():
                return self._table(node, scope)
            case ast.Call():
                return self._call(node, scope)
            case ast.Lambda():
                return Defined("lambda", node, scope)
            case ast.ListComp(elt=inner, generators=[ast.comprehension(ifs=[]) as loop]):
                return self._comprehended(node, inner, loop, scope)
            case ast.Await(value=inner) | ast.NamedExpr(value=inner):
                return self.value(inner, scope)
            case _:
                return self._operators(node, scope)

    def _operators(self, node: ast.expr, scope: Scope) -> Any:
        match node:
            case ast.BinOp(left=left, op=kind, right=right):
                first, second = self.value(left, scope), self.value(right, scope)
                if isinstance(kind, ast.Div) and isinstance(first, str):  # of a path
                    return values.called(values.FUNCTIONS["os.path.join"], [first, second], {})
                return values.operated(kind, first, second)
            case ast.UnaryOp(op=kind, operand=operand):
                return values.operated(kind, self.value(operand, scope))
            case ast.BoolOp(op=kind, values=inner):
                return self._any_or_all(node, isinstance(kind, ast.Or), inner, scope)
            case ast.Compare(left=left, ops=[kind], comparators=[right]):
                return self._compared(kind, self.value(left, scope), self.value(right, scope))
            case ast.IfExp(test=test, body=body, orelse=other):
                decided = values.truth(self.value(test, scope))
                if decided is not None:
                    return self.value(body if decided else other, scope)
                pair = self.value(body, scope), self.value(other, scope)
                return values.merged(*pair, self.unread(node))
            case ast.JoinedStr(values=parts):
                return "".join(self._formatted(part, scope) for part in parts)
            case _:
                return self.unread(node)

    def _any_or_all(
        self, node: ast.expr, stops_at: bool, inner: list[ast.expr], scope: Scope
    ) -> Any:
        result: Any = None
        for part in inner:
            result = self.value(part, scope)
            decided = values.truth(result)
            if decided is None and part is not inner[-1]:
                return self.unread(node)
            if decided is stops_at:
                return result
        return result

    def _compared(self, kind: ast.cmpop, left: Any, right: Any) -> Any:
        if not isinstance(kind, ast.Is | ast.IsNot):
            return values.operated(kind, left, right)
        if right is not None:
            raise ValueError
        there = isinstance(left, Defined | DefinedClass | Imported) or (
            isinstance(left, Built)
            and (left.short[:1].isupper() or left.short == "from_pretrained")
        )
        if not there and not values.is_literal(left):
            raise ValueError
        return (left is None) is isinstance(kind, ast.Is)

    def _formatted(self, part: ast.expr, scope: Scope) -> str:
        if not isinstance(part, ast.FormattedValue):
            return str(self.value(part, scope))
        form = "".join(
            self._formatted(inner, scope)
            for inner in (
                part.format_spec.values if isinstance(part.format_spec, ast.JoinedStr) else ()
            )
        )
        return values.formatted(self.value(part.value, scope), part.conversion, form)

    def _listed(self, inner: list[ast.expr], scope: Scope) -> list[Any]:
        result: list[Any] = []
        for node in inner:
            if isinstance(node, ast.Starred):
                several = self.value(node.value, scope)
                result += (
                    cast(list[Any], several) if isinstance(several, list) else [self.unread(node)]
                )
            else:
                result.append(self.value(node, scope))
        return result

    def _comprehended(
        self, node: ast.expr, inner: ast.expr, loop: ast.comprehension, scope: Scope
    ) -> Any:
        source = self.value(loop.iter, scope)
        if isinstance(source, Built) and isinstance(inner, ast.Call) and len(inner.args) == 1:
            function = self.value(inner.func, scope)  # [f(row) for row in dataset]
            return self._built(".map", node, [function], base=source)
        if not isinstance(source, list) or not isinstance(loop.target, ast.Name):
            return self.unread(node)
        name = loop.target.id
        return [self.value(inner, Scope({name: part}, scope)) for part in cast(list[Any], source)]

    def _table(self, node: ast.Dict, scope: Scope) -> Any:
        table: dict[str, Any] = {}
        for key, inner in zip(node.keys, node.values, strict=True):
            value = self.value(inner, scope)
            name = self.value(key, scope) if key is not None else None
            if key is None and isinstance(value, dict):
                table |= cast(dict[str, Any], value)
            elif isinstance(name, str):
                table[name] = value
            else:
                return self.unread(node)
        return table

    def _attribute(self, base: Any, name: str, node: ast.expr) -> Any:
        match base:
            case Imported():
                return Imported(f"{base.name}.{name}", node.lineno)
            case DefinedClass():
                return base.fields[name] if name in base.fields else self.unread(node)
            case str():
                return values.part_of_path(base, name)
            case Built(kwargs=kwargs):
                return kwargs[name] if name in kwargs else self._built(f"@{name}", node, base=base)
            case _:
                return self.unread(node)

    def _subscript(self, node: ast.Subscript, base: Any, place: ast.expr, scope: Scope) -> Any:
        if isinstance(place, ast.Slice):
            bounds = [self.value(b, scope) if b else None for b in (place.lower, place.upper)]
            literal = all(isinstance(bound, int | None) for bound in bounds) and not place.step
            return values.entry(base, slice(*bounds)) if literal else self.unread(node)
        key = self.value(place, scope)
        if isinstance(base, Imported) and base.name in ("os.environ", "environ"):
            return self.environment.get(key, self.unread(node)) if isinstance(key, str) else None
        return self.entry(base, key, node)

    def entry(self, base: Any, key: Any, node: ast.expr) -> Any:
        """An entry of a list, a table or of what a call returns."""
        if isinstance(base, Built):
            return self._built("[]", node, [key], base=base)
        return values.entry(base, key)

    # Calls

    def _call(self, node: ast.Call, scope: Scope) -> Any:
        args = self._listed(node.args, scope)
        kwargs = self.named(node, scope)
        if isinstance(node.func, ast.Attribute):
            base = self.value(node.func.value, scope)
            name = node.func.attr
            kind = base.kind if isinstance(base, Built) else base
            if isinstance(kind, DefinedClass) and (function := kind.method(name)) is not None:
                return self._follow(function, [*_receiver(function, base, kind), *args], kwargs)
            if isinstance(base, Built):
                return self._answered(self._built(f".{name}", node, args, kwargs, base))
            if values.changes(base, name) and isinstance(node.func.value, ast.Name):
                return self._changed(node, node.func.value.id, base, args, kwargs, scope)
            if isinstance(base, str | list | dict):
                return values.method(base, name, args, kwargs)
        function = self.value(node.func, scope)
        if isinstance(function, Defined):
            return self._follow(function, args, kwargs)
        if isinstance(function, DefinedClass):
            return self._constructed(function, node, args, kwargs)
        if isinstance(function, Imported):
            return self._imported(function.name, node, args, kwargs)
        return self.unread(node)

    def _changed(
        self, node: ast.Call, name: str, base: Any, args: list[Any], kwargs: dict[str, Any],
        scope: Scope,
    ) -> Any:  # fmt: skip
        """What a method of a list or a table returns, which changes it."""
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        after = result = self.unread(node)
        if "**" not in kwargs:
            with contextlib.suppress(ValueError):
                after, result = values.changed(base, method, args, kwargs)
        scope.change(name, self.bounded(after, node))
        return result

    def named(self, node: ast.Call, scope: Scope) -> dict[str, Any]:
        """The arguments of a call by name; "**" for those that cannot be read."""
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, scope)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, dict):
                named |= cast(dict[str, Any], value)
            else:
                named["**"] = self.unread(keyword.value)
        return named

    def _imported(self, name: str, node: ast.Call, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if name in values.FUNCTIONS:
            try:
                return values.called(values.FUNCTIONS[name], args, kwargs)
            except ValueError:
                return self._built(name, node, args, kwargs)
        if name == "dict" and all(isinstance(arg, dict) for arg in args):
            return {key: value for table in (*args, kwargs) for key, value in table.items()}
        if name == "getattr" and len(args) > 1 and isinstance(args[1], str):
            return self._attribute(args[0], args[1], node)
        if name in _WHERE_SET and args and isinstance(args[0], str):
            default = args[1] if len(args) > 1 else kwargs.get("default")
            return self.environment.get(args[0], default)
        if name in ("dataclasses.field", "field"):
            return self._default(node, kwargs)
        if name in _COPIES and args:
            return self._copy(args[0], kwargs)
        return self._answered(self._built(name, node, args, kwargs))

    def _copy(self, value: Any, changes: dict[str, Any]) -> Any:
        """What copy.deepcopy and dataclasses.replace return."""
        if not isinstance(value, Built):
            return value
        kwargs = {**value.kwargs, **changes}
        copy = replace(value, kwargs=kwargs, number=next(self._numbers))
        self.calls[copy.number] = copy
        return copy

    def _default(self, node: ast.expr, kwargs: dict[str, Any]) -> Any:
        """What a field of a dataclass has where nothing is said."""
        factory = kwargs.get("default_factory")
        if isinstance(factory, Imported) and factory.name in ("list", "dict"):
            return [] if factory.name == "list" else {}
        if isinstance(factory, Defined):
            return self._follow(factory, [], {})
        return kwargs.get("default", self.unread(node))

    def _constructed(
        self, kind: DefinedClass, node: ast.expr, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        """An object of the program's own class: its fields, and what the call says."""
        fields, start = kind.fields, kind.method("__init__")
        if kind.imported is None and start is not None:
            built = self._built(kind.name, node, [], dict(fields), kind=kind)
            self.calls[built.number] = built
            self._follow(start, [built, *args], kwargs)
            return built
        named = kwargs
        if kind.imported is None:  # else positions are those of the class that it is made from
            named = {**dict(zip(fields, args, strict=False)), **kwargs}
            args = []
        name = kind.imported or kind.name
        return self._answered(self._built(name, node, args, {**fields, **named}, kind=kind))

    def _built(
        self, name: str, node: ast.expr, args: list[Any] | None = None,
        kwargs: dict[str, Any] | None = None, base: Any = None, kind: DefinedClass | None = None,
    ) -> Built:  # fmt: skip
        return Built(
            name, tuple(args or ()), kwargs or {}, node.lineno, self.unread(node).text,
            next(self._numbers), base, kind,
        )  # fmt: skip

    def build(self, name: str, call: Built, fields: dict[str, Any]) -> Built:
        """An object of a class that a call returns."""
        number = next(self._numbers)
        built = Built(name, (), fields, call.line, call.text, number)
        self.calls[number] = built
        return built

    def _answered(self, built: Built) -> Any:
        """What a call returns: as the hook says, else the call itself."""
        self.calls[built.number] = built
        answer = self._hook(self, built)
        return built if answer is None else answer


def _receiver(function: Defined, base: Any, kind: DefinedClass) -> list[Any]:
    """What stands before the arguments of a method: an object, its class, or nothing."""
    node = function.node
    decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
    names = [decorator.id for decorator in decorators if isinstance(decorator, ast.Name)]
    if "classmethod" in names:
        return [kind]
    return [base] if isinstance(base, Built) and "staticmethod" not in names else []
