"""Tests call functions of a program that runs in another process, and get plain data back.

The program cannot touch the tests: it sees the arguments of each call and chooses what to return.
A value that is not plain (values.py) stays with the program; the tests hold a `Remote` for it. That
can be called, asked for attributes, items and length, iterated, and handed back as an argument. It
has no equality, no truth and no arithmetic: those would let the program decide what a test finds.

Nothing that a program sends ends a loop of the tests, but the end of an iterator of its own that
they iterate. A StopIteration that it raises or claims arrives as RuntimeError, as it does out of a
generator (PEP 479); an answer that is none, and the end of the program, are `Lost`, after which no
test passes, whatever it catches.
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
_MOST_ITEMS, _LONGEST_VALUE = 10_000, 1 << 16  # of what the tests are told of unasked; characters
_ENDS_LOOPS = frozenset({"StopIteration", "StopAsyncIteration"})


class Lost(BaseException):
    """The program ended, or answered with what is no answer. No `except Exception` catches it."""


class RemoteError(Exception):
    """An exception of the program's own class."""


class Server:
    """The program's side: does what it is asked with the objects of `module`."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._objects: list[Any] = []
        self._deeds: dict[str, Callable[..., Any]] = {
            "call": lambda target, *given: target(*given[0], **given[1]),
            "attribute": getattr,
            "item": lambda target, key: target[key],
            "length": len,
            "iterate": iter,
            "next": next,
        }

    def serve(self, asks: BinaryIO, replies: BinaryIO) -> None:
        """Tell the names of the module, then answer until nobody asks any more."""
        _send(replies, self._hello())
        for line in asks:
            _send(replies, self._answer(json.loads(line)))

    def _hello(self) -> dict[str, Any]:
        given = {name: value for name, value in vars(self._module).items() if _is_free(name)}
        modules = [name for name, value in given.items() if isinstance(value, ModuleType)]
        names = {name: self._readable(given[name]) for name in given.keys() - set(modules)}
        return {
            "names": {name: value for name, value in names.items() if value is not _TOO_LONG},
            "modules": modules,
        }

    def _readable(self, value: Any) -> Any:
        """A value of the program as the tests may read it; _TOO_LONG for a table that is its own
        business, and longer than an answer may be.
        """
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
            value = self._deeds[ask["deed"]](target, *arguments)
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
    """The tests' side. A line of an answer is at most `line_bytes` long.

    lost: why nothing more can be asked; then the tests have failed.
    """

    def __init__(self, asks: BinaryIO, replies: BinaryIO, line_bytes: int) -> None:
        self.lost: str | None = None
        self._asks = asks
        self._replies = replies
        self._line_bytes = line_bytes

    def names(self) -> dict[str, Any]:
        """What the program defines, by name, but no name of Python's own.

        Modules that it has imported are imported here too, from the standard library. What has the
        name of such a module and is none can be called and nothing else: tests that say
        math.isclose mean Python's.
        """
        hello = self._receive()
        names, modules = hello.get("names"), hello.get("modules")
        if not isinstance(names, dict) or not isinstance(modules, list):
            self._lose("the first answer has no names")
        free = {name: self._decode(value) for name, value in names.items() if _is_free(name)}
        for name, value in free.items():
            if name in sys.stdlib_module_names and isinstance(value, Remote):
                free[name] = value.__call__
        for name in modules:
            if isinstance(name, str) and name in sys.stdlib_module_names and _is_free(name):
                free[name] = importlib.import_module(name)
        return free

    def ask(self, deed: str, target: int, *arguments: Any) -> Any:
        """The value of a deed. Raises what the program raised, as a built-in exception.

        StopIteration comes of "next" only; a program that claims it elsewhere is lost.
        """
        data = [encode(argument, _number) for argument in arguments]
        reply = self._exchange({"deed": deed, "target": target, "arguments": data})
        if deed == "next" and reply == _STOP:
            raise StopIteration
        if "error" in reply:
            raise _exception(reply)
        if "value" not in reply:
            self._lose("an answer has neither a value nor an error")
        value = self._decode(reply["value"])
        if deed == "call" and json.dumps(reply.get("after")) != json.dumps(data[0]):
            after = self._decode(reply.get("after"))
            if not isinstance(after, list) or len(after) != len(arguments[0]):
                self._lose("an answer has other arguments than the call")
            for before, changed in zip(arguments[0], after, strict=True):
                _write_back(before, changed)
        return value

    def iterate(self, target: int) -> "Remote":
        """An iterator that the program holds."""
        iterator = self.ask("iterate", target)
        if not isinstance(iterator, Remote):
            self._lose("an iterator is no object of the program")
        return iterator

    def length(self, target: int) -> int:
        """What `len` says; an int, since the program's own __int__ stays behind."""
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
            return decode(data, lambda remote: Remote(self, int(remote["remote"])))
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            self._lose("an answer holds no value", error)

    def _lose(self, why: str, error: BaseException | None = None) -> NoReturn:
        self.lost = why
        raise Lost(why) from error


class Remote:
    """An object that the program holds."""

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
    if isinstance(value, Remote):
        return {"remote": value._number}
    raise TypeError(f"a {type(value).__name__} of the tests cannot be handed to the program")


def _is_free(name: str) -> bool:
    """Whether tests may take this name from a program: what Python itself calls so, they do not."""
    return name.isidentifier() and not name.startswith("_") and not hasattr(builtins, name)


def _exception(reply: dict[str, Any]) -> Exception:
    """The nearest built-in kind of what the program raised; what ends loops is RuntimeError."""
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
