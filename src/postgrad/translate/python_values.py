"""Values that a Python program's text gives without running it: literals, operators on them, a few
pure functions, and the calls that it would make.

Whatever else an expression is, it stays `Unread`, with its line and its text. Nothing grows beyond
bounds: numbers, texts and nested values that no person writes stay unread too.
"""

import ast
import operator
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import PurePosixPath
from typing import Any, cast

from postgrad.translate.files import LARGEST

MOST_TEXT = 2**15  # letters of a text that operators make
MOST_VALUES = 2000  # in a value, those within it counted too
_PLAIN = (bool, int, float, str, type(None))
_FORM = re.compile(r"[<>^=+ ,]{0,2}\d{0,2}(\.\d{1,2})?[a-zA-Z%]?")  # of a value in a text


@dataclass(frozen=True, slots=True)
class Unread:
    """An expression whose value only a run of the program would give."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Imported:
    """A name of another module: "torch.bfloat16"; a name alone where nothing in the program sets
    it.
    """

    name: str
    line: int


@dataclass(frozen=True, slots=True, eq=False)
class Defined:
    """A function of the program itself."""

    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: "Scope"  # in which it was defined

    @property
    def line(self) -> int:
        """Where the program has it."""
        return self.node.lineno


@dataclass(frozen=True, slots=True, eq=False)
class DefinedClass:
    """A class of the program itself."""

    name: str
    line: int
    bases: tuple[Any, ...]
    members: Mapping[str, Any]  # what its body sets: defaults of fields, functions

    @property
    def imported(self) -> str | None:
        """The class of another module that it is made from; None where there is none."""
        for base in self.bases:
            if isinstance(base, Imported):
                return base.name
            if isinstance(base, DefinedClass) and (name := base.imported) is not None:
                return name
        return None

    def method(self, name: str) -> Defined | None:
        """A function of the class or of its bases in the program; None where it has none."""
        if isinstance(function := self.members.get(name), Defined):
            return function
        bases = (base for base in self.bases if isinstance(base, DefinedClass))
        inherited = (base.method(name) for base in bases)
        return next((function for function in inherited if function is not None), None)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields by name with their defaults, in order, those of its bases first."""
        inherited = [base.fields for base in self.bases if isinstance(base, DefinedClass)]
        functions = (Defined, DefinedClass)
        members = {k: v for k, v in self.members.items() if not isinstance(v, functions)}
        return reduce(operator.or_, inherited[::-1], cast(dict[str, Any], {})) | members


@dataclass(frozen=True, slots=True)
class Built:
    """What a call would return, or a part of it: ".map" of `base`, "@config" for an attribute of
    `base`, "[]" for an entry.
    """

    name: str  # of the function or class, dotted: "trl.SFTConfig"
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]  # and the attributes that are set later
    line: int
    text: str
    number: int  # of the call in the program, which stays as attributes are set
    base: Any = None
    kind: DefinedClass | None = None  # the program's own class that was called

    @property
    def short(self) -> str:
        """The name without its module."""
        return self.name.rpartition(".")[2]

    @property
    def subclass(self) -> str:
        """The name of the program's own class, where that is made from another one, `name`."""
        return self.kind.name if self.kind is not None else ""


@dataclass(slots=True)
class Scope:
    """Names and their values, those of the scope around it behind them."""

    names: dict[str, Any] = field(default_factory=dict[str, Any])
    outer: "Scope | None" = None
    shared: set[str] = field(default_factory=set[str])  # names of the program's top: `global`
    changed: list[Any] = field(default_factory=list[Any])  # objects that are no longer as they were

    @property
    def chain(self) -> "Iterator[Scope]":
        """The scope and those around it."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.outer

    def put(self, name: str, value: Any) -> None:
        """Assigns to a name."""
        scope = self
        while name in self.shared and scope.outer is not None:
            scope = scope.outer
        scope.names[name] = value

    def change(self, name: str, value: Any) -> None:
        """Puts what an object has become in place of it, whatever other names it has here."""
        before = self.get(name)
        self.replace(before, value)
        self.changed.append(before)

    def replace(self, before: Any, after: Any) -> None:
        """Another object in place of one, under all names that it has."""
        for scope in self.chain:
            for name, value in scope.names.items():
                if value is before:
                    scope.names[name] = after

    def get(self, name: str) -> Any:
        """The value of a name. Raises KeyError where nothing sets it."""
        for scope in self.chain:
            if name in scope.names:
                return scope.names[name]
        raise KeyError(name)


def is_literal(value: Any) -> bool:
    """Whether a value is one of JSON's, all within it too."""
    if isinstance(value, list):
        return all(map(is_literal, cast(list[Any], value)))
    if isinstance(value, dict):
        table = cast(dict[Any, Any], value)
        return all(isinstance(key, str) and is_literal(inner) for key, inner in table.items())
    return isinstance(value, _PLAIN)


