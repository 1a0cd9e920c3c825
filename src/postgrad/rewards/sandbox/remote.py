"""Tests call functions of a program that runs in another process, and get plain data back.

The program cannot touch the tests: it sees the arguments of each call and chooses what to return.
A value that is not plain (values.py) stays with the program; the tests hold a `RemoteObject` for
it, which can be called, asked for attributes, items and length, iterated, and passed back as an
argument. It has no equality, truth value or arithmetic: with them the program would decide what a
test sees.

A program cannot end a loop of the tests, except by the end of its own iterator that they iterate: a
StopIteration that it raises or claims elsewhere arrives as RuntimeError, as it does from a
generator (PEP 479). A malformed answer or the program's end raises `Lost`, after which no test
passes, whatever it catches.
"""

import builtins
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, BinaryIO, NoReturn

from postgrad.rewards.sandbox.values import decode, encode

_STOP = {"stop": True}
_TOO_LONG = object()
_TABLES = (list, tuple, dict, set, frozenset, str, bytes)
# Of the module's values that are sent at the start: items of a table, characters of JSON.
_MOST_ITEMS, _LONGEST_VALUE = 10_000, 1 << 16
_ENDS_LOOPS = frozenset({"StopIteration", "StopAsyncIteration"})


class Lost(BaseException):
    """The program ended, or sent a malformed answer. No `except Exception` catches it."""


class RemoteError(Exception):
    """The program raised an exception of a class of its own."""


