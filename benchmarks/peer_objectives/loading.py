"""Imports single files of a checkout without the packages that it needs.

The packages of the checkout are entered without their `__init__`, and modules that are not
installed are stood for by ones whose every attribute is a class that does nothing: a loss function
needs torch alone, and what imports it needs Ray, Megatron and a GPU.
"""

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any


class _Anything(type):
    """The class of stand-ins, which can be called, subscripted, subclassed and used to decorate."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __call__(cls, *args: Any, **knobs: Any) -> Any:
        if "__stands_in__" not in vars(cls):
            return super().__call__(*args, **knobs)
        if len(args) == 1 and isinstance(args[0], types.FunctionType) and not knobs:
            return args[0]  # a decorator
        return cls


def stand_in(name: str) -> Any:
    """A class that does nothing."""
    return _Anything(name, (), {"__stands_in__": True})


class _Hollow(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = stand_in(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `package` in its folder, without its `__init__`, and `hollow` modules nowhere."""

    def __init__(self, package: Path, hollow: Sequence[str]) -> None:
        self.package = package
        self.hollow = hollow

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        empty = any(f"{fullname}.".startswith(f"{name}.") for name in self.hollow)
        if not empty and fullname != self.package.name:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        spec.submodule_search_locations = [] if empty else [str(self.package)]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Hollow(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Checkout:
    """Modules of a checkout by their names."""

    def __init__(self, package: Path, hollow: Sequence[str] = ()) -> None:
        """package: the folder that is its top package; hollow: what its files import and need not
        have, packages that are not installed and modules of its own.
        """
        prefix = f"{package.name}."
        missing = [
            name
            for name in hollow
            if name.startswith(prefix) or importlib.util.find_spec(name) is None
        ]
        sys.meta_path.insert(0, _Finder(package, missing))

    def module(self, name: str) -> Any:
        """The module of one file."""
        return importlib.import_module(name)


def statements(path: Path, start: str, count: int = 1) -> Callable[[dict[str, Any]], None]:
    """What runs `count` statements of a file, the first of which begins with `start`, in a
    namespace: a part of a method of hundreds of lines. Raises LookupError where there is none.
    """
    for body in _bodies(ast.parse(path.read_text("utf-8"))):
        for place, statement in enumerate(body):
            if ast.unparse(statement).startswith(start):
                chosen = ast.Module(body[place : place + count], type_ignores=[])
                code = compile(chosen, str(path), "exec")
                return lambda space: exec(code, space)  # noqa: S102  the caller's checkout
    raise LookupError(f"{path} has no statement that begins with {start!r}")


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for inner in ast.walk(node):
        for name in ("body", "orelse"):
            if isinstance(body := getattr(inner, name, None), list):
                yield body