def size(value: Any) -> int:
    """How many values a value has in it; more than MOST_VALUES are not counted to the end."""
    count, pending = 0, [value]
    while pending and count <= MOST_VALUES:
        inner = pending.pop()
        count += 1 + (len(inner) // 1024 if isinstance(inner, str) else 0)
        if isinstance(inner, list | tuple):
            pending += cast("list[Any]", inner)
        elif isinstance(inner, dict):
            pending += cast(dict[Any, Any], inner).values()
        elif isinstance(inner, Built):
            pending += [*inner.args, *inner.kwargs.values(), inner.base]
    return count


def truth(value: Any) -> bool | None:
    """Whether a value counts as true; None where the text does not say."""
    return bool(value) if isinstance(value, (*_PLAIN, list, dict)) else None


def merged(first: Any, second: Any, otherwise: Unread) -> Any:
    """The value of a name after two branches, of which one runs: what they agree on."""
    if first is second or (type(first) is type(second) and first == second):
        return first
    if isinstance(first, dict) and isinstance(second, dict):
        return merged_tables(first, second, otherwise)
    if isinstance(first, Built) and isinstance(second, Built) and first.number == second.number:
        return replace(first, kwargs=merged_tables(first.kwargs, second.kwargs, otherwise))
    return otherwise


def merged_tables(
    first: Mapping[str, Any], second: Mapping[str, Any], otherwise: Unread
) -> dict[str, Any]:
    """The entries of a table after two branches: what they agree on."""
    names = dict.fromkeys([*first, *second])
    pairs = {name: (first.get(name, otherwise), second.get(name, otherwise)) for name in names}
    return {name: merged(*pair, otherwise) for name, pair in pairs.items()}


def _small(value: Any) -> Any:
    """The value. Raises OverflowError where no person writes one of its size."""
    if isinstance(value, int | float) and not abs(value) < LARGEST:
        raise OverflowError
    if isinstance(value, str) and len(value) > MOST_TEXT:
        raise OverflowError
    return value


def _power(base: Any, exponent: Any) -> Any:
    if abs(exponent) > 64 or abs(base) > LARGEST:
        raise OverflowError
    return base**exponent


def _product(left: Any, right: Any) -> Any:
    for many, times in ((left, right), (right, left)):
        if isinstance(many, str | list) and len(cast(str, many)) * abs(times) > MOST_VALUES:
            raise OverflowError
    return left * right


def _remainder(left: Any, right: Any) -> Any:
    if isinstance(left, str):  # a text's own format
        raise TypeError
    return left % right


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: _product, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: _remainder, ast.Pow: _power, ast.USub: operator.neg,
    ast.UAdd: operator.pos, ast.Not: operator.not_, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right, ast.NotIn: lambda left, right: left not in right,
    ast.BitOr: operator.or_,
}  # fmt: skip
_FAILURES = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip


def operated(kind: ast.AST, *operands: Any) -> Any:
    """The operator's result on literals. Raises ValueError where there is none, or none within
    bounds.
    """
    function = _OPERATORS.get(type(kind))
    if function is None or not all(map(is_literal, operands)):
        raise ValueError
    try:
        return _small(function(*operands))
    except _FAILURES:
        raise ValueError from None


def formatted(value: Any, conversion: int, form: str) -> str:
    """A value as it stands in an f-string. Raises ValueError for a form that is not read."""
    if not isinstance(value, _PLAIN) or not _FORM.fullmatch(form):
        raise ValueError
    value = repr(value) if conversion == ord("r") else value
    try:
        return format(str(value) if value is None else value, form)
    except _FAILURES:
        raise ValueError from None


def _at_most(*values: Any) -> Any:
    return min(*values)