class ProgramServer:
    """The program's side: performs the operations that the tests ask for on objects of `module`."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._objects: list[Any] = []
        self._operations: dict[str, Callable[..., Any]] = {
            "call": lambda target, *arguments: target(*arguments[0], **arguments[1]),
            "attribute": getattr,
            "item": lambda target, key: target[key],
            "length": len,
            "iterate": iter,
            "next": next,
        }

    def serve(self, asks: BinaryIO, replies: BinaryIO) -> None:
        """Send the names of the module, then answer requests until the pipe closes."""
        _send(replies, self._hello())
        for line in asks:
            _send(replies, self._answer(json.loads(line)))

    def _hello(self) -> dict[str, Any]:
        exported = {name: value for name, value in vars(self._module).items() if _is_free(name)}
        modules = [name for name, value in exported.items() if isinstance(value, ModuleType)]
        names = {name: self._readable(exported[name]) for name in exported.keys() - set(modules)}
        return {
            "names": {name: value for name, value in names.items() if value is not _TOO_LONG},
            "modules": modules,
        }

    def _readable(self, value: Any) -> Any:
        """A value of the module encoded for the tests; _TOO_LONG where it is too large to send."""
        try:
            if isinstance(value, _TABLES) and len(value) > _MOST_ITEMS:
                return _TOO_LONG
            data = encode(value, self._keep)
            return data if len(json.dumps(data)) <= _LONGEST_VALUE else _TOO_LONG
        except (RecursionError, ValueError):  # a list in itself, a fraction of 5000 digits
            return _TOO_LONG

    def _answer(self, ask: dict[str, Any]) -> dict[str, Any]:
        target = self._objects[ask["target"]]
        arguments = [decode(argument, self._open) for argument in ask["arguments"]]
        try:
            value = self._operations[ask["deed"]](target, *arguments)
        except Exception as error:  # noqa: BLE001  # the tests decide what it means
            if ask["deed"] == "next" and isinstance(error, StopIteration):
                return _STOP
            names = [kind.__name__ for kind in type(error).__mro__]
            return {"error": names, "message": str(error)[:500]}
        after = arguments[0] if ask["deed"] == "call" else []
        return {"value": encode(value, self._keep), "after": encode(after, self._keep)}

    def _keep(self, value: Any) -> dict[str, int]:
        self._objects.append(value)
        return {"remote": len(self._objects) - 1}

    def _open(self, data: dict[str, Any]) -> Any:
        return self._objects[data["remote"]]


class Client:
    """The tests' side. line_bytes: the longest line of an answer.

    lost: why nothing more can be asked, and the tests have failed; None until then.
    """

    def __init__(self, asks: BinaryIO, replies: BinaryIO, line_bytes: int) -> None:
        self.lost: str | None = None
        self._asks = asks
        self._replies = replies
        self._line_bytes = line_bytes

    def names(self) -> dict[str, Any]:
        """What the program defines, by name, without names of Python's built-ins.

        Standard modules that it has imported are imported here, too. An object of the program with
        the name of such a module can only be called: tests that use math.isclose mean Python's.
        """
        hello = self._receive()
        names, modules = hello.get("names"), hello.get("modules")
        if not isinstance(names, dict) or not isinstance(modules, list):
            self._lose("the first answer has no names")
        free = {name: self._decode(value) for name, value in names.items() if _is_free(name)}
        for name, value in free.items():
            if name in sys.stdlib_module_names and isinstance(value, RemoteObject):
                free[name] = value.__call__
        for name in modules:
            if isinstance(name, str) and name in sys.stdlib_module_names and _is_free(name):
                free[name] = importlib.import_module(name)
        return free

    def ask(self, operation: str, target: int, *arguments: Any) -> Any:
        """The result of an operation (a key of ProgramServer's table) on object number `target`.

        Raises what the program raised, as a built-in exception. StopIteration is raised for "next"
        only; a program that claims it elsewhere is Lost.
        """
        data = [encode(argument, _number) for argument in arguments]
        reply = self._exchange({"deed": operation, "target": target, "arguments": data})
        if operation == "next" and reply == _STOP:
            raise StopIteration
        if "error" in reply:
            raise _exception(reply)
        if "value" not in reply:
            self._lose("an answer has neither a value nor an error")
        value = self._decode(reply["value"])
        if operation == "call" and json.dumps(reply.get("after")) != json.dumps(data[0]):
            after = self._decode(reply.get("after"))
            if not isinstance(after, list) or len(after) != len(arguments[0]):
                self._lose("an answer has other arguments than the call")
            for before, changed in zip(arguments[0], after, strict=True):
                _write_back(before, changed)
        return value

    def iterate(self, target: int) -> "RemoteObject":
        """An iterator that the program holds."""
        iterator = self.ask("iterate", target)
        if not isinstance(iterator, RemoteObject):
            self._lose("an iterator is no object of the program")
        return iterator

    def length(self, target: int) -> int:
        """len() of the object. Only a plain int is accepted, so no __int__ of the program runs."""
        length = self.ask("length", target)
        if type(length) is not int:
            self._lose("a length is no number")
        return length

    def _exchange(self, ask: dict[str, Any]) -> dict[str, Any]:
        if self.lost is not None:
            raise Lost(self.lost)
        try:
            _send(self._asks, ask)
        except OSError as error:
            self._lose("the program ended", error)
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        line = self._replies.readline(self._line_bytes)
        if not line.endswith(b"\n"):
            self._lose("the program ended" if not line else "a value is too long")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError) as error:
            self._lose("an answer is no JSON", error)
        if not isinstance(reply, dict):
            self._lose("an answer is no object")
        return reply

    def _decode(self, data: Any) -> Any:
        try:
            return decode(data, lambda remote: RemoteObject(self, int(remote["remote"])))
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            self._lose("an answer holds no value", error)

    def _lose(self, why: str, error: BaseException | None = None) -> NoReturn:
        self.lost = why
        raise Lost(why) from error


class RemoteObject:
    """The tests' stand-in for an object that the program holds."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, client: Client, number: int) -> None:
        self._client = client
        self._number = number

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._client.ask("call", self._number, list(arguments), named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._client.ask("attribute", self._number, name)

    def __getitem__(self, key: Any) -> Any:
        return self._client.ask("item", self._number, key)

    def __len__(self) -> int:
        return self._client.length(self._number)

    def __iter__(self) -> Iterator[Any]:
        return self._client.iterate(self._number)

    def __next__(self) -> Any:
        return self._client.ask("next", self._number)

    def __eq__(self, other: object) -> bool:
        raise TypeError("the program returned an object of a class, which tests cannot compare")

    def __bool__(self) -> bool:
        raise TypeError("the program returned an object of a class, not true or false")


def _number(value: Any) -> dict[str, int]:
    if isinstance(value, RemoteObject):
        return {"remote": value._number}
    raise TypeError(f"a {type(value).__name__} of the tests cannot be handed to the program")


def _is_free(name: str) -> bool:
    """Whether tests may take this name from a program: a public identifier, not a built-in's."""
    return name.isidentifier() and not name.startswith("_") and not hasattr(builtins, name)


def _exception(reply: dict[str, Any]) -> Exception:
    """The nearest built-in class of what the program raised; StopIteration becomes RuntimeError."""
    names, message = reply["error"], str(reply.get("message"))
    names = [str(name) for name in names] if isinstance(names, list) else []
    if not _ENDS_LOOPS.isdisjoint(names):
        return RuntimeError(f"the program raised {names[0]}: {message}")
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
            try:
                return kind(message)
            except TypeError:  # a kind that wants more than a message, such as UnicodeDecodeError
                continue
    return RemoteError(f"{names[0] if names else 'an exception'}: {message}")


def _write_back(before: Any, after: Any) -> None:
    """A list, dict or set that the program changed in place changes here too."""
    if isinstance(before, list) and isinstance(after, list):
        before[:] = after
    elif isinstance(before, dict | set) and type(before) is type(after):
        before.clear()
        before.update(after)


def _send(pipe: BinaryIO, message: dict[str, Any]) -> None:
    rest = memoryview(json.dumps(message).encode() + b"\n")
    while rest:
        rest = rest[pipe.write(rest) :]