def _path(*parts: Any) -> str:
    """os.path.join, pathlib.Path and their like."""
    return "/".join(str(part).rstrip("/") if n < len(parts) - 1 else str(part)
                    for n, part in enumerate(parts))  # fmt: skip


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int": int, "float": float, "str": str, "bool": bool, "len": len, "min": _at_most, "max": max,
    "abs": abs, "round": round, "list": list, "tuple": list, "sum": sum,
    "os.path.join": _path, "pathlib.Path": _path, "os.fspath": str,
    "os.path.expanduser": str, "os.path.abspath": str, "os.path.dirname": posixpath.dirname,
    "os.path.basename": posixpath.basename,
}  # fmt: skip
_SAME_PATH = ("as_posix", "resolve", "absolute", "expanduser")  # of pathlib, whose paths are texts
_PARTS_OF_PATH: dict[str, Callable[[PurePosixPath], Any]] = {
    "parent": lambda path: path.parent, "name": lambda path: path.name,
    "stem": lambda path: path.stem, "suffix": lambda path: path.suffix,
}  # fmt: skip
_METHODS: dict[type, tuple[str, ...]] = {
    str: ("split", "rsplit", "strip", "lstrip", "rstrip", "replace", "lower", "upper", "title",
          "removeprefix", "removesuffix", "startswith", "endswith", "join", *_SAME_PATH),
    dict: ("get", "copy", "items", "keys", "values"),
    list: ("copy", "index", "count"),
}  # fmt: skip


def called(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A pure function's result on literals. Raises ValueError where there is none."""
    if not is_literal([*args, *kwargs.values()]):
        raise ValueError
    try:
        return _small(function(*args, **kwargs))
    except _FAILURES:
        raise ValueError from None


_CHANGES: dict[type, tuple[str, ...]] = {  # methods that change what they are called on
    dict: ("update", "pop", "setdefault", "clear", "popitem"),
    list: ("append", "extend", "insert", "remove", "pop", "clear", "reverse", "sort"),
}


def changes(value: Any, name: str) -> bool:
    """Whether a method of a list or a table changes it."""
    return any(isinstance(value, kind) and name in names for kind, names in _CHANGES.items())


def changed(
    value: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """What a list or a table has become behind a method that changes it, and what that returns.
    Raises ValueError where the text does not say.
    """
    copy: Any = value.copy()
    try:
        result = getattr(copy, name)(*args, **kwargs)
    except _FAILURES:
        raise ValueError from None
    if any(isinstance(arg, Unread | Built) for arg in args) and name in ("update", "extend"):
        raise ValueError
    return copy, list(result) if isinstance(result, tuple) else result


def method(value: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a text's, a table's or a list's own method. Raises ValueError for another."""
    kind = next((kind for kind in _METHODS if isinstance(value, kind)), None)
    if kind is None or name not in _METHODS[kind]:
        raise ValueError
    if name in _SAME_PATH:
        return value
    if not is_literal([*args, *kwargs.values()]) and name != "get":
        raise ValueError
    if name in ("replace", "join") and _length(value) * _length(list(args)) > MOST_TEXT:
        raise ValueError
    try:
        result = _small(getattr(value, name)(*args, **kwargs))
    except _FAILURES:
        raise ValueError from None
    if isinstance(result, tuple | type({}.items()) | type({}.keys()) | type({}.values())):
        return [list(entry) if isinstance(entry, tuple) else entry for entry in result]
    return result


def _length(value: Any) -> int:
    """Letters of a text, or of all texts of a list, and one more for each."""
    texts = cast(list[Any], value) if isinstance(value, list) else [value]
    return sum(_length(text) if isinstance(text, list) else len(str(text)) + 1 for text in texts)


def part_of_path(path: str, name: str) -> str:
    """An attribute of pathlib's paths. Raises ValueError for another one."""
    if name not in _PARTS_OF_PATH:
        raise ValueError
    return str(_PARTS_OF_PATH[name](PurePosixPath(path)))


def entry(value: Any, key: Any) -> Any:
    """An entry of a list, a table or a text. Raises ValueError where there is none."""
    if not isinstance(value, str | list | dict) or not (is_literal(key) or isinstance(key, slice)):
        raise ValueError
    try:
        return cast(Any, value)[key]
    except _FAILURES:
        raise ValueError from None
